"""The input and the output of a controller, the cost model that it decides with, and the words for its reasons."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from itertools import combinations
from numbers import Integral, Real
from typing import Any

from lightning_echo.insertion import POINTS, InsertionPoint, Needs, earliest
from lightning_echo.schema import entry, record

# ---------------------------------------------------------------------- words
# Words for figures and findings, shared by a training's summary and a stall analysis.


def busy(idle_fraction: float, only: bool = False, last: int = 0) -> str:
    """Returns the share of the time in which the accelerator works, measured over the ``last`` steps.

    >>> busy(0.25), busy(0.25, only=True, last=100)
    ('the accelerator is busy 75% of the time', 'the accelerator is busy only 75% of the time (last 100 steps)')
    """
    return f"the accelerator is busy {'only ' if only else ''}{percent(1 - idle_fraction)} of the time{over_last(last)}"


def callback_line(options: Mapping[str, Any]) -> str:
    """Returns the `EchoCallback` with these options as a line of Python to paste.

    >>> print(callback_line({"factor": 2.0, "cache": "8GiB"}))
    EchoCallback(factor=2, cache="8GiB")
    >>> print(callback_line({"cache": {"size": "8GiB", "path": "/it's"}}))
    EchoCallback(cache={'size': '8GiB', 'path': "/it's"})
    """
    values = {name: f"{value:g}" if isinstance(value, float) else repr(value) for name, value in options.items()}
    line = f"EchoCallback({', '.join(f'{name}={value}' for name, value in values.items())})"
    return line if '"' in line else line.replace("'", '"')


def cores_elsewhere(needed: int, here: int, elsewhere: int, ranks: int = 1) -> str:
    """Returns the number of cores that fresh examples alone take, and what workers on other machines would have to add.

    ``needed``, ``here`` and ``elsewhere`` are those of one rank.

    >>> cores_elsewhere(23, 16, 7).partition(", with")[0]
    'Feeding it without echoes takes 23 cores, and this machine has 16: 7 on other machines would do'
    """
    whose, for_each = ("this machine has", "") if ranks == 1 else ("a rank has", f" for each of {ranks} ranks")
    taking = " (more than the difference, since taking their examples in costs cores here)" if elsewhere > needed - here else ""
    return (
        f"Feeding it without echoes takes {number_of(needed, 'core', 'cores')}, and {whose} {here}: {elsewhere} on other machines"
        f'{for_each}{taking} would do, with ShareConfig("train", cluster="ray", cluster_workers={elsewhere * ranks}).'
    )


def fewer_fresh(factor: float) -> str:
    """Returns the cost of an echo factor in words.

    >>> fewer_fresh(4)
    'each step then has 25% as many fresh examples'
    """
    return f"each step then has {percent(1 / factor)} as many fresh examples"


def no_workers(workers: int, idle_fraction: float, last: int = 0) -> str:
    why = f"since with 0 loading and training take turns: {busy(idle_fraction, last=last)}"
    return f"Set num_workers to {workers} or more first, {why}."


def number_of(number: float, one: str, several: str) -> str:
    """Returns a number with its noun, singular or plural.

    >>> number_of(1, "pass", "passes"), number_of(1200, "step", "steps")
    ('1 pass', '1,200 steps')
    """
    digits = three_digits(number)
    return f"{digits} {one if digits == '1' else several}"


def over_last(steps: int) -> str:
    """Returns the words for the steps behind a figure; empty if their number is unknown."""
    return f" (last {number_of(steps, 'step', 'steps')})" if steps else ""


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def three_digits(number: float) -> str:
    """Returns a number with three digits, or with all digits of its integer part.

    >>> three_digits(0.01234), three_digits(12.345), three_digits(12345.6)
    ('0.0123', '12.3', '12,346')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


_MOST_SLICES, _LEAST_STEPS = 40, 10


def slice_ends(steps: int) -> list[int]:
    """Returns after how many steps each slice of an epoch ends: at most 40 slices of equally many steps, of ten or more.

    >>> slice_ends(25), slice_ends(9), len(slice_ends(1_000_000))
    ([12, 25], [9], 40)
    """
    count = min(_MOST_SLICES, max(steps // _LEAST_STEPS, 1))
    return [steps * number // count for number in range(1, count + 1)] if steps else []


# ---------------------------------------------------------------------- control
# The input of a controller, `Observation`, and its output, `Decision`.


class Reason(Enum):
    """Why a factor was chosen, for programs. `Decision.message` is for people."""

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

    early = "early"  # while the run is young: `Controller.first_after_steps`, and twice, four times, ... as many
    within_epoch = "within_epoch"  # `Controller.every_n_steps`, or a step of `Controller.asked_after`
    epoch_end = "epoch_end"


@dataclass(frozen=True)
class Observation:
    """The measurements at the end of an epoch, or within one. It is the same on all ranks.

    Attributes:
        epoch: Number of the epoch, from 0.
        factor: Echo factor that was set last; on demand the bound ``max_factor``.
        steps: Number of steps over which `idle_fraction` and `step_seconds` were measured. They are the steps of the epoch that
            came after the last decision, and whose batches were planned with this factor. A few steps prove little.
        idle_fraction: Idle fraction of the job over these steps, 0 to 1; None if there are no such steps.
        step_seconds: Seconds per step over these steps, with the waiting; None if there are no such steps.
        costs: Measured costs of the pipeline on the slowest rank. None if the workers cannot be measured and no step waited.
        metrics: The values in ``trainer.callback_metrics``, as means over the ranks, without the keys that begin with ``echo/``.
        logged: Names of the metrics that were logged since the last decision.
        validated: Whether validation has run in this ``fit``, or is switched off.
        moment: When the controller is asked.
        batches: Number of batches of the run so far.
        idle_low: Lower end of the 99% interval of `idle_fraction`. None if there are too few steps for an interval.
        mean_uses: On demand: uses per fresh example in the epoch so far, all ranks. None otherwise, or if no example was fresh.

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
    mean_uses: float | None = None


@dataclass(frozen=True)
class Decision:
    """The factor from now on; on demand the bound ``max_factor``.

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
    """Decides on the echo factor. Subclass it, write `decide`, and give an instance to ``EchoCallback(controller=...)``.

    The callback asks it through `Decider` (``training/counts.py``).

    Each rank gives its controller the same observation. The decision of rank 0 is used on all ranks.

    The controller is asked at the end of each epoch. Set one of the attributes if it must be asked within epochs, too:

    * The attributes count batches, not optimizer steps. Gradient accumulation therefore makes no difference.
    * With ``epoch_length="full_pass"`` and a known length, the controller is asked only at the ends of epochs, because the
      Trainer cannot be told a new length within an epoch.
    * At the last batch of an epoch it is asked once: at the end.

    Attributes:
        first_after_steps: The controller is asked after this number of batches of the run, and again each time their number has
            doubled (`Moment.early`), as long as it is below ``every_n_steps``. None: it is not asked then.
        every_n_steps: The controller is asked each time after this number of batches of an epoch (`Moment.within_epoch`). Each
            time, the ranks exchange their measurements. None: it is not asked then.
        asked_after: The controller is also asked after these numbers of batches of the run (`Moment.within_epoch`).
        why_not_on_demand: Why the controller cannot drive loaders with ``factor="demand"``. Empty: it can, and its factors are
            bounds (``max_factor``).

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
    why_not_on_demand: str = ""

    @abstractmethod
    def decide(self, observation: Observation) -> Decision:
        """Returns the factor from now on. Batches that are planned already keep their factor.

        Args:
            observation: The present measurements.
        """

    def initial_factor(self) -> float | None:
        """Returns the factor of the first epoch; None leaves the factor that the loader has."""
        return None

    def largest_factor(self) -> float | None:
        """Returns the largest factor that `decide` may return, or None if it is unknown.

        A buffer that cannot hold this factor is then refused before training.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, in plain types and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: B027 (a controller without state has nothing to load)
        """Restores what `state_dict` returned.

        Args:
            state_dict: The saved state.
        """


def check_on_demand(controller: Controller, error: type[Exception] = ValueError) -> None:
    """Raises an error if a controller cannot drive loaders that echo on demand."""
    if why := controller.why_not_on_demand:
        raise error(
            f"controller={controller!r} is impossible with factor='demand': {why}. Leave the controller out, or give a factor as "
            "a number"
        )


def load_state_by_kind(controller: Controller, state: dict[str, Any]) -> None:
    """Restores a state by the name of its controller's class; the state of another class is ignored."""
    name = type(controller).__name__
    if (own := entry(state, name, dict | None, None)) is not None:
        controller.load_state_dict(own)


def as_count(name: str, value: Any) -> int | None:
    """Returns an option that is a number of steps >= 1, or None; raises a TypeError or a ValueError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a number of steps (an integer), or None, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be a number of steps >= 1, got {value!r}; None: the controller is not asked then")
    return int(value)


def as_number(name: str, value: Any) -> float:
    """Returns an option as a float; raises a TypeError if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


# ---------------------------------------------------------------------- cost
# The cost model: the time per step at any echo factor, from measured seconds, and the smallest factor that feeds the device.
#
#     host time per batch        h(e) = (reused / e + redone) / W          W workers
#     time per step              T(e) = max(h(e), d)                       d: device time per step
#                                T(e) = reused / e + redone + d            W = 0: nothing overlaps
#     idle fraction              1 - d / T(e)
#     speed-up                   S(e) = T(1) / T(e)
#
# The insertion point decides which of the source, rest and collate seconds are reused and which are redone.
# Source: Choi et al. 2019, arXiv 1907.05550, section 2 (upstream and downstream time, their ratio R).


GAINS_LITTLE = 1.05
"""A setting whose steps take at most this many times as long as another one's is as good."""


_CLEARLY_IDLE = 0.1  # workers that had no request for a smaller share of the time may be those of a loader that is too slow


@dataclass(frozen=True)
class PipelineCosts:
    """The seconds that one batch costs if all its examples are fresh.

    Example:
        >>> costs = PipelineCosts("after_augmentation", 0.08, 0.0, 0.0, device_seconds=0.01, workers=2)
        >>> costs.step_seconds(1), costs.step_seconds(4), costs.speedup(8), costs.feeding_factor()
        (0.04, 0.01, 4.0, 4.0)
    """

    insertion_point: str  # the name of an `InsertionPoint`, but not "auto"
    source_seconds: float  # of a worker per batch, before the insertion point
    rest_seconds: float  # of a worker per batch, after the insertion point, without collate
    collate_seconds: float  # of a worker per batch
    device_seconds: float  # per step in which the device is busy, transfer included
    workers: int  # with 0, loading and training take turns
    keeps_up: bool = False  # the workers had nothing to do for so long that the device does not wait for loading
    from_waiting: bool = False  # no stage was measured by itself: what echoes redo is not known

    @classmethod
    def of_waiting(
        cls, step_seconds: float, idle_fraction: float, factor: float, workers: int = 1, no_request: float = 0.0
    ) -> PipelineCosts:
        """Returns the costs of a pipeline whose workers cannot be measured, from waiting that is clearly more than 0.

        ``no_request``: the share of the time in which the workers had nothing to do.

        >>> PipelineCosts.of_waiting(0.0125, 0.2, 1.0, no_request=0.6).keeps_up  # they take 5 ms for a batch, a step 10 ms
        True
        """
        # While the device waits, a step lasts as long as the host needs for a batch; without workers the host needs the time
        # that the device waited. Whole batches are assumed to be reused.
        host = step_seconds * (1 - no_request) if workers else step_seconds * idle_fraction
        device = step_seconds * (1 - idle_fraction)
        keeps_up = no_request >= _CLEARLY_IDLE and host <= device
        return cls(earliest(Needs.batches).value, host * factor, 0.0, 0.0, device, min(workers, 1), keeps_up, from_waiting=True)

    @property
    def reused_seconds(self) -> float:
        """Worker time per batch that echoing saves."""
        if InsertionPoint(self.insertion_point).by_batches:
            return self.source_seconds + self.rest_seconds + self.collate_seconds
        return self.source_seconds

    @property
    def redone_seconds(self) -> float:
        """Worker time per batch that no echo factor saves."""
        return self.source_seconds + self.rest_seconds + self.collate_seconds - self.reused_seconds

    @property
    def upstream_seconds(self) -> float:
        """Host time per fresh batch when all workers work on it: the paper's upstream time."""
        return self.reused_seconds / max(self.workers, 1)

    def host_seconds(self, factor: float) -> float:
        return (self.reused_seconds / factor + self.redone_seconds) / max(self.workers, 1)

    def step_seconds(self, factor: float) -> float:
        host = self.host_seconds(factor)
        return max(host, self.device_seconds) if self.workers else host + self.device_seconds

    def idle_fraction(self, factor: float) -> float:
        seconds = self.step_seconds(factor)
        return 1 - self.device_seconds / seconds if seconds else 0.0

    def speedup(self, factor: float) -> float:
        """Returns the steps per second, relative to factor 1."""
        seconds = self.step_seconds(factor)
        return self.step_seconds(1) / seconds if seconds else 1.0

    def feeding_factor(self, idle_fraction: float = 0.0) -> float:
        """Returns the smallest factor that brings idle down to a target in [0, 1); infinite if no factor does."""
        longest_step = self.device_seconds / (1 - idle_fraction)
        worker_seconds = longest_step * self.workers if self.workers else longest_step - self.device_seconds
        left_for_reused = worker_seconds - self.redone_seconds
        if not self.reused_seconds and left_for_reused >= 0:
            return 1.0
        return max(1.0, self.reused_seconds / left_for_reused) if left_for_reused > 0 else math.inf

    def gaining_factor(self, most: float) -> float:
        """Returns the smallest factor whose steps take hardly longer than those of the factor ``most``, which costs no less.

        With ``most`` itself, a step is shorter by 5% at most.

        >>> costs = PipelineCosts("before_augmentation", 0.02, 0.02, 0.0, device_seconds=0.01, workers=1)  # never fed
        >>> round(costs.gaining_factor(8.0), 2), round(costs.gaining_factor(100.0), 2)  # 22.5 ms, 20.2 ms
        (5.52, 16.53)
        """
        longest_step = GAINS_LITTLE * self.step_seconds(most)
        worker_seconds = longest_step * self.workers if self.workers else longest_step - self.device_seconds
        return max(1.0, min(self.reused_seconds / (worker_seconds - self.redone_seconds), most)) if self.reused_seconds else 1.0

    def slower(self, ratio: float) -> PipelineCosts:
        """Returns the costs of the same pipeline on a host that takes ``ratio`` times as long."""
        return replace(
            self,
            source_seconds=self.source_seconds * ratio,
            rest_seconds=self.rest_seconds * ratio,
            collate_seconds=self.collate_seconds * ratio,
        )

    def at_later_points(self) -> list[PipelineCosts]:
        """Returns the costs at each later insertion point whose cost is known, earliest first.

        ``after_transfer`` is left out, because the transfer takes no host time.
        """
        source = self.source_seconds + self.rest_seconds
        return [
            replace(self, insertion_point=point.value, source_seconds=source, rest_seconds=0.0)
            for point in self.later_points()
            if "augment" in point.properties.reused and "transfer" in point.properties.redone
        ]

    def later_points(self) -> tuple[InsertionPoint, ...]:
        return POINTS[POINTS.index(InsertionPoint(self.insertion_point)) + 1 :]


# ---------------------------------------------------------------------- other machines
# Workers on other machines (`ShareConfig.cluster_workers`) prepare a share of the examples, and this machine the rest. Each limit
# is then a line over that share. A limit of this machine falls with it, one of the other machines rises with it. Lanes that get
# the next examples when they are free share the work so that the highest line is as low as possible.

TAKING_SECONDS = 0.0005
"""Processor time of this machine for an example of 150 KB that another machine has prepared, in seconds.

It is the upper bound that sharing over a cluster has to keep. On a simulated cluster the processes of both machines took 0.28 and
0.55 ms together in two runs (``make bench ARGS="--only cluster"``), of which this machine has a part."""

MOST_OF_READER = 96  # workers on other machines that a reader can have: `ShareConfig.cluster_workers`
_MOST_ELSEWHERE = 4096  # that are asked about


def whole_cores(cores: float) -> int:
    """Returns a number of cores, rounded up.

    >>> whole_cores(2.1), whole_cores(0.46 / 0.02)  # 23.000000000000004
    (3, 23)
    """
    return math.ceil(round(cores, 6))


def least_of_most(lines: Sequence[tuple[float, float]]) -> float:
    """Returns the smallest value that the highest of some lines takes between 0 and 1: pairs of the values at 0 and at 1.

    >>> least_of_most([(6.0, 0.0), (0.0, 3.0)])  # they meet at two thirds
    2.0
    """
    shares = [0.0, 1.0]
    for (first, first_end), (second, second_end) in combinations(lines, 2):
        opening = (first_end - first) - (second_end - second)
        shares += [(second - first) / opening] if opening else []
    return min(max(begin + (end - begin) * share for begin, end in lines) for share in shares if 0 <= share <= 1)


def fewest_elsewhere(is_enough: Callable[[int], bool]) -> int | None:
    """Returns the fewest workers on other machines that are enough, where more of them never are less; None: no number is.

    >>> fewest_elsewhere(lambda workers: 3 * workers > 20)
    7
    """
    if not is_enough(_MOST_ELSEWHERE):
        return None
    return 1 + bisect_left(range(1, _MOST_ELSEWHERE), True, key=is_enough)


# ---------------------------------------------------------------------- recent
# Short epochs are judged together: `RecentSteps` has the means over about the last hundred steps with one factor.
#
# In an epoch of 16 steps at factor 4, one late batch makes 6% of idle time, and the device's own time varies by as much between
# such epochs. A controller that trusted each of these epochs would change the factor without need.
#
# * An epoch of fewer than `ENOUGH_STEPS` steps is joined with the epochs before it. A longer one is judged by itself.
# * Steps with different factors are never joined. After waiting, the device's caches are cold, so even the device's own time
#   depends on the factor.
# * Fewer than `FEWEST_STEPS` steps prove nothing, no matter how many epochs they took.

FEWEST_STEPS = 4
ENOUGH_STEPS = 100  # 5% of idle time is then five steps' worth: more than one late batch


class RecentSteps:
    """The means over the latest steps with one factor, at most ``enough`` of them.

    Example:
        >>> recent = RecentSteps()
        >>> first = recent.joined(Observation(0, 4.0, steps=25, idle_fraction=0.08, step_seconds=0.01))
        >>> both = recent.joined(Observation(1, 4.0, steps=75, idle_fraction=0.0, step_seconds=0.01))
        >>> first.idle_fraction, both.steps, round(both.idle_fraction, 4)
        (0.08, 100, 0.02)
    """

    def __init__(self, enough: int = ENOUGH_STEPS) -> None:
        self._enough = enough
        self._joined: Observation | None = None

    def joined(self, epoch: Observation) -> Observation:
        """Adds an epoch, and returns it joined with the epochs before it that had the same factor.

        An epoch that was not measured is returned as it is. A result with fewer than `FEWEST_STEPS` steps has no means.
        """
        if epoch.idle_fraction is None or epoch.step_seconds is None:
            return epoch
        before, joined = self._joined, epoch
        if before is not None and before.factor == epoch.factor and before.steps and epoch.steps < self._enough:
            joined = mean_over_steps(before, epoch, self._enough)
        self._joined = joined
        return replace(joined, idle_fraction=None, step_seconds=None) if 0 < joined.steps < FEWEST_STEPS else joined

    def state_dict(self) -> dict[str, Any]:
        return {} if self._joined is None else observation_state(self._joined)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._joined = observation_from_state(state) if state else None  # it may raise a FieldError


_MEASURED = ("epoch", "factor", "steps", "idle_fraction", "step_seconds")


def observation_state(observation: Observation) -> dict[str, Any]:
    costs = observation.costs
    return {**{name: getattr(observation, name) for name in _MEASURED}, "costs": None if costs is None else asdict(costs)}


def observation_from_state(state: dict[str, Any]) -> Observation:
    """Returns an observation without its metrics; raises a FieldError if a field is missing, wrong or unknown."""
    return record(Observation, state, saved=(*_MEASURED, "costs"))


def are_of_same_pipeline(one: PipelineCosts, other: PipelineCosts) -> bool:
    return (one.insertion_point, one.workers) == (other.insertion_point, other.workers)


def mean_over_steps(before: Observation, now: Observation, enough: float = math.inf) -> Observation:
    """Returns the means over the steps of two measured observations; the other fields are those of the later one.

    If both together have more than ``enough`` steps, the earlier ones count less.
    """
    steps = int(min(before.steps + now.steps, enough))
    share = now.steps / steps

    def mean(of_before: float, of_now: float) -> float:
        return (1 - share) * of_before + share * of_now

    waited = mean(wait_per_step(before), wait_per_step(now))
    seconds = mean(before.step_seconds or 0.0, now.step_seconds or 0.0)
    earlier, costs = before.costs, now.costs
    if costs is not None and earlier is not None and are_of_same_pipeline(costs, earlier):
        costs = replace(
            costs,
            source_seconds=mean(earlier.source_seconds, costs.source_seconds),
            rest_seconds=mean(earlier.rest_seconds, costs.rest_seconds),
            collate_seconds=mean(earlier.collate_seconds, costs.collate_seconds),
            device_seconds=mean(earlier.device_seconds, costs.device_seconds),
        )
    return replace(now, steps=steps, idle_fraction=waited / seconds if seconds else 0.0, step_seconds=seconds, costs=costs)


def wait_per_step(observation: Observation) -> float:
    return (observation.idle_fraction or 0.0) * (observation.step_seconds or 0.0)


# ---------------------------------------------------------------------- interval
# Blocks of the batch means, and the 99% quantile of Student's t with one degree of freedom less. On simulated waits over 8, 10,
# 50 and 250 steps with a true idle fraction of 0.05, the lower end lay above that in at most 0.3% of the samples if waits were
# independent, came in bursts (periods 2 to 32) or had heavy tails, and in up to 8% with a correlation of 0.95 from step to step.
# Of 95% intervals over 50 steps, those from more blocks were wrong up to 21% of the time, those of a bootstrap up to 17%.
_QUANTILES = {5: 3.747, 4: 4.541}
_LEAST_PER_BLOCK = 2  # steps: blocks of a single step would not show how the waits of neighbouring steps depend on each other


def idle_low(waited: Sequence[float], seconds: Sequence[float], workers: int = 1) -> float | None:
    """Returns the lower end of the 99% interval of the idle fraction; None for fewer than eight steps, or if they took no time.

    The waits of neighbouring steps are not independent, because all ``workers`` deliver their batches in a row. So the steps are
    cut into a few long blocks, whose sums are nearly independent (batch means): whole rounds of the workers, if there are enough
    steps. The idle fraction is a ratio of two sums; its error follows from the differences between each block's waiting and the
    mean share of its time. The longest wait is left out: one wait alone proves nothing, no matter how long it is.

    Example:
        >>> once = [10.0 * (step == 7) for step in range(50)]  # one step of 50 waited for ten seconds
        >>> idle_low([0.2] * 50, [1.0] * 50) > 0.18, idle_low(once, [1.0 + wait for wait in once])
        (True, 0.0)
    """
    counts = [count for count in _QUANTILES if len(waited) // count >= _LEAST_PER_BLOCK]
    if not counts:
        return None
    count = next((count for count in counts if len(waited) // count >= workers), counts[0])
    size = len(waited) // count
    size -= size % workers if size > workers else 0
    waits, times = list(waited[-size * count :]), list(seconds[-size * count :])
    longest = max(range(len(waits)), key=waits.__getitem__)
    times[longest] -= waits[longest]
    waits[longest] = 0.0
    waits_in, times_in = ([math.fsum(part[i : i + size]) for i in range(0, len(part), size)] for part in (waits, times))
    total = math.fsum(times_in)
    if total <= 0:
        return None
    fraction = math.fsum(waits_in) / total
    beyond = math.fsum((wait - fraction * time) ** 2 for wait, time in zip(waits_in, times_in, strict=True))
    return max(0.0, fraction - _QUANTILES[count] * math.sqrt(beyond * count / (count - 1)) / total)
