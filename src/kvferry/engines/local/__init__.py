"""kvferry engines/local."""
