"""`Trials`: whether a larger factor has brought what the cost model says; where it has not, the factor before is the better one.

Costs are means. Where single reads take far longer than the others, or a source hangs at times, the queue of a worker stands
still, and batches come in order: the device waits, although the workers are fast enough on average. A larger factor makes slow
reads a little rarer, and does nothing against a source that hangs. It then brings far less than the model says, and costs as many
fresh examples. So raises are looked at:

    before ---- raised ----> tried ---- too little came ----> back to before, and held there
                                                                        |
           going back lost what the model says: the raise was right after all, and is made again

A source that has got slower meanwhile is no failure of the factor. If the workers have measured it, it explains the waiting. If
it was slow for an epoch only, it is the worst stretch of all that are looked at, which is left out. If it is slower for good, and
no clock shows it, that is found out by going back. What is held is held until the costs have changed.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

from lightning_echo.measuring.control import Observation
from lightning_echo.measuring.cost import PipelineCosts
from lightning_echo.measuring.recent import ENOUGH_STEPS, are_alike, mean_of, observation_of, state_of

__all__ = ["Trials", "share_gained"]

_STRETCH_STEPS = ENOUGH_STEPS // 2  # that an idle fraction is compared over; an epoch that has more is one stretch
_STRETCHES, _STEPS = 3, 10 * ENOUGH_STEPS  # both are needed for a verdict: a few slow reads more or less make a difference
# Less of what the model says is too little: learning takes 1.57 to 1.75 times the steps at factor 4 (docs/evidence.md), so that
# about half of what a larger factor should gain is lost again.
_ENOUGH_GAINED = 0.5
_ALL_GAINED = 0.75  # as much of it is all, give or take what jitters
_RAISED = 1.25  # smaller raises say little
_RAISED_NEAR_TARGET = 1.5  # the same while idle is not far over the target: jitter is overcome in small steps
_NEAR_TARGET = 2.0  # times the target
_EXPLAINED = 1.5  # times as much waiting as today's costs say is no more than they say, give or take what no clock sees
_CHANGED = 1.5  # costs that differ by less are the same


class _Held(NamedTuple):
    """A raise that brought too little.

    Attributes:
        before: What was seen at the factor gone back to.
        tried: What was seen at the larger one.
        refuted: Whether going back has shown that the larger one was right.
    """

    before: Observation
    tried: Observation
    refuted: bool = False


class Trials:
    """What raising the factor has brought.

    Args:
        target: Idle fraction to stay under.
    """

    def __init__(self, target: float) -> None:
        self._target = target
        self._raised: list[Observation] = []  # what was seen where the factor was raised, as long as that is looked at
        self._held: _Held | None = None
        self._stretches: list[Observation] = []  # with the factor in force; the last one may still grow

    @property
    def held(self) -> tuple[Observation, Observation] | None:
        """What was seen at the factor gone back to, and at the larger one that brought too little; None: nothing is held."""
        return None if self._held is None or self._held.refuted else (self._held.before, self._held.tried)

    @property
    def is_doubtful(self) -> bool:
        """Whether it seems so far that raising the factor has brought too little."""
        return self._failed() is not None

    def see(self, epoch: Observation) -> None:
        """To be called with each epoch that was measured, alone, before what to do next is decided."""
        self._add(epoch)
        if len(self._stretches) < _STRETCHES or sum(stretch.steps for stretch in self._stretches) < _STEPS:
            return
        seen = _calm(self._stretches)
        if self._held is not None:
            self._held = _seen_again(self._held, seen)
        if (before := self._failed()) is not None:
            self._held = _Held(before, seen)
        self._raised.clear()

    def raises(self) -> None:
        """The factor is raised, and from where it is; raises that were found to be right are not looked at again."""
        if not self._stretches or (self._held is not None and self._stretches[-1].factor < self._held.tried.factor):
            return
        self._raised.append(_calm(self._stretches))

    def _add(self, epoch: Observation) -> None:
        stretches = self._stretches
        if stretches and stretches[-1].factor != epoch.factor:
            stretches.clear()
        if stretches and stretches[-1].steps < _STRETCH_STEPS:
            stretches[-1] = mean_of(stretches[-1], epoch)
        else:
            stretches.append(epoch)
        while len(stretches) > _STRETCHES and sum(stretch.steps for stretch in stretches[1:]) >= _STEPS:
            del stretches[0]
        self._raised = [before for before in self._raised if before.factor < epoch.factor]

    def _failed(self) -> Observation | None:
        """Where the first of those raises began that have brought too little until now, as far as can be told."""
        seen = _calm(self._stretches) if self._stretches else None
        if seen is None or seen.steps < _STRETCH_STEPS:
            return None
        is_near_target = (seen.idle_fraction or 0.0) <= _NEAR_TARGET * self._target
        far = seen.factor / (_RAISED_NEAR_TARGET if is_near_target else _RAISED)
        known = [before for before in self._raised if before.factor <= far and before.steps >= _STRETCH_STEPS]
        return next((before for before in known if _brought_too_little(before, seen)), None)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        held = self._held
        return {
            "raised": [state_of(before) for before in self._raised],
            "held": None if held is None else [state_of(held.before), state_of(held.tried), held.refuted],
            "stretches": [state_of(stretch) for stretch in self._stretches],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`; an empty one is that of a run that has tried nothing."""
        held = state.get("held")
        self._raised = [observation_of(before) for before in state.get("raised", [])]
        self._held = None if held is None else _Held(observation_of(held[0]), observation_of(held[1]), held[2])
        self._stretches = [observation_of(stretch) for stretch in state.get("stretches", [])]


def share_gained(before: Observation, now: Observation) -> float | None:
    """How much less is waited per step than at the factor before, as a share of what the model says; None where it says nothing.

    The host is taken to cost what it cost before, and to be as much slower than that as it was.

    Example:
        >>> costs = PipelineCosts("after_augmentation", 0.06, 0.0, 0.0, device_seconds=0.01, workers=2)
        >>> before = Observation(epoch=0, factor=1.0, steps=100, idle_fraction=2 / 3, step_seconds=0.03, costs=costs)
        >>> now = Observation(epoch=1, factor=2.0, steps=100, idle_fraction=0.6, step_seconds=0.025, costs=costs)
        >>> round(share_gained(before, now), 2)  # 15 ms of waiting in place of 20, where 5 were expected
        0.33
    """
    without, expected = _waiting(before, before.costs, before.factor), _waiting(before, before.costs, now.factor)
    if without is None or expected is None or without <= expected:
        return None
    return (without - _waited(now)) / (without - expected)


def _brought_too_little(before: Observation, now: Observation) -> bool:
    """Whether a raise has, and what the host costs now does not explain it."""
    share, explained = share_gained(before, now), _waiting(before, now.costs, now.factor)
    return share is not None and share < _ENOUGH_GAINED and explained is not None and explained * _EXPLAINED < _waited(now)


def _seen_again(held: _Held, seen: Observation) -> _Held | None:
    """What is held after another look; None where costs have changed."""
    costs = [_relative_cost(each) for each in (held.before, held.tried)]
    if not min(costs) / _CHANGED < _relative_cost(seen) < max(costs) * _CHANGED:
        return None
    lost = share_gained(seen, held.tried) if seen.factor == held.before.factor else None
    return held if lost is None or lost < _ALL_GAINED else held._replace(refuted=True)


def _waiting(before: Observation, costs: PipelineCosts | None, factor: float) -> float | None:
    """Seconds per step that the model says, of a host as much slower than its costs as it was before."""
    if costs is None or before.costs is None or before.step_seconds is None or not are_alike(before.costs, costs):
        return None
    host = before.costs.host_seconds(before.factor)
    if not costs.workers or not host:
        return None
    return costs.slower(before.step_seconds / host).step_seconds(factor) - costs.device_seconds


def _waited(seen: Observation) -> float:
    """Seconds per step that were waited."""
    return (seen.idle_fraction or 0.0) * (seen.step_seconds or 0.0)


def _relative_cost(seen: Observation) -> float:
    """What a batch costs all workers at factor 1, in steps of the device; 0 where that is not known."""
    costs = seen.costs
    return costs.host_seconds(1.0) / costs.device_seconds if costs is not None and costs.device_seconds else 0.0


def _calm(stretches: list[Observation]) -> Observation:
    """All of them together but the worst; a single one, or the better of two, stands for itself."""
    worst = max(range(len(stretches)), key=lambda i: stretches[i].idle_fraction or 0.0) if len(stretches) > 1 else -1
    return reduce(mean_of, [stretch for i, stretch in enumerate(stretches) if i != worst])
