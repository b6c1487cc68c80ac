"""The verdict in words: do nothing, or apply the remedies that are enough, in their order, and what an echo factor costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from lightning_echo.analysis.predict import (
    MeasuredStages,
    TrainingSetting,
    cached_example,
    costs_of,
    fits_point,
    fitting_fraction,
    possible_holds,
    predict,
    size_for,
)
from lightning_echo.measure.control import busy, fewer_fresh, no_workers, percent
from lightning_echo.measure.target_idle import AIM, LARGE_FACTOR, TARGET, round_up

# ---------------------------------------------------------------------- remedies
# The remedies against a starved accelerator, in their order. A remedy that helps is added to those before it.
#
#     more workers         as many as help, no more than there are cores
#     a cache              the smallest share of the data set that is enough, with a margin; else as much as memory holds
#     echoing              for the rest: at the earliest point whose factor is not large, by the smallest factor
#
# Fresh examples are worth more than echoed ones (Choi et al. 2019, arXiv 1907.05550, section 3), and a cache does not change the
# examples that the model learns from. So a cache comes before echoing. If the source takes R times as long as the step, a cache
# of a share x reduces that to R (1 - x) times. The echo factor is chosen for the rest.

_HELPS = 1.05  # a remedy helps if steps take this many times as long without it
_LARGEST_FACTOR = 64.0  # larger factors are not tried


@dataclass(frozen=True)
class Remedy:
    """A remedy (``"workers"``, ``"cache"`` or ``"echo"``); ``setting`` and ``is_enough`` include the ones before it."""

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


def remedies(stages: MeasuredStages, target: float) -> list[Remedy]:
    """Returns the remedies that help, in their order, up to the first that is enough."""
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
    # Besides the best cache, or without a cache if none helps.
    choices = (_by_echoing(stages, choice, target) for choice in [*_largest_caches(stages, base), base])
    echoed = next((choice for choice in choices if choice is not None), None)
    if echoed is not None:
        cached = replace(echoed, factor=base.factor, insertion_point=base.insertion_point) if echoed.hold else None
    add("cache", cached)
    add("echo", echoed)
    return found


def _by_workers(stages: MeasuredStages, target: float) -> TrainingSetting | None:
    """Returns the fewest workers that are enough, else the fewest that are about as good as the best number; None: no change."""
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

    def bytes_and_share(setting: TrainingSetting) -> tuple[float, float]:
        example = None if setting.hold is None else cached_example(stages, setting.hold)
        return (0.0 if example is None else setting.cached_fraction * example.bytes), setting.cached_fraction

    enough = [setting for setting in _caches(stages, base) if feeds(stages, setting, target)]
    if with_margin := [setting for setting in enough if _feeds_with_margin(stages, setting, target)]:
        return min(with_margin, key=bytes_and_share)
    if enough:
        return max(enough, key=lambda setting: setting.cached_fraction)
    return next(iter(_largest_caches(stages, base)), None)


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
    """Returns the setting with a factor slightly above the smallest one that feeds the accelerator; None: no factor does."""
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
    fitting = fitting_fraction(stages, hold)
    return 1.0 if fitting is None else fitting


def _cache(stages: MeasuredStages, base: TrainingSetting, hold: str, share: float) -> TrainingSetting:
    return replace(base, cached_fraction=share, hold=hold, cache_size=size_for(stages, hold, share))


# ---------------------------------------------------------------------- verdict

_EXPLAINED = 1.15  # a step is explained if it takes at most this many times as long as predicted
_UNCUT = (
    "The data set cannot be cut before its augmentation, so that a cache can hold its examples only whole (hold='whole'), if it "
    "returns the same each time"
)


class VerdictKind(Enum):
    """The kind of an advice, for programs. `Verdict.message` is for people."""

    not_starved = "not_starved"  # do nothing
    more_workers = "more_workers"  # more workers are enough
    cache = "cache"  # a part of the data set in memory is enough
    cache_and_echo = "cache_and_echo"  # memory does not hold enough; the echo factor is for the rest
    transform = "transform"  # one transform alone starves the accelerator
    echo = "echo"  # no cheaper remedy is enough
    not_enough = "not_enough"  # no remedy is enough, workers fail, or the predictions do not explain the measured steps


@dataclass(frozen=True)
class Verdict:
    """The advice of an analysis.

    Attributes:
        setting: The advised setting; the measured one if nothing is to be changed. Its ``options`` are those of an `EchoConfig`,
            and its ``line`` is the callback to paste.
        remedies: The remedies that help, in their order. Each contains those before it. Empty if none was looked for.
    """

    kind: VerdictKind
    message: str
    setting: TrainingSetting
    remedies: tuple[Remedy, ...] = ()


def judge(stages: MeasuredStages, step_seconds: float, transforms: Mapping[str, float], target: float = TARGET) -> Verdict:
    """Returns the cheapest setting that feeds the accelerator: ``target`` is the share of the time that it may wait."""
    idle = max(0.0, 1 - stages.step.median / step_seconds)
    if idle <= target:
        return Verdict(VerdictKind.not_starved, f"Do nothing: {busy(idle)}.", TrainingSetting())
    if feeds(stages, TrainingSetting(), target):
        return _not_by_waiting(stages, step_seconds, idle)
    if not stages.can_have_workers:
        message = (
            "Make the data set work in worker processes first (the notes say how it fails), then analyze again: "
            f"{busy(idle, only=True)}, since without workers loading and training take turns."
        )
        return Verdict(VerdictKind.not_enough, message, TrainingSetting())
    found = tuple(remedies(stages, target))
    if found and found[-1].is_enough:
        return replace(_by_remedy(stages, found[-1], transforms, idle), remedies=found)
    message = f"Nothing that was tried is enough: {busy(idle, only=True)}. What helps is a faster source."
    return Verdict(VerdictKind.not_enough, message, TrainingSetting(), found)


def _by_remedy(stages: MeasuredStages, last: Remedy, transforms: Mapping[str, float], idle: float) -> Verdict:
    setting = last.setting
    if last.name == "workers" and not stages.workers:
        return Verdict(VerdictKind.more_workers, no_workers(setting.workers or 1, idle), setting)
    gain = f"{busy(idle, only=True)}, and would be {percent(1 - predict(stages, setting).idle_fraction)}"
    how = _how(stages, setting)
    begun = how[0].upper() + how[1:]
    if last.name != "echo":
        kind = VerdictKind.cache if last.name == "cache" else VerdictKind.more_workers
        return Verdict(kind, f"{begun}: {gain}.{_about_cache(setting)}", setting)
    price = fewer_fresh(setting.factor)
    if setting.factor > LARGE_FACTOR:
        price += "; so large a factor seldom pays in learning: try a faster source first"
    slowest = max(transforms, key=lambda each: transforms[each], default="")
    spread = max(stages.workers, stages.cores)  # even with a worker for each core, it takes longer than a step
    if slowest and transforms[slowest] * stages.batch_size / spread > stages.step.median:
        moved = "Move it to the device, for whole batches at once"
        message = f"{slowest} alone starves the accelerator. {moved}, or {how}: {gain}; {price}."
        return Verdict(VerdictKind.transform, message, setting)
    kind = VerdictKind.cache_and_echo if setting.hold else VerdictKind.echo
    message = f"{begun}: {gain}; {price}. {_nothing_cheaper(stages, setting)}.{_about_cache(setting)}"
    return Verdict(kind, message, setting)


def _not_by_waiting(stages: MeasuredStages, step_seconds: float, idle: float) -> Verdict:
    """Returns the verdict for a loader that is fast enough while the accelerator waits nevertheless."""
    predicted = predict(stages, TrainingSetting()).step_seconds
    if step_seconds <= _EXPLAINED * predicted:
        message = f"Do nothing: {busy(idle)}, and the rest is spent on taking and copying batches, not on waiting for them."
        return Verdict(VerdictKind.not_starved, message, TrainingSetting())
    message = (
        f"No advice: {busy(idle, only=True)}, but the stages by themselves explain {1e3 * predicted:.3g} of "
        f"{1e3 * step_seconds:.3g} ms. Something else takes time; analyze again on a quiet machine."
    )
    return Verdict(VerdictKind.not_enough, message, TrainingSetting())


def _how(stages: MeasuredStages, setting: TrainingSetting) -> str:
    """Returns the changes of a setting, as a request in the order of the remedies."""
    parts = []
    if setting.workers not in (None, stages.workers):
        parts.append(f"set num_workers to {setting.workers}")
    if setting.cached_fraction:
        where = "memory" if setting.hold is None else f"a cache with hold='{setting.hold}'"
        size = f" and size='{setting.cache_size}'" if setting.cache_size else ""
        parts.append(f"keep {percent(setting.cached_fraction)} of the data set in {where}{size}")
    if setting.factor > 1:
        left = " for what is left" if setting.cached_fraction else ""
        parts.append(f"echo{left} at insertion_point='{setting.insertion_point}' with factor {setting.factor:.3g}")
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]


def _about_cache(setting: TrainingSetting) -> str:
    if setting.hold and setting.cache_size is None:
        return " The size of that cache is not known from this analysis: analyze again."
    if setting.cached_fraction and setting.hold is None:
        return f" {_UNCUT}."
    return ""


def _nothing_cheaper(stages: MeasuredStages, setting: TrainingSetting) -> str:
    if setting.hold:
        is_all = setting.cached_fraction == 1
        return "The rest takes too long even then" if is_all else "Memory does not hold more"
    limits = {
        "cores": f"The {stages.cores} cores are the limit, so that neither",
        "storage": "The storage is the limit, and neither",
    }
    limit = predict(stages, TrainingSetting(max(stages.workers, stages.cores))).limit
    why = f"{limits.get(limit, 'Neither')} more workers nor a cache are enough"
    return why if possible_holds(stages) or not stages.read.median else f"{why}. {_UNCUT}"
