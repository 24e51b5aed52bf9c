"""kvferry cli."""
