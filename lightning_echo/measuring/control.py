"""What a controller gets and what it returns: an `Observation`, and a `Decision` with its reason."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from typing import Any

from lightning_echo.measuring.cost import PipelineCosts
from lightning_echo.saved import entry

__all__ = [
    "Controller",
    "Decision",
    "Moment",
    "Observation",
    "Reason",
    "as_count",
    "as_number",
    "load_state_by_kind",
    "state_by_kind",
]


class Reason(Enum):
    """Why a factor was chosen, for programs. `Decision.message` tells it to people."""

    fits = "fits"  # the factor in force is right
    starved = "starved"  # the device waits too long: the factor must be larger
    cheaper_source = "cheaper_source"  # a smaller factor is enough
    at_maximum = "at_maximum"  # the device waits too long, but the factor may not be larger
    at_minimum = "at_minimum"  # a smaller factor would be enough, but the factor may not be smaller
    downstream_too_slow = "downstream_too_slow"  # the work that is redone for each use starves the device by itself
    no_workers = "no_workers"  # loading and training take turns: set num_workers first
    no_gain = "no_gain"  # the device waits too long, but a larger factor was tried and brought too little
    not_measured = "not_measured"  # too little was measured to decide
    scheduled = "scheduled"  # the schedule has this factor
    guarded = "guarded"  # a metric got no better, so the factor is smaller than the wrapped controller wants
    custom = "custom"  # for your own controllers

    @property
    def is_measured(self) -> bool:
        """Whether the decision follows from measurements of the pipeline alone."""
        return self not in (Reason.not_measured, Reason.scheduled, Reason.guarded, Reason.custom)


class Moment(Enum):
    """When a controller is asked."""

    early = "early"  # once in a run, in its first epoch: `Controller.first_after_steps`
    within_epoch = "within_epoch"  # `Controller.every_n_steps`, or a step of `Controller.asked_after`
    epoch_end = "epoch_end"


@dataclass(frozen=True)
class Observation:
    """What is known at the end of an epoch, or within one. It is the same on all ranks.

    Attributes:
        epoch: Number of the epoch, from 0.
        factor: Echo factor that was set last.
        steps: Number of steps over which `idle_fraction` and `step_seconds` were measured. They are the steps of the epoch that
            came after the last decision, and whose batches were planned with this factor. A few steps tell little.
        idle_fraction: Idle fraction of the job over these steps, 0 to 1; None if there are no such steps.
        step_seconds: Seconds per step over these steps, with the waiting; None if there are no such steps.
        costs: Measured costs of the pipeline on the slowest rank. None if the workers cannot be measured and no step waited.
        metrics: The values in ``trainer.callback_metrics``, as means over the ranks, without the keys that begin with ``echo/``.
        logged: Names of the metrics that were logged since the last decision.
        validated: Whether validation has run in this ``fit``, or is switched off.
        moment: When the controller is asked.
        batches: Number of batches of the run so far.
        idle_low: Lower end of the 95 % interval of `idle_fraction`. None if there are too few steps for an interval.

    Example:
        >>> seen = Observation(epoch=3, factor=2.0, steps=100, idle_fraction=0.25, step_seconds=0.02, metrics={"val_loss": 0.5})
        >>> seen.step_seconds * (1 - seen.idle_fraction)  # what a step takes without waiting
        0.015
    """

    epoch: int
    factor: float
    steps: int = 0
    idle_fraction: float | None = None
    step_seconds: float | None = None
    costs: PipelineCosts | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    logged: frozenset[str] = frozenset()
    validated: bool = True
    moment: Moment = Moment.epoch_end
    batches: int = 0
    idle_low: float | None = None


@dataclass(frozen=True)
class Decision:
    """The factor from now on.

    Attributes:
        factor: Echo factor, >= 1.
        reason: The reason, for programs.
        message: The reason for people, with the values that led to it.
        since: Number of the first batch of the run with this factor. None: the first batch that is not planned yet.

    Raises:
        TypeError: The factor is not a number, or the reason is not a `Reason`.
        ValueError: The factor is below 1 or not finite.

    Example:
        >>> Decision(2.5, Reason.custom, "as my formula says").factor
        2.5
    """

    factor: float
    reason: Reason
    message: str
    since: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.reason, Reason):
            raise TypeError(f"Decision.reason must be a Reason, e.g. Reason.custom, got {self.reason!r}")
        object.__setattr__(self, "factor", as_number("Decision.factor", self.factor))  # a plain float, also of a numpy number
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"Decision.factor must be a finite number >= 1, got {self.factor!r}; use 1 to switch echoing off")


class Controller(ABC):
    """Decides on the echo factor. Subclass it and write `decide`.

    Each rank gives its controller the same observation. The decision of rank 0 is used on all ranks.

    The controller is asked at the end of each epoch. Set one of the attributes if it must be asked within epochs, too:

    * The attributes count batches, not optimizer steps. Gradient accumulation therefore makes no difference.
    * With ``epoch_length="full_pass"`` and a known length, the controller is asked only at the ends of epochs, because the
      Trainer cannot be told a new length within an epoch.
    * At the last batch of an epoch it is asked once: at the end.

    Attributes:
        first_after_steps: In the first epoch of a run, the controller is asked after this number of steps, if it has not been
            asked before (`Moment.early`). Three kinds of steps tell nothing and are not counted: the steps whose batches were
            queued at the start, the steps that fill the buffer, and ten more. None: it is not asked early.
        every_n_steps: The controller is asked each time after this number of batches of an epoch (`Moment.within_epoch`). An
            epoch that never ends needs this. Each time, the ranks exchange what they have measured. None: it is not asked then.
        asked_after: The controller is also asked after these numbers of batches of the run (`Moment.within_epoch`).

    Example:
        >>> class Halve(Controller):
        ...     def decide(self, observation: Observation) -> Decision:
        ...         return Decision(max(1.0, observation.factor / 2), Reason.custom, "half of it")
        >>> Halve().decide(Observation(epoch=0, factor=3.0)).factor
        1.5
    """

    first_after_steps: int | None = None
    every_n_steps: int | None = None
    asked_after: Collection[int] = ()

    @abstractmethod
    def decide(self, observation: Observation) -> Decision:
        """Returns the factor from now on. Batches that are planned already keep their factor.

        Args:
            observation: What is known now.
        """

    def initial_factor(self) -> float | None:
        """Returns the factor of the first epoch; None leaves the factor that the loader has."""
        return None

    def largest_factor(self) -> float | None:
        """Returns the largest factor that `decide` may return, or None if it is not known.

        A buffer that cannot hold this factor is then refused before training.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint has to save, in plain types and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: B027 (a controller without state has nothing to load)
        """Restores what `state_dict` returned.

        Args:
            state_dict: The saved state.
        """


def state_by_kind(controller: Controller) -> dict[str, Any]:
    """Returns a controller's state under the name of its class."""
    return {type(controller).__name__: controller.state_dict()}


def load_state_by_kind(controller: Controller, state: dict[str, Any]) -> None:
    """Restores the state that `state_by_kind` returned. It ignores the state of another class of controller."""
    name = type(controller).__name__
    if (own := entry(state, name, dict | None, None)) is not None:
        controller.load_state_dict(own)


def as_count(name: str, value: Any) -> int | None:
    """Returns a number of steps as an int, or None.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is below 1.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a number of steps (an integer), or None, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be a number of steps >= 1, got {value!r}; None: the controller is not asked then")
    return int(value)


def as_number(name: str, value: Any) -> float:
    """Returns an option as a float.

    Raises:
        TypeError: It is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)
