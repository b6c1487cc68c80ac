"""The loader's phases: how long reading, decoding, augmentation and collation take, out of memory and in memory."""

from __future__ import annotations

import math
import pickle
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed
from torch.utils.data import DataLoader

from lightning_echo.analysis.measured import CachedExample, ProcessorTime, ReadsInFlight, Spread
from lightning_echo.analysis.parts import (
    Batches,
    Cuts,
    FirstBatches,
    MakeStages,
    Part,
    PartRun,
    both_halves,
    counted,
    cuts,
    drop_pages,
    fewest_batches,
    first_half,
    hold_data,
    in_cache,
    in_threads,
    mean_of,
    run_part,
    second_half,
    whole,
)
from lightning_echo.analysis.predict import HOLDS
from lightning_echo.analysis.prefetch import FEWEST_BATCHES
from lightning_echo.cache.reads import Keys, NoKeysError
from lightning_echo.insertion import Needs, points_from
from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.split.reading import ReadPart

# ---------------------------------------------------------------------- process


@contextmanager
def process_state_restored() -> Iterator[None]:
    """Restores, at its end, the random states of torch, numpy and Python, and the switches of torch that a Trainer sets."""
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        for device, state in enumerate(of_devices):
            torch.cuda.set_rng_state(state, device)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
        torch.backends.cudnn.benchmark = benchmark


# ---------------------------------------------------------------------- ranks

Value = TypeVar("Value")


def gathered(value: Value) -> list[Value]:
    """Returns the values of all ranks, in their order; one value without a process group. All ranks must call this together."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    found: list[Value] = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


# ---------------------------------------------------------------------- steps

_FEWEST = 4
_DEFAULT = 100


@dataclass(frozen=True)
class StepNumber:
    """The number of steps of a phase: as many as ``asked`` (at least 4), else 100, or as many as the loader has batches."""

    asked: int | None
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        if self.asked is not None and self.asked < _FEWEST:
            raise ValueError(f"steps must be >= {_FEWEST}, got {self.asked!r}")

    @property
    def most(self) -> int:
        return _DEFAULT if self.asked is None else self.asked

    def within(self, batches: int) -> int:
        """Returns the number of steps for a loader with (at least) ``batches`` batches, which must be equal on all ranks."""
        if batches >= self.most:
            return self.most
        if self.asked is not None:
            raise ValueError(
                f"steps must be at most {batches}, the batches of the training loader, got {self.asked}: give fewer steps, or "
                "none, to measure as many as there are"
            )
        if batches < _FEWEST:
            raise ValueError(
                f"the training loader must have at least {_FEWEST} batches for an analysis, got {batches}: make batches smaller"
            )
        self.tell(f"{batches} steps in each phase: the training loader has no more batches")
        return batches


# ---------------------------------------------------------------------- phases
#     look        everything, once: which files are opened, how long each transform takes
#     cold        out of memory: the files' pages are dropped first; if no file is opened, examples that were not read before
#     warm        in memory: the same examples once more
#     augment     augmentation by itself, if the data set can be cut there
#     cache       the cost of some examples in a cache, in each form that the cuts give
#     in flight   reading alone, by more and more threads of each worker: out of memory, too
#
# Reading is the time by which the cold run is longer than the warm run. In one case the cold run reads only: if no file is opened
# and the data set can be cut after reading. Then the raw items are held in memory, and the warm run prepares them from there.

_FIRST_READ = (
    "fetch rate: no file was seen to be opened (a network, a database, or data in memory), or this system cannot drop files "
    "from memory; the first read of each example was measured instead"
)
_READ_BEFORE = (
    "fetch rate: the training loader is too short for examples that were not read before, so that caches outside of this program "
    "may have been warm; it needs {steps} batches"
)
_NOT_OBSERVED = (
    "files and transforms: not seen, since the data set fails in a worker process, and the loader has none ({error}); "
    "with num_workers the training would fail, too"
)
# Devices and handles that a worker does not get, a worker that dies; with spawn, an object that cannot be pickled.
_FAILS_IN_A_WORKER = (RuntimeError, OSError, TypeError, AttributeError, pickle.PicklingError)
_NOTICED = 0.05  # share of an example's time: how a stage slows down with more workers is measured if it takes more than this
_NO_TIME, _NO_PROCESSOR = Spread.exactly(0.0), ProcessorTime(0.0, 0.0)
_EXAMPLES_IN_CACHE = 64  # whose mean size is taken


@dataclass(frozen=True)
class LoaderPhases:
    """The seconds that the workers spend, and loaders that yield the same batches from the storage and from memory.

    Attributes that `MeasuredStages` has, too, are described there.

    Attributes:
        transforms: Seconds per example of each transform, by name.
        stage_cpu: Processor time per example of each stage, by name; empty if it is not known.
        transform_cpu: The same of each transform.
        files: Files that were read.
        real: Yields batches as in a training. Drop the files' pages before using it.
        in_memory: Yields batches without reading from the storage; None if that is not possible.
        cut_after_reading: Makes the functions before and after reading; None if the data set cannot be cut there.
        raw_items: The raw items that are held in memory, by index.
        notes: Shortcomings of the measurement, with reasons.
    """

    decode: Spread
    points: tuple[str, ...]
    batch_size: float
    real: Batches | FirstBatches
    notes: tuple[str, ...]
    read: Spread = _NO_TIME
    read_cached: Spread = _NO_TIME
    augment: Spread = _NO_TIME
    collate: Spread = _NO_TIME
    read_cpu_share: float = 0.0
    prepare_cpu_share: float = 0.0
    read_sharing: float = 0.0
    prepare_sharing: float = 0.0
    takes_ahead: bool = False
    transforms: Mapping[str, float] = field(default_factory=dict)
    stage_cpu: Mapping[str, ProcessorTime] = field(default_factory=dict)
    transform_cpu: Mapping[str, ProcessorTime] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    in_memory: Batches | None = None
    cut_after_reading: MakeStages | None = None
    raw_items: Mapping[Any, Any] = field(default_factory=dict)
    can_have_workers: bool = True
    in_cache: Mapping[str, CachedExample] = field(default_factory=dict)
    examples: int | None = None
    in_flight: tuple[ReadsInFlight, ...] = ()
    read_ahead: str = ""
    no_reads_ahead: str = ""
    batch_seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class _ColdAndWarm:
    """Seconds per example of a cold and a warm run. ``prepare`` is decoding and augmentation; ``in_memory``, the warm batches.

    ``batch_seconds``: of a worker for each batch, out of memory, in their order.
    """

    read: Spread
    read_cached: Spread
    prepare: Spread
    read_cpu_share: float
    read_cpu: ProcessorTime
    prepare_cpu: ProcessorTime
    warm: PartRun
    in_memory: Batches
    batch_seconds: Sequence[float]
    raw_items: Mapping[Any, Any] = field(default_factory=dict)


class _Chunks(NamedTuple):
    """The batches of each run that should read examples for the first time."""

    observed: list[list[Any]]
    measured: list[list[Any]]
    real: list[list[Any]]
    other_workers: list[list[Any]]


CHUNKS = len(_Chunks._fields)


@dataclass(frozen=True)
class _Runner:
    loader: DataLoader[Any]
    most_seconds: float
    say: Callable[[str], None]
    look: Callable[[], None] = lambda: None

    def __call__(self, what: str, part: Part, batches: Sequence[list[Any]], **options: Any) -> PartRun:
        self.say(what)
        return run_part(self.loader, part, batches, most_seconds=self.most_seconds, look=self.look, **options)


def measure_loader(
    loader: DataLoader[Any],
    batches: Sequence[list[Any]],
    steps: int,
    most_seconds: float,
    say: Callable[[str], None],
    asked: int | str = 1,
    look: Callable[[], None] = lambda: None,
) -> LoaderPhases:
    """Runs the phases over a map-style data set: at most ``steps`` batches and ``most_seconds`` a run.

    With `CHUNKS` times as many ``batches`` (of indices) as steps, and `READ_AHEAD` examples more, each run can read examples that
    were not read before. ``asked`` is as in `cuts`, ``look`` as in `run_part`.
    """
    run = _Runner(loader, most_seconds, say, look)
    cut = cuts(loader, asked)
    seen, failure = _look(run, batches[:steps])
    steps = min(gathered(len(seen.batches)))  # no later run is longer than the first, on any rank: so each has time to finish
    can_drop = any(gathered(hold_data(seen.files, steps) and drop_pages(seen.files) > 0))
    files = seen.files if can_drop else []
    chunks, notes = _chunks(batches, steps, can_drop)
    size = fmean(map(len, batches[: CHUNKS * steps]))
    if cut.after_reading is not None and not can_drop:
        measure: Callable[..., _ColdAndWarm] = partial(_by_raw_items, run, cut.after_reading, size)
    else:
        measure = partial(_by_difference, run, cut.after_reading, size, files)
    # The run with another number of workers comes first, because a run that takes too long leaves some files out of memory.
    other_workers = 1 if loader.num_workers > 1 else 2
    other = measure(chunks.other_workers, other_workers) if loader.num_workers else None
    found = measure(chunks.measured)
    augment, augment_cpu = _NO_TIME, _NO_PROCESSOR
    if cut.before_augmenting is not None:
        halves = run("augmentation alone", partial(both_halves, cut.before_augmenting), found.in_memory.indices)
        augment, augment_cpu = halves.of("second", size), halves.processor("second", size)
    read_sharing = prepare_sharing = 0.0
    if other is not None:
        times, noticed = other_workers / loader.num_workers, _NOTICED * (found.read.median + found.prepare.median)
        read_sharing = _exponent(found.read.median, other.read.median, times, noticed)
        prepare_sharing = _exponent(found.prepare.median, other.prepare.median, times, noticed)
    unread = [] if can_drop else batches[CHUNKS * steps :]
    indices = [index for batch in unread or found.in_memory.indices for index in batch]
    in_flight = _reads_in_flight(run, cut, indices, files, found.read.median)
    of_transforms = {name: [spent[name] for spent in counted(seen.transforms)] for name in seen.transforms[-1]}
    return LoaderPhases(
        read=found.read,
        read_cached=found.read_cached,
        decode=found.prepare.without(augment),
        augment=augment,
        collate=found.warm.of("collate", 1),
        read_cpu_share=found.read_cpu_share,
        prepare_cpu_share=found.warm.cpu_share,
        points=cut.points,
        read_sharing=read_sharing,
        prepare_sharing=prepare_sharing,
        takes_ahead=kind_of(loader).may_run_in_thread,
        batch_size=size,
        transforms={name: fmean(spent.seconds for spent in each) / size for name, each in of_transforms.items()},
        stage_cpu={
            "read": found.read_cpu,
            "decode": found.prepare_cpu.without(augment_cpu),
            "augment": augment_cpu,
            "collate": found.warm.processor("collate", size),
        },
        transform_cpu={name: mean_of(each, size) for name, each in of_transforms.items()},
        files=tuple(files),
        real=Batches(loader, whole, chunks.real[: len(found.in_memory)]),
        in_memory=found.in_memory,
        cut_after_reading=cut.after_reading,
        raw_items=found.raw_items,
        notes=notes if failure is None else (_NOT_OBSERVED.format(error=failure), *notes),
        can_have_workers=failure is None,
        in_cache=_cost_in_cache(run, cut, found.in_memory.indices, size),
        examples=_length_of(loader),
        in_flight=in_flight,
        read_ahead=cut.reading.part.value if isinstance(cut.reading, ReadPart) else "",
        no_reads_ahead=cut.reading if isinstance(cut.reading, str) else "",
        batch_seconds=tuple(found.batch_seconds) if len(found.batch_seconds) >= FEWEST_BATCHES else (),
    )


def _look(run: _Runner, batches: Sequence[list[Any]]) -> tuple[PartRun, str | None]:
    """Runs everything once, and notes files and transforms. That needs a worker: a loader that has none gets one.

    The second value describes how the data set failed in that worker; None if it did not.
    """
    what = "the loader: files and transforms"
    if run.loader.num_workers:
        return run(what, whole, batches, observes=True), None
    try:
        return run(what, whole, batches, observes=True, workers=1), None
    except _FAILS_IN_A_WORKER as error:
        here = run("the loader, in this process", whole, batches)  # raises the data set's own errors
        raised = "".join(traceback.format_exception_only(error)).strip()
        return here, raised.splitlines()[-1]  # the lines before it are the worker's traceback


def _chunks(batches: Sequence[list[Any]], steps: int, can_be_dropped: bool) -> tuple[_Chunks, tuple[str, ...]]:
    """Returns the batches of each run, and notes. If possible, each run reads other examples than the runs before."""
    same = _Chunks(*[[*batches[:steps]]] * CHUNKS)
    if can_be_dropped:
        return same, ()
    if len(batches) < CHUNKS * steps:
        return same, (_FIRST_READ, _READ_BEFORE.format(steps=CHUNKS * steps))
    return _Chunks(*([*batches[steps * number : steps * (number + 1)]] for number in range(CHUNKS))), (_FIRST_READ,)


def _by_raw_items(
    run: _Runner, after_reading: MakeStages, size: float, batches: list[list[Any]], workers: int | None = None
) -> _ColdAndWarm:
    """Measures with raw items: they are read once, held in memory, and prepared from there."""
    also = "" if workers is None else f", num_workers={workers}"
    part = partial(first_half, after_reading)
    cold = run(f"fetch rate: reading alone{also}", part, batches, collates=False, keeps_outputs=True, workers=workers)
    batches = batches[: min(gathered(len(cold.batches)))]  # those that all ranks have read in time are in memory
    raw_items: dict[Any, Any] = {}
    for indices, items in zip(batches, cold.outputs, strict=False):
        raw_items.update(zip(indices, items, strict=True))
    from_memory = partial(second_half, after_reading, raw_items)
    warm = run(f"preparation rate: from memory{also}", from_memory, batches, workers=workers)
    return _ColdAndWarm(
        read=cold.of("first", size),
        read_cached=_NO_TIME,
        prepare=warm.of("first", size),
        read_cpu_share=cold.cpu_share,
        read_cpu=cold.processor("first", size),
        prepare_cpu=warm.processor("first", size),
        warm=warm,
        in_memory=Batches(run.loader, from_memory, batches),
        batch_seconds=counted([a.first.seconds + b.all.seconds for a, b in zip(cold.batches, warm.batches, strict=False)]),
        raw_items=raw_items,
    )


def _by_difference(
    run: _Runner,
    after_reading: MakeStages | None,
    size: float,
    files: Sequence[str],
    batches: list[list[Any]],
    workers: int | None = None,
) -> _ColdAndWarm:
    """Measures whole cold and warm runs, because a read takes longer between two decodings than right after another read."""
    also = "" if workers is None else f", num_workers={workers}"
    drop_pages(files)
    cold = run(f"fetch rate: out of memory{also}", whole, batches, workers=workers)
    batches = batches[: min(gathered(len(cold.batches)))]  # those that all ranks have read in time are in memory
    warm = run(f"preparation rate: in memory{also}", whole, batches, workers=workers)
    all_cold, all_warm = cold.of("first", size), warm.of("first", size)
    cold_cpu, warm_cpu = cold.processor("first", size), warm.processor("first", size)
    warm_read, warm_read_cpu = _NO_TIME, _NO_PROCESSOR
    if after_reading is not None:
        part = partial(first_half, after_reading)
        reading = run(f"fetch rate: in memory{also}", part, batches, collates=False, workers=workers)
        warm_read, warm_read_cpu = reading.of("first", size), reading.processor("first", size)
    longer = all_cold.without(all_warm)
    cpu_seconds = (cold.cpu_seconds - warm.cpu_seconds) / size
    return _ColdAndWarm(
        read=longer.plus(warm_read),
        read_cached=warm_read,
        prepare=all_warm.without(warm_read),
        read_cpu_share=min(1.0, max(0.0, cpu_seconds / longer.median)) if longer.median else 0.0,
        read_cpu=cold_cpu.without(warm_cpu).plus(warm_read_cpu),
        prepare_cpu=warm_cpu.without(warm_read_cpu),
        warm=warm,
        in_memory=Batches(run.loader, whole, batches),
        batch_seconds=cold.batch_seconds,
    )


def _cost_in_cache(run: _Runner, cut: Cuts, batches: Sequence[list[Any]], size: float) -> dict[str, CachedExample]:
    made = zip(HOLDS, (cut.after_reading, cut.before_augmenting), strict=True)
    to_hold = {hold: make_stages for hold, make_stages in made if make_stages is not None}
    if not to_hold:
        return {}
    try:
        keys = Keys(run.loader.dataset)
    except NoKeysError:
        return {}
    if any(keys.of(index) is None for batch in batches for index in batch):  # a cache could not find it again
        return {}
    batches = batches[: max(2, math.ceil(_EXAMPLES_IN_CACHE / size))]
    seen = run("what a cache holds of an example", partial(in_cache, to_hold), batches, collates=False, keeps_outputs=True)
    examples = [example for batch in seen.outputs for example in batch]
    costs = {hold: [example[hold] for example in examples if hold in example] for hold in to_hold}
    return {
        hold: CachedExample(fmean(each.bytes for each in found), Spread.of([each.hit_seconds for each in found]))
        for hold, found in costs.items()
        if len(found) == len(examples)
    }


# --- reads in flight

READ_AHEAD = 4096  # examples that are enough for this phase
_IN_FLIGHT = (1, 4, 16, 64)  # reads under way, all workers together
_ROUNDS, _FEWEST_ROUNDS = 8, 2  # reads of a thread in each batch: between two batches, threads wait for the slowest of them
_LEVEL_SECONDS = 0.5
_LEAST_WAIT_SECONDS = 0.0005  # of a read; threads that wait less gain nothing (as in ``pipeline/reads.py``)
_GAINS = 0.9  # more reads under way are tried as long as an example takes at most this many times as long


def _reads_in_flight(
    run: _Runner, cut: Cuts, indices: Sequence[Any], files: Sequence[str], expected_seconds: float
) -> tuple[ReadsInFlight, ...]:
    """Measures reading with more and more reads under way, as long as that makes it faster.

    ``indices`` are of examples that are out of memory once ``files`` are dropped. ``expected_seconds``: of a single read.
    """
    if not isinstance(cut.reading, ReadPart):
        return ()
    workers, found = max(run.loader.num_workers, 1), list[ReadsInFlight]()
    quiet = replace(run, most_seconds=min(run.most_seconds, _LEVEL_SECONDS), say=lambda what: None)
    run.say(f"fetch rate: with {', '.join(map(str, _IN_FLIGHT))} reads under way")
    begin = 0
    for threads in dict.fromkeys(max(reads // workers, 1) for reads in _IN_FLIGHT):
        batches = _batches_of_reads(indices[begin:], threads, run.loader.num_workers, expected_seconds)
        if not batches and files:
            begin, batches = 0, _batches_of_reads(indices, threads, run.loader.num_workers, expected_seconds)
        if not batches:
            break
        begin += sum(map(len, batches))
        drop_pages(files)
        read = quiet("", partial(in_threads, cut.reading, cut.until, threads), batches, collates=False)
        size = len(batches[0])
        seconds, cpu_seconds = read.of("first", size * workers), read.cpu_seconds / size
        is_useless = bool(found) and seconds.median > _GAINS * found[-1].seconds.median
        found.append(ReadsInFlight(threads * workers, seconds, cpu_seconds))
        if is_useless or seconds.median * workers - cpu_seconds < _LEAST_WAIT_SECONDS * workers / found[-1].reads:
            break
    return tuple(found)


def _batches_of_reads(indices: Sequence[Any], threads: int, workers: int, seconds: float) -> list[list[Any]]:
    """Returns batches in which each thread reads several examples; none if there are too few indices for that."""
    number = 2 * fewest_batches(workers)
    rounds = min(_ROUNDS, len(indices) // (number * threads))
    if seconds:
        rounds = min(rounds, max(_FEWEST_ROUNDS, int(_LEVEL_SECONDS * max(workers, 1) / (seconds * number))))
    size = rounds * threads
    return [list(indices[size * i : size * (i + 1)]) for i in range(number)] if rounds >= _FEWEST_ROUNDS else []


def _length_of(loader: DataLoader[Any]) -> int | None:
    indices, dataset = kind_of(loader).readable_indices, loader.dataset
    try:
        return len(dataset if indices is None else indices)  # type: ignore[arg-type]
    except TypeError:  # it has no length; the sampler knows which indices there are
        return None


def _exponent(before: float, after: float, times: float, noticed: float) -> float:
    """Returns the power (0 to 1) of the number of workers with which seconds grow: ``after`` is with ``times`` as many."""
    if min(before, after) < noticed or not noticed:
        return 0.0
    return min(1.0, max(0.0, math.log(after / before) / math.log(times)))


# ---------------------------------------------------------------------- streams
# The phases of a stream, or of a data set that makes its batches itself: such a loader cannot run in parts.
#
# It cannot read the same examples again, so reading and preparation are not measured separately, and ``decode`` contains all of
# the workers' work.

_SKIPPED = (
    "skipped: fetch rate, preparation rate and single stages. The training loader goes over {what}, whose examples cannot be "
    "asked for a second time; only the loader as a whole was measured, and fetch stall and prep stall are not told apart"
)


def measure_stream(
    loader: DataLoader[Any],
    steps: StepNumber,
    batch_size: int,
    most_seconds: float,
    say: Callable[[str], None],
    look: Callable[[], None] = lambda: None,
) -> tuple[int, LoaderPhases]:
    """Measures the loader as a whole. Returns the number of steps of a phase, and the measures."""
    say("the loader: as a whole")
    seconds: list[float] = []
    ended = True
    begin = last = time.perf_counter()
    for _ in FirstBatches(loader, steps.most):
        now = time.perf_counter()
        seconds.append(now - last)
        look()
        last = time.perf_counter()
        if now - begin > most_seconds and len(seconds) >= fewest_batches(loader.num_workers):
            ended = False
            break
    most = steps.within(min(gathered(len(seconds) if ended else steps.most)))  # gathered: all ranks must raise the error
    workers = max(loader.num_workers, 1)
    counted = seconds[min(workers, len(seconds) - 1) :]  # the workers start during the batches before
    per_example = workers / batch_size
    is_opaque = loader.batch_size is None or type(loader).__iter__ is not DataLoader.__iter__  # it yields no single examples
    return most, LoaderPhases(
        decode=Spread.of([each * per_example for each in counted], period=workers),
        points=tuple(point.value for point in points_from(Needs.batches if is_opaque else Needs.examples)),
        batch_size=batch_size,
        real=FirstBatches(loader, min(gathered(len(seconds)))),
        notes=(
            _SKIPPED.format(what=type(loader.dataset).__name__),
            "skipped: processor time. So a prediction may say that more workers than cores help",
        ),
    )
