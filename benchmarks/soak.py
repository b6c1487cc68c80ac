"""`make soak`: three trainings share one reader for minutes. Every few seconds one of them, the reader or its worker is killed.

In the first half of the time all three take all of the data, and one that comes within a pass gets all of it (``late``). In
the second half two take a fold each, the reader has a cache, and one that comes begins with the next pass.
What must hold: each pass that a training attends has each example of its part once, with the right bytes, and no other one; two
trainings that attend the same pass have what is in all parts in the same order, with the same noise; nothing grows, and nothing
is left behind. In the last third of each half nobody is killed, so that growth can be told from a restart. The exit status is 1
if something failed.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import Table, machine, progress, verdict
from torch.utils.data import DataLoader, Subset

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.share.config import names
from lightning_echo.share.sharing import status_of

RESULTS = Path(__file__).parent / "results"
_NAME = "soak"
_LENGTH = 2000
_BATCH_SIZES = (16, 32, 50)
_KILLING = 2 / 3  # share of the time
_WHILE_IT_BEGINS = 0.2  # probability that a training is killed that has not had a pass: on a busy machine no one would get one
_MOST_GROWTH, _MOST_MORE_BYTES, _MOST_MORE_DESCRIPTORS = 1.1, 16 * 2**20, 2
_BETWEEN_SAMPLES_SECONDS = 2.0
_MOST_END_SECONDS = 60.0


class Numbers(StagedDataset):
    """Small examples: the index, noise, and bytes that follow from the index. What is read are 1 KiB."""

    def __len__(self) -> int:
        return _LENGTH

    def read(self, index: Any) -> torch.Tensor:
        return torch.full((256,), index, dtype=torch.int32)

    def decode(self, raw: Any) -> torch.Tensor:
        return raw

    def augment(self, example: Any) -> dict[str, Any]:
        index = int(example[-1])
        return {"index": index, "noise": torch.rand(()), "data": torch.full((64,), index % 251, dtype=torch.uint8)}


class Case(NamedTuple):
    """What the trainings take, and what the reader holds.

    Attributes:
        name: For people.
        folds: For each training, the fold of five that it leaves out; None: it takes all.
        cache: The cache of the reader; None: it has none.
        joins: How a training comes that was killed: options of `ShareConfig` under which each pass of it is a whole one.
    """

    name: str
    folds: tuple[int | None, ...]
    cache: str | None
    joins: dict[str, Any]

    def part(self, number: int) -> list[int]:
        """The indices that a training takes."""
        return [index for index in range(_LENGTH) if index % 5 != self.folds[number]]

    def common(self) -> torch.Tensor:
        """Whether all trainings take an index, for each of the data set."""
        index = torch.arange(_LENGTH)
        return torch.stack([index % 5 != -1 if fold is None else index % 5 != fold for fold in self.folds]).all(0)


CASES = (
    Case("all of the data", (None, None, None), None, {"join": "now", "late": 1.0}),
    Case("folds, and a cache of half of the data", (0, 1, None), "1MiB", {"join": "pass"}),
)


class Pass(NamedTuple):
    """A pass as a training had it.

    Attributes:
        training: Which one.
        first: Its first example that all trainings take: index and noise, which no other pass has.
        examples: How many there were.
        is_exact: Whether each index of its part came once, and no other one.
        is_right: Whether the bytes of each are those of its index.
        digest: Of indices and noise, in order, of the examples that all trainings take.
    """

    training: int
    first: tuple[int, float]
    examples: int
    is_exact: bool
    is_right: bool
    digest: str


class Sample(NamedTuple):
    """What a process holds.

    Attributes:
        who: A name; the reader has the number of its process in it.
        rss_bytes: Its memory, that of the window included as far as it has touched that.
        descriptors: How many.
    """

    who: str
    rss_bytes: int
    descriptors: int


# ---------------------------------------------------------------------- what must hold


def wrong_passes(passes: Sequence[Pass]) -> list[str]:
    """Says which passes lack an example, have one too many or wrong bytes, or differ from training to training."""
    exactly = "each example of its part once, and no other one"
    found = [f"training {each.training} did not get {exactly}: {each.examples} came" for each in passes if not each.is_exact]
    found += [f"training {each.training} had wrong bytes" for each in passes if not each.is_right]
    by_first: dict[tuple[int, float], set[str]] = {}
    for each in passes:
        by_first.setdefault(each.first, set()).add(each.digest)
    differing = [first for first, had in by_first.items() if len(had) > 1]
    return found + [f"the pass that begins with {first} was not the same for all" for first in differing]


def growth(samples: Sequence[Sample]) -> list[str]:
    """Says which processes grew from their first sample to the last."""
    first: dict[str, Sample] = {}
    last: dict[str, Sample] = {}
    for sample in samples:
        first.setdefault(sample.who, sample)
        last[sample.who] = sample
    found = []
    for who, before in first.items():
        after = last[who]
        if after.rss_bytes > _MOST_GROWTH * before.rss_bytes + _MOST_MORE_BYTES:
            found.append(f"{who} grew from {before.rss_bytes:,} to {after.rss_bytes:,} bytes")
        if after.descriptors > before.descriptors + _MOST_MORE_DESCRIPTORS:
            found.append(f"{who} had {before.descriptors} descriptors and has {after.descriptors}")
    return found


# ---------------------------------------------------------------------- trainings


def _train(connection: Any, case: Case, number: int, end: float) -> None:
    torch.set_num_threads(1)
    part, common = case.part(number), case.common()
    data = Numbers() if case.folds[number] is None else Subset(Numbers(), part)
    plain = DataLoader(data, _BATCH_SIZES[number], shuffle=True, num_workers=2)
    share = {"name": _NAME, "linger_seconds": 1, "window": "4MiB", **case.joins}
    loader = EchoLoader(plain, 1, share=share, cache=case.cache, seed=number)
    while time.time() < end:
        indices, is_right, first = [], True, None
        of_index, of_noise = (hashlib.blake2b(digest_size=16) for _ in range(2))
        for batch in loader:
            index, noise = batch["index"], batch["noise"]
            indices += index.tolist()
            is_right &= torch.equal(batch["data"], (index % 251).to(torch.uint8)[:, None].expand(-1, 64))
            index, noise = index[common[index]], noise[common[index]]
            if first is None and len(index):
                first = int(index[0]), float(noise[0])
            of_index.update(index.numpy())
            of_noise.update(noise.numpy())
        digest = of_index.hexdigest() + of_noise.hexdigest()
        connection.send(Pass(number, first or (-1, 0.0), len(indices), sorted(indices) == part, is_right, digest))
    loader.close()


class _Trainings:
    """The trainings, each in a process of its own.

    Args:
        case: What they take.
        end: When they stop, in seconds since the epoch.
    """

    def __init__(self, case: Case, end: float) -> None:
        self._case, self._end, self._context = case, end, multiprocessing.get_context("spawn")
        self._running: dict[int, tuple[Any, Any]] = {}
        self._settled: set[int] = set()  # trainings whose process has had a pass
        self.passes: list[Pass] = []
        self.failures: list[str] = []
        for number in range(len(_BATCH_SIZES)):
            self._start(number)

    def _start(self, number: int) -> None:
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_train, args=(there, self._case, number, self._end))
        process.start()
        there.close()
        self._running[number] = process, here
        self._settled.discard(number)

    def kill(self, number: int) -> None:
        """Kills one as it can be killed at any time, and starts it again."""
        process, connection = self._running[number]
        process.kill()
        process.join()
        self._drain(connection)
        connection.close()
        self._start(number)

    def has_had_a_pass(self, number: int) -> bool:
        """Whether one has had a pass since it was started last."""
        return number in self._settled

    def hear(self) -> None:
        """Takes what they say."""
        for _, connection in self._running.values():
            self._drain(connection)

    def _drain(self, connection: Any) -> None:
        with suppress(EOFError, ConnectionError):  # killed, perhaps in the middle of a message
            while connection.poll():
                self.passes.append(connection.recv())
                self._settled.add(self.passes[-1].training)

    def samples(self) -> list[Sample]:
        """What they and the reader hold; nothing before each of them has had a pass."""
        if len(self._settled) < len(self._running):
            return []
        pids = {f"training {number}": process.pid for number, (process, _) in self._running.items()}
        if (said := status_of(_NAME)) is not None:
            pids[f"reader {said['pid']}"] = said["pid"]
        found = []
        for who, pid in pids.items():
            with suppress(OSError):  # it ends just now
                status = Path(f"/proc/{pid}/status").read_text()
                rss = int(status.split("VmRSS:")[1].split()[0]) * 1024
                found.append(Sample(who, rss, len(os.listdir(f"/proc/{pid}/fd"))))
        return found

    def join(self) -> None:
        """Waits for their end."""
        for number, (process, connection) in self._running.items():
            deadline = time.monotonic() + _MOST_END_SECONDS
            while process.is_alive() and time.monotonic() < deadline:
                self._drain(connection)
                process.join(0.1)
            self._drain(connection)
            if process.exitcode != 0:
                self.failures.append(f"training {number} ended with {process.exitcode}")
            process.kill()


def soak(case: Case, minutes: float, seed: int = 0) -> tuple[dict[str, Any], list[str]]:
    """Runs one case.

    Args:
        case: What the trainings take.
        minutes: For how long.
        seed: Of who is killed when.

    Returns:
        What came of it, by name, and what failed.
    """
    generator, began = random.Random(seed), time.time()
    end = began + 60 * minutes
    trainings, killer, samples = _Trainings(case, end), _Killer(generator), list[Sample]()
    next_kill, next_sample = began + 5, began
    while (now := time.time()) < end:
        trainings.hear()
        is_killing = now - began < _KILLING * (end - began)
        if is_killing and now >= next_kill:
            killer.kill_one(trainings)
            next_kill = now + generator.uniform(2, 8)
            had = sum(each.examples for each in trainings.passes)
            progress(f"{case.name}: {end - now:.0f} s left, {had:,} examples, killed: {killer.kills}")
        if not is_killing and now >= next_sample:
            samples += trainings.samples()
            next_sample = now + _BETWEEN_SAMPLES_SECONDS
        time.sleep(0.05)
    trainings.join()
    left = _left_over()
    failures = [*trainings.failures, *wrong_passes(trainings.passes), *growth(samples), *left]
    attended = [sum(each.training == number for each in trainings.passes) for number in range(len(_BATCH_SIZES))]
    both = len(trainings.passes) - len({each.first for each in trainings.passes})
    if not both:
        failures.append("no two trainings have attended the same pass")
    found = {
        "minutes": minutes,
        "examples delivered": sum(each.examples for each in trainings.passes),
        "passes attended by each training": ", ".join(map(str, attended)),
        "passes that another training had, too": both,
        **{f"times that {who} was killed": count for who, count in killer.kills.items()},
        "samples of memory and descriptors": len(samples),
        "failures": len(failures),
        "passed": verdict(not failures),
    }
    return found, [f"{case.name}: {failure}" for failure in failures]


class _Killer:
    """Kills trainings, readers and workers of readers, and counts them."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._first: dict[int, int] = {}  # the item that all trainings had reached when a reader was seen first, by its process
        self.kills = {"a training": 0, "the reader": 0, "a worker": 0}

    def kill_one(self, trainings: _Trainings) -> None:
        victim, said = self._generator.choice(["a training", "the reader", "a worker"]), status_of(_NAME)
        # If readers die twice at one item, that is an error of the trainings: the items of this reader must have been taken.
        has_read = said is not None and said["low"] > self._first.setdefault(said["pid"], said["low"])
        if said is not None and has_read and victim != "a training":
            pids = [said["pid"]] if victim == "the reader" else children_of(said["pid"])
            if pids:
                with suppress(ProcessLookupError):
                    os.kill(self._generator.choice(pids), signal.SIGKILL)
                self.kills[victim] += 1
                return
        number = self._generator.randrange(len(_BATCH_SIZES))
        if trainings.has_had_a_pass(number) or self._generator.random() < _WHILE_IT_BEGINS:
            trainings.kill(number)
            self.kills["a training"] += 1


def children_of(pid: int) -> list[int]:
    """Returns the processes that a process has started, which for a reader are its workers."""
    found = list[int]()
    with suppress(OSError):  # it ends just now
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def _left_over() -> list[str]:
    """Says which readers and other processes are there that should have ended. A socket of one that was killed may be left."""
    deadline = time.monotonic() + _MOST_END_SECONDS
    while (left := _readers() + _orphans()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"{each} is still there" for each in left]


def _readers() -> list[str]:
    return [f"the reader of {name!r}" for name in names() if status_of(name) is not None]


def _orphans() -> list[str]:
    """Says which processes have lost their parent and look into the folder of this run. Those of a killed training end, too."""
    folder, found = os.environ["LIGHTNING_ECHO_SHARED"].encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ends just now
            is_of_run = b"LIGHTNING_ECHO_SHARED=" + folder in (path / "environ").read_bytes().split(b"\0")
            if is_of_run and int((path / "stat").read_text().rpartition(")")[2].split()[1]) == 1:
                found.append(f"process {path.name}, whose parent has ended,")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of who is killed when")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    found, failures = [], []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["LIGHTNING_ECHO_SHARED"] = folder
            came, failed = soak(case, options.minutes / len(CASES), options.seed)
        found.append(came)
        failures += failed
    text = f"three trainings, batches of {', '.join(map(str, _BATCH_SIZES))}, passes of {_LENGTH:,} small examples"
    rows = [(what, *(came[what] for came in found)) for what in found[0]]
    table = Table("sharing_soak", text, ("what", *(case.name for case in CASES)), rows)
    table.print()
    where = machine(f"--minutes {options.minutes:g} --seed {options.seed}", load)
    for each in (table, Table("sharing_soak_machine", where.text, where.columns, where.rows)):
        each.write(options.results)
    for failure in failures[:50]:
        print(failure, file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
