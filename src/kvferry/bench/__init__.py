"""Measurements between real processes, as the scheduler that calls kvferry sees them."""
