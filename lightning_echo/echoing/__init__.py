"""Data echoing: plan, cache and loader. Imports neither Lightning nor the measuring side. Start with plan.py and dataset.py."""
