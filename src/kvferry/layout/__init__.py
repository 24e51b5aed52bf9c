"""kvferry layout."""
