"""Time to the target behind a source that is slower than the step."""
