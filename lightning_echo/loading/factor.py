"""The echo factor of a run: what was set, and to which batches it applies."""

from __future__ import annotations

from lightning_echo.loading.state import EchoState

__all__ = ["RunFactor"]


class RunFactor:
    """A factor that may change while batches that were planned with an earlier factor are still to come.

    Args:
        factor: The factor at the start.

    Attributes:
        value: The factor that was set last.
        constructed: The factor at the start.
        largest: The largest factor so far. It decides how far ahead batches may be planned.
        since: Number of the first batch of the run to which `value` applies.
        before: The factor that applies until then.

    Example:
        >>> factor = RunFactor(2.0)
        >>> factor.change(4.0, since=10, delivered=3)
        >>> factor.value, factor.in_force(9), factor.in_force(10)
        (4.0, 2.0, 4.0)
    """

    def __init__(self, factor: float) -> None:
        self.constructed = factor
        self.restart()

    def restart(self, value: float | None = None) -> None:
        """Goes back to the start of the run, with another factor if one is given."""
        self.value = self.largest = self.before = self.constructed if value is None else value
        self.since = 0

    def change(self, value: float, since: int, delivered: int) -> None:
        """Sets a factor after ``delivered`` batches of the run. It applies from batch ``since`` on."""
        self.before = self.in_force(delivered)
        self.value, self.since, self.largest = value, since, max(self.largest, value)

    def in_force(self, number: int) -> float:
        """Returns the factor that batch ``number`` was planned with. It is right for batches delivered after the last change."""
        return self.value if number >= self.since else self.before

    def load(self, state: EchoState) -> None:
        """Continues from a state of the loader."""
        self.value, self.largest = state.factor, state.largest_factor
        if state.plan is not None:
            self.since = max((change.number for change in state.plan.pending), default=0)
            self.before = state.plan.factor
        elif state.stream is not None:
            self.since, self.before = state.factor_since, state.factor_before
        else:
            self.since, self.before = 0, self.value
