"""The verdict: which remedies help a starved accelerator, in their order, and the advice in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from lightning_echo.analysis.measured import MeasuredStages
from lightning_echo.analysis.predict import (
    TrainingSetting,
    cached_example,
    cores_wanted,
    costs_of,
    fits_point,
    fitting_fraction,
    mostly_computes,
    possible_holds,
    predict,
    queue_fits,
    read_seconds,
    reads_per_step,
    size_for,
    waiting_for_long_batches,
)
from lightning_echo.analysis.prefetch import without_chance
from lightning_echo.measure.control import (
    MOST_OF_READER,
    busy,
    callback_line,
    cores_elsewhere,
    fewer_fresh,
    fewest_elsewhere,
    no_workers,
    number_of,
    percent,
    three_digits,
    whole_cores,
)
from lightning_echo.measure.target_idle import AIM, LARGE_FACTOR, TARGET, round_up

# ---------------------------------------------------------------------- remedies
# The remedies against a starved accelerator, in their order. A remedy that helps is added to those before it.
#
#     more workers         as many as help, no more than there are cores
#     prefetching          the fewest batches ahead that are enough, with a margin; else the fewest that are about as good as the
#                          largest number, as far as they take a small part of the free memory
#     pinning              if the copy to the device is so much faster from pinned memory
#     reads in flight      the fewest that are enough, with a margin; else the fewest that are about as good as the best number
#     a cache              the smallest share of the data set that is enough, with a margin; else as much as memory holds
#     a cluster's workers  the fewest that are enough without a cache, if there is a cluster and the processors here are the limit
#     echoing              for the rest: at the earliest point whose factor is not large, by the smallest factor
#
# Prefetching helps if batches take unequally long. More workers prefetch more, too, but cost more. So workers are counted as if
# they prefetched as much as memory allows: they are for batches that take too long on average. In the same way they are counted
# as if their batches were pinned.
#
# A step that waits only for its copy counts as fed. So pinning follows even where the remedies before it are enough.
#
# Reads in flight cost neither memory nor fresh examples. They help if a read waits rather than works, as far as was measured.
#
# Fresh examples are worth more than echoed ones (Choi et al. 2019, arXiv 1907.05550, section 3), and a cache does not change the
# examples that the model learns from. So a cache comes before echoing. If the source takes R times as long as the step, a cache
# of a share x reduces that to R (1 - x) times. The echo factor is chosen for the rest.
#
# Workers on other machines cost other machines. Where no cluster is known, they are no remedy of this list: if the processors of
# this machine cannot feed the accelerator, and nothing before echoing is enough, the verdict says how many they would be
# (`by_other_machines`). Whether other trainings read the same data is not known to an analysis: a run looks for them.

_HELPS = 1.05  # a remedy helps if steps take this many times as long without it
_LARGEST_FACTOR = 64.0  # larger factors are not tried
_READS = (2, 4, 8, 16, 32, 64)  # that are advised
_PREFETCHED = (2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Remedy:
    """A remedy: ``"workers"``, ``"prefetching"``, ``"pinning"``, ``"reads"``, ``"cache"``, ``"cluster"``, ``"echo"``.

    Its setting and ``is_enough`` include the ones before it. But a cluster's workers are without the cache, and echoing is
    without a cluster's workers.
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
    seconds = max(costs.slower(AIM).step_seconds(setting.factor), AIM * reads_per_step(stages, setting))
    seconds *= waiting_for_long_batches(stages, setting, slower=AIM)
    return seconds * (1 - target) <= costs.device_seconds


def remedies(stages: MeasuredStages, target: float) -> list[Remedy]:
    """Returns the remedies that are possible and help, in their order, up to the first that is enough."""
    setting, found = TrainingSetting(), list[Remedy]()
    is_fed = feeds(stages, setting, target)

    def add(name: str, next_setting: TrainingSetting | None) -> bool:
        nonlocal setting, is_fed
        if next_setting is not None and next_setting != setting:
            setting = next_setting
            is_fed = is_fed or feeds(stages, setting, target)
            found.append(Remedy(name, setting, is_fed))
        return is_fed

    if not is_fed and not add("workers", _by_workers(stages, target)):
        add("prefetching", _by_prefetching(stages, setting, target))
    if add("pinning", _by_pinning(stages, setting)) or add("reads", _by_reads(stages, setting, target)):
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
    best_loader = _with_best_loader(stages, TrainingSetting())
    if feeds(stages, best_loader, target) and _by_prefetching(stages, TrainingSetting(), target) is not None:
        return None
    now = predict(stages, best_loader).step_seconds
    seconds = {}
    for workers in range(stages.workers + 1, stages.cores + 1):
        setting = _with_best_loader(stages, TrainingSetting(workers))
        if feeds(stages, setting, target):
            return TrainingSetting(workers)
        seconds[workers] = predict(stages, setting).step_seconds
    best = min([now, *seconds.values()])
    if now <= _HELPS * best:
        return None
    return TrainingSetting(next(workers for workers in seconds if seconds[workers] <= _HELPS * best))


def _with_best_loader(stages: MeasuredStages, setting: TrainingSetting) -> TrainingSetting:
    """Returns the setting with the longest queue that memory allows, and with pinned batches if they are copied faster."""
    setting = next(iter(_prefetching(stages, setting)[::-1]), setting)
    is_faster = stages.pinning is not None and stages.pinning.copy.median < stages.copy.median
    return replace(setting, pin_memory=is_faster)


def _prefetching(stages: MeasuredStages, base: TrainingSetting) -> list[TrainingSetting]:
    """Returns the settings that prefetch more, as far as memory allows. None if the times of single batches are unknown."""
    workers = stages.workers if base.workers is None else base.workers
    if not workers or not stages.batch_seconds:
        return []
    more = (replace(base, prefetch_factor=ahead) for ahead in _PREFETCHED if ahead > stages.prefetch_factor)
    return [setting for setting in more if queue_fits(stages, setting)]


def _by_prefetching(stages: MeasuredStages, base: TrainingSetting, target: float) -> TrainingSetting | None:
    """Returns the least prefetching that is enough, else the least about as good as the most; None: none helps."""
    now = predict(stages, base).step_seconds
    seconds = {setting: predict(stages, setting).step_seconds for setting in _prefetching(stages, base)}
    helping = [setting for setting in seconds if now > _HELPS * seconds[setting]]
    for feed in (_feeds_with_margin, feeds):
        if enough := [setting for setting in helping if feed(stages, setting, target)]:
            return enough[0]
    return next((setting for setting in helping if seconds[setting] <= _HELPS * min(seconds.values())), None)


def _by_pinning(stages: MeasuredStages, base: TrainingSetting) -> TrainingSetting | None:
    """Returns the setting whose loader pins; None: that is not possible, or does not help."""
    if stages.pinning is None:
        return None
    pinned = replace(base, pin_memory=True)
    helps = predict(stages, base).step_seconds > _HELPS * predict(stages, pinned).step_seconds
    return pinned if helps else None


def _by_reads(stages: MeasuredStages, base: TrainingSetting, target: float) -> TrainingSetting | None:
    """Returns the fewest reads in flight that are enough, else the fewest about as good as the best number; None: none help."""
    if not stages.in_flight:
        return None
    fewest, most = stages.workers if base.workers is None else base.workers, stages.in_flight[-1].reads
    settings = [replace(base, reads_in_flight=reads) for reads in _READS if fewest <= reads <= most]
    for feed in (_feeds_with_margin, feeds):
        if enough := [setting for setting in settings if feed(stages, setting, target)]:
            return enough[0]
    seconds = {setting: predict(stages, setting).step_seconds for setting in settings}
    best = min(seconds.values(), default=math.inf)
    if predict(stages, base).step_seconds <= _HELPS * best:
        return None
    return next(setting for setting in settings if seconds[setting] <= _HELPS * best)


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
    """Yields the caches that memory holds, of a data set that a cache can hold."""
    tenths = [number / 10 for number in range(1, 11)]
    for hold in possible_holds(stages):
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


def by_other_machines(stages: MeasuredStages, found: Sequence[Remedy], target: float = TARGET) -> TrainingSetting | None:
    """Returns the setting with the fewest workers on other machines that feed the accelerator without echoing and cache.

    None if the processors of this machine can feed it, if workers mostly wait, if a remedy before echoing is enough, or if other
    machines are no cure: the storage is the limit, examples take less time to prepare than to bring here, or a reader has no room
    for so many workers.
    """
    cheaper = [remedy for remedy in found if remedy.name != "echo"]
    if stages.no_cluster_workers or any(remedy.is_enough for remedy in cheaper):
        return None
    asked = [remedy.setting for remedy in cheaper if remedy.name != "cache"]
    base = asked[-1] if asked else TrainingSetting()
    if cores_wanted(stages, base) * (1 - target) <= stages.cores or not mostly_computes(stages):
        return None
    fewest = fewest_elsewhere(lambda workers: feeds(stages, replace(base, cluster_workers=workers), target))
    if fewest is None:
        return None
    missing = whole_cores(cores_wanted(stages, replace(base, cluster_workers=fewest))) - stages.cores
    workers = max(fewest, missing)
    return replace(base, cluster_workers=workers) if workers * stages.ranks <= MOST_OF_READER else None


# ---------------------------------------------------------------------- verdict

_LEAST_WAIT_SECONDS, _MOSTLY = 0.0005, 0.5  # reading waits if a read waits so long, and that is so much of a loader's time
_EXPLAINED = 1.15  # a step is explained if it takes at most this many times as long as predicted
_UNCUT = (
    "The data set cannot be cut before its augmentation, so that a cache can hold its examples only whole (hold='whole'), if it "
    "returns the same each time"
)


class VerdictKind(Enum):
    """The kind of an advice, for programs. `Verdict.message` is for people."""

    not_starved = "not_starved"  # do nothing
    more_workers = "more_workers"  # more workers are enough
    prefetching = "prefetching"  # a longer queue of batches is enough
    pinning = "pinning"  # pinned memory is enough
    reads_in_flight = "reads_in_flight"  # threads that read ahead are enough
    cache = "cache"  # a part of the data set in memory is enough
    cluster_workers = "cluster_workers"  # workers of the cluster are enough, and nothing cheaper is
    cache_and_echo = "cache_and_echo"  # memory does not hold enough; the echo factor is for the rest
    transform = "transform"  # one transform alone starves the accelerator
    echo = "echo"  # no cheaper remedy is enough
    not_enough = "not_enough"  # no remedy is enough (the setting has what helps), workers fail, or the steps are not explained


@dataclass(frozen=True)
class Verdict:
    """The advice of an analysis.

    Attributes:
        setting: The advised setting; the measured one if nothing is to be changed. Its ``options`` are those of an `EchoConfig`,
            and its ``line`` is the callback to paste; those of workers of a cluster are here (``options`` and ``lines``).
        remedies: The remedies that help, in their order. Each contains those before it. Empty if none was looked for.
        elsewhere: The setting that feeds the accelerator without echoes, by workers on other machines (for each rank). None if
            the processors of this machine are not the limit, or if a remedy before echoing is enough.
        ranks: Number of ranks of the job.
    """

    kind: VerdictKind
    message: str
    setting: TrainingSetting
    remedies: tuple[Remedy, ...] = ()
    elsewhere: TrainingSetting | None = None
    ranks: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """The options of an `EchoConfig` for the advice. Workers of a cluster are those of all ``ranks``."""
        if not self.setting.cluster_workers:
            return self.setting.options
        share = {"name": "train", "cluster": "ray", "cluster_workers": self.setting.cluster_workers * self.ranks}
        return {"factor": 1.0, **self.setting.options, "share": share}

    @property
    def lines(self) -> list[str]:
        """The lines to paste: the options of the ``DataLoader`` that change, and the callback for the Trainer if any."""
        if not self.setting.cluster_workers:
            return self.setting.lines
        return [*self.setting.lines_of_loader, callback_line(self.options)]


def judge(stages: MeasuredStages, step_seconds: float, transforms: Mapping[str, float], target: float = TARGET) -> Verdict:
    """Returns the cheapest setting that feeds the accelerator: ``target`` is the share of the time that it may wait."""
    idle = max(0.0, 1 - stages.step.median / step_seconds)
    if idle <= target:
        return Verdict(VerdictKind.not_starved, f"Do nothing: {busy(idle)}.", TrainingSetting())
    if feeds(stages, TrainingSetting(), target):
        is_explained = step_seconds <= _EXPLAINED * predict(stages, TrainingSetting()).step_seconds
        if not is_explained or _by_pinning(stages, TrainingSetting()) is None:
            return _not_by_waiting(stages, step_seconds, idle)
    if not stages.can_have_workers:
        message = (
            "Make the data set work in worker processes first (the notes say how it fails), then analyze again: "
            f"{busy(idle, only=True)}, since without workers loading and training take turns."
        )
        return Verdict(VerdictKind.not_enough, message, TrainingSetting())
    found = tuple(remedies(stages, target))
    elsewhere = by_other_machines(stages, found, target)
    if elsewhere is not None and stages.has_cluster:  # echoing then starts from what is without it
        of_cluster = Remedy("cluster", elsewhere, is_enough=True)
        found = (*(each for each in found if each.name != "echo"), of_cluster, *(each for each in found if each.name == "echo"))
        verdict = _by_remedy(stages, of_cluster, transforms, idle)
    elif found and found[-1].is_enough:
        verdict = _by_remedy(stages, found[-1], transforms, idle)
    elif found:
        verdict = replace(_by_remedy(stages, found[-1], transforms, idle), kind=VerdictKind.not_enough)
        verdict = replace(
            verdict, message=f"{verdict.message} Nothing that was tried is enough: a faster source would help more."
        )
    else:
        message = f"Nothing that was tried is enough: {busy(idle, only=True)}. What helps is a faster source."
        verdict = Verdict(VerdictKind.not_enough, message, TrainingSetting())
    without_reads = (VerdictKind.more_workers, VerdictKind.prefetching, VerdictKind.pinning)
    about = _about_queue(stages, verdict.setting)
    about += "" if verdict.kind in without_reads else _about_reads(stages, verdict.setting)
    if elsewhere is not None:
        needed = whole_cores(cores_wanted(stages, elsewhere))
        about += f" {cores_elsewhere(needed, stages.cores, elsewhere.cluster_workers, stages.ranks)}"
    return replace(verdict, message=f"{verdict.message}{about}", remedies=found, elsewhere=elsewhere, ranks=stages.ranks)


def _by_remedy(stages: MeasuredStages, last: Remedy, transforms: Mapping[str, float], idle: float) -> Verdict:
    setting = last.setting
    if last.name == "workers" and not stages.workers:
        return Verdict(VerdictKind.more_workers, no_workers(setting.workers or 1, idle), setting)
    gain = f"{busy(idle, only=True)}, and would be {percent(1 - predict(stages, setting).idle_fraction)}"
    how = _how(stages, setting)
    begun = how[0].upper() + how[1:]
    if last.name != "echo":
        kinds = {"cache": "cache", "reads": "reads_in_flight", "prefetching": "prefetching", "pinning": "pinning"}
        kinds["cluster"] = "cluster_workers"
        kind = VerdictKind(kinds.get(last.name, "more_workers"))
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
    options = setting.loader_options
    if setting.workers == stages.workers:
        options.pop("num_workers")
    parts = [f"set {name} to {value}" for name, value in options.items()]
    if setting.reads_in_flight > 1:
        parts.append(f"set reads_in_flight to {setting.reads_in_flight}")
    if setting.cached_fraction:
        where = "memory" if setting.hold is None else f"a cache with hold='{setting.hold}'"
        size = f" and size='{setting.cache_size}'" if setting.cache_size else ""
        parts.append(f"keep {percent(setting.cached_fraction)} of the data set in {where}{size}")
    if setting.cluster_workers:
        parts.append(f"take {number_of(setting.cluster_workers * stages.ranks, 'worker', 'workers')} of the cluster")
    if setting.factor > 1:
        left = " for what is left" if setting.cached_fraction else ""
        parts.append(f"echo{left} at insertion_point='{setting.insertion_point}' with factor {setting.factor:.3g}")
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]


def _about_reads(stages: MeasuredStages, setting: TrainingSetting) -> str:
    """Returns a sentence on reading ahead if reads mostly wait: what it brings, or why it is not advised."""
    if (reads := setting.reads_in_flight) > 1:
        first, last = stages.in_flight[0], stages.in_flight[-1]
        if first.seconds.median < last.seconds.median * math.sqrt(last.reads / first.reads):
            return " Threads then read while the workers do the rest. More hardly help: the storage's bandwidth is the limit."
        if reads == first.reads:
            return " Threads then read while the workers do the rest."
        seconds = read_seconds(stages, reads)
        return (
            f" Reading is latency, not bandwidth: an example takes {_ms(first.seconds.median)} ms with "
            f"{number_of(first.reads, 'read', 'reads')} under way, and {_ms(seconds)} ms with {reads}."
        )
    waits = stages.read.median * (1 - stages.read_cpu_share)
    batch = stages.batch_size * (stages.read.median + stages.decode.median + stages.augment.median) + stages.collate.median
    if waits < _LEAST_WAIT_SECONDS or stages.batch_size * waits < _MOSTLY * batch:
        return ""
    if stages.in_flight:
        return " Reads in flight bring too little: the storage's bandwidth is the limit, not its latency."
    if not stages.no_reads_ahead:
        return ""
    return f" Reads mostly wait, and reads_in_flight could overlap them, but threads may not read ahead: {stages.no_reads_ahead}."


def _about_queue(stages: MeasuredStages, setting: TrainingSetting) -> str:
    """Returns a sentence on batches that take unequally long, if prefetching is advised."""
    if setting.prefetch_factor is None:
        return ""
    median, longest = statistics.median(stages.batch_seconds), max(without_chance(stages.batch_seconds))
    return f" A batch takes a worker {_ms(median)} ms as a rule and up to {_ms(longest)} ms: a longer queue evens that out."


def _ms(seconds: float) -> str:
    return three_digits(1e3 * seconds)


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
    if possible_holds(stages):
        return f"{limits.get(limit, 'Neither')} more workers nor a cache are enough"
    begun = {"cores": f"The {stages.cores} cores are the limit, so that more", "storage": "The storage is the limit, and more"}
    why = f"{begun.get(limit, 'More')} workers are not enough"
    return f"{why}. {_UNCUT}" if stages.read.median else why
