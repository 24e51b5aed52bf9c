"""kvferry bootstrap."""
