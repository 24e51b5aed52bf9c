"""kvferry proto."""
