"""kvferry plan."""
