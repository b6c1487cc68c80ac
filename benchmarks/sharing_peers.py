"""Sharing beside TensorSocket: how fast each training is, what it gets of each pass, what that costs the processor.

``python -m sharing_peers ROLE NAME FOLDER PLAN`` is a process of a run: ``train`` is a training that shares, ``consume`` one that
TensorSocket serves, ``produce`` what serves it. Trainings write what they have found to ``FOLDER/NAME.json``. No run can last: if
nothing arrives for a while, all its processes are ended, and its row says "hung".
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from report import Table, progress
from timing import tree_seconds
from torch.utils.data import DataLoader, Dataset
from workloads import BATCH_SIZE, IMAGE_BYTES, WORKERS, Images

from lightning_echo import EchoLoader
from lightning_echo.share.sharing import status_of

_SLEEP_SECONDS = 0.004
# TensorSocket itself waits 10 s for a training that does not answer.
_START_SECONDS, _QUIET_SECONDS, _MOST_SECONDS, _LEAVE_SECONDS = 60, 25, 180, 10
_SHORT = 8  # batches
_MISSING_IN_LAST = 10  # examples of a last part batch
_LOOPBACK = "tcp://127.0.0.1"
_COLUMNS = (
    *("what", "version", "k", "runs", "batches a pass", "delivered", "examples a pass", "missed", "twice"),
    *("examples/s", "lowest", "highest", "of ours", "us per example"),
)


@dataclass(frozen=True)
class Sharer:
    """Who shares.

    Attributes:
        name: As it stands in the table.
        together: Batches that TensorSocket collects before it hands them over (``producer_batch_size``); 0: ours.
        package: What must be installed; empty: nothing more.
        most: Trainings. More are not run: three beside eight batches together took 15 GB, and 15 s for eight batches.
    """

    name: str
    together: int = 0
    package: str = "tensorsocket"
    most: int = 4

    @property
    def version(self) -> str:
        """The version of its package; empty if that is not installed."""
        if not self.package:
            return "-"
        try:
            return version(self.package)
        except PackageNotFoundError:
            return ""


OURS = Sharer("ours", package="")
SHARERS = (OURS, Sharer("TensorSocket", together=8, most=2), Sharer("TensorSocket, producer_batch_size=2", together=2))


@dataclass(frozen=True)
class Plan:
    """A run.

    Attributes:
        trainings: How many share.
        batches: Of a pass; the last one is a part batch.
        passes: The first one is not timed.
        together: As in `Sharer`.
        ports: Four free ones, for TensorSocket.
        reader: The process that TensorSocket's producer is; 0 where there is none.
    """

    trainings: int
    batches: int
    passes: int
    together: int = 0
    ports: tuple[int, ...] = ()
    reader: int = 0

    @property
    def examples(self) -> int:
        """Examples of a pass.

        Example:
            >>> Plan(trainings=2, batches=20, passes=3).examples
            630
        """
        return self.batches * BATCH_SIZE - _MISSING_IN_LAST


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        said: ``ran``, or what happened instead.
        facts: Of each training, if it ran: batches, examples and different examples of each pass; seconds of the timed passes,
            and processor seconds in them, of itself and of the process that reads.
    """

    said: str
    facts: Sequence[dict[str, Any]] = ()


def sharing_peers(quick: bool) -> Table:
    """The table."""
    counts, batches, passes, rounds = ((1, 2), 10, 2, 1) if quick else ((1, 2, 3), 30, 3, 3)
    cases = [(Plan(count, batches, passes), rounds) for count in counts] + [(Plan(1, _SHORT, passes=2), 1)]
    found: dict[tuple[Sharer, Plan], list[Outcome]] = {(sharer, plan): [] for plan, _ in cases for sharer in SHARERS}
    for number in range(rounds):
        for plan in (plan for plan, times in cases if number < times):
            for sharer in SHARERS:
                if sharer.version and plan.trainings <= sharer.most:
                    what = f"{sharer.name}, k = {plan.trainings}, {plan.batches} batches"
                    progress(f"sharing beside others, round {number + 1}: {what}")
                    found[sharer, plan].append(outcome(sharer, plan))
    rows = [row(sharer, plan, outcomes, found[OURS, plan]) for (sharer, plan), outcomes in found.items()]
    text = (
        f"k trainings that take each batch at once, batch {BATCH_SIZE}, a source that sleeps {1e3 * _SLEEP_SECONDS:g} ms for an "
        f"example of {IMAGE_BYTES:,} bytes, {WORKERS} workers in all; delivered, missed and twice: of the pass in which a "
        "training had the least; examples/s: delivered, of the slowest of the k, without the first pass; us: processor time of a "
        "training, and its part of the reader's; medians of the rounds"
    )
    return Table("sharing_peers", text, _COLUMNS, rows)


def row(sharer: Sharer, plan: Plan, outcomes: Sequence[Outcome], ours: Sequence[Outcome]) -> tuple[Any, ...]:
    """A row of the table.

    Args:
        sharer: Whose it is.
        plan: What was run.
        outcomes: Of each round; none where it is not installed.
        ours: Those of ours in the same rounds.
    """
    named = (sharer.name, sharer.version or "not installed", plan.trainings)
    ran = [outcome for outcome in outcomes if outcome.facts]
    said = _together([outcome.said for outcome in outcomes])
    if not ran:
        return (
            *named,
            said or ("not run" if sharer.version else "-"),
            plan.batches,
            "-",
            plan.examples,
            *["-"] * (len(_COLUMNS) - len(named) - 4),
        )
    passes = [each for outcome in ran for facts in outcome.facts for each in facts["passes"]]
    missed = max(plan.examples - different for _, _, different in passes)
    twice = max(examples - different for _, examples, different in passes)
    rates = [rate(outcome) for outcome in ran]
    ratios = [rate(mine) / rate(other) for mine, other in zip(outcomes, ours, strict=True) if mine.facts and other.facts]
    return (
        *(*named, said, plan.batches, min(batches for batches, _, _ in passes), plan.examples, missed, twice),
        *(statistics.median(rates), min(rates), max(rates), statistics.median(ratios) if ratios else "-"),
        statistics.median(map(microseconds, ran)),
    )


def rate(outcome: Outcome) -> float:
    """Delivered examples a second of the slowest training, without the first pass.

    Example:
        >>> rate(Outcome("ran", [{"passes": [[2, 60, 60], [2, 50, 50]], "seconds": 2.0}]))
        25.0
    """
    return min(_delivered(facts) / facts["seconds"] for facts in outcome.facts)


def microseconds(outcome: Outcome) -> float:
    """Processor time for each delivered example: a training's, and its part of the reader's.

    Example:
        >>> facts = {"passes": [[2, 60, 60], [2, 50, 50]], "own": 1.0, "reader": 3.0}
        >>> microseconds(Outcome("ran", [facts, facts]))
        50000.0
    """
    count = len(outcome.facts)
    own = statistics.mean(facts["own"] / _delivered(facts) for facts in outcome.facts)
    return 1e6 * (own + statistics.mean(facts["reader"] / _delivered(facts) for facts in outcome.facts) / count)


def _delivered(facts: dict[str, Any]) -> int:
    return sum(examples for _, examples, _ in facts["passes"][1:])


def _together(said: list[str]) -> str:
    """The same for all rounds, or how often each.

    Example:
        >>> _together(["ran", "ran"]), _together(["ran", "hung", "ran"])
        ('ran', 'ran 2 of 3, hung 1 of 3')
    """
    if len(set(said)) <= 1:
        return "".join(said[:1])
    return ", ".join(f"{each} {said.count(each)} of {len(said)}" for each in dict.fromkeys(said))


# ---------------------------------------------------------------------- a run


def outcome(sharer: Sharer, plan: Plan, quiet_seconds: float = _QUIET_SECONDS) -> Outcome:
    """Runs trainings that share, each in a process of its own; ends them all if nothing arrives for so long."""
    plan = Plan(plan.trainings, plan.batches, plan.passes, sharer.together, _free_ports(4) if sharer.together else ())
    names = [f"training-{number}" for number in range(plan.trainings)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        processes: dict[str, subprocess.Popen[bytes]] = {}
        stack.callback(lambda: _end(processes.values()))
        if sharer.together:
            processes["producer"] = _start("produce", "producer", folder, plan)
            plan = Plan(**{**asdict(plan), "reader": processes["producer"].pid})
        for name in names:
            processes[name] = _start("consume" if sharer.together else "train", name, folder, plan)
        said = _watch(processes, names, folder, quiet_seconds)
        if said != "ran":
            return Outcome(said)
        with suppress(subprocess.TimeoutExpired):  # ours take leave, so that their reader ends
            for name in names:
                processes[name].wait(_LEAVE_SECONDS)
        return Outcome(said, [json.loads((folder / f"{name}.json").read_text()) for name in names])


def _watch(processes: dict[str, subprocess.Popen[bytes]], names: list[str], folder: Path, quiet_seconds: float) -> str:
    """Waits until all trainings have found what they are to find; returns ``ran``, or what happened instead."""
    began = changed = time.monotonic()
    before: list[str] = []
    while not all((folder / f"{name}.json").exists() for name in names):
        time.sleep(0.05)
        for name, process in processes.items():
            if process.poll() is not None and not (folder / f"{name}.json").exists():
                return f"{name.partition('-')[0]} died: {_last_words(folder / f'{name}.log')}"
        now = time.monotonic()
        seen = [_text(folder / f"{name}.seen") for name in names]
        if seen != before:
            before, changed = seen, now
        patience = quiet_seconds if all(seen) else _START_SECONDS
        if now - changed > patience or now - began > _MOST_SECONDS:
            return f"hung after {min(int(each or 0) for each in seen)} batches"
    return "ran"


def _start(role: str, name: str, folder: Path, plan: Plan) -> subprocess.Popen[bytes]:
    here = Path(__file__).parent
    paths = os.pathsep.join(filter(None, (str(here), str(here.parent), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "LIGHTNING_ECHO_SHARED": str(folder)}
    command = [sys.executable, "-m", "sharing_peers", role, name, str(folder), json.dumps(asdict(plan))]
    with open(folder / f"{name}.log", "w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its workers with it
            process.wait()


def _free_ports(count: int) -> tuple[int, ...]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return tuple(each.getsockname()[1] for each in sockets)


def _last_words(log: Path) -> str:
    lines = [line for line in _text(log).splitlines() if line.strip()]
    return lines[-1].strip()[:60] if lines else "without a word"


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except FileNotFoundError:
        return ""


# ---------------------------------------------------------------------- the processes of a run


class Numbered(Dataset[tuple[torch.Tensor, int]]):
    """Images with their numbers. TensorSocket takes batches that are tuples of tensors."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], index


def _loader(plan: Plan) -> DataLoader[Any]:
    data = Numbered(Images(_SLEEP_SECONDS, length=plan.examples))
    return DataLoader(data, BATCH_SIZE, num_workers=WORKERS, persistent_workers=True, multiprocessing_context="fork")


def produce(plan: Plan) -> None:
    """TensorSocket's producer. It would listen on all interfaces; the address is no option, but a variable of its module."""
    module = import_module("tensorsocket.producer")
    module.LOCALHOST = _LOOPBACK
    port, acknowledged, *hearts = plan.ports
    producer = module.TensorProducer(
        _loader(plan), port=port, ack_port=acknowledged, heart_ports=tuple(hearts), producer_batch_size=plan.together
    )
    while len(producer.hb.consumers) < plan.trainings:  # nobody comes too late
        time.sleep(0.01)
    for _ in range(plan.passes):
        for _ in producer:
            pass
    time.sleep(_MOST_SECONDS)  # until it is ended


def consume(plan: Plan, take: Callable[[Iterable[Any], int], None]) -> None:
    """A training that TensorSocket serves."""
    module = import_module("tensorsocket.consumer")
    module.LOCALHOST = _LOOPBACK
    port, acknowledged, *hearts = plan.ports
    consumer = module.TensorConsumer(port=port, ack_port=acknowledged, heart_ports=tuple(hearts), batch_size=BATCH_SIZE)
    take(consumer, plan.reader)
    sys.stdout.flush()
    os._exit(0)  # some abort in the interpreter's end, beside threads that wait for the producer


def train(plan: Plan, take: Callable[[Iterable[Any], int], None]) -> None:
    """A training of ours."""
    share = {"name": "peers", "wait_for": plan.trainings, "linger_seconds": 0, "window": "256MiB", "workers": "starter"}
    with closing(EchoLoader(_loader(plan), 1, share=share, seed=0)) as loader:
        take(loader, 0)


def take_passes(plan: Plan, name: str, folder: Path, loader: Iterable[Any], reader: int) -> None:
    """Takes the passes, says how far it is, and writes what it has found.

    Args:
        plan: How many.
        name: Of this training.
        folder: Where it writes.
        loader: Yields images and their numbers.
        reader: The process that reads; 0: that of ours, which is there from the first batch on.
    """
    seen, passes, total = folder / f"{name}.seen", [], 0
    began, own, read = 0.0, 0.0, 0.0
    seen.write_text("0")
    for number in range(plan.passes):
        indices: list[int] = []
        batches = 0
        for _, numbers in loader:
            indices += numbers.tolist()
            batches += 1
            total += 1
            seen.write_text(str(total))
        passes.append((batches, len(indices), len(set(indices))))
        reader = reader or status_of("peers")["pid"]  # type: ignore[index]  # it is there
        if not number:
            began, own, read = time.perf_counter(), tree_seconds(os.getpid()), tree_seconds(reader)
    found = {
        "passes": passes,
        "seconds": time.perf_counter() - began,
        "own": tree_seconds(os.getpid()) - own,
        "reader": tree_seconds(reader) - read,
    }
    written = folder / f"{name}.written"
    written.write_text(json.dumps(found))
    written.rename(folder / f"{name}.json")  # nobody sees a part of it


def _main(role: str, name: str, folder: Path, plan: Plan) -> None:
    torch.set_num_threads(1)
    if role == "produce":
        return produce(plan)
    run = {"consume": consume, "train": train}[role]
    return run(plan, lambda loader, reader: take_passes(plan, name, folder, loader, reader))


if __name__ == "__main__":
    _role, _name, _folder, _plan = sys.argv[1:]
    _main(_role, _name, Path(_folder), Plan(**json.loads(_plan)))
