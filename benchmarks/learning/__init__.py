"""Learning experiments: how many fresh examples, and steps, until the target. The rules stand in `rules`; see README.md."""
