"""Reads in flight: examples a second behind sources that wait, processor time where they do not, and other loaders beside ours.

A read that sleeps, files from an HTTP server, local files in the page cache, and reads of which a few take very long.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from cache import timed_collate, write_jpegs
from learning.rules import interval_of_median
from PIL import Image
from readers import (
    LENGTH,
    PEERS,
    READERS,
    THREADS,
    HeavyTailed,
    Reader,
    ServedJpegs,
    beside,
    close,
    examples_per_second,
    local_jpegs,
    our,
    there,
)
from report import Cell, Table, progress, verdict
from slow_server import Fetch, answers_per_second, by_fsspec, by_kept_connection, by_urllib, served
from timing import alternate
from workloads import BATCH_SIZE, WORKERS, Sleeping

_MOST = 64  # in flight
_BATCH_SIZES = (BATCH_SIZE, 4)
_OF_BARE, _OF_MANY = 25, 2.5  # required at 64 in flight
_OF_BOUND = {BATCH_SIZE: 0.9, 4: 0.75}
_SERVED_OF_BARE = 10
_SIZES = ((128, 96), (500, 375))  # pixels of the files that are served; of the smaller ones something is required
_SERVED_SECONDS, _TAIL_SECONDS = 0.6, 3  # of a run, for each second elsewhere
_OTHERS_EVERY = 7  # rounds: other loaders with local files
_MOST_PROCESSOR_TIME = 1.03
_NO_TIME = "reads of 0 ms"


@dataclass(frozen=True)
class Extent:
    """How long is measured.

    Attributes:
        rounds: Runs of each reader, in turn.
        seconds: Of a run, after its first batches.
        pairs: Runs whose processor time is compared.
        files: Local files, and the examples of such a run.
        read_seconds: What a read takes.
    """

    rounds: int
    seconds: float
    pairs: int
    files: int
    read_seconds: float = 0.02

    @property
    def milliseconds(self) -> str:
        return f"{1e3 * self.read_seconds:g} ms"


FULL, QUICK = Extent(3, 2.0, 21, 256), Extent(1, 0.5, 3, 64)
Run = Callable[..., float]


def reads(quick: bool) -> list[Table]:
    """All tables about reads in flight."""
    return tables(QUICK if quick else FULL)


def tables(extent: Extent) -> list[Table]:
    """All tables, measured for so long."""
    with beside() as run, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
        return [sleeping(extent, run), served_files(extent, run), local_files(extent, run), heavy_tail(extent, run)]


def _peers() -> list[str]:
    return [f"{peer} {threads}" for peer in PEERS for threads in THREADS]


def _about(name: str) -> tuple[Cell, ...]:
    """The first cells of a reader's row."""
    reader = READERS[name]
    return reader.title, reader.version or "not installed", reader.workers, reader.in_flight


def _rates(found: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(found), min(found), max(found)


def _over(one: Sequence[float], other: Sequence[float]) -> float:
    """The median of what one is divided by the other of the same round."""
    return statistics.median(mine / its for mine, its in zip(one, other, strict=True))


def _ours_over(name: str, found: dict[str, list[float]]) -> Cell:
    """Ours with as many reads in flight, divided by a peer."""
    if not name.startswith(PEERS):
        return "-"
    return _over(found[our(READERS[name].in_flight)], found[name])


def _passed(ratios: Sequence[float], required: Sequence[float]) -> tuple[str, str]:
    """The last two cells of a row."""
    if not required:
        return "-", "-"
    return ", ".join(f"{each:g}" for each in required), verdict(
        all(ratio >= least for ratio, least in zip(ratios, required, strict=True))
    )


# ---------------------------------------------------------------------- a read that sleeps


def sleeping(extent: Extent, run: Run) -> Table:
    """A read that sleeps: how many may be in flight, and how large the batch is."""
    rows = [row for batch_size in _BATCH_SIZES for row in _sleeping_rows(batch_size, extent, run)]
    text = (
        f"a read sleeps {extent.milliseconds}, {LENGTH} examples, shuffled, no step; bound: as many reads as are in flight "
        f"divided by {extent.milliseconds}, or the rate of the same loader ({_MOST} in flight) with {_NO_TIME} where that "
        f"is less; ours / its: with as many in flight; median of {extent.rounds} rounds in turn"
    )
    columns = (
        *("batch", "reader", "version", "workers", "in flight", "read ms", "examples/s", "lowest", "highest"),
        *("of bare, 2 workers", "of bare, 16 workers", "of the bound", "ours / its", "required", "passed"),
    )
    return Table("reads", text, columns, rows)


def _sleeping_rows(batch_size: int, extent: Extent, run: Run) -> list[tuple[Cell, ...]]:
    progress(f"reads that sleep, batch {batch_size}")
    names = ["bare", "bare, many", *map(our, (1, 4, 16, _MOST)), *_peers()]
    slow, quick = Sleeping(extent.read_seconds, LENGTH), Sleeping(0, LENGTH)
    cases = [(name, extent.read_seconds) for name in names] + [(our(each), 0.0) for each in (1, _MOST)]
    runs: dict[str, Callable[[], float]] = {
        _key(name, read): partial(run, examples_per_second, name, slow if read else quick, batch_size, extent.seconds)
        for name, read in cases
        if READERS[name].version
    }
    found = alternate(runs, extent.rounds)
    return [_sleeping_row(batch_size, name, read, found) for name, read in cases]


def _key(name: str, read: float) -> str:
    return name if read else f"{name}, {_NO_TIME}"


def _sleeping_row(batch_size: int, name: str, read: float, found: dict[str, list[float]]) -> tuple[Cell, ...]:
    own = found.get(_key(name, read))
    if own is None:
        return (batch_size, *_about(name), 1e3 * read, *["-"] * 9)
    of_bare, of_many = _over(own, found["bare"]), _over(own, found["bare, many"])
    of_bound: Cell = "-"
    if name.startswith("ours") and read:
        at_once = max(int(READERS[name].in_flight), WORKERS)
        of_bound = _over(own, [min(at_once / read, limit) for limit in found[_key(our(_MOST), 0.0)]])
    ratios: list[float] = []
    required: tuple[float, ...] = ()
    if name == our(_MOST) and isinstance(of_bound, float):
        is_large = batch_size == BATCH_SIZE
        ratios = [of_bare, of_many, of_bound] if is_large else [of_bound]
        required = (*((_OF_BARE, _OF_MANY) if is_large else ()), _OF_BOUND[batch_size])
    return (
        *(batch_size, *_about(name), 1e3 * read, *_rates(own), of_bare, of_many, of_bound),
        *(_ours_over(name, found), *_passed(ratios, required)),
    )


# ---------------------------------------------------------------------- files from a server


def served_files(extent: Extent, run: Run) -> Table:
    """JPEG files from a server that waits before it answers."""
    rows = [row for size in _SIZES for row in _served_rows(size, extent, run)]
    text = (
        "JPEG files from an HTTP server in a process of its own on the same machine, which answers after "
        f"{extent.milliseconds}, decoded by Pillow {version('pillow')}; batch {BATCH_SIZE}; threads alone: {_MOST} threads "
        "in two processes that ask and do nothing with the answer; ours / its: with as many in flight; median of "
        f"{extent.rounds} rounds in turn"
    )
    columns = (
        *("pixels", "KB", "reader", "version", "workers", "in flight", "by", "answered after ms"),
        *("examples/s", "lowest", "highest", "of bare", "of threads alone", "ours / its", "required", "passed"),
    )
    return Table("reads_served", text, columns, rows)


def _served_rows(pixels: tuple[int, int], extent: Extent, run: Run) -> list[tuple[Cell, ...]]:
    progress(f"files from a server, {pixels[0]} x {pixels[1]} pixels")
    seconds = _SERVED_SECONDS * extent.seconds
    with tempfile.TemporaryDirectory() as folder:
        size = _write_files(Path(folder), pixels)
        with served(Path(folder), extent.read_seconds) as slow, served(Path(folder), 0.0) as quick:
            cases = (_served_cases if pixels == _SIZES[0] else _few_served_cases)(extent.read_seconds, slow, quick)
            runs: dict[str, Callable[[], float]] = {}
            for key, (name, fetch, _, urls) in cases.items():
                if not name:
                    runs[key] = partial(answers_per_second, urls, fetch, _MOST, seconds)
                elif READERS[name].version:
                    runs[key] = partial(run, examples_per_second, name, ServedJpegs(urls, fetch), BATCH_SIZE, seconds)
            found = alternate(runs, extent.rounds)
    return [_served_row(pixels, size, key, case, found) for key, case in cases.items()]


def _write_files(folder: Path, pixels: tuple[int, int], count: int = 32) -> float:
    """Writes files of so many pixels; returns their mean size in KB."""
    for file in write_jpegs(folder, count):
        if (image := Image.open(file)).size != pixels:
            image.resize(pixels).save(file, quality=90)
    return statistics.fmean(file.stat().st_size for file in folder.iterdir()) / 1000


Case = tuple[str, Fetch, float, list[str]]


def _served_cases(read: float, slow: list[str], quick: list[str]) -> dict[str, Case]:
    """Reader (none: threads alone), how it fetches, after how long it is answered, and the files."""
    names = ["bare", "bare, many", *map(our, (1, 16, _MOST)), *_peers()]
    cases: dict[str, Case] = {f"{name}, urllib": (name, by_urllib, read, slow) for name in names}
    cases |= {f"{name}, fsspec": (name, by_fsspec, read, slow) for name in ("bare", our(_MOST))}
    cases[_key(our(_MOST), 0.0)] = (our(_MOST), by_urllib, 0.0, quick)
    cases["alone, urllib"] = ("", by_urllib, read, slow)
    cases["alone, kept"] = ("", by_kept_connection, read, slow)
    return cases


def _few_served_cases(read: float, slow: list[str], _: list[str]) -> dict[str, Case]:
    """Those that show what decoding of large files leaves to win."""
    names = ["bare", our(_MOST), *(f"{peer} {_MOST}" for peer in PEERS)]
    cases: dict[str, Case] = {f"{name}, urllib": (name, by_urllib, read, slow) for name in names}
    return cases | {"alone, urllib": ("", by_urllib, read, slow)}


_BY: dict[Fetch, str] = {
    by_urllib: "urllib",
    by_fsspec: f"fsspec {version('fsspec')}",
    by_kept_connection: "http.client, connections kept",
}


def _served_row(pixels: tuple[int, int], size: float, key: str, case: Case, found: dict[str, list[float]]) -> tuple[Cell, ...]:
    name, fetch, read, _ = case
    about: tuple[Cell, ...] = _about(name) if name else ("threads alone", "-", WORKERS, _MOST)
    about = (f"{pixels[0]} x {pixels[1]}", size, *about, _BY[fetch], 1e3 * read)
    if (own := found.get(key)) is None:
        return (*about, *["-"] * 8)
    of_bare = _over(own, found["bare, fsspec" if fetch is by_fsspec else "bare, urllib"])
    of_alone = _over(own, found["alone, urllib"])
    required = (_SERVED_OF_BARE,) if name == our(_MOST) and read and pixels == _SIZES[0] else ()
    ours_over = _over(found[f"{our(READERS[name].in_flight)}, urllib"], own) if name.startswith(PEERS) else "-"
    return (*about, *_rates(own), of_bare, of_alone, ours_over, *_passed([of_bare], required))


# ---------------------------------------------------------------------- local files


def local_files(extent: Extent, run: Run) -> Table:
    """What reads in flight cost where reading takes no time: processor time of files that are in the page cache."""
    one, compared = our(1), [our("auto"), our(16)]
    others = ["bare", *(f"{peer} 16" for peer in PEERS), "litdata"]
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room, "files", "of one class")
        folder.mkdir(parents=True)
        progress("local files are written")
        size = statistics.fmean(file.stat().st_size for file in write_jpegs(folder, extent.files)) / 1000
        measured = partial(run, processor_seconds)
        runs = {name: partial(measured, name, folder.parent, extent.files) for name in [one, *compared]}
        beside_them = {name: partial(measured, name, folder.parent, extent.files) for name in there(others)}
        found: dict[str, list[float]] = {name: [] for name in (*runs, *beside_them)}
        for number in range(extent.pairs):
            progress(f"processor time of local files, round {number + 1} of {extent.pairs}")
            names = [*runs, *(beside_them if number % _OTHERS_EVERY == 0 else ())]
            for name in names[:: -1 if number % 2 else 1]:  # each is as often before a partner as after it
                found[name].append((runs | beside_them)[name]())
    rows = [_local_row(name, found, name in compared) for name in (one, *compared, *others)]
    text = (
        f"ImageFolder over {extent.files} JPEG files of {size:.0f} KB in the page cache, decoded, cropped and flipped; batch "
        f"{BATCH_SIZE}; processor time of the main process and its workers in steady state; over 1 in flight: median of "
        f"{extent.pairs} pairs in turn, and its bootstrap 95% interval (the other loaders run in each "
        f"{_OTHERS_EVERY}th round)"
    )
    columns = (
        *("reader", "version", "workers", "in flight", "ms per example", "lowest", "highest"),
        *("over 1 in flight", "from", "to", "required", "passed"),
    )
    return Table("reads_local", text, columns, rows)


def _local_row(name: str, found: dict[str, list[float]], is_compared: bool) -> tuple[Cell, ...]:
    if not (own := found.get(name)):
        return (*_about(name), *["-"] * 8)
    partner = found[our(1)][:: 1 if len(own) == len(found[our(1)]) else _OTHERS_EVERY]
    interval = interval_of_median([mine / its for mine, its in zip(own, partner, strict=True)])
    end = (_MOST_PROCESSOR_TIME, verdict(interval.middle <= _MOST_PROCESSOR_TIME)) if is_compared else ("-", "-")
    return (*_about(name), *(1e3 * each for each in _rates(own)), interval.middle, interval.low, interval.high, *end)


_WARM_UP = 2  # batches of each worker


def processor_seconds(name: str, folder: Path, examples: int) -> float:
    """Processor seconds for an example of local files: of this process, and of its workers from batch to batch."""
    reader = READERS[name]
    batches = reader.make(local_jpegs(folder), BATCH_SIZE, timed_collate)
    iterator, count = iter(batches), examples // BATCH_SIZE // WORKERS * WORKERS
    seconds = [_processor_seconds(reader, iterator, each) for each in (_WARM_UP * WORKERS, count)]
    del iterator
    close(batches)
    return (seconds[1] - seconds[0]) / count / BATCH_SIZE


def _processor_seconds(reader: Reader, batches: Iterator[Any], count: int) -> float:
    """Takes batches; returns processor seconds so far, of all. Workers take turns, and each batch has those of its worker."""
    of_workers = [float(seconds) for _, seconds in islice(batches, count)][-WORKERS:]
    return time.process_time() + (sum(of_workers) if reader.workers else 0)


# ---------------------------------------------------------------------- a few reads that take very long


def heavy_tail(extent: Extent, run: Run) -> Table:
    """One read in 50 takes 50 times as long, and the order is kept."""
    progress("reads of which a few take very long")
    dataset = HeavyTailed(extent.read_seconds / 2)
    names = ["bare", "bare, many", *map(our, (16, _MOST)), *_peers()]
    seconds = _TAIL_SECONDS * extent.seconds
    runs: dict[str, Callable[[], float]] = {
        name: partial(run, examples_per_second, name, dataset, BATCH_SIZE, seconds) for name in there(names)
    }
    found = alternate(runs, extent.rounds)
    rows = [_tail_row(name, dataset.mean_seconds, found) for name in names]
    text = (
        f"a read sleeps {1e3 * dataset.seconds:g} ms, and 1 in 50 of them 50 times as long; batches in their order, batch "
        f"{BATCH_SIZE}; of N / mean: of as many reads as are in flight, divided by the mean of a read "
        f"({1e3 * dataset.mean_seconds:.3g} ms); ours / its: with as many in flight; median of {extent.rounds} rounds in turn"
    )
    columns = (
        *("reader", "version", "workers", "in flight", "examples/s", "lowest", "highest"),
        *("of N / mean", "of bare, 2 workers", "ours / its"),
    )
    return Table("reads_tail", text, columns, rows)


def _tail_row(name: str, mean: float, found: dict[str, list[float]]) -> tuple[Cell, ...]:
    if (own := found.get(name)) is None:
        return (*_about(name), *["-"] * 6)
    rates = _rates(own)
    return (
        *(*_about(name), *rates, rates[0] * mean / int(READERS[name].in_flight)),
        *(_over(own, found["bare"]), _ours_over(name, found)),
    )
