"""Stall analysis: where the time for input goes, what would help, and when not to echo."""
