"""kvferry api."""
