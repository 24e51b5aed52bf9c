"""kvferry serve."""
