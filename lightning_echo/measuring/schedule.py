"""`FactorSchedule`: a fixed echo factor for each epoch, or the factors of an earlier run for the same batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_echo.measuring.control import Controller, Decision, Observation, Reason, as_number
from lightning_echo.measuring.echo_summary import FactorUse, RunSummary

__all__ = ["FactorSchedule"]


class FactorSchedule(Controller):
    """Sets the factor of each epoch. An entry applies from its epoch on, until the next entry.

    Args:
        factors: A mapping from the number of an epoch, from 0, to its echo factor. Before the first entry the factor is not
            changed.

    Raises:
        TypeError: ``factors`` is not a mapping, an epoch is not an integer, or a factor is not a number.
        ValueError: There is no entry, an epoch is negative, or a factor is below 1.

    Example:
        >>> schedule = FactorSchedule({0: 1.0, 2: 4.0, 8: 1.0})
        >>> [schedule.decide(Observation(epoch, factor=1.0)).factor for epoch in (0, 1, 6, 7)]
        [1.0, 4.0, 4.0, 1.0]
    """

    def __init__(self, factors: dict[int, float]) -> None:
        self.factors = _check_schedule(factors)

    @classmethod
    def from_summary(cls, path: str | PathLike[str]) -> FactorSchedule:
        """Returns a schedule that replays the decisions of an earlier run batch by batch.

        The run gets exactly the batches of the earlier run, also if it is resumed, under these conditions:

        * Data, seed, batch size, number of ranks, insertion point, buffer size, ``reuse`` and ``epoch_length`` are the same.
        * The number of workers is the same. If whole batches are echoed, it may differ.
        * ``prefetch_factor`` is the same or smaller. If it were larger, a factor that was decided on within an epoch would come
          too late. With several loaders it must be the same.

        With ``epoch_length="fixed"``, the number of steps in an epoch may differ.

        Args:
            path: An ``echo_summary.json``, which `EchoCallback` writes. All ranks must be able to read it.

        Raises:
            ValueError: The file is damaged, or does not tell how the run began, or holds a factor that was not set by the
                controller.
        """
        return _Replay(path)

    def __repr__(self) -> str:
        return f"FactorSchedule({self.factors})"

    def initial_factor(self) -> float | None:
        return self.factors.get(0)

    def largest_factor(self) -> float | None:
        return max(self.factors.values())

    def decide(self, observation: Observation) -> Decision:
        following = observation.epoch + 1
        entries = [epoch for epoch in self.factors if epoch <= following]
        if not entries:
            return Decision(observation.factor, Reason.scheduled, f"no entry up to epoch {following}")
        return Decision(self.factors[entries[-1]], Reason.scheduled, f"scheduled from epoch {entries[-1]} on")


class _Replay(FactorSchedule):
    """Makes the same decisions as an earlier run, after the same batches.

    Args:
        path: The earlier run's ``echo_summary.json``.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        try:
            self._uses = _check_uses(RunSummary.from_json(self._path.read_text(encoding="utf-8")).decisions)
        except ValueError as error:
            raise ValueError(f"{self._path} cannot be replayed: {error}") from error
        self.asked_after = frozenset(step for step in self._uses if step)

    def __repr__(self) -> str:
        return f"FactorSchedule.from_summary({str(self._path)!r})"

    def initial_factor(self) -> float | None:
        return self._uses[0].factor

    def largest_factor(self) -> float | None:
        return max(use.factor for use in self._uses.values())

    def decide(self, observation: Observation) -> Decision:
        after = observation.batches
        before = max((step for step in self._uses if step < after), default=0)
        if observation.factor != (expected := self._uses[before].factor):
            raise ValueError(
                f"{self._path} has factor {expected:g} from the decision after batch {before} on, but after batch {after} the "
                f"factor is {observation.factor:g}: here nobody was asked after batch {before}, or somebody else has set the "
                "factor. Use the epoch_length of the earlier run"
            )
        if (use := self._uses.get(after)) is None:
            return Decision(observation.factor, Reason.scheduled, f"no decision after batch {after} of {self._path}")
        since = use.batch if isinstance(use.batch, int) else None
        return Decision(use.factor, Reason.scheduled, f"as after batch {after} of {self._path}", since)


def _check_uses(decisions: Sequence[FactorUse]) -> dict[int, FactorUse]:
    """Returns the decisions by the number of batches after which they were made.

    Raises:
        ValueError: They cannot be replayed.
    """
    if not decisions or decisions[0].step != 0:
        raise ValueError("it does not tell with which factor the run began")
    uses: dict[int, FactorUse] = {}
    for use in decisions:
        if use.step is None:
            raise ValueError(f"factor {use.factor:g} from batch {use.batch} on was not decided on by the controller")
        if not 1 <= as_number("factor", use.factor) < math.inf:
            raise ValueError(f"a factor must be a finite number >= 1, got {use.factor!r}")
        uses[use.step] = use
    return uses


def _check_schedule(factors: Any) -> dict[int, float]:
    if not isinstance(factors, Mapping):
        raise TypeError(f"factors must map epochs to echo factors, e.g. {{0: 1.0, 2: 4.0}}, got {factors!r}")
    if not factors:
        raise ValueError("factors must have at least one entry, e.g. {0: 1.0, 2: 4.0}, got {}")
    for epoch, factor in factors.items():
        if isinstance(epoch, bool) or not isinstance(epoch, Integral):
            raise TypeError(f"factors must have epochs (integers) as keys, got {epoch!r}")
        if epoch < 0:
            raise ValueError(f"factors must have epochs from 0 on as keys, got {epoch}; 0 is the first epoch")
        if not 1 <= as_number(f"factors[{epoch}]", factor) < math.inf:
            raise ValueError(f"factors[{epoch}] must be a finite number >= 1, got {factor!r}; 1 switches echoing off")
    return {int(epoch): float(factors[epoch]) for epoch in sorted(factors)}
