"""kvferry wire."""
