"""What grows with ranks and examples, for 8 to 4,096 ranks and 10^7 to 10^10 examples. docs/scale.md says what follows.

Nothing here needs so many machines. Plan and order are pure functions of sizes: those of one rank of so many are built and run.
What the leader of a node with a partitioned cache computes for all ranks is computed. Which collectives an epoch has, and how
many bytes a rank gives to them, is counted in a training on two ranks; what a rank gets follows from the kind of the collective.

``python -m scale RANK PORT FOLDER CALLBACK`` is a rank of that training.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from report import Table, progress
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from workloads import IMAGE_BYTES

from lightning_echo import EchoCallback
from lightning_echo.cache.board import Partition, told, transfers_of
from lightning_echo.measure.timing import IdleFraction
from lightning_echo.pipeline.requests import AllRanksOrder, ExampleRequests, SamplerOrder
from lightning_echo.plan.memory import MemoryPlan
from lightning_echo.plan.order import ShuffledOrder
from lightning_echo.plan.plan import PlanShape, Reuse

_RANKS = (8, 64, 512, 4096)
_LENGTHS = (10**7, 10**8, 10**9, 10**10)
_BATCH, _FACTOR, _WORKERS, _HELD = 64, 4, 4, 2**16
_PER_NODE = 8  # ranks
_STEP_SECONDS = 0.1
_EPOCH_STEPS = 100_000


def scale(quick: bool) -> list[Table]:
    """All tables."""
    return [_planning(quick), _samplers(quick), _exchange(quick), *_collectives()]


# ---------------------------------------------------------------------- plan and order


def _planning(quick: bool) -> Table:
    rows = []
    for ranks, length in product(_RANKS, _LENGTHS[:2] if quick else _LENGTHS):
        progress(f"scale: the plan of one of {ranks:,} ranks, {length:,} examples")
        began = time.thread_time()
        requests = _requests(ranks, length)
        next(requests)
        first = time.thread_time() - began
        seconds = _seconds_of_batches(requests, 500 if quick else 10_000)
        crossing, peak = _crossing(ranks, length)
        state = {"plan": requests.plan.state(), "order": requests.order.state(requests.plan.position)}
        facts = (1e3 * first, 1e6 * seconds / _BATCH, 1e3 * crossing, peak / 2**20, len(pickle.dumps(state)) / 1024)
        rows.append((ranks, length, -(-length // ranks), requests.plan.shape.buffer_size, *facts))
    text = (
        f"one rank of so many: shuffled, batch {_BATCH}, factor {_FACTOR}, {_WORKERS} workers, echoes from a memory of {_HELD:,} "
        "examples, or of half a pass; processor time of 10,000 batches; the pass that begins is spread; peak: of plan and order"
    )
    columns = (
        "ranks",
        "examples",
        "of a rank",
        "held",
        "first batch ms",
        "us per example",
        "a pass begins ms",
        "peak MiB",
        "state KiB",
    )
    return Table("scale_planning", text, columns, rows)


def _requests(ranks: int, length: int) -> ExampleRequests:
    per_rank = -(-length // ranks)
    batches = -(-per_rank // _BATCH)
    shape = PlanShape(
        batch_size=_BATCH,
        last_batch_size=per_rank - (batches - 1) * _BATCH,
        batches_per_pass=batches,
        workers=_WORKERS,
        buffer_size=min(_HELD, per_rank // 2),
        seed=1,
        reuse=Reuse.memory,
    )
    order = ShuffledOrder(length, per_rank, ranks, ranks // 2, shape.distance, seed=2)
    return ExampleRequests(MemoryPlan(shape, _FACTOR), order, whole_calls=False)


def _seconds_of_batches(requests: ExampleRequests, batches: int) -> float:
    began = time.thread_time()
    for _ in range(batches):
        requests.delivered = next(requests).number
    return (time.thread_time() - began) / batches


def _crossing(ranks: int, length: int) -> tuple[float, int]:
    """Processor seconds in which the order comes from one pass into the next, which is spread; bytes that it takes at most."""
    order = _requests(ranks, length).order
    order.begin_spreading()
    order.seek(order.pass_length - 1)
    began = time.thread_time()
    order.take(_BATCH)
    seconds = time.thread_time() - began
    tracemalloc.start()
    requests = _requests(ranks, length)
    next(requests)
    requests.order.seek(order.pass_length - 1)
    requests.order.take(_BATCH)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak


def _samplers(quick: bool) -> Table:
    """What a sampler of torch's costs that is not replaced, as a torch.Generator or a DistributedSampler was given."""
    rows = []
    for length in (10**5, 10**6) if quick else (10**6, 10**7):
        for name in ("RandomSampler", "DistributedSampler"):
            progress(f"scale: {name}, {length:,} examples")
            bare = _cost(lambda name=name, length=length: next(iter(_sampler(name, length))))
            ours = _cost(lambda name=name, length=length: _sampled(name, length).take(1))
            rows.append((name, length, *bare, *ours))
    text = "the first index of a pass: seconds of processor time, and memory at most; bare: the sampler by itself"
    columns = ("sampler", "examples", "bare s", "bare MiB", "ours s", "ours MiB")
    return Table("scale_samplers", text, columns, rows)


def _sampler(name: str, length: int) -> Any:
    if name == "RandomSampler":
        return RandomSampler(range(length), generator=torch.Generator().manual_seed(0))
    return DistributedSampler(range(length), 8, 3)


def _sampled(name: str, length: int) -> SamplerOrder:
    sampler = _sampler(name, length)
    ranks = 8 if name == "RandomSampler" else 1  # the other one has dealt out already
    return SamplerOrder(sampler, len(sampler), -(-len(sampler) // ranks), ranks, 0, seed=0)


def _cost(make: Callable[[], Any]) -> tuple[float, float]:
    """Processor seconds, and MiB of the process beyond what it has: torch's memory is not Python's."""
    began = time.thread_time()
    make()
    seconds = time.thread_time() - began
    context = torch.multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def measure() -> None:
        before = _forget_peak()
        made = make()
        there.send(_peak_bytes() - before)
        del made

    process = context.Process(target=measure)
    process.start()
    grown = here.recv()
    process.join()
    return seconds, grown / 2**20


def _forget_peak() -> int:
    """Returns the memory of this process now, from which its peak counts from now on."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    with open("/proc/self/status") as status:
        return 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])


# ---------------------------------------------------------------------- a partitioned cache


def _exchange(quick: bool) -> Table:
    """What the leaders of all nodes compute and send for a step, while all data is in the caches."""
    length, rows = 10**7, []
    for ranks in _RANKS:
        nodes, fresh = ranks // _PER_NODE, _BATCH // _FACTOR
        if nodes < 2:
            nodes, per_node = 2, ranks // 2
        else:
            per_node = _PER_NODE
        progress(f"scale: a partitioned cache, {nodes} nodes of {per_node} ranks")
        per_rank = -(-length // ranks)
        whole = ShuffledOrder(length, per_rank * ranks, 1, 0, _HELD // 8, ranks, seed=2)
        order, partition = AllRanksOrder(whole, ranks, 0), Partition(np.zeros(length, dtype=np.int16))
        needing = np.arange(fresh * ranks) % ranks // per_node
        record = -(-(IMAGE_BYTES + 64) // 64) * 64
        times, sent = [], 0
        for _ in range(3 if quick else 30):
            began = time.thread_time()
            order.take(fresh)
            keys = np.array(order.taken.popleft(), dtype=np.int64)
            taken = time.thread_time() - began
            said = told(np.full(len(keys), record), keys % nodes)  # what a reduction tells
            began = time.thread_time()
            partition.settle(keys, needing, said, [False] * nodes)
            transfers = transfers_of(keys, needing, said, [1 << 40] * nodes)
            transfers.block_bytes(nodes)
            times.append(taken + time.thread_time() - began)
            sent = max(transfers.bytes_by(transfers.sources, nodes))
        needs_kib = 8 * fresh * ranks / 1024
        rows.append(
            (ranks, nodes, fresh * ranks, 1e3 * statistics.median(times), needs_kib, sent / 2**20, sent / _STEP_SECONDS / 1e9)
        )
    text = (
        f"for a step: batch {_BATCH}, factor {_FACTOR}, records of {IMAGE_BYTES:,} bytes, {_PER_NODE} ranks to a node (of 8 "
        "ranks 4), all data in the caches; processor time of each leader, without looking its own up; GB/s of a node's link "
        f"with steps of {1e3 * _STEP_SECONDS:g} ms"
    )
    columns = ("ranks", "nodes", "needs", "leader ms", "reduced KiB", "MiB sent by a node", "GB/s")
    return Table("scale_exchange", text, columns, rows)


# ---------------------------------------------------------------------- collectives


def _collectives() -> list[Table]:
    """Counts those that `EchoCallback` adds to an epoch, and what the idle fraction of a long one takes."""
    progress("scale: collectives of an epoch, counted on two ranks")
    without, with_callback = (_count(callback) for callback in ("none", "echo"))
    rows = []
    for what in sorted(with_callback):
        calls, given, seconds = (
            after - before for after, before in zip(with_callback[what], without.get(what, (0, 0, 0.0)), strict=True)
        )
        if calls:
            gets = [given * ranks if "gather" in what else given for ranks in _RANKS]
            rows.append((what, int(calls), int(given), 1e3 * seconds, *(each / 1024 for each in gets)))
    text = (
        "collectives that EchoCallback adds to an epoch, counted in the third of four epochs of 20 steps on two ranks; bytes "
        "that a rank gives in all, milliseconds that it spends there, waiting included, and KiB that it gets with so many ranks"
    )
    columns = ("collective", "calls", "bytes given", "ms on two ranks", *(f"got with {ranks:,}" for ranks in _RANKS))
    return [Table("scale_collectives", text, columns, rows), _idle_fraction()]


def _idle_fraction() -> Table:
    """Memory and time of the idle fraction of an epoch of 100,000 steps, on one rank of a group of two."""
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("fork")
        here, there = context.Pipe()
        processes = [context.Process(target=_join_on, args=(rank, folder, there)) for rank in range(2)]
        for process in processes:
            process.start()
        seconds, grown = here.recv()
        for process in processes:
            process.join()
    gathered = [2 * 4 * _EPOCH_STEPS * ranks / 2**20 for ranks in _RANKS]
    rows = [
        ("joined by reductions (measured)", seconds, *([grown / 2**20] * len(_RANKS))),
        ("if all were gathered (calculated)", "", *gathered),
    ]
    text = (
        f"the idle fraction of an epoch of {_EPOCH_STEPS:,} steps: seconds on two ranks, MiB that a rank needs with so many ranks"
    )
    return Table("scale_idle", text, ("how", "seconds", *(f"{ranks:,} ranks" for ranks in _RANKS)), rows)


def _join_on(rank: int, folder: str, there: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    idle = IdleFraction()
    idle.update(torch.rand(_EPOCH_STEPS), torch.rand(_EPOCH_STEPS) + 1)
    torch.distributed.barrier()
    before, began = _forget_peak(), time.perf_counter()
    idle.compute()
    if not rank:
        there.send((time.perf_counter() - began, _peak_bytes() - before))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _count(callback: str) -> dict[str, list[float]]:
    """Returns calls, bytes and seconds of each kind of collective in the third epoch, on rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = Path(__file__).parent
    paths = os.pathsep.join(filter(None, (str(here), str(here.parent), os.environ.get("PYTHONPATH", ""))))
    with tempfile.TemporaryDirectory() as folder:
        commands = [[sys.executable, "-m", "scale", str(rank), str(port), folder, callback] for rank in range(2)]
        processes = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}) for command in commands]
        statuses = [process.wait(300) for process in processes]
        if any(statuses):
            raise RuntimeError("a rank of the counted training has failed")
        found: dict[str, list[float]] = json.loads(Path(folder, "counted.json").read_text())
        return found


class _Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any) -> Any:
        time.sleep(0.002)
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class _Counting(Callback):
    """Counts the calls of torch.distributed in the third epoch, up to the start of the next one."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier"):
            self._watch(name, lambda args: next((arg.nbytes for arg in reversed(args) if isinstance(arg, torch.Tensor)), 0))
        self._watch("all_gather_object", lambda args: len(pickle.dumps(args[1])))
        self._watch("broadcast_object_list", lambda args: len(pickle.dumps(args[0])))
        self._counts = False

    def _watch(self, name: str, bytes_of: Callable[[tuple[Any, ...]], int]) -> None:
        function = getattr(torch.distributed, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._counts:
                return function(*args, **kwargs)
            self.calls[name] += 1
            self.bytes[name] += bytes_of((*args, *kwargs.values()))
            began = time.perf_counter()
            found = function(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - began
            return found

        setattr(torch.distributed, name, watched)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._counts = trainer.current_epoch == 2


def main(rank: int, port: str, folder: Path, callback: str) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": 0, "GROUP_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "scale"})
    torch.set_num_threads(1)
    counting = _Counting()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy="ddp",
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*([EchoCallback(factor="auto")] if callback == "echo" else []), counting],
    )
    trainer.fit(_Model(), DataLoader([torch.zeros(8)] * 160, batch_size=4, num_workers=1, persistent_workers=True))
    if not rank:
        counted = {name: (calls, counting.bytes[name], counting.seconds[name]) for name, calls in counting.calls.items()}
        (folder / "counted.json").write_text(json.dumps(counted))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
