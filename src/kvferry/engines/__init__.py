"""kvferry engines."""
