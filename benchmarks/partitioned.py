"""A cache partitioned among two nodes, over the loopback: what the exchange carries, and what a training reaches with it.

``python -m partitioned RANK FOLDER ROUNDS PASSES`` is a node. It writes ``FOLDER/RANK.json``.

Nothing here is a network: the two processes share the machine, and with two cores also their time. The bound is that of
`cache.py` with a share of 1 held, as both caches together hold all of the data: ``max(h, d) / d``. A step has a collective, as
with DDP, and ``d`` is measured with it, on both nodes without a loader: the collective takes 2 ms where it follows a sleep.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from report import Table, progress, verdict
from timing import seconds_per_batch
from torch.utils.data import DataLoader
from workloads import BATCH_SIZE, IMAGE_BYTES, WORKERS, sleep_for

from lightning_echo import CacheConfig, EchoLoader, StagedDataset
from lightning_echo.cache.arena import Arena
from lightning_echo.cache.board import Board, Shape
from lightning_echo.cache.exchange import Exchange, Group
from lightning_echo.cache.reads import Keys

_NODES = 2
_PATIENCE_SECONDS = 400
_PER_ROUND = 64  # records that a node gets in a round
_RING_ROUNDS = 8
_LENGTH = 2 * 22 * BATCH_SIZE
_FIRST_PASSES, _FILLING_PASSES = 1, 14  # not counted
_STEPS_ALONE = 100
_STEPS = (0.004, 0.016)  # seconds
_RATIO = 4
_GIGABYTES_PER_SECOND, _CORES, _SHARE_OF_BOUND = 0.8, 1.0, 0.9


def partitioned(quick: bool) -> list[Table]:
    """Both tables."""
    progress("two nodes with a partitioned cache")
    facts = _run_nodes(100 if quick else 400, 3 if quick else 6)
    return [_exchange_table(facts), _training_table(facts)]


def _exchange_table(facts: list[dict[str, Any]]) -> Table:
    rows = []
    for node, each in enumerate(facts):
        speed, cores = each["gigabytes_per_second"], each["cores"]
        passed = verdict(speed >= _GIGABYTES_PER_SECOND and cores <= _CORES)
        rows.append((node, speed, cores, _GIGABYTES_PER_SECOND, _CORES, passed))
    text = (
        f"two processes over the loopback, {_PER_ROUND} records of {IMAGE_BYTES} bytes each way in a round, from arena to ring; "
        "cores: processor time of the whole process"
    )
    return Table("partitioned_exchange", text, ("node", "GB/s", "cores", "required GB/s", "at most cores", "passed"), rows)


def _training_table(facts: list[dict[str, Any]]) -> Table:
    rows = []
    for step in _STEPS:
        of_nodes = [each[str(step)] for each in facts]
        # The slower node counts: steps are synchronous.
        host, real = max(each["host"] for each in of_nodes), max(each["step"] for each in of_nodes)
        taken, alone = max(each["taken"] for each in of_nodes), max(each["all"] for each in of_nodes)
        reached = real / taken
        received = sum(each["received"] for each in of_nodes) / sum(each["fresh"] for each in of_nodes)
        passed = verdict(reached >= _SHARE_OF_BOUND)
        rows.append((1e3 * real, 1e3 * host, 1e3 * taken, 1e3 * alone, host / real, reached, received, _SHARE_OF_BOUND, passed))
    text = (
        f"two nodes of one rank with {WORKERS} workers, {_LENGTH} examples of {IMAGE_BYTES} bytes, half in each cache, batch "
        f"{BATCH_SIZE}, R about {_RATIO}, from the second pass on; reached: share of the bound"
    )
    columns = (
        "step ms, alone",
        "bare loader ms",
        "half in each ms",
        "nearly all in each ms",
        "bound",
        "reached",
        "received",
        "required",
        "passed",
    )
    return Table("partitioned_training", text, columns, rows)


def _run_nodes(rounds: int, passes: int) -> list[dict[str, Any]]:
    """Returns the facts of both nodes."""
    here = Path(__file__).parent
    paths = os.pathsep.join(filter(None, (str(here), str(here.parent), os.environ.get("PYTHONPATH", ""))))
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(_NODES):
            command = [sys.executable, "-m", "partitioned", str(rank), folder, str(rounds), str(passes)]
            environment = {**os.environ, "PYTHONPATH": paths, "LOCAL_RANK": "0", "GROUP_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        try:
            statuses = [process.wait(_PATIENCE_SECONDS) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        if any(statuses):
            raise RuntimeError(f"a node has failed: {statuses}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(_NODES)]


# ---------------------------------------------------------------------- one node


def _exchange(rank: int, rounds: int) -> dict[str, float]:
    """Hands records over as fast as it goes; a thread in the place of the workers takes them."""
    keys = _NODES * _PER_ROUND
    arena, record = Arena.create(keys, keys * (IMAGE_BYTES + 4096)), np.random.default_rng(0).bytes(IMAGE_BYTES)
    for key in range(rank, keys, _NODES):
        arena.put(key, [record])
    ring_bytes = _RING_ROUNDS * _PER_ROUND * (IMAGE_BYTES + 128)
    board = Board.create(Shape(keys, 1, 4 * _RING_ROUNDS, ring_bytes))
    group = Group(torch.distributed.new_group(list(range(_NODES)), backend="gloo"))
    exchange = Exchange(group, rank, range(_NODES), board, [ring_bytes] * _NODES, arena, Keys(range(keys)), 1)
    # What stands in the slots of the two shares: each node needs what the other one has.
    rows = [key ^ 1 for key in range(keys)]
    done = threading.Event()

    def take() -> None:
        for number in range(rounds):
            board.wait_for(0, 1, number, 60.0)
            board.mark(0, 1, number)
        done.set()

    for _ in range(rounds):
        exchange.ask(rows)
    threading.Thread(target=take, daemon=True).start()
    torch.distributed.barrier()
    began, used = time.perf_counter(), time.process_time()
    exchange.begin()
    done.wait()
    seconds, used = time.perf_counter() - began, time.process_time() - used
    torch.distributed.barrier()
    exchange.close()
    return {"gigabytes_per_second": rounds * _PER_ROUND * IMAGE_BYTES / seconds / 1e9, "cores": used / seconds}


class Slow(StagedDataset):
    """Images that take a while to read."""

    def __init__(self, seconds: float, length: int) -> None:
        self.seconds, self.length = seconds, length

    def __len__(self) -> int:
        return self.length

    def load(self, index: Any) -> Any:
        time.sleep(self.seconds)
        return torch.full((IMAGE_BYTES,), index % 256, dtype=torch.uint8)

    def augment(self, example: Any) -> Any:
        return example


def _training(seconds: float, passes: int) -> dict[str, float]:
    """A training of which both caches hold half of the data; a collective after each step, as with DDP."""
    step = _seconds_per_step(seconds)
    dataset = Slow(sleep_for(_RATIO * step * WORKERS / BATCH_SIZE), _LENGTH)

    def loader() -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=WORKERS)

    endless = Slow(dataset.seconds, 1_000_000)
    host = seconds_per_batch(DataLoader(endless, batch_size=BATCH_SIZE, num_workers=WORKERS), 48)
    torch.distributed.barrier()
    size, facts = _LENGTH * (IMAGE_BYTES + 1024), {"step": step, "host": host}
    for name, cache in (
        ("taken", CacheConfig(size // _NODES, hold="loaded", partitioned=True, ignore=["seconds"])),
        ("all", CacheConfig(size, hold="loaded")),
    ):
        cached = EchoLoader(loader(), 1, insertion_point="before_augmentation", seed=1, cache=cache)
        # Where each node holds all, it has read all after some passes more: nothing is exchanged, and nothing is read.
        first = _FIRST_PASSES if cache.partitioned else _FILLING_PASSES
        times = [_seconds_per_batch(cached, seconds) for _ in range(first + passes)]
        facts[name] = median(times[-passes:])
        if cache.partitioned and (counts := cached.cache_counts) is not None:
            facts |= {"received": counts.received, "fresh": cached.counts.fresh}
        torch.distributed.barrier()
        cached.close()
    return facts


def _seconds_per_step(seconds: float) -> float:
    """Runs steps whose batches are there."""
    batch = torch.zeros(BATCH_SIZE, 1, dtype=torch.uint8)
    torch.distributed.barrier()
    began = time.perf_counter()
    for _ in range(_STEPS_ALONE):
        _step(batch, seconds)
    return (time.perf_counter() - began) / _STEPS_ALONE


def _seconds_per_batch(cached: EchoLoader, seconds: float) -> float:
    """Runs an epoch: a step for each batch."""
    began, batches = time.perf_counter(), 0
    for batch in cached:
        _step(batch, seconds)
        batches += 1
    return (time.perf_counter() - began) / batches


def _step(batch: Any, seconds: float) -> None:
    torch.distributed.all_reduce(batch[0, 0].float())
    time.sleep(seconds)


def main(rank: int, folder: Path, rounds: int, passes: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_NODES)
    facts: dict[str, Any] = _exchange(rank, rounds)
    facts |= {str(seconds): _training(seconds, passes) for seconds in _STEPS}
    (folder / f"{rank}.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
