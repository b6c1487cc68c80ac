"""The echo factor of a run: what was set, and which batches it counts for."""

from __future__ import annotations

from typing import Any

__all__ = ["RunFactor"]


class RunFactor:
    """A factor that may change while batches planned with the one before are still to come.

    Args:
        factor: To begin with.

    Attributes:
        value: The factor last set.
        constructed: The one to begin with.
        largest: The largest one so far: how far ahead batches may be planned depends on it.
        since: Number in the run of the first batch that `value` counts for.

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
        """Goes back to the start of the run, or begins with another factor."""
        self.value = self.largest = self._before = self.constructed if value is None else value
        self.since = 0

    def change(self, value: float, since: int, delivered: int) -> None:
        """Sets a factor, ``delivered`` batches into the run; it counts from batch ``since`` on."""
        self._before = self.in_force(delivered)
        self.value, self.since, self.largest = value, since, max(self.largest, value)

    def in_force(self, number: int) -> float:
        """The factor that batch ``number`` was planned with, if it is not older than the last change."""
        return self.value if number >= self.since else self._before

    def state(self) -> dict[str, float]:
        """What a state of the loader says of it."""
        return {
            "factor": self.value,
            "constructed_factor": self.constructed,
            "largest_factor": self.largest,
            "factor_before": self._before,
            "factor_since": self.since,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a state of the loader."""
        plan = state["plan"]
        self.value, self.largest = state["factor"], state["largest_factor"]
        if plan is not None:
            self.since, self._before = max((number for number, _ in plan["pending"]), default=0), plan["factor"]
        elif state.get("stream") is not None:
            self.since, self._before = state["factor_since"], state["factor_before"]
        else:
            self.since, self._before = 0, self.value
