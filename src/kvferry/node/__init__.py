"""kvferry node."""
