"""The loader's phases: what reading, decoding, augmentation and collation take, out of memory and in it.

    look        everything once: which files are opened, what each transform takes
    cold        out of memory: the files' pages are dropped before; where no file is opened, examples that were not touched yet
    warm        in memory: the same examples once more
    augment     augmentation by itself, where the data set can be cut there

Reading is what the cold pass takes longer than the warm one. Only where no file is opened and the data set can be cut after
reading, the cold pass reads alone, and what was read is kept and prepared from memory.
"""

from __future__ import annotations

import math
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from torch.utils.data import DataLoader

from lightning_echo.analysis.measured import Spread
from lightning_echo.analysis.probing.loading import Batches, FirstBatches, Pass, counted, run_pass
from lightning_echo.analysis.probing.pages import drop_pages, hold_data
from lightning_echo.analysis.probing.parts import MakeStages, Part, cuts, halves, preparing, reading, whole
from lightning_echo.analysis.probing.ranks import gathered
from lightning_echo.fetching.source import Source

__all__ = ["CHUNKS", "LoaderPhases", "measure_loader"]

_FIRST_TOUCH = (
    "fetch rate: no files were seen to be opened (a network, a database, or data in memory), or this system cannot drop them "
    "from memory; measured is the first touch of each example"
)
_TOUCHED = (
    "fetch rate: the training loader is too short for examples that were not read before, so that caches outside of this program "
    "may have been warm; {steps} batches were wanted"
)
_NOT_LOOKED = (
    "files and transforms: not seen, since the data set fails in a worker process, and the loader has none ({error}); "
    "with num_workers the training would fail, too"
)
# Devices and handles that do not come along into a worker, a worker that dies; under spawn: what cannot be pickled.
_FAILS_IN_A_WORKER = (RuntimeError, OSError, TypeError, AttributeError, pickle.PicklingError)
CHUNKS = 4  # passes whose examples are touched for the first time, where no files are opened
_NOTICED = 0.05  # of an example's time: a stage that takes less is not asked how it scales
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
        read_sharing: How reading slows down with more workers, see `MeasuredStages`.
        prepare_sharing: The same of the rest.
        takes_ahead: Whether an `EchoLoader` takes batches from the workers in a thread of its own.
        batch_size: Examples in a batch, their mean.
        transforms: Seconds per example of each, by name.
        files: That were read.
        real: Batches as in a training; the files' pages are to be dropped before.
        in_memory: Batches of which nothing need be read; None where that could not be had.
        raw: Cuts the data set after reading; None where that is not possible.
        kept: Raw items in memory, by index.
        notes: What could not be measured as it should, and why.
        can_have_workers: Whether the data set does what it does in a worker process, too.
    """

    read: Spread
    read_cached: Spread
    decode: Spread
    augment: Spread
    collate: Spread
    read_cpu_share: float
    prepare_cpu_share: float
    points: tuple[str, ...]
    read_sharing: float
    prepare_sharing: float
    takes_ahead: bool
    batch_size: float
    transforms: Mapping[str, float]
    files: tuple[str, ...]
    real: Batches | FirstBatches
    in_memory: Batches | None
    raw: MakeStages | None
    kept: Mapping[Any, Any]
    notes: tuple[str, ...]
    can_have_workers: bool = True


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
        batches: Indices of each: of `CHUNKS` times as many steps where there are so many, so that some stay untouched.
        steps: Batches of a pass at most.
        most_seconds: Of a pass.
        say: Told what is done.

    Raises:
        Exception: The data set raises it.
    """
    run = _Runner(loader, most_seconds, say)
    raw, split, points = cuts(loader)
    look, failure = _look(run, batches[:steps])
    steps = min(gathered(len(look.batches)))  # what was begun is finished: no pass is longer, and it is the same on all ranks
    can_drop = any(gathered(hold_data(look.files, steps) and drop_pages(look.files) > 0))
    files = look.files if can_drop else []
    chunks, notes = _chunks(batches, steps, can_drop)
    size = fmean(map(len, batches[: CHUNKS * steps]))
    if raw is not None and not can_drop:
        fetch: Callable[..., _Fetched] = partial(_by_keeping, run, raw, size)
    else:
        fetch = partial(_by_difference, run, raw, size, files)
    # Before, since a pass that takes too long leaves files out of memory.
    other = fetch(chunks[3], 1 if loader.num_workers > 1 else 2) if loader.num_workers else None
    fetched = fetch(chunks[1])
    augment = _NOTHING
    if split is not None:
        augment = run("augmentation alone", partial(halves, split), fetched.in_memory.indices).of("second", size)
    read_sharing, prepare_sharing = _sharing(fetched, other, loader.num_workers)
    return LoaderPhases(
        read=fetched.read,
        read_cached=fetched.read_cached,
        decode=fetched.prepare.without(augment),
        augment=augment,
        collate=fetched.warm.of("collate", 1),
        read_cpu_share=fetched.read_cpu_share,
        prepare_cpu_share=fetched.warm.cpu_share,
        points=points,
        read_sharing=read_sharing,
        prepare_sharing=prepare_sharing,
        takes_ahead=Source(loader).may_run_in_thread,
        batch_size=size,
        transforms={name: fmean(seconds[name] for seconds in counted(look.transforms)) / size for name in look.transforms[-1]},
        files=tuple(files),
        real=Batches(loader, whole, chunks[2][: len(fetched.in_memory)]),
        in_memory=fetched.in_memory,
        raw=raw,
        kept=fetched.kept,
        notes=notes if failure is None else (_NOT_LOOKED.format(error=failure), *notes),
        can_have_workers=failure is None,
    )


def _look(run: _Runner, batches: Sequence[list[Any]]) -> tuple[Pass, str | None]:
    """The first pass: only a worker can look, so one is borrowed where there is none; and how the data set failed in that one."""
    what = "the loader: files and transforms"
    if run.loader.num_workers:
        return run(what, whole, batches, looks=True), None
    try:
        return run(what, whole, batches, looks=True, workers=1), None
    except _FAILS_IN_A_WORKER as error:
        here = run("the loader, in this process", whole, batches)  # what is wrong with the data set itself is raised here
        raised = "".join(traceback.format_exception_only(error)).strip()
        return here, raised.splitlines()[-1]  # before it torch puts the worker's traceback


def _chunks(batches: Sequence[list[Any]], steps: int, can_be_dropped: bool) -> tuple[list[list[list[Any]]], tuple[str, ...]]:
    """Batches for each pass out of memory, the first one looked at already; what there is to say about them."""
    same = [[*batches[:steps]]] * CHUNKS
    if can_be_dropped:
        return same, ()
    if len(batches) < CHUNKS * steps:
        return same, (_FIRST_TOUCH, _TOUCHED.format(steps=CHUNKS * steps))
    return [[*batches[steps * number : steps * (number + 1)]] for number in range(CHUNKS)], (_FIRST_TOUCH,)


def _by_keeping(run: _Runner, raw: MakeStages, size: float, batches: list[list[Any]], workers: int | None = None) -> _Fetched:
    """Raw items are read once, kept, and prepared from memory."""
    also = _also(workers)
    cold = run(f"fetch rate: reading alone{also}", partial(reading, raw), batches, collates=False, keeps=True, workers=workers)
    batches = _reached(batches, cold)
    kept = _by_index(batches, cold.outputs)
    in_memory = partial(preparing, raw, kept)
    warm = run(f"preparation rate: from memory{also}", in_memory, batches, workers=workers)
    read, prepare = cold.of("first", size), warm.of("first", size)
    return _Fetched(read, _NOTHING, prepare, cold.cpu_share, warm, Batches(run.loader, in_memory, batches), kept)


def _by_difference(
    run: _Runner, raw: MakeStages | None, size: float, files: Sequence[str], batches: list[list[Any]], workers: int | None = None
) -> _Fetched:
    """Everything out of memory and everything in memory: a read between two decodings takes longer than one after another."""
    also = _also(workers)
    drop_pages(files)
    cold = run(f"fetch rate: out of memory{also}", whole, batches, workers=workers)
    batches = _reached(batches, cold)
    warm = run(f"preparation rate: in memory{also}", whole, batches, workers=workers)
    all_cold, all_warm = cold.of("first", size), warm.of("first", size)
    again = _NOTHING
    if raw is not None:
        warm_reads = run(f"fetch rate: in memory{also}", partial(reading, raw), batches, collates=False, workers=workers)
        again = warm_reads.of("first", size)
    longer = all_cold.without(all_warm)
    read = Spread(*(getattr(longer, which) + getattr(again, which) for which in ("median", "low", "high")))
    busy = (cold.cpu_seconds - warm.cpu_seconds) / size
    share = min(1.0, max(0.0, busy / longer.median)) if longer.median else 0.0
    return _Fetched(read, again, all_warm.without(again), share, warm, Batches(run.loader, whole, batches))


def _also(workers: int | None) -> str:
    return "" if workers is None else f", num_workers={workers}"


def _reached(batches: list[list[Any]], cold: Pass) -> list[list[Any]]:
    """Those that were read in time, on all ranks: others are not in memory."""
    return batches[: min(gathered(len(cold.batches)))]


def _sharing(fetched: _Fetched, other: _Fetched | None, workers: int) -> tuple[float, float]:
    """How reading, and the rest, slow down with more workers: from what they take with another number of them."""
    if other is None:
        return 0.0, 0.0
    read, prepare = fetched.read.median, fetched.prepare.median
    noticed, more = _NOTICED * (read + prepare), (1 if workers > 1 else 2) / workers
    return _exponent(read, other.read.median, more, noticed), _exponent(prepare, other.prepare.median, more, noticed)


def _exponent(before: float, after: float, more: float, noticed: float) -> float:
    """How a worker's seconds grow with the number of workers, in [0, 1]."""
    if min(before, after) < noticed or not noticed:
        return 0.0
    return min(1.0, max(0.0, math.log(after / before) / math.log(more)))


def _by_index(batches: Sequence[list[Any]], outputs: Sequence[list[Any]]) -> dict[Any, Any]:
    """What was read, by its index."""
    return {
        index: item for indices, items in zip(batches, outputs, strict=False) for index, item in zip(indices, items, strict=True)
    }
