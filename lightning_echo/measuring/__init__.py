"""Measure, predict, decide: where the time goes, and the echo factor that follows from it. Knows no trainer and no loader."""
