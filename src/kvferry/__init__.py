"""kvferry ."""
