"""A cache in the reader: how much faster trainings become that share, if it holds half of the data.

Rules, fixed before the first run:

* k = 3 trainings share a reader with two workers, in processes of their own, without steps: reading is the limit. A read sleeps.
* The cache has room for half of the data, in the loaded form. ``x`` is the share that it really holds.
* Speeds are those of the slowest of the k trainings, over four passes. Before these, all take a pass and a quarter, which fills
  the cache.
* The comparison partner is the same without a cache, in turn. A round has both. The speed-up is that of the round.
* Required is a median speed-up of at least 0.9 of ``1 / (1 - x)``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from report import Table, progress, verdict
from sharing import _FORK, in_own_folder
from torch.utils.data import DataLoader
from workloads import BATCH_SIZE, IMAGE_BYTES, WORKERS, Sleeping

from lightning_echo import CacheConfig, EchoLoader

_TRAININGS, _HELD, _REQUIRED = 3, 0.5, 0.9
_SLEEP_SECONDS = 0.008
_LENGTH = 20 * BATCH_SIZE
_TIMED_PASSES, _BEFORE_PASSES = 4, 1.25
_BESIDE_BYTES = 256  # of a record, at most


class Shots(Sleeping):
    """Reading takes a while in which the processor is free. An example has 150 KB."""

    def __init__(self) -> None:
        super().__init__(_SLEEP_SECONDS, _LENGTH)

    def decode(self, raw: Any) -> Any:
        return torch.full((IMAGE_BYTES,), raw % 251, dtype=torch.uint8)


class Seen(NamedTuple):
    """The timed passes of a training."""

    seconds: float
    examples: int
    hits: int  # of these examples
    held: int  # examples that the cache holds at the end


def _train(connection: Any, name: str, passes: int, size: int | None) -> None:
    torch.set_num_threads(1)
    share = {"name": name, "wait_for": _TRAININGS, "linger_seconds": 0, "window": "64MiB", "workers": "starter"}
    cache = None if size is None else CacheConfig(size, hold="loaded")
    loader = EchoLoader(DataLoader(Shots(), BATCH_SIZE, shuffle=True, num_workers=WORKERS), 1, share=share, cache=cache, seed=0)
    batches = (batch for _ in range(passes + 2) for batch in loader)
    for _ in range(int(_BEFORE_PASSES * _LENGTH) // BATCH_SIZE):
        next(batches)
    connection.send("ready")
    connection.recv()
    hits, began, count = _hits(loader), time.perf_counter(), passes * _LENGTH // BATCH_SIZE
    for _ in range(count):
        next(batches)
    seconds = time.perf_counter() - began
    counts = loader.cache_counts
    connection.send(Seen(seconds, count * BATCH_SIZE, _hits(loader) - hits, 0 if counts is None else counts.examples))
    connection.recv()  # nobody leaves before all are measured
    loader.close()


def _hits(loader: EchoLoader) -> int:
    return 0 if loader.cache_counts is None else loader.cache_counts.hits


def _run(passes: int, size: int | None) -> list[Seen]:
    """What each of the trainings has seen, with a cache of so many bytes (None: without)."""
    name, pipes, processes = f"bench-{time.monotonic_ns()}", [], []
    for _ in range(_TRAININGS):
        here, there = _FORK.Pipe()
        process = _FORK.Process(target=_train, args=(there, name, passes, size))
        process.start()
        pipes.append(here)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send("go")
    found = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send("over")
    for process in processes:
        process.join()
    return found


def row(rounds: Sequence[tuple[Sequence[Seen], Sequence[Seen]]], length: int) -> tuple[Any, ...]:
    """The table's row of some rounds: what each training has seen without a cache, and with one."""
    plain = [_slowest(without) for without, _ in rounds]
    cached = [_slowest(with_cache) for _, with_cache in rounds]
    speedups = [mine / other for mine, other in zip(cached, plain, strict=True)]
    held = statistics.median(each.held for _, with_cache in rounds for each in with_cache) / length
    read = statistics.median(1 - each.hits / each.examples for _, with_cache in rounds for each in with_cache)
    bound, middle = 1 / (1 - held), statistics.median(speedups)
    return (
        *(len(rounds[0][1]), held, read, statistics.median(plain), statistics.median(cached)),
        *(middle, min(speedups), max(speedups), bound, middle / bound),
        *(f">= {_REQUIRED}", verdict(middle / bound >= _REQUIRED)),
    )


def _slowest(trainings: Sequence[Seen]) -> float:
    """Examples a second of the slowest training."""
    return min(each.examples / each.seconds for each in trainings)


_COLUMNS = (
    *("k", "held", "read", "examples/s without", "examples/s with", "speed-up", "lowest", "highest", "bound", "reached"),
    *("required", "passed"),
)


@in_own_folder
def sharing_cache(quick: bool) -> Table:
    passes, rounds = (1, 1) if quick else (_TIMED_PASSES, 3)
    size, found = int(_HELD * _LENGTH * (IMAGE_BYTES + _BESIDE_BYTES)), []
    for number in range(rounds):
        progress(f"sharing with a cache, round {number + 1}")
        found.append((_run(passes, None), _run(passes, size)))
    text = (
        f"{_TRAININGS} trainings that share a reader with {WORKERS} workers, batch {BATCH_SIZE}, {_LENGTH} examples of "
        f"{IMAGE_BYTES:,} bytes, shuffled, a read sleeps {1e3 * _SLEEP_SECONDS:g} ms: examples/s of the slowest training from "
        "the second pass on, with a cache in the reader and without; read: share of the examples that were read; reached: "
        "speed-up divided by the bound 1 / (1 - held); medians of the rounds"
    )
    return Table("sharing_cache", text, _COLUMNS, [row(found, _LENGTH)])
