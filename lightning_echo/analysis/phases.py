"""The loader's phases: what reading, decoding, augmentation and collation take, out of memory and in it.

    look        everything once: which files are opened, what each transform takes
    cold        out of memory: the files' pages are dropped before; where no file is opened, examples that were not touched yet
    warm        in memory: the same examples once more
    augment     augmentation by itself, where the data set can be cut there

Reading is what the cold pass takes longer than the warm one. Only where no file is opened and the data set can be cut after
reading, the cold pass reads alone, and what was read is kept and prepared from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from torch.utils.data import DataLoader

from lightning_echo.analysis.loading import (
    Batches,
    BatchSeconds,
    FirstBatches,
    MakeStages,
    Part,
    Pass,
    halves,
    preparing,
    reading,
    run_pass,
    whole,
)
from lightning_echo.analysis.measured import Spread
from lightning_echo.analysis.pages import drop_pages
from lightning_echo.analysis.ranks import gathered
from lightning_echo.echoing.choice import choose
from lightning_echo.echoing.insertion import InsertionPoint
from lightning_echo.echoing.source import Source

__all__ = ["LoaderPhases", "measure_loader"]

_FIRST_TOUCH = (
    "fetch rate: no files were seen to be opened (a network, a database, or data in memory), so that nothing could be dropped "
    "from memory; measured is the first touch of each example"
)
_TOUCHED = (
    "fetch rate: the training loader is too short for examples that were not read before, so that caches outside of this program "
    "may have been warm; {steps} batches were wanted"
)
_NOTHING = Spread.exactly(0.0)


@dataclass(frozen=True)
class LoaderPhases:
    """What the workers spend, and how the same batches are had out of memory and in it.

    Attributes:
        read: Per example, from the storage.
        read_cached: Per example, from memory.
        decode: Per example.
        augment: Per example.
        collate: Per batch.
        read_cpu_share: Share of reading in which a processor is busy.
        prepare_cpu_share: The same of the rest.
        points: Insertion points that are possible.
        takes_ahead: Whether an `EchoLoader` takes batches from the workers in a thread of its own.
        transforms: Seconds per example of each, by name.
        files: That were read.
        real: Batches as in a training; the files' pages are to be dropped before.
        in_memory: Batches of which nothing need be read; None where that could not be had.
        raw: Cuts the data set after reading; None where that is not possible.
        kept: Raw items in memory, by index.
        notes: What could not be measured as it should, and why.
    """

    read: Spread
    read_cached: Spread
    decode: Spread
    augment: Spread
    collate: Spread
    read_cpu_share: float
    prepare_cpu_share: float
    points: tuple[str, ...]
    takes_ahead: bool
    transforms: Mapping[str, float]
    files: tuple[str, ...]
    real: Batches | FirstBatches
    in_memory: Batches | None
    raw: MakeStages | None
    kept: Mapping[Any, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Fetched:
    """What the cold and the warm pass came to; per example ``prepare`` is all but reading."""

    read: Spread
    read_cached: Spread
    prepare: Spread
    read_cpu_share: float
    warm: Pass
    in_memory: Batches
    kept: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Runner:
    """Runs passes over the user's loader."""

    loader: DataLoader[Any]
    most_seconds: float
    say: Callable[[str], None]

    def __call__(self, what: str, part: Part, batches: Sequence[list[Any]], **options: Any) -> Pass:
        self.say(what)
        return run_pass(self.loader, part, batches, most_seconds=self.most_seconds, **options)


def measure_loader(
    loader: DataLoader[Any], batches: Sequence[list[Any]], steps: int, most_seconds: float, say: Callable[[str], None]
) -> LoaderPhases:
    """Runs the phases.

    Args:
        loader: The user's, over a map-style data set.
        batches: Indices of each: of three times as many steps where there are so many, so that some stay untouched.
        steps: Batches of a pass at most.
        most_seconds: Of a pass.
        say: Told what is done.

    Raises:
        Exception: The data set raises it.
    """
    run = _Runner(loader, most_seconds, say)
    raw, split, points = _cuts(loader)
    look = run("the loader: files and transforms", whole, batches[:steps], looks=True, workers=max(loader.num_workers, 1))
    steps = min(gathered(len(look.batches)))  # what was begun is finished: no pass is longer, and it is the same on all ranks
    size = len(batches[0])
    notes: tuple[str, ...] = ()
    first, second, third = ([*batches[:steps]] for _ in range(3))
    if look.files:
        drop_pages(look.files)
    elif len(batches) < 3 * steps:
        notes = (_FIRST_TOUCH, _TOUCHED.format(steps=3 * steps))
    else:
        second, third, notes = [*batches[steps : 2 * steps]], [*batches[2 * steps : 3 * steps]], (_FIRST_TOUCH,)
    if raw is not None and not look.files:
        fetched = _by_keeping(run, raw, second, size)
    else:
        fetched = _by_difference(run, raw, None if look.files else look, first, size)
    augment = _NOTHING
    if split is not None:
        augment = _per_example(run("augmentation alone", partial(halves, split), first), size, "second")
    return LoaderPhases(
        fetched.read,
        fetched.read_cached,
        _longer(fetched.prepare, augment),
        augment,
        _per_example(fetched.warm, 1, "collate"),
        fetched.read_cpu_share,
        _cpu_share(fetched.warm.batches),
        points,
        Source(loader).repeats_passes,
        {name: fmean(seconds[name] for seconds in _counted(look.transforms)) / size for name in look.transforms[-1]},
        tuple(look.files),
        Batches(loader, whole, third[: len(fetched.in_memory)]),
        fetched.in_memory,
        raw,
        fetched.kept,
        notes,
    )


def _by_keeping(run: _Runner, raw: MakeStages, batches: list[list[Any]], size: int) -> _Fetched:
    """Raw items are read once, kept, and prepared from memory."""
    cold = run("fetch rate: reading alone", partial(reading, raw), batches, collates=False, keeps=True)
    batches = batches[: min(gathered(len(cold.batches)))]
    kept = _by_index(batches, cold.outputs)
    in_memory = partial(preparing, raw, kept)
    warm = run("preparation rate: from memory", in_memory, batches)
    read, prepare = _per_example(cold, size, "first"), _per_example(warm, size, "first")
    return _Fetched(read, _NOTHING, prepare, _cpu_share(cold.batches), warm, Batches(run.loader, in_memory, batches), kept)


def _by_difference(
    run: _Runner, raw: MakeStages | None, first_touch: Pass | None, batches: list[list[Any]], size: int
) -> _Fetched:
    """Everything out of memory and everything in memory: a read between two decodings takes longer than one after another."""
    cold = first_touch or run("fetch rate: out of memory", whole, batches)
    warm = run("preparation rate: in memory", whole, batches)
    all_cold, all_warm = _per_example(cold, size, "first"), _per_example(warm, size, "first")
    again = _NOTHING
    if raw is not None:
        warm_reads = run("fetch rate: in memory", partial(reading, raw), batches, collates=False)
        again = _per_example(warm_reads, size, "first")
    longer = _longer(all_cold, all_warm)
    read = Spread(*(getattr(longer, which) + getattr(again, which) for which in ("median", "low", "high")))
    busy = _cpu_per_example(cold, size) - _cpu_per_example(warm, size)
    share = min(1.0, max(0.0, busy / longer.median)) if longer.median else 0.0
    return _Fetched(read, again, _longer(all_warm, again), share, warm, Batches(run.loader, whole, batches))


def _cuts(loader: DataLoader[Any]) -> tuple[MakeStages | None, MakeStages | None, tuple[str, ...]]:
    """Where data echoing would cut the data set: after reading, before augmentation; and the insertion points that gives."""
    source = Source(loader)
    chosen = choose(source, InsertionPoint.auto)
    points = [point.value for point in InsertionPoint if point.by_batches]
    if chosen.point is not InsertionPoint.after_batching:
        points.insert(0, InsertionPoint.after_augmentation.value)
    split = raw = None
    if chosen.point is InsertionPoint.before_augmentation:
        split = chosen.make_stages
        points.insert(0, chosen.point.value)
    try:
        raw = choose(source, InsertionPoint.after_read).make_stages
        points.insert(0, InsertionPoint.after_read.value)
    except ValueError:  # impossible there
        pass
    return raw, split, tuple(points)


def _by_index(batches: Sequence[list[Any]], outputs: Sequence[list[Any]]) -> dict[Any, Any]:
    """What was read, by its index."""
    return {
        index: item for indices, items in zip(batches, outputs, strict=False) for index, item in zip(indices, items, strict=True)
    }


def _counted(batches: Sequence[Any]) -> Sequence[Any]:
    """Those but the first ones, which each worker starts with."""
    return batches[max(1, len(batches) // 10) :] or batches


def _per_example(made: Pass, size: int, name: str) -> Spread:
    return Spread.of([getattr(batch, name) / size for batch in _counted(made.batches)])


def _longer(all_of_it: Spread, part: Spread) -> Spread:
    """What is left of a time without a part of it."""
    return Spread(
        max(0.0, all_of_it.median - part.median),
        max(0.0, all_of_it.low - part.high),
        max(0.0, all_of_it.high - part.low),
    )


def _cpu_per_example(made: Pass, size: int) -> float:
    return fmean(batch.cpu for batch in _counted(made.batches)) / size


def _cpu_share(batches: Sequence[BatchSeconds]) -> float:
    spent = sum(batch.first + batch.second + batch.collate for batch in batches)
    return min(1.0, sum(batch.cpu for batch in batches) / spent) if spent else 0.0
