"""Clocks, costs, controllers and reports: they decide from seconds alone what to do about a stall."""
