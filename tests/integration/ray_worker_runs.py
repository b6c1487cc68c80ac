"""Trainings whose reader has workers on other nodes: data that notes who reads it, and what local workers alone deliver."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray._private.state
import torch
from ray_runs import Nodes
from sharing_cache_runs import Shots, Together
from sharing_runs import Numbers, examples, rows, wait_until
from torch.utils.data import DataLoader, get_worker_info

from lightning_echo import EchoLoader

LENGTH = 240
NAME = "far"  # the seed follows from it: all that have this name have the same order, and the same noise
SECONDS = 150  # nothing takes so long, unless it hangs


class Read(NamedTuple):
    """A line of a `Noted` data set."""

    index: int
    pid: int
    node: str
    is_actor: bool
    number: int
    workers: int
    seed: int
    threads: int
    is_own: bool  # ``get_worker_info().dataset`` is this data set


def is_actor() -> bool:
    """Whether this process is a worker on another node."""
    return Path("/proc/self/cmdline").read_bytes().startswith(b"ray::EchoWorker")


def is_comparing() -> bool:
    """Whether examples are read only to be compared with those of the training."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "another_example":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def note_read(log: Path, dataset: Any, index: Any) -> None:
    """Notes a read by a worker here or on another node: not what a training looks at, nor what is compared."""
    info = get_worker_info()
    on_actor = is_actor()
    if info is None or not (on_actor or b"lightning_echo.share." in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()):
        return
    if on_actor and is_comparing():
        return
    node = Path(os.environ["LIGHTNING_ECHO_SHARED"]).name
    own = getattr(info, "dataset", None) is dataset
    line = [index, os.getpid(), node, int(on_actor), info.id, info.num_workers, info.seed, torch.get_num_threads(), int(own)]
    with log.open("a") as file:
        file.write(" ".join(map(str, line)) + "\n")


def reads(log: Path) -> list[Read]:
    """What was read, by whom, in order."""
    if not log.exists():
        return []
    found = []
    for line in log.read_text().splitlines():
        index, pid, node, actor, *rest, own = line.split()
        number, workers, seed, threads = map(int, rest)
        found.append(Read(int(index), int(pid), node, actor == "1", number, workers, seed, threads, own == "1"))
    return found


def by_actors(log: Path) -> list[Read]:
    return [read for read in reads(log) if read.is_actor]


class Noted(Numbers):
    """`Numbers` that note who reads them."""

    def __init__(self, log: Path, seconds: float = 0.0, length: int = LENGTH) -> None:
        super().__init__(length, seconds)
        self.log = log

    def __getitem__(self, index: int) -> dict[str, Any]:
        note_read(self.log, self, index)
        return dict(super().__getitem__(index))


def note_start(log: Path, worker: int) -> None:
    """A ``worker_init_fn``: notes the process, and its number."""
    with log.open("a") as file:
        file.write(f"{os.getpid()} {worker}\n")


def far_loader(
    dataset: Any, batch_size: int, *, starts: Path | None = None, workers: int = 1, factor: Any = 1, **options: Any
) -> Any:
    """An `EchoLoader` of a training on a node of a cluster. ``share`` is among its ``options``."""
    share = {"name": NAME, "cluster": "ray", "linger_seconds": 1, "window": 2**16, **options.pop("share")}
    begins = None if starts is None else partial(note_start, starts)
    plain = DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=1, worker_init_fn=begins)
    return EchoLoader(plain, factor, share=share, seed=0, **options)


class NotedShots(Shots):
    """`Shots` that note who reads them, if there is a file for that."""

    def __init__(self, length: int, noted: Path | None = None, seconds: float = 0.0) -> None:
        super().__init__(length, seconds=seconds)
        self.noted = noted

    def read(self, index: int) -> Any:
        if self.noted is not None:
            note_read(self.noted, self, index)
        return super().read(index)


class NotedTogether(Together):
    """`Together` that notes who reads it."""

    def __init__(self, length: int, noted: Path | None = None, seconds: float = 0.0) -> None:
        super().__init__()
        self.inside = NotedShots(length, noted, seconds)

    def __len__(self) -> int:
        return len(self.inside)


class Trained(NamedTuple):
    """What a training has delivered."""

    epochs: list[list[Any]]  # the examples of each
    counts: Any
    cache_counts: Any
    error: str  # that ended it


@dataclass
class Run:
    """How a training runs. It pauses before each batch, and waits for the gate (a file) after each."""

    epochs: int = 3
    batches: int | None = None  # at most so many
    pause: float = 0.0
    gate: Path | None = None
    stop: Path | None = None  # if that file is there, the epoch is the last one
    state: Path | None = None  # after ``state_at`` batches the state is written there, with the process's number
    state_at: int = 0
    resumes: bool = False  # from there


@ray.remote(num_cpus=0.1, max_retries=0)
def trains_far(dataset: Any, batch_size: int, run: Run, options: dict[str, Any]) -> Trained:
    torch.set_num_threads(1)
    return trained(far_loader(dataset() if callable(dataset) else dataset, batch_size, **options), run)


def trained(loader: Any, run: Run) -> Trained:
    found, count, error = list[list[Any]](), 0, ""
    try:
        if run.resumes:
            assert run.state is not None
            loader.load_state_dict(torch.load(run.state, weights_only=False)["loader"])
        while len(found) < run.epochs and count != run.batches and not (run.stop is not None and run.stop.exists()):
            found.append([])
            for batch in loader:
                count += 1
                found[-1].append(rows(batch))
                if run.state is not None and count == run.state_at:
                    torch.save({"loader": loader.state_dict(), "pid": os.getpid()}, run.state.with_suffix(".new"))
                    run.state.with_suffix(".new").rename(run.state)
                time.sleep(run.pause)
                wait_until(lambda: run.gate is None or run.gate.exists(), "the gate is open")
                if count == run.batches:
                    break
        cache = loader.cache_counts if hasattr(loader, "cache_counts") else None
    except Exception as raised:
        error, cache = f"{type(raised).__name__}: {raised}", None
    finally:
        loader.close()
    return Trained([examples(epoch) for epoch in found], loader.counts, cache, error)


def far_training(
    node: str, dataset: Any, batch_size: int = 8, run: Run | None = None, options: dict[str, Any] | None = None, **share: Any
) -> Any:
    """Begins a training on a node; returns what `ray.get` takes. ``dataset`` is a data set, or makes it there."""
    given = {**(options or {}), "share": share}
    return trains_far.options(resources={node: 1}).remote(dataset, batch_size, run or Run(), given)


def delivered(training: Any) -> Trained:
    """What a training has delivered, in which nothing was raised."""
    found = ray.get(training, timeout=SECONDS)
    assert not found.error, found.error
    return found


def locally(nodes: Nodes, dataset: Any, batch_size: int, epochs: int, **options: Any) -> Trained:
    """What a training delivers whose reader has local workers alone: here, without a cluster."""
    folder = nodes.folder("oracle")
    folder.mkdir(mode=0o700, exist_ok=True)
    share = {"name": NAME, "cluster": None, **options.pop("share", {})}
    with nodes.on("oracle"):
        return trained(far_loader(dataset, batch_size, share=share, **options), Run(epochs))


# ---------------------------------------------------------------------- processes


def states_of_actors() -> dict[str, str]:
    """The states of the actors that the cluster knows, by their numbers: those with one CPU, which readers have asked for."""
    found = ray._private.state.actors()
    return {name: actor["State"] for name, actor in found.items() if actor["ActorClassName"].endswith("EchoWorker")}


def count_of_actors() -> int:
    """How many of them there are, also those that wait for a CPU."""
    return sum(state != "DEAD" for state in states_of_actors().values())


def actors(nodes: Nodes, *names: str) -> list[int]:
    """The processes of actors on these nodes (without any: on all) of this cluster, and of no other one on this machine."""
    folders = [str(nodes.folder(name)) for name in names] or [str(nodes.folder("x").parent)]
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(b"ray::EchoWorker"):
                variables = (entry / "environ").read_bytes().split(b"\0")
                where = [each[22:].decode() for each in variables if each.startswith(b"LIGHTNING_ECHO_SHARED=")]
                is_here = any(each == folder or Path(each).parent == Path(folder) for each in where for folder in folders)
                if is_here and b"State:\tZ" not in (entry / "status").read_bytes():
                    found.append(int(entry.name))
    return sorted(found)


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
