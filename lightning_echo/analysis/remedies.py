"""The remedies against a starved accelerator, in their order. A remedy that helps is added to those before it.

    more workers         as many as help, no more than there are cores
    a cache              the smallest share of the data set that is enough, with a margin; else as much as memory holds
    echoing              for what is left: at the earliest point whose factor is not large, by the smallest factor

Fresh examples are worth more than echoed ones (Choi et al. 2019, arXiv 1907.05550, section 3), and a cache does not change what
the model learns from. So a cache comes before echoing. If the source takes R times as long as the step, a cache of a share x
reduces that to R (1 - x) times. The echo factor is chosen for what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_echo.analysis.caches import cached_example, fits_point, fitting_fraction, possible_holds, size_for
from lightning_echo.analysis.measured import MeasuredStages
from lightning_echo.analysis.predict import TrainingSetting, costs_of, predict
from lightning_echo.measuring.target_idle import AIM, LARGE_FACTOR, round_up

__all__ = ["Remedy", "feeds", "most_workers", "remedies"]

_HELPS = 1.05  # a remedy helps if steps take this many times as long without it
_LARGEST_FACTOR = 64.0  # larger factors are not tried


@dataclass(frozen=True)
class Remedy:
    """A remedy, together with those before it.

    Attributes:
        name: ``"workers"``, ``"cache"`` or ``"echo"``.
        setting: The setting with this remedy and those before it.
        is_enough: Whether these remedies together feed the accelerator.
    """

    name: str
    setting: TrainingSetting
    is_enough: bool


def feeds(stages: MeasuredStages, setting: TrainingSetting, target: float) -> bool:
    """Whether a step waits for hardly more than its own copy and hand-over."""
    return predict(stages, setting).step_seconds * (1 - target) <= costs_of(stages, setting).device_seconds


def _feeds_with_margin(stages: MeasuredStages, setting: TrainingSetting, target: float) -> bool:
    """Whether the setting would feed the accelerator even if the host were slower, by the margin of an echo factor."""
    costs = costs_of(stages, setting)
    return costs.slower(AIM).step_seconds(setting.factor) * (1 - target) <= costs.device_seconds


def most_workers(stages: MeasuredStages) -> int:
    """Returns the largest number of workers that is advised."""
    return max(stages.workers, stages.cores)


def remedies(stages: MeasuredStages, target: float) -> list[Remedy]:
    """Returns the remedies that help, in their order, up to the first that is enough.

    Args:
        stages: What was measured.
        target: Share of the time that the accelerator may wait.
    """
    setting, found = TrainingSetting(), list[Remedy]()

    def add(name: str, next_setting: TrainingSetting | None) -> bool:
        nonlocal setting
        if next_setting is not None and next_setting != setting:
            setting = next_setting
            found.append(Remedy(name, setting, feeds(stages, setting, target)))
        return bool(found) and found[-1].is_enough

    if add("workers", _by_workers(stages, target)):
        return found
    base = setting
    cached = _by_cache(stages, base, target)
    if cached is not None and feeds(stages, cached, target):
        add("cache", cached)
        return found
    echoed = _by_cache_and_echoing(stages, base, target)
    if echoed is not None:
        cached = replace(echoed, factor=base.factor, insertion_point=base.insertion_point) if echoed.hold else None
    add("cache", cached)
    add("echo", echoed)
    return found


def _by_workers(stages: MeasuredStages, target: float) -> TrainingSetting | None:
    """Returns the fewest workers that are enough, else the fewest that are about as good as the best number.

    None: the number of workers stays as it is.
    """
    if not stages.can_have_workers:
        return None
    now = predict(stages, TrainingSetting()).step_seconds
    seconds = {}
    for workers in range(stages.workers + 1, stages.cores + 1):
        setting = TrainingSetting(workers)
        if feeds(stages, setting, target):
            return setting
        seconds[workers] = predict(stages, setting).step_seconds
    best = min([now, *seconds.values()])
    if now <= _HELPS * best:
        return None
    return TrainingSetting(next(workers for workers in seconds if seconds[workers] <= _HELPS * best))


def _by_cache(stages: MeasuredStages, base: TrainingSetting, target: float) -> TrainingSetting | None:
    """Returns the smallest cache that is enough, else the largest one of those that help; None: no cache helps."""
    enough = [setting for setting in _caches(stages, base) if feeds(stages, setting, target)]
    if with_margin := [setting for setting in enough if _feeds_with_margin(stages, setting, target)]:
        return min(with_margin, key=lambda setting: _bytes_and_share(stages, setting))
    if enough:
        return max(enough, key=lambda setting: setting.cached_fraction)
    return next(iter(_largest_caches(stages, base)), None)


def _by_cache_and_echoing(stages: MeasuredStages, base: TrainingSetting, target: float) -> TrainingSetting | None:
    """Returns the setting that echoes beside the best cache, or without a cache if none helps; None: no factor is enough."""
    echoed = (_by_echoing(stages, setting, target) for setting in [*_largest_caches(stages, base), base])
    return next((setting for setting in echoed if setting is not None), None)


def _by_echoing(stages: MeasuredStages, base: TrainingSetting, target: float) -> TrainingSetting | None:
    """Returns the setting that echoes at the earliest point whose factor is not large, else with the smallest factor."""
    choices = [
        setting
        for point in stages.points
        if base.hold is None or fits_point(base.hold, point)
        if (setting := _feeding(stages, replace(base, insertion_point=point), target)) is not None
    ]
    least = min(choices, key=lambda setting: setting.factor, default=None)
    return next((setting for setting in choices if setting.factor <= LARGE_FACTOR), least)


def _feeding(stages: MeasuredStages, setting: TrainingSetting, target: float) -> TrainingSetting | None:
    """Returns the setting with a factor slightly above the smallest one that feeds the accelerator, as `TargetIdle` chooses it.

    Returns None if no factor feeds it.
    """
    low, high = 1.0, _LARGEST_FACTOR
    if not feeds(stages, replace(setting, factor=high), target):
        return None
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if feeds(stages, replace(setting, factor=middle), target) else (middle, high)
    return replace(setting, factor=round_up(high * AIM))


def _caches(stages: MeasuredStages, base: TrainingSetting) -> Iterator[TrainingSetting]:
    """Yields the caches that memory holds. If the data set cannot be cut, a share may be in the page cache instead."""
    tenths = [number / 10 for number in range(1, 11)]
    holds = possible_holds(stages)
    if not holds:
        yield from (replace(base, cached_fraction=share) for share in tenths)
    for hold in holds:
        most = _most(stages, hold)
        yield from (_cache(stages, base, hold, share) for share in [*tenths, most] if 0 < share <= most)


def _largest_caches(stages: MeasuredStages, base: TrainingSetting) -> list[TrainingSetting]:
    """Returns, for each form, the largest cache that memory holds, if it helps. The cache with the shortest steps comes first."""
    largest = [(hold, _most(stages, hold)) for hold in possible_holds(stages)]
    seconds = {
        setting: predict(stages, setting).step_seconds
        for setting in (_cache(stages, base, hold, most) for hold, most in largest if most)
    }
    now = predict(stages, base).step_seconds
    return sorted((setting for setting in seconds if now > _HELPS * seconds[setting]), key=lambda setting: seconds[setting])


def _most(stages: MeasuredStages, hold: str) -> float:
    """Returns the largest share of the data set that memory holds; 1 if that is not known."""
    fitting = fitting_fraction(stages, hold)
    return 1.0 if fitting is None else fitting


def _cache(stages: MeasuredStages, base: TrainingSetting, hold: str, share: float) -> TrainingSetting:
    return replace(base, cached_fraction=share, hold=hold, cache_size=size_for(stages, hold, share))


def _bytes_and_share(stages: MeasuredStages, setting: TrainingSetting) -> tuple[float, float]:
    """Returns the cost by which caches are compared: the bytes, if they are known, and the share."""
    example = None if setting.hold is None else cached_example(stages, setting.hold)
    return (0.0 if example is None else setting.cached_fraction * example.bytes), setting.cached_fraction
