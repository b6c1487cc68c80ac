"""`MetricGuard` lowers the echo factor while a validation metric does not improve; `FactorSchedule` fixes one for each epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_echo.measure.control import Controller, Decision, Moment, Observation, Reason, as_number, load_state_by_kind
from lightning_echo.measure.summary import FactorUse, RunSummary
from lightning_echo.schema import entry, state_of

# ---------------------------------------------------------------------- guard

_OF_GUARDED = "The attribute of the guarded controller."


class _Unchanged(Controller):
    """Wants the factor that the run has had before anything lowered it."""

    def __init__(self) -> None:
        self._factor: float | None = None

    def __repr__(self) -> str:
        return "None"

    def decide(self, observation: Observation) -> Decision:
        if self._factor is None:
            self._factor = observation.factor
        return Decision(self._factor, Reason.scheduled, "the factor that the run began with")

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self._factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._factor = entry(state_dict, "factor", float | None)


class MetricGuard(Controller):
    """Limits the factor of another controller. While a metric gets no better, it lowers this limit, the *ceiling*.

    The guard is asked whenever the other controller is asked, also within epochs. The ceiling applies there, too. A *check* is a
    decision before which the metric was logged again.

    * At first there is no ceiling. When it is lowered for the first time, it starts from the echo factor of that moment.
    * On demand the ceiling limits ``max_factor``. It is lowered from the uses per fresh example in the epoch, if these are fewer.
    * After ``patience`` checks in a row without improvement, the ceiling is multiplied by ``shrink``.
    * After ``patience`` checks in a row with improvement, the ceiling is divided by ``shrink``. When it is back at the value that
      it started from, there is no ceiling any more.

    Args:
        controller: The controller to guard. None: the guard limits the factor that the run begins with.
        monitor: Name of a logged metric.
        mode: ``"min"`` if a smaller value is better, ``"max"`` if a larger one is.
        patience: Number of checks in a row, >= 1.
        min_delta: The metric has improved if it is better than its best value so far by more than this, >= 0. In the metric's
            unit.
        shrink: The number that the ceiling is multiplied by, in (0, 1).

    Raises:
        TypeError: ``controller`` is not a controller, or an option is not a number.
        ValueError: An option has an impossible value. `decide` also raises it if no metric named ``monitor`` is logged.

    Example:
        >>> from lightning_echo.measure.guard import FactorSchedule
        >>> guard = MetricGuard(FactorSchedule({0: 4.0}), monitor="val_loss", patience=1)
        >>> losses = enumerate([0.5, 0.4, 0.6, 0.3])
        >>> seen = [Observation(i, 4.0, metrics={"val_loss": x}, logged=frozenset({"val_loss"})) for i, x in losses]
        >>> [guard.decide(observation).factor for observation in seen]
        [4.0, 4.0, 2.0, 4.0]
    """

    def __init__(
        self,
        controller: Controller | None = None,
        *,
        monitor: str = "val_loss",
        mode: str = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        shrink: float = 0.5,
    ) -> None:
        if not isinstance(controller, Controller | None):
            raise TypeError(
                f"controller must be a Controller to guard, e.g. TargetIdle(), or None for that of the run, got {controller!r}"
            )
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', got {mode!r}")
        if isinstance(patience, bool) or not isinstance(patience, int):
            raise TypeError(f"patience must be an integer (a number of checks), got {patience!r}")
        if patience < 1:
            raise ValueError(f"patience must be a number of checks >= 1, got {patience!r}; 1 acts at once")
        if not 0 <= as_number("min_delta", min_delta) < math.inf:
            raise ValueError(f"min_delta must be a finite number >= 0, got {min_delta!r}; 0 counts any improvement")
        if not 0 < as_number("shrink", shrink) < 1:
            raise ValueError(f"shrink must be a number between 0 and 1, both excluded, got {shrink!r}; 0.5 halves the ceiling")
        self.controller, self.monitor, self.mode = controller or _Unchanged(), monitor, mode
        self.patience, self.min_delta, self.shrink = patience, float(min_delta), float(shrink)
        self._best: float | None = None
        self._row = 0  # checks in a row: positive with improvement, negative without
        self._ceiling = math.inf
        self._first_ceiling = math.inf  # when the ceiling is back at this value, it ends
        self._missing = 0  # decisions of this process before which the metric should have been logged, but was not

    def __repr__(self) -> str:
        options = f"monitor={self.monitor!r}, mode={self.mode!r}, patience={self.patience}"
        return f"MetricGuard({self.controller!r}, {options}, min_delta={self.min_delta:g}, shrink={self.shrink:g})"

    # Read only: the attributes of the guarded controller.
    first_after_steps = property(attrgetter("controller.first_after_steps"), doc=_OF_GUARDED)
    every_n_steps = property(attrgetter("controller.every_n_steps"), doc=_OF_GUARDED)
    asked_after = property(attrgetter("controller.asked_after"), doc=_OF_GUARDED)
    why_not_on_demand = property(attrgetter("controller.why_not_on_demand"), doc=_OF_GUARDED)

    def initial_factor(self) -> float | None:
        return self.controller.initial_factor()

    def largest_factor(self) -> float | None:
        return self.controller.largest_factor()

    def decide(self, observation: Observation) -> Decision:
        wanted = self.controller.decide(observation)
        value = observation.metrics.get(self.monitor)
        if value is None:
            # Within an epoch it need not be logged. What a module logs in its own ``on_train_epoch_end`` reaches callbacks one
            # epoch late: only the second epoch without it is an error.
            self._missing += observation.validated and observation.moment is Moment.epoch_end
            if self._missing > 1:
                known = ", ".join(sorted(observation.metrics)) or "none"
                raise ValueError(f"monitor={self.monitor!r} is not logged. Logged are: {known}. Log it, or choose one of them")
            finding = f"{self.monitor} is not logged yet"
        else:
            self._missing = 0
            is_new = self.monitor in observation.logged
            finding = self._check(value, observation) if is_new else f"{self.monitor} {value:.4g} is not new"
        if wanted.factor <= self._ceiling:
            return wanted
        name = "factor" if observation.mean_uses is None else "max_factor"
        message = f"{finding}: at most {name} {self._ceiling:g} instead of {wanted.factor:g}"
        return Decision(self._ceiling, Reason.guarded, message)

    def _check(self, value: float, observation: Observation) -> str:
        """Moves the ceiling after ``patience`` checks in a row, and returns a text about the metric."""
        best, sign = self._best, 1 if self.mode == "min" else -1
        is_better = not math.isnan(value) and (best is None or sign * (best - value) > self.min_delta)
        self._row = max(self._row, 0) + 1 if is_better else min(self._row, 0) - 1
        finding = f"{self.monitor} {value:.4g}, best {value if best is None else best:.4g}"
        if abs(self._row) >= self.patience:
            self._row = 0
            if is_better:
                self._ceiling /= self.shrink
                if self._ceiling >= self._first_ceiling:
                    self._ceiling = self._first_ceiling = math.inf
            else:
                uses = math.inf if observation.mean_uses is None else observation.mean_uses
                if self._ceiling == math.inf:
                    self._ceiling = self._first_ceiling = min(observation.factor, uses)
                # On demand a ceiling above the uses would lower nothing.
                self._ceiling = max(1.0, min(self._ceiling, uses) * self.shrink)
        if is_better:
            self._best = value
        return finding

    def state_dict(self) -> dict[str, Any]:
        return {
            "controller": {type(self.controller).__name__: self.controller.state_dict()},
            "best": self._best,
            "row": self._row,
            "ceiling": self._ceiling,
            "first_ceiling": self._first_ceiling,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with state_of("MetricGuard"):
            load_state_by_kind(self.controller, entry(state_dict, "controller", dict))
            self._best, self._row = entry(state_dict, "best", float | None), entry(state_dict, "row", int)
            self._ceiling, self._first_ceiling = (entry(state_dict, name, float) for name in ("ceiling", "first_ceiling"))


# ---------------------------------------------------------------------- schedule


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
        self.factors = {int(epoch): float(factors[epoch]) for epoch in sorted(factors)}

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
            ValueError: The file is damaged, or lacks the beginning of the run, or holds a factor that was not set by the
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
    """Makes the decisions of an earlier run, recorded in its ``echo_summary.json``, after the same batches."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        self._uses: dict[int, FactorUse] = {}  # by the number of batches after which the controller decided on them
        try:
            decisions = RunSummary.from_json(self._path.read_text(encoding="utf-8")).decisions
            if not decisions or decisions[0].step != 0:
                raise ValueError("it does not tell with which factor the run began")
            for use in decisions:
                if use.step is None:
                    raise ValueError(f"factor {use.factor:g} from batch {use.batch} on was not decided on by the controller")
                if not 1 <= as_number("factor", use.factor) < math.inf:
                    raise ValueError(f"a factor must be a finite number >= 1, got {use.factor!r}")
                self._uses[use.step] = use
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
