"""Steps per second at R = 4: the source reads by sleeping, four times as long per batch as a step sleeps.

All run in turn, A B C A B C, those that start threads in a process beside this one; what is compared is compared round by round.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from report import Cell, Table, progress
from timing import alternate, seconds_per_batch
from workloads import BATCH_SIZE, WORKERS, Sleeping, real_sleep, sleep_for

from peers.loaders import FACTOR, PEERS
from peers.verdicts import standing

_STEP_SECONDS = 0.004
_EXAMPLES = 2**15  # no run comes to the end of a pass


@dataclass(frozen=True)
class Extent:
    """How long is measured.

    Attributes:
        rounds: Runs of each peer.
        steps: Of a run, after the first ones, which are not timed; of those that do not echo a fourth.
    """

    rounds: int
    steps: int


FULL, QUICK = Extent(5, 800), Extent(3, 200)


def speed(names: list[str], extent: Extent) -> Table:
    """All peers that are installed."""
    step_seconds = real_sleep(_STEP_SECONDS)
    data, ratio = _source(step_seconds)
    progress(f"steps per second, R = {ratio:.2f}, {extent.rounds} rounds")
    threads = {"initializer": torch.set_num_threads, "initargs": (torch.get_num_threads(),)}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), **threads) as beside:
        runs: dict[str, Callable[[], float]] = {}
        for name in names:
            steps = extent.steps if PEERS[name].factor > 1 else extent.steps // FACTOR
            run = partial(rate, name, data, steps)
            runs[name] = partial(_result, beside, run) if PEERS[name].own_process else run
        rates = alternate(runs, extent.rounds)
    rows = [_row(name, rates, step_seconds) for name in names]
    text = (
        f"Steps per second, echo factor {FACTOR}, R = {ratio:.2f}: a step sleeps {step_seconds * 1e3:.2f} ms, a read "
        f"{data.seconds * 1e3:.2f} ms; batch {BATCH_SIZE}, {WORKERS} workers; median, lowest and highest of {extent.rounds} "
        "rounds in turn. Last columns: the rate of ours that reuses at the same place, divided by the peer's of the same round"
    )
    columns = (
        *("peer", "version", "steps/s", "lowest", "highest", "of the possible"),
        *("of ours", "ours / peer", "lowest", "highest", "ours is"),
    )
    return Table("peers_speed", text, columns, rows)


def rate(name: str, data: Sleeping, steps: int) -> float:
    """Steps per second of one run."""
    return 1 / seconds_per_batch(PEERS[name].loader(data), steps, _step)


def _step() -> None:
    time.sleep(_STEP_SECONDS)


def _result(beside: ProcessPoolExecutor, run: Callable[[], float]) -> float:
    return beside.submit(run).result()


def _source(step_seconds: float) -> tuple[Sleeping, float]:
    """A data set from which a bare loader makes a batch in `FACTOR` steps, and the ratio that it really has."""
    data = Sleeping(sleep_for(FACTOR * step_seconds * WORKERS / BATCH_SIZE), _EXAMPLES)
    ratio = _ratio(data, step_seconds)
    data.seconds *= FACTOR / ratio
    return data, _ratio(data, step_seconds)


def _ratio(data: Sleeping, step_seconds: float) -> float:
    return statistics.median(seconds_per_batch(PEERS["bare"].loader(data), 30) for _ in range(3)) / step_seconds


def _row(name: str, rates: dict[str, list[float]], step_seconds: float) -> tuple[Cell, ...]:
    peer, own = PEERS[name], rates[name]
    middle = statistics.median(own)
    cells = (peer.title, peer.version, middle, min(own), max(own), middle * step_seconds)
    if peer.ours not in rates:
        return (*cells, "", "", "", "", "")
    ratios = [ours / its for ours, its in zip(rates[peer.ours], own, strict=True)]
    return (*cells, peer.ours, statistics.median(ratios), min(ratios), max(ratios), standing(ratios))
