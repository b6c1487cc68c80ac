"""What to do, cheapest remedy first: nothing, more workers, a cache, and only then echoing.

Fresh examples are worth more than echoed ones (Choi et al. 2019, arXiv 1907.05550, section 3). So echoing is advised only if no
remedy before it feeds the accelerator. The verdict then names the earliest insertion point whose factor is not large, and what
that factor costs in fresh data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from lightning_echo.analysis.measured import MeasuredStages
from lightning_echo.analysis.predict import TrainingSetting, costs_of, predict
from lightning_echo.measuring.target_idle import AIM, LARGE_FACTOR, TARGET, round_up
from lightning_echo.measuring.words import busy, fewer_fresh, no_workers, percent

__all__ = ["Verdict", "VerdictKind", "judge"]

_EXPLAINED = 1.15  # a step is explained if it takes at most this many times as long as predicted
_CACHED_FRACTIONS = [tenths / 10 for tenths in range(1, 11)]
_LARGEST_FACTOR = 64.0  # larger factors are not tried


class VerdictKind(Enum):
    """What kind of advice it is, for programs. `Verdict.message` tells it to people."""

    not_starved = "not_starved"  # do nothing
    more_workers = "more_workers"  # more workers are enough
    cache = "cache"  # a part of the data set in memory is enough
    transform = "transform"  # one transform alone starves the accelerator
    echo = "echo"  # no cheaper remedy is enough
    not_enough = "not_enough"  # no remedy is enough, workers fail, or the predictions do not explain the measured steps


@dataclass(frozen=True)
class Verdict:
    """What to do.

    Attributes:
        kind: What kind of advice it is, for programs.
        message: The advice, for people.
        setting: The advised setting; the measured one if nothing is to be changed.
    """

    kind: VerdictKind
    message: str
    setting: TrainingSetting


def judge(stages: MeasuredStages, step_seconds: float, transforms: Mapping[str, float], target: float = TARGET) -> Verdict:
    """Returns the cheapest setting that feeds the accelerator: its steps are hardly longer than a step with everything ready.

    Args:
        stages: What was measured.
        step_seconds: Time per step of the real run.
        transforms: Seconds per example of each transform, by name.
        target: Share of the time that the accelerator may wait.
    """
    idle = max(0.0, 1 - stages.step.median / step_seconds)
    if idle <= target:
        return Verdict(VerdictKind.not_starved, f"Do nothing: {busy(idle)}.", TrainingSetting())
    if _feeds(stages, TrainingSetting(), target):
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
            TrainingSetting(),
        )
    )


def _feeds(stages: MeasuredStages, setting: TrainingSetting, target: float) -> bool:
    """Whether a step waits for hardly more than its own copy and hand-over."""
    return predict(stages, setting).step_seconds * (1 - target) <= costs_of(stages, setting).device_seconds


def _not_by_waiting(stages: MeasuredStages, step_seconds: float, idle: float) -> Verdict:
    """Returns the verdict if the loader is fast enough, and yet the accelerator waits."""
    predicted = predict(stages, TrainingSetting()).step_seconds
    if step_seconds <= _EXPLAINED * predicted:
        message = f"Do nothing: {busy(idle)}, and the rest is spent on taking and copying batches, not on waiting for them."
        return Verdict(VerdictKind.not_starved, message, TrainingSetting())
    message = (
        f"No advice: {busy(idle, only=True)}, but the stages by themselves explain {1e3 * predicted:.3g} of "
        f"{1e3 * step_seconds:.3g} ms. Something else takes time; analyze again on a quiet machine."
    )
    return Verdict(VerdictKind.not_enough, message, TrainingSetting())


def _by_mending_workers(idle: float) -> Verdict:
    """Returns the verdict if the data set fails in workers, which are the first remedy."""
    message = (
        "Make the data set work in worker processes first (the notes say how it fails), then analyze again: "
        f"{busy(idle, only=True)}, since without workers loading and training take turns."
    )
    return Verdict(VerdictKind.not_enough, message, TrainingSetting())


def _by_workers(stages: MeasuredStages, idle: float, target: float) -> Verdict | None:
    for workers in range(stages.workers + 1, stages.cores + 1):
        if _feeds(stages, TrainingSetting(workers), target):
            setting = TrainingSetting(workers)
            message = f"Set num_workers to {workers}: {_gain(stages, setting, idle)}."
            return Verdict(VerdictKind.more_workers, message if stages.workers else no_workers(workers, idle), setting)
    return None


def _by_cache(stages: MeasuredStages, idle: float, target: float, most: int) -> Verdict | None:
    for workers in dict.fromkeys((stages.workers or 1, most)):
        for share in _CACHED_FRACTIONS:
            setting = TrainingSetting(workers, cached_fraction=share)
            if _feeds(stages, setting, target):
                more = "" if workers == stages.workers else f" and set num_workers to {workers}"
                message = f"Keep {percent(share)} of the data set in memory{more}: {_gain(stages, setting, idle)}."
                return Verdict(VerdictKind.cache, message, setting)
    return None


def _by_echoing(stages: MeasuredStages, transforms: Mapping[str, float], idle: float, target: float, most: int) -> Verdict | None:
    """Returns the advice to echo, at the earliest point whose factor is not large; None if no factor is enough.

    The number of workers stays, if that is enough; else there are as many as cores.
    """
    choices = [
        setting
        for workers in dict.fromkeys((stages.workers or 1, most))
        for point in stages.points
        if (setting := _feeding(stages, TrainingSetting(workers, insertion_point=point), target)) is not None
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
    if (transform := _starving_transform(stages, transforms, most)) is not None:
        moved = "Move it to the device, for whole batches at once"
        message = f"{transform} alone starves the accelerator. {moved}, or {how}: {gain}; {price}."
        return Verdict(VerdictKind.transform, message, best)
    message = f"{how[0].upper()}{how[1:]}: {gain}; {price}. {_nothing_cheaper(stages, most)}."
    return Verdict(VerdictKind.echo, message, best)


def _gain(stages: MeasuredStages, setting: TrainingSetting, idle: float) -> str:
    """Returns how busy the accelerator is, and how busy a setting makes it, in words."""
    return f"{busy(idle, only=True)}, and would be {percent(1 - predict(stages, setting).idle_fraction)}"


def _feeding(stages: MeasuredStages, setting: TrainingSetting, target: float) -> TrainingSetting | None:
    """Returns the setting with a factor slightly above the smallest one that feeds the accelerator, as `TargetIdle` chooses it.

    Returns None if no factor feeds it.
    """
    low, high = 1.0, _LARGEST_FACTOR
    if not _feeds(stages, replace(setting, factor=high), target):
        return None
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if _feeds(stages, replace(setting, factor=middle), target) else (middle, high)
    return replace(setting, factor=round_up(high * AIM))


def _starving_transform(stages: MeasuredStages, transforms: Mapping[str, float], most: int) -> str | None:
    """Returns the transform that alone takes longer than a step, with as many workers as there are cores; None if none does."""
    if not transforms:
        return None
    name = max(transforms, key=lambda each: transforms[each])
    return name if transforms[name] * stages.batch_size / max(most, 1) > stages.step.median else None


def _nothing_cheaper(stages: MeasuredStages, most: int) -> str:
    """Returns why the cheaper remedies are not enough, in words."""
    limits = {
        "cores": f"The {stages.cores} cores are the limit, so that neither",
        "storage": "The storage is the limit, and neither",
    }
    return f"{limits.get(predict(stages, TrainingSetting(most)).limit, 'Neither')} more workers nor a cache are enough"
