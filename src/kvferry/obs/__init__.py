"""kvferry obs."""
