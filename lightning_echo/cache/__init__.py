"""Examples that are kept for good: what fits into memory is read once (the MinIO cache of CoorDL, section 4.1)."""
