"""Clocks, costs, controllers and reports: they decide from seconds alone how to treat a stall."""
