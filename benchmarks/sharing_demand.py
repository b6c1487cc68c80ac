"""Two trainings that share and echo on demand: the faster one echoes while the reader, or the slower training, lets it wait.

Each training is a process of its own with an `EchoLoader` and a loop whose step sleeps. The reader makes a batch in 10 ms (a
sleeping source), so the faster training needs one twice as soon, and the slower one half as often. The window has room for some
300 examples, so that the reader soon waits for the slower training: the faster one then gets a fresh batch each 20 ms.

Rule, fixed before the first run: from step `WARM_UP` on, each training waits for at most `MOST_IDLE` of the time.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import torch
from report import Table, progress, verdict
from torch.utils.data import DataLoader
from workloads import BATCH_SIZE, WORKERS, Sleeping, sleep_for

from lightning_echo import EchoLoader

WARM_UP, MOST_IDLE = 40, 0.03
_STEP_SECONDS = {"fast": 0.005, "slow": 0.020}
_BATCH_SECONDS, _WINDOW = 0.010, "1MiB"
_FORK = multiprocessing.get_context("fork")


def sharing_demand(quick: bool) -> Table:
    """About 15 seconds."""
    seconds = 2.0 if quick else 12.0
    progress("sharing: two trainings on demand")
    read_seconds = sleep_for(_BATCH_SECONDS * WORKERS / BATCH_SIZE)
    started = []
    for name, step in _STEP_SECONDS.items():
        here, there = _FORK.Pipe()
        process = _FORK.Process(target=_train, args=(there, read_seconds, step, int(seconds / step)))
        process.start()
        started.append((name, here, process))
    found = {}
    for name, here, process in started:
        if not here.poll(120):
            raise RuntimeError(f"the {name} training does not end")
        found[name] = here.recv()
        process.join()
    return table(found)


def table(found: dict[str, tuple[float, int, int]]) -> Table:
    """``found``: idle fraction, fresh and echoed examples of each training, by name."""
    rows = [
        (name, 1e3 * _STEP_SECONDS[name], fresh, echoed, idle, f"<= {MOST_IDLE}", verdict(idle <= MOST_IDLE))
        for name, (idle, fresh, echoed) in found.items()
    ]
    text = (
        f"two trainings on demand that share a reader, a batch of {BATCH_SIZE} in {1e3 * _BATCH_SECONDS:g} ms, behind='wait', "
        f"from step {WARM_UP} on"
    )
    return Table("sharing_demand", text, ("training", "step ms", "fresh", "echoed", "idle", "required", "passed"), rows)


def _train(connection: Any, read_seconds: float, step_seconds: float, steps: int) -> None:
    torch.set_num_threads(1)
    plain = DataLoader(Sleeping(read_seconds), BATCH_SIZE, num_workers=WORKERS)
    share = {"name": "bench", "wait_for": 2, "linger_seconds": 0, "window": _WINDOW, "workers": "starter"}
    loader = EchoLoader(plain, "demand", share=share, seed=0)
    iterator, step, waited = iter(loader), sleep_for(step_seconds), 0.0
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            waited, began, before = 0.0, time.perf_counter(), loader.counts
        asked = time.perf_counter()
        next(iterator)
        waited += time.perf_counter() - asked
        time.sleep(step)
    idle, counts = waited / (time.perf_counter() - began), loader.counts
    connection.send((idle, counts.fresh - before.fresh, counts.echoed - before.echoed))
    loader.close()
