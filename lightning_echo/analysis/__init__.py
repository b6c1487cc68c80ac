"""Stall analysis: where the time for input goes, the remedies, and when not to echo."""
