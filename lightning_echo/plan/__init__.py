"""Which example is used when: arithmetic, without torch and without data."""
