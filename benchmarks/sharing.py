"""What sharing costs and brings: speed of k trainings, processor time per example, attaching, handing a large batch over.

Each training is a process of its own with an `EchoLoader` and a loop. Behind a sleeping source reading is the limit: k trainings
that share should each be as fast as one alone, with its workers (``workers="starter"``; ``sharing_workers.py`` has those of all).
Beside it, k loaders that read each for itself with as many workers in all.
Processor time is that of the reader and its workers, and of the training.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from report import Table, progress, verdict
from timing import Memory, tree_memory, tree_seconds
from torch.utils.data import DataLoader, Dataset
from workloads import BATCH_SIZE, IMAGE_BYTES, WORKERS, Images

from lightning_echo import EchoCallback, EchoLoader, TargetIdle
from lightning_echo.share.packing import unpack
from lightning_echo.share.sharing import status_of
from lightning_echo.share.window import Window

Found = TypeVar("Found")
_FORK = multiprocessing.get_context("fork")
_SLEEP_SECONDS, _WORK_SECONDS = 0.004, 0.001
_TRAININGS = (1, 2, 3, 4)
_REQUIRED, _MOST_MICROSECONDS, _MOST_HANDOVER_SECONDS, _MOST_ATTACH_SECONDS = 0.95, 150, 0.001, 1.0
_LARGE = 256  # examples: a batch of 38.5 MB
_RECEIVERS = 3
_BLOCKS = (True, False, False, True) * 2  # of a batch: taken, or copied
_ROUND_THE_WINDOW = 8  # batches: after so many each page of the window was met; the first time costs 0.2 us a page
_STEP_SECONDS = {"fast": 0.010, "slow": 0.020}
_MOST_IDLE, _NEAR = 0.1, 0.2


def in_own_folder(measure: Callable[[bool], Found]) -> Callable[[bool], Found]:
    """Lets a benchmark have readers of its own."""

    @functools.wraps(measure)
    def measured(quick: bool) -> Found:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["LIGHTNING_ECHO_SHARED"] = folder
            try:
                return measure(quick)
            finally:
                del os.environ["LIGHTNING_ECHO_SHARED"]

    return measured


# ---------------------------------------------------------------------- trainings in processes of their own


def _train(connection: Any, dataset: Images, workers: int, share: dict[str, Any] | None, batches: int, step: float) -> None:
    torch.set_num_threads(1)
    plain = DataLoader(dataset, BATCH_SIZE, num_workers=workers)
    loader = plain if share is None else EchoLoader(plain, 1, share=share, seed=0)
    iterator = iter(loader)
    for _ in range(WARM_UP):
        next(iterator)
    pid = None if share is None else status_of(share["name"])["pid"]  # type: ignore[index]  # it is there
    connection.send("ready")
    connection.recv()
    before, began = _cpu_seconds(os.getpid(), pid), time.perf_counter()
    for _ in range(batches):
        next(iterator)
        if step:
            time.sleep(step)
    connection.send((time.perf_counter() - began, _minus(_cpu_seconds(os.getpid(), pid), before)))
    connection.recv()  # nobody leaves before all are measured
    if share is not None:
        loader.close()


WARM_UP = 8


def _run(
    count: int,
    workers: int,
    batches: int,
    *,
    shares: bool,
    dataset: Images,
    step: float = 0.0,
    reader_workers: int | str = "starter",
    begin: Callable[[], None] = lambda: None,
    look: Callable[[list[int], int | None], None] = lambda trainings, reader: None,
) -> list[tuple[float, tuple[float, float]]]:
    """Seconds of each of the trainings, and processor seconds of itself and its workers, and of the reader.

    ``begin`` is called when all are about to be measured. At the end ``look`` is called with the processes of the trainings and
    that of the reader.
    """
    name = f"bench-{time.monotonic_ns()}"
    options = {"wait_for": count, "linger_seconds": 0, "window": "256MiB", "workers": reader_workers}
    share = {"name": name, **options} if shares else None
    pipes, processes = [], []
    for _ in range(count):
        here, there = _FORK.Pipe()
        process = _FORK.Process(target=_train, args=(there, dataset, workers, share, batches, step))
        process.start()
        pipes.append(here)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    begin()
    for pipe in pipes:
        pipe.send("go")
    found = [pipe.recv() for pipe in pipes]
    look([process.pid or 0 for process in processes], status_of(name)["pid"] if shares else None)  # type: ignore[index]
    for pipe in pipes:
        pipe.send("over")
    for process in processes:
        process.join()
    return found


def _cpu_seconds(training: int, reader: int | None) -> tuple[float, float]:
    return tree_seconds(training), 0.0 if reader is None else tree_seconds(reader)


def _minus(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] - other[0], one[1] - other[1]


# ---------------------------------------------------------------------- tables


@in_own_folder
def sharing(quick: bool) -> Table:
    batches, rounds = (20, 1) if quick else (60, 3)
    cases: dict[tuple[str, int], Callable[[], list[tuple[float, tuple[float, float]]]]] = {}
    sleeping, working = Images(sleep_seconds=_SLEEP_SECONDS), Images(work_seconds=_WORK_SECONDS)
    for count in _TRAININGS:
        cases["sleeping source", count] = lambda count=count: _run(count, WORKERS, batches, shares=True, dataset=sleeping)
    for count in _TRAININGS[1:]:
        each = max(WORKERS // count, 1)
        cases[f"sleeping source, {each} worker each, not shared", count] = lambda count=count, each=each: _run(
            count, each, batches, shares=False, dataset=sleeping
        )
    for count in (1, 2):
        cases["working source, one worker, sleeping steps", count] = lambda count=count: _run(
            count, 1, batches, shares=True, dataset=working, step=0.01
        )
    speeds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for number in range(rounds):
        for case, run in cases.items():
            progress(f"sharing, round {number + 1}: {case[0]}, k = {case[1]}")
            speeds[case].append(min(batches * BATCH_SIZE / seconds for seconds, _ in run()))
    rows = []
    for (what, count), found in speeds.items():
        alone = "sleeping source" if what.startswith("sleeping") else what
        ratios = sorted(mine / one for mine, one in zip(found, speeds[alone, 1], strict=True))
        middle = statistics.median(ratios)
        is_required = count > 1 and "not shared" not in what
        rows.append(
            (
                *(what, count, statistics.median(found), middle, ratios[0], ratios[-1]),
                *((f">= {_REQUIRED}", verdict(middle >= _REQUIRED)) if is_required else ("", "")),
            )
        )
    text = (
        f"k trainings, batch {BATCH_SIZE}, examples of {IMAGE_BYTES:,} bytes; {WORKERS} workers in all behind a source that "
        f"sleeps {1e3 * _SLEEP_SECONDS:g} ms, one behind one that works {1e3 * _WORK_SECONDS:g} ms; examples/s of the slowest of "
        "the k, and divided by those of one that shares alone; medians of the rounds"
    )
    return Table("sharing", text, ("source", "k", "examples/s", "of one alone", "lowest", "highest", "required", "passed"), rows)


@in_own_folder
def sharing_costs(quick: bool) -> Table:
    batches = 20 if quick else 100
    dataset = Images(work_seconds=_WORK_SECONDS)
    rounds = 1 if quick else 3
    bare, shared = [], {count: list[float]() for count in (1, 2, 4)}
    for number in range(rounds):
        progress(f"sharing, processor time, round {number + 1}")
        ((_, (own, _)),) = _run(1, 1, batches, shares=False, dataset=dataset)
        bare.append(1e6 * own / batches / BATCH_SIZE)
        for count, found in shared.items():
            runs = _run(count, 1, batches, shares=True, dataset=dataset)
            mine = statistics.mean(own for _, (own, _) in runs)
            readers = statistics.mean(reader for _, (_, reader) in runs)
            found.append(1e6 * (mine + readers / count) / batches / BATCH_SIZE)
    alone = statistics.median(bare)
    rows: list[tuple[Any, ...]] = [("bare loader", 1, alone, "", "", "")]
    for count, found in shared.items():
        more = statistics.median(one - other for one, other in zip(found, bare, strict=True))
        required = (f"<= {_MOST_MICROSECONDS}", verdict(more <= _MOST_MICROSECONDS)) if count == 1 else ("", "")
        rows.append(("shared", count, statistics.median(found), more, *required))
    text = (
        f"processor time per delivered example of {IMAGE_BYTES:,} bytes, source of {1e3 * _WORK_SECONDS:g} ms of processor time, "
        "one worker: of a training, and its part of the reader's, microseconds; medians of the rounds"
    )
    return Table("sharing_costs", text, ("loader", "k", "us per example", "more than bare us", "required", "passed"), rows)


class _LargeBatches(Dataset[torch.Tensor]):
    """Whole batches of 38.5 MB."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((_LARGE, IMAGE_BYTES), index % 251, dtype=torch.uint8)


@in_own_folder
def sharing_handing_over(quick: bool) -> Table:
    progress("sharing: attaching, and handing large batches over")
    attach = _attaching(2 if quick else 5)
    rounds = 3 if quick else 40
    of_examples = _beyond_copying(DataLoader(Images(), _LARGE, num_workers=WORKERS), _examples_beyond, _LARGE, rounds)
    whole = _beyond_copying(DataLoader(_LargeBatches(), batch_size=None, num_workers=WORKERS), _batch_beyond, 1, rounds)
    attach_rule, rule = f"<= {_MOST_ATTACH_SECONDS:g}", f"<= {_MOST_HANDOVER_SECONDS:g}"
    what = "processor time of a training's thread beyond the copy, s"
    rows = [
        ("first batch after attaching to a reader, s", attach, attach_rule, verdict(attach <= _MOST_ATTACH_SECONDS)),
        (f"{_LARGE} examples: {what}", of_examples, rule, verdict(of_examples <= _MOST_HANDOVER_SECONDS)),
        (f"a whole batch: {what}", whole, rule, verdict(whole <= _MOST_HANDOVER_SECONDS)),
    ]
    text = f"batches of {_LARGE} x {IMAGE_BYTES:,} bytes, handed over to {_RECEIVERS} trainings; medians"
    return Table("sharing_handing_over", text, ("what", "value", "required", "passed"), rows)


def _attaching(rounds: int) -> float:
    """Seconds to the first batch of a training that comes to a reader."""

    def made() -> EchoLoader:
        return EchoLoader(DataLoader(Images(), _LARGE, num_workers=WORKERS), 1, share=_share("attaching"), seed=0)

    first, attaching = made(), []
    kept = iter(first)  # else its loop would be over, and the next loader would close it
    next(kept)
    for _ in range(rounds):
        second = made()
        began = time.perf_counter()
        next(iter(second))
        attaching.append(time.perf_counter() - began)
        second.close()
    first.close()
    return statistics.median(attaching)


def _share(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, "linger_seconds": 5, "window": "160MiB", "workers": "starter", **options}


def _beyond_copying(plain: DataLoader[Any], measure: Callable[[EchoLoader, int, int], float], pieces: int, rounds: int) -> float:
    """Processor seconds for a batch of 38.5 MB, beyond those for copying the bytes of one out of the window.

    Of batches that the thread has not seen: what was copied just now is in the processor's caches.
    """
    loaders = [EchoLoader(plain, 1, share=_share(f"large-{pieces}"), seed=0) for _ in range(_RECEIVERS)]
    kept = [iter(loader) for loader in loaders]  # else a loop would be over, and the next loader would close its loader
    for loader, batches in zip(loaders, kept, strict=True):
        next(batches)
        loader._run._pipeline.started._inner.close()  # type: ignore[union-attr]  # its thread, so that this one takes
    found = []
    for number in range(-_ROUND_THE_WINDOW, rounds):
        for loader in loaders:
            seconds = measure(loader, pieces, number)
            found += [seconds] if number >= 0 else []
    for loader in loaders:
        loader.close()
    return statistics.median(found)


def _examples_beyond(loader: EchoLoader, pieces: int, number: int) -> float:
    """Of one batch: half of its examples are taken and half are copied, block by block, so that nothing that changes counts."""
    del number
    first, seconds = _wait_for_batch(loader, pieces), 0.0
    attachment: Any = loader.sharing._attachment  # type: ignore[union-attr]  # it shares
    attachment._tell_every = 2 * pieces
    size = pieces // len(_BLOCKS)
    for begin, is_taken in zip(range(first, first + pieces, size), _BLOCKS, strict=True):
        began = time.thread_time()
        if is_taken:
            for item in range(begin, begin + size):
                attachment.take(item)
            seconds += time.thread_time() - began
        else:
            _copy(attachment._link.window, begin, size)
            seconds -= time.thread_time() - began
    began = time.thread_time()
    attachment._tell(attachment._next)  # as it does once for a batch
    return 2 * seconds + time.thread_time() - began


def _batch_beyond(loader: EchoLoader, pieces: int, number: int) -> float:
    """Of two batches that follow each other: one is taken and one is copied, in turn the first."""
    seconds = 0.0
    for is_taken in (number % 2, (number + 1) % 2):
        first = _wait_for_batch(loader, pieces)
        window = loader.sharing._attachment._link.window  # type: ignore[union-attr]
        began = time.thread_time()
        if is_taken:
            _take_batch(loader)
            seconds += time.thread_time() - began
        else:
            _copy(window, first, pieces)
            seconds -= time.thread_time() - began
            _take_batch(loader)
    return seconds


def _take_batch(loader: EchoLoader) -> None:
    item: Any = loader.sharing._stream._next()  # type: ignore[union-attr]
    unpack(item.kind, item.data)


def _copy(window: Window, first: int, pieces: int) -> None:
    for item in range(first, first + pieces):
        row = item % window.slots * 3
        _, place, size = window._row_words[row : row + 3]
        at = window._address(place)
        bytearray(window._bytes[at : at + size % 2**56])


def _wait_for_batch(loader: EchoLoader, pieces: int) -> int:
    """Waits until the next batch is in the window; returns its first item."""
    attachment: Any = loader.sharing._attachment  # type: ignore[union-attr]  # it shares
    attachment._tell(attachment._next)
    while not attachment._link.window.has(attachment._next + pieces - 1):
        time.sleep(0.01)
    return int(attachment._next)


@in_own_folder
def sharing_memory(quick: bool) -> Table:
    """Memory of trainings and reader, with their workers: what each has for itself, and what they share."""
    progress("sharing: memory")
    batches, dataset, rows = 20 if quick else 120, Images(), []
    for what, count, shares in (("bare loader", 1, False), ("shared", 1, True), ("shared", 3, True)):
        found: list[Any] = []

        def look(trainings: list[int], reader: int | None, found: list[Any] = found) -> None:
            own = [tree_memory(pid) for pid in trainings]
            of_reader = Memory(0, 0) if reader is None else tree_memory(reader)
            shared = sum(each.shared_memory_bytes for each in [*own, of_reader])
            found += [max(each.own_bytes for each in own), of_reader.own_bytes, shared]

        _run(count, WORKERS, batches, shares=shares, dataset=dataset, look=look)
        rows.append((what, count, *(round(value / 2**20, 1) for value in found)))
    text = (
        f"memory after {batches} batches of {BATCH_SIZE} x {IMAGE_BYTES:,} bytes, {WORKERS} workers, a window of 256 MiB; MiB, "
        "workers included"
    )
    return Table("sharing_memory", text, ("loader", "k", "a training's own", "the reader's own", "shared memory in all"), rows)


# ---------------------------------------------------------------------- two controllers


class _Sleeps(LightningModule):
    """A step takes so long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.weight * float(batch[0, 0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _fit(connection: Any, seconds: float) -> None:
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    share = {"name": "two", "wait_for": 2, "window": "5MiB", "linger_seconds": 0, "workers": "starter"}
    callback = EchoCallback(TargetIdle(), share=share, summary=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=6, accelerator="cpu", callbacks=[callback], **quiet)
    trainer.fit(_Sleeps(seconds), DataLoader(Images(length=640), 8, num_workers=1))
    connection.send([(report.factor, report.idle_fraction) for report in callback.reports])


@in_own_folder
def sharing_controllers(quick: bool) -> Table:
    """A training twice as fast as another: it should echo by 2, and the other one not at all."""
    del quick  # it takes half a minute
    progress("sharing: two controllers")
    found = {}
    started = []
    for name, seconds in _STEP_SECONDS.items():
        here, there = _FORK.Pipe()
        process = _FORK.Process(target=_fit, args=(there, seconds))
        process.start()
        started.append((name, here, process))
    for name, here, process in started:
        if not here.poll(120):
            raise RuntimeError(f"the {name} training does not end")
        found[name] = here.recv()
        process.join()
    rows = []
    for name, wanted in (("fast", 2.0), ("slow", 1.0)):
        factor, idle = found[name][2]  # found in the first epoch; the fast one is at work until the third of the slow one's
        passed = abs(factor - wanted) <= _NEAR * wanted and idle <= _MOST_IDLE
        rows.append(
            (name, 1e3 * _STEP_SECONDS[name], factor, idle, f"{wanted:g} +- {100 * _NEAR:g}%, <= {_MOST_IDLE}", verdict(passed))
        )
    text = (
        "two trainings with TargetIdle, batch 8, a source that takes no time, behind='wait': factor and idle fraction in the "
        "third epoch"
    )
    return Table("sharing_controllers", text, ("training", "step ms", "factor", "idle", "required", "passed"), rows)
