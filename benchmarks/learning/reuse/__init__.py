"""Which rule of reuse, how much memory, which factor: the learning runs whose time behind a source of any speed is replayed."""
