"""What to do, cheapest first: nothing, more workers, a cache, and only then echoing.

Fresh examples are worth more than echoed ones (Choi et al. 2019, arXiv 1907.05550, section 3), so that echoing is advised only
where nothing of what is tried before it feeds the accelerator; and then at the earliest insertion point whose factor is not
large, with what it costs in fresh data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from lightning_echo.analysis.measured import MeasuredStages
from lightning_echo.analysis.predict import Setting, costs_of, predict
from lightning_echo.measuring.target_idle import AIM, LARGE_FACTOR, TARGET, round_up
from lightning_echo.measuring.words import busy, fewer_fresh, no_workers, percent

__all__ = ["Verdict", "VerdictKind", "judge"]

_EXPLAINED = 1.15  # times what was predicted: a step is not explained that takes longer
_CACHED_FRACTIONS = [tenths / 10 for tenths in range(1, 11)]
_LARGEST_FACTOR = 64.0  # beyond it nothing is looked for


class VerdictKind(Enum):
    """For programs; `Verdict.message` says it to people."""

    not_starved = "not_starved"  # do nothing
    more_workers = "more_workers"  # workers are all that is missing
    cache = "cache"  # so is a part of the data set in memory
    transform = "transform"  # one transform starves the accelerator by itself
    echo = "echo"  # nothing cheaper is enough
    not_enough = "not_enough"  # nothing that can be predicted is enough, workers fail, or what was measured is not explained


@dataclass(frozen=True)
class Verdict:
    """What to do.

    Attributes:
        kind: For programs.
        message: For people.
        setting: What is advised; that which was measured where nothing is.
    """

    kind: VerdictKind
    message: str
    setting: Setting


def judge(stages: MeasuredStages, step_seconds: float, transforms: Mapping[str, float], target: float = TARGET) -> Verdict:
    """The cheapest setting that feeds the accelerator: whose steps are no longer than a step with everything ready but a little.

    Args:
        stages: What was measured.
        step_seconds: Of the real run.
        transforms: Seconds per example of each, by name.
        target: Share of the time that may be waited.
    """
    idle = max(0.0, 1 - stages.step.median / step_seconds)
    if idle <= target:
        return Verdict(VerdictKind.not_starved, f"Do nothing: {busy(idle)}.", Setting())
    if _feeds(stages, Setting(), target):
        return _not_by_waiting(stages, step_seconds, idle)
    if not stages.can_have_workers:
        return _by_mending_workers(idle)
    most = max(stages.workers, stages.cores)
    return (
        _by_workers(stages, idle, target)
        or _by_cache(stages, idle, target, most)
        or _by_echoing(stages, transforms, idle, target, most)
        or Verdict(
            VerdictKind.not_enough,
            f"Nothing that was tried is enough: {busy(idle, only=True)}. What helps is a faster source.",
            Setting(),
        )
    )


def _feeds(stages: MeasuredStages, setting: Setting, target: float) -> bool:
    """Whether a step waits for next to nothing but its own copy and hand-over."""
    return predict(stages, setting).step_seconds * (1 - target) <= costs_of(stages, setting).device_seconds


def _not_by_waiting(stages: MeasuredStages, step_seconds: float, idle: float) -> Verdict:
    """The loader is fast enough, and yet the accelerator waits."""
    predicted = predict(stages, Setting()).step_seconds
    if step_seconds <= _EXPLAINED * predicted:
        said = f"Do nothing: {busy(idle)}, and what is left is spent on taking and copying batches, not on waiting for them."
        return Verdict(VerdictKind.not_starved, said, Setting())
    said = (
        f"No advice: {busy(idle, only=True)}, but the stages by themselves explain {1e3 * predicted:.3g} of "
        f"{1e3 * step_seconds:.3g} ms. Something else takes time; analyze again on a quiet machine."
    )
    return Verdict(VerdictKind.not_enough, said, Setting())


def _by_mending_workers(idle: float) -> Verdict:
    """Workers come first, and this data set fails in them."""
    said = (
        "Have the data set work in worker processes first (the notes say how it fails), then analyze again: "
        f"{busy(idle, only=True)}, since without workers loading and training take turns."
    )
    return Verdict(VerdictKind.not_enough, said, Setting())


def _by_workers(stages: MeasuredStages, idle: float, target: float) -> Verdict | None:
    for workers in range(stages.workers + 1, stages.cores + 1):
        if _feeds(stages, Setting(workers), target):
            setting = Setting(workers)
            said = f"Set num_workers to {workers}: {_gain(stages, setting, idle)}."
            return Verdict(VerdictKind.more_workers, said if stages.workers else no_workers(workers, idle), setting)
    return None


def _by_cache(stages: MeasuredStages, idle: float, target: float, most: int) -> Verdict | None:
    for workers in dict.fromkeys((stages.workers or 1, most)):
        for share in _CACHED_FRACTIONS:
            setting = Setting(workers, cached_fraction=share)
            if _feeds(stages, setting, target):
                more = "" if workers == stages.workers else f" and set num_workers to {workers}"
                said = f"Keep {percent(share)} of the data set in memory{more}: {_gain(stages, setting, idle)}."
                return Verdict(VerdictKind.cache, said, setting)
    return None


def _by_echoing(stages: MeasuredStages, transforms: Mapping[str, float], idle: float, target: float, most: int) -> Verdict | None:
    """With the workers there are, else with as many as there are cores; at the earliest point whose factor is not large."""
    choices = [
        setting
        for workers in dict.fromkeys((stages.workers or 1, most))
        for point in stages.points
        if (setting := _feeding(stages, Setting(workers, insertion_point=point), target)) is not None
    ]
    if not choices:
        return None
    least = min(choices, key=lambda setting: setting.factor)
    best = next((setting for setting in choices if setting.factor <= LARGE_FACTOR), least)
    how = f"echo at insertion_point='{best.insertion_point}' with factor {best.factor:.3g}"
    if best.workers != stages.workers:
        how += f" and num_workers={best.workers}"
    price = fewer_fresh(best.factor)
    if best.factor > LARGE_FACTOR:
        price += "; so large a factor seldom pays in learning: try a faster source first"
    gain = _gain(stages, best, idle)
    if (alone := _alone(stages, transforms, most)) is not None:
        moved = "Move it to the device, for whole batches at once"
        said = f"{alone} alone starves the accelerator. {moved}, or {how}: {gain}; {price}."
        return Verdict(VerdictKind.transform, said, best)
    said = f"{how[0].upper()}{how[1:]}: {gain}; {price}. {_nothing_cheaper(stages, most)}."
    return Verdict(VerdictKind.echo, said, best)


def _gain(stages: MeasuredStages, setting: Setting, idle: float) -> str:
    """How busy the accelerator is, and would be."""
    return f"{busy(idle, only=True)}, and would be {percent(1 - predict(stages, setting).idle_fraction)}"


def _feeding(stages: MeasuredStages, setting: Setting, target: float) -> Setting | None:
    """The setting with the smallest factor that feeds the accelerator, and the room of `TargetIdle`; None if none does."""
    low, high = 1.0, _LARGEST_FACTOR
    if not _feeds(stages, replace(setting, factor=high), target):
        return None
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if _feeds(stages, replace(setting, factor=middle), target) else (middle, high)
    return replace(setting, factor=round_up(high * AIM))


def _alone(stages: MeasuredStages, transforms: Mapping[str, float], most: int) -> str | None:
    """The transform that takes longer than a step all by itself, with as many workers as there are cores."""
    if not transforms:
        return None
    name = max(transforms, key=lambda each: transforms[each])
    return name if transforms[name] * stages.batch_size / max(most, 1) > stages.step.median else None


def _nothing_cheaper(stages: MeasuredStages, most: int) -> str:
    """What was tried before."""
    limits = {
        "cores": f"The {stages.cores} cores are the limit, so that neither",
        "storage": "The storage is the limit, and neither",
    }
    return f"{limits.get(predict(stages, Setting(most)).limit, 'Neither')} more workers nor a cache are enough"
