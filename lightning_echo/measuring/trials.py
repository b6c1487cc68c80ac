"""`Trials`: finds out whether a larger factor has brought the predicted gain. If not, the factor before it is the better one.

The cost model knows only means. If single reads take far longer than the others, or if a source hangs at times, one worker
delivers nothing for a while. Batches come in order, so the device waits, although the workers are fast enough on average. A
larger factor makes slow reads a little rarer, and does nothing against a source that hangs. It then brings far less than the
model says, but the training still gets fewer fresh examples. So each raise of the factor is judged:

    before ---- raised ----> tried ---- too little gained ----> back at the factor before, and kept there
                                                                            |
        going back lost as much as the model says: the raise was right after all, and is made again

A source that has become slower in the meantime does not count as a failure of the factor:

* If the workers have measured that it is slower, their costs explain the waiting.
* If it was slow for an epoch only, that epoch is in the worst of the stretches that are compared. The worst one is left out.
* If it stays slower, but the measured costs do not show it, then the return to the factor before shows it.

A raise that was taken back is not made again until the costs have changed.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

from lightning_echo.measuring.control import Observation
from lightning_echo.measuring.cost import PipelineCosts
from lightning_echo.measuring.recent import (
    ENOUGH_STEPS,
    are_of_same_pipeline,
    mean_over_steps,
    observation_from_state,
    observation_state,
    wait_per_step,
)
from lightning_echo.saved import entry, inside, rows

__all__ = ["TakenBack", "Trials", "share_gained"]

_STRETCH_STEPS = ENOUGH_STEPS // 2  # steps of a stretch, whose idle fractions are compared; a longer epoch is one stretch
# Stretches and steps that a verdict needs. With fewer of them, it would depend on a few slow reads.
_STRETCHES, _STEPS = 3, 10 * ENOUGH_STEPS
# A smaller share of the predicted gain is too little: at factor 4 learning takes 1.57 to 1.75 times the steps (docs/evidence.md),
# so that about half of the gain of a larger factor is lost again.
_ENOUGH_GAINED = 0.5
_ALL_GAINED = 0.75  # this share of the predicted gain counts as all of it: measurements jitter
_RAISED = 1.25  # a raise is judged only if the factor was multiplied by at least this
_RAISED_NEAR_TARGET = 1.5  # the same while idle is near the target, where small raises overcome jitter
_NEAR_TARGET = 2.0  # near the target is up to this many times the target
_EXPLAINED = 1.5  # waiting up to this many times what the present costs predict counts as explained: no clock sees all of it
_CHANGED = 1.5  # costs that differ by less than this factor count as equal


class TakenBack(NamedTuple):
    """A raise of the factor that brought too little.

    Attributes:
        before: Observation at the smaller factor, which is used again.
        tried: Observation at the larger factor.
        is_refuted: Whether going back has shown that the larger factor was right.
    """

    before: Observation
    tried: Observation
    is_refuted: bool = False


class Trials:
    """The raises of the factor, and the gain of each.

    Args:
        target: Idle fraction to stay under.
    """

    def __init__(self, target: float) -> None:
        self._target = target
        self._before_raises: list[Observation] = []  # observations before the raises that are still judged
        self._taken_back: TakenBack | None = None
        self._stretches: list[Observation] = []  # with the factor in force; the last one may still grow

    @property
    def taken_back(self) -> TakenBack | None:
        """The raise that was taken back. None if there is none, or if that raise was right after all."""
        return None if self._taken_back is None or self._taken_back.is_refuted else self._taken_back

    @property
    def is_doubtful(self) -> bool:
        """Whether a raise of the factor seems to have brought too little so far."""
        return self._before_failed_raise() is not None

    def add(self, epoch: Observation) -> None:
        """Adds a measured epoch before the next decision. The epoch must not be joined with others."""
        self._add(epoch)
        if len(self._stretches) < _STRETCHES or sum(stretch.steps for stretch in self._stretches) < _STEPS:
            return
        now = _without_worst(self._stretches)
        if self._taken_back is not None:
            self._taken_back = _judged_again(self._taken_back, now)
        if (before := self._before_failed_raise()) is not None:
            self._taken_back = TakenBack(before, now)
        self._before_raises.clear()

    def note_raise(self) -> None:
        """Notes that the factor is raised now, unless this is a raise that was found to be right."""
        if not self._stretches or (self._taken_back is not None and self._stretches[-1].factor < self._taken_back.tried.factor):
            return
        self._before_raises.append(_without_worst(self._stretches))

    def _add(self, epoch: Observation) -> None:
        stretches = self._stretches
        if stretches and stretches[-1].factor != epoch.factor:
            stretches.clear()
        if stretches and stretches[-1].steps < _STRETCH_STEPS:
            stretches[-1] = mean_over_steps(stretches[-1], epoch)
        else:
            stretches.append(epoch)
        while len(stretches) > _STRETCHES and sum(stretch.steps for stretch in stretches[1:]) >= _STEPS:
            del stretches[0]
        self._before_raises = [before for before in self._before_raises if before.factor < epoch.factor]

    def _before_failed_raise(self) -> Observation | None:
        """Returns the observation before the first raise that has brought too little so far; None if there is none."""
        now = _without_worst(self._stretches) if self._stretches else None
        if now is None or now.steps < _STRETCH_STEPS:
            return None
        is_near_target = (now.idle_fraction or 0.0) <= _NEAR_TARGET * self._target
        largest = now.factor / (_RAISED_NEAR_TARGET if is_near_target else _RAISED)
        judged = [before for before in self._before_raises if before.factor <= largest and before.steps >= _STRETCH_STEPS]
        return next((before for before in judged if _brought_too_little(before, now)), None)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in plain types."""
        back = self._taken_back
        return {
            "raised": [observation_state(before) for before in self._before_raises],
            "held": None if back is None else [observation_state(back.before), observation_state(back.tried), back.is_refuted],
            "stretches": [observation_state(stretch) for stretch in self._stretches],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. An empty state is the state of a run without raises."""
        self._before_raises = rows(state, "raised", observation_from_state, [])
        held = entry(state, "held", tuple[Any, Any, bool] | None, None)
        with inside("held"):
            self._taken_back = held and TakenBack(observation_from_state(held[0]), observation_from_state(held[1]), held[2])
        self._stretches = rows(state, "stretches", observation_from_state, [])


def share_gained(before: Observation, now: Observation) -> float | None:
    """Returns the share of the predicted gain that a larger factor has brought. The gain is the waiting that it saves per step.

    The prediction uses the costs that were measured before. If the host was slower than these costs then, it assumes the same
    slowness now.

    Args:
        before: The observation at the smaller factor.
        now: The observation at the larger factor.

    Returns:
        The share; None if the model predicts no gain, or knows too little.

    Example:
        >>> costs = PipelineCosts("after_augmentation", 0.06, 0.0, 0.0, device_seconds=0.01, workers=2)
        >>> before = Observation(epoch=0, factor=1.0, steps=100, idle_fraction=2 / 3, step_seconds=0.03, costs=costs)
        >>> now = Observation(epoch=1, factor=2.0, steps=100, idle_fraction=0.6, step_seconds=0.025, costs=costs)
        >>> round(share_gained(before, now), 2)  # 15 ms of waiting in place of 20, where 5 were expected
        0.33
    """
    at_smaller = _predicted_wait(before, before.costs, before.factor)
    at_larger = _predicted_wait(before, before.costs, now.factor)
    if at_smaller is None or at_larger is None or at_smaller <= at_larger:
        return None
    return (at_smaller - wait_per_step(now)) / (at_smaller - at_larger)


def _brought_too_little(before: Observation, now: Observation) -> bool:
    """Whether a raise has brought too little, and the present costs do not explain why."""
    share, explained = share_gained(before, now), _predicted_wait(before, now.costs, now.factor)
    if share is None or explained is None:
        return False
    return share < _ENOUGH_GAINED and explained * _EXPLAINED < wait_per_step(now)


def _judged_again(taken_back: TakenBack, now: Observation) -> TakenBack | None:
    """Returns the raise that was taken back, as refuted if going back was wrong. Returns None if the costs have changed."""
    costs = [_relative_cost(each) for each in (taken_back.before, taken_back.tried)]
    if not min(costs) / _CHANGED < _relative_cost(now) < max(costs) * _CHANGED:
        return None
    lost = share_gained(now, taken_back.tried) if now.factor == taken_back.before.factor else None
    return taken_back if lost is None or lost < _ALL_GAINED else taken_back._replace(is_refuted=True)


def _predicted_wait(before: Observation, costs: PipelineCosts | None, factor: float) -> float | None:
    """Returns the predicted waiting per step, in seconds. It assumes that the host is still as much slower than its costs."""
    if costs is None or before.costs is None or before.step_seconds is None or not are_of_same_pipeline(before.costs, costs):
        return None
    host = before.costs.host_seconds(before.factor)
    if not costs.workers or not host:
        return None
    return costs.slower(before.step_seconds / host).step_seconds(factor) - costs.device_seconds


def _relative_cost(observation: Observation) -> float:
    """Returns the host time per batch at factor 1, as a multiple of the device time; 0 if it is not known."""
    costs = observation.costs
    return costs.host_seconds(1.0) / costs.device_seconds if costs is not None and costs.device_seconds else 0.0


def _without_worst(stretches: list[Observation]) -> Observation:
    """Returns the mean over all stretches but the one with the most idle time. A single stretch is returned as it is."""
    worst = max(range(len(stretches)), key=lambda i: stretches[i].idle_fraction or 0.0) if len(stretches) > 1 else -1
    return reduce(mean_over_steps, [stretch for i, stretch in enumerate(stretches) if i != worst])
