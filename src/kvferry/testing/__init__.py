"""kvferry testing."""
