"""From the plan to batches: what runs in workers, and the pipelines in the main process."""
