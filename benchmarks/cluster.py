"""Workers on other machines: one training fed by its reader's own two workers and by Ray actors (``cluster_workers``).

The cluster is simulated on this machine: a head without processors, and two nodes of eight, each with a raylet of its own. All
share the real cores and the loopback network. So these figures show what the way through Ray costs, not what a network does.
These rules were fixed before the first run:

* `cluster`: a source that sleeps 20 ms an example, of 150 KB, so that two cores are enough for sixteen actors. 0, 4, 8 and 16
  actors in turn, several rounds. The rate is measured over some seconds, when all actors are at work. ``n`` workers in all are
  linear if they give ``n / 2`` times the rate of the two alone in the same round. The median must be at least 0.9 of that. Beside
  it, in the same rounds: Ray Data over the same data set, with so many actors (``map_batches``, ``iter_torch_batches``).
* `cluster_costs`: JPEG files that make an example of 150 KB. Processor time of an example, of all processes together, with two
  workers here, and with one worker here and two actors. What an example through an actor takes more must be at most 0.5 ms. Then
  the same with examples that cost nothing: the most that one reader takes in.
* `cluster_first`: seconds from the start of the loader to its first batch, with 0 and 4 actors.
"""

from __future__ import annotations

import io
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import psutil
import torch
from report import Table, progress, verdict
from sharing import in_own_folder
from torch.utils.data import DataLoader, Dataset
from workloads import BATCH_SIZE, IMAGE_BYTES, WORKERS, Images

from lightning_echo import EchoLoader
from lightning_echo.share.sharing import status_of

_SLEEP_SECONDS = 0.02
_ACTORS = (0, 4, 8, 16)
_LEAST_OF_LINEAR, _MOST_MORE_MS = 0.9, 0.5
_NODES, _CPUS = 2, 8
_STORE_BYTES = 2**28
_MOST_BEGINNING_SECONDS = 120.0
_COLUMNS = (
    *("actors", "workers in all", "examples/s", "of linear", "lowest", "required"),
    *("Ray Data, examples/s", "its share of linear", "passed"),
)
_QUIET = {"RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}


class Jpegs(Dataset[torch.Tensor]):
    """Images of 224 x 224, decoded from the bytes of a file: 150 KB each."""

    def __init__(self, folder: str, files: int = 64, length: int = 100_000) -> None:
        from PIL import Image

        self.length, self.paths = length, [os.path.join(folder, f"{number}.jpg") for number in range(files)]
        pixels = np.random.default_rng(0)
        for path in self.paths:
            coarse = pixels.integers(0, 255, (28, 28, 3), np.uint8)
            Image.fromarray(coarse).resize((224, 224)).save(path, quality=90)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        from PIL import Image

        with open(self.paths[index % len(self.paths)], "rb") as file:
            return torch.from_numpy(np.asarray(Image.open(io.BytesIO(file.read())).convert("RGB")).copy())


@contextmanager
def _cluster() -> Iterator[None]:
    """A cluster on this machine, which this process has joined by the node that has no processors."""
    if find_spec("ray") is None:
        raise SystemExit("this benchmark needs Ray, which is not installed: pip install 'lightning-echo[ray]'")
    import ray
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ.update(_QUIET)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": _STORE_BYTES})
    try:
        for _ in range(_NODES):
            cluster.add_node(num_cpus=_CPUS, object_store_memory=_STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


class _Training:
    """A training with so many actors. ``first_seconds`` is the time to its first batch."""

    def __init__(self, dataset: Any, actors: int, workers: int = WORKERS, window: str = "256MiB") -> None:
        self._name = f"bench-{time.monotonic_ns()}"
        share: dict[str, Any] = {"name": self._name, "cluster": "ray", "linger_seconds": 0, "window": window}
        if actors:
            share["cluster_workers"] = actors
        began = time.perf_counter()
        self.loader = EchoLoader(DataLoader(dataset, BATCH_SIZE, num_workers=workers), 1, share=share, seed=0)
        self._batches = iter(self.loader)
        next(self._batches)
        self.first_seconds = time.perf_counter() - began
        end = time.monotonic() + _MOST_BEGINNING_SECONDS
        while sum(each["examples"] > 0 for each in self.status["cluster"]) < actors:
            next(self._batches)
            if time.monotonic() > end:
                raise SystemExit(f"{actors} actors have not begun within {_MOST_BEGINNING_SECONDS:g} s: {self.status['cluster']}")

    @property
    def status(self) -> dict[str, Any]:
        found = status_of(self._name)
        assert found is not None, "the reader is there"
        return found

    @property
    def from_actors(self) -> int:
        return sum(each["examples"] for each in self.status["cluster"])

    def rate(self, seconds: float) -> float:
        """Examples a second."""
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            next(self._batches)
            count += BATCH_SIZE
        return count / (time.perf_counter() - began)

    def cpu_per_example(self, seconds: float) -> tuple[float, float, float]:
        """Processor seconds of an example, of all processes together; the share of the actors; examples a second."""
        reader, before, began = self.status["pid"], _cpu_seconds(self.status["pid"]), self.from_actors
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            next(self._batches)
            count += BATCH_SIZE
        passed, far = time.perf_counter() - start, self.from_actors - began
        return (_cpu_seconds(reader) - before) / count, min(far / count, 1.0), count / passed

    def close(self) -> None:
        self.loader.close()


def _cpu_seconds(reader: int) -> float:
    """Processor seconds of this process, of the reader, of all their processes, and of all that Ray has started."""
    roots = [psutil.Process(), psutil.Process(reader)]
    processes = {each.pid: each for root in roots for each in (root, *root.children(recursive=True))}
    total = 0.0
    for process in processes.values():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


@in_own_folder
def cluster(quick: bool) -> list[Table]:
    rounds, seconds, numbers = (1, 3.0, (0, 4)) if quick else (3, 10.0, _ACTORS)
    with _cluster(), tempfile.TemporaryDirectory() as folder:
        return [_rates(rounds, seconds, numbers), _costs(folder, rounds, seconds), _first(rounds)]


def _rates(rounds: int, seconds: float, numbers: tuple[int, ...]) -> Table:
    found: dict[str, dict[int, list[float]]] = {"ours": {each: [] for each in numbers}, "ray": {each: [] for each in numbers}}
    for number in range(rounds):
        for actors in numbers:
            progress(f"cluster, round {number + 1}: {actors} actors")
            training = _Training(Images(_SLEEP_SECONDS), actors)
            found["ours"][actors].append(training.rate(seconds))
            training.close()
            if actors:
                progress(f"cluster, round {number + 1}: Ray Data, {actors} actors")
                found["ray"][actors].append(_ray_data_rate(Images(_SLEEP_SECONDS), actors, seconds))
    rows = rows_of(found["ours"], found["ray"])
    text = (
        f"examples/s of one training with {WORKERS} workers here and so many actors; a source that sleeps "
        f"{1e3 * _SLEEP_SECONDS:g} ms, examples of {IMAGE_BYTES:,} bytes, batch {BATCH_SIZE}; as a share of linear, from "
        f"{WORKERS} workers alone in the same round; Ray Data with so many actors, and not the two workers; medians of the rounds"
    )
    return Table("cluster", text, _COLUMNS, rows)


def rows_of(ours: dict[int, list[float]], ray_data: dict[int, list[float]]) -> list[tuple[Any, ...]]:
    """Returns the rows of the table, from the rates of each round by the number of actors."""
    rows = []
    for actors, rates in ours.items():
        workers = WORKERS + actors
        shares = sorted(rate / (alone * workers / WORKERS) for rate, alone in zip(rates, ours[0], strict=True))
        share = statistics.median(shares)
        of_ray = [rate / (alone * actors / WORKERS) for rate, alone in zip(ray_data[actors], ours[0], strict=False)]
        theirs: tuple[Any, Any] = (statistics.median(ray_data[actors]), statistics.median(of_ray)) if of_ray else ("", "")
        passed = verdict(share >= _LEAST_OF_LINEAR) if actors else "yes"
        rows.append((actors, workers, statistics.median(rates), share, shares[0], f">= {_LEAST_OF_LINEAR}", *theirs, passed))
    return rows


def _ray_data_rate(dataset: Images, actors: int, seconds: float) -> float:
    """Examples a second of Ray Data's own way, with so many actors that read the same data set."""
    import ray
    from ray.data import ActorPoolStrategy, DataContext

    DataContext.get_current().enable_progress_bars = False

    class Reads:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"image": np.stack([dataset[int(index)].numpy() for index in batch["id"]])}

    rows = ray.data.range(100_000, override_num_blocks=400).map_batches(
        Reads, batch_size=BATCH_SIZE, compute=ActorPoolStrategy(size=actors), num_cpus=1
    )
    batches = iter(rows.iter_torch_batches(batch_size=BATCH_SIZE, prefetch_batches=4))
    for _ in range(2 * actors + 4):
        next(batches)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        count += len(next(batches)["image"])
    rate = count / (time.perf_counter() - began)
    del batches
    return rate


def _costs(folder: str, rounds: int, seconds: float) -> Table:
    jpegs, free = Jpegs(folder), Images()
    here, more, most = list[float](), list[float](), list[float]()
    for number in range(rounds):
        progress(f"cluster, costs, round {number + 1}")
        training = _Training(jpegs, 0)
        alone, _, _ = training.cpu_per_example(seconds)
        training.close()
        training = _Training(jpegs, 2, workers=1)
        both, share, _ = training.cpu_per_example(seconds)
        training.close()
        here.append(1e3 * alone)
        more.append(1e3 * (both - alone) / share)
        training = _Training(free, 4, workers=1)
        _, share, rate = training.cpu_per_example(seconds)
        training.close()
        most.append(rate * share)
    extra, rate = statistics.median(more), statistics.median(most)
    rows = [
        ("processor time of an example, two workers here, ms", statistics.median(here), "", "yes"),
        ("more, through an actor, ms", extra, f"<= {_MOST_MORE_MS}", verdict(extra <= _MOST_MORE_MS)),
        ("the most from actors, examples/s", rate, "", "yes"),
        ("the most from actors, MB/s", rate * IMAGE_BYTES / 1e6, "", "yes"),
    ]
    text = (
        f"JPEG files of 224 x 224 pixels: processor time of an example ({IMAGE_BYTES:,} bytes), of all processes of the "
        "training, its reader and the simulated cluster; and examples that cost nothing, from four actors; medians of the rounds"
    )
    return Table("cluster_costs", text, ("figure", "value", "required", "passed"), rows)


def _first(rounds: int) -> Table:
    rows: list[tuple[Any, ...]] = []
    for actors in (0, 4):
        found = []
        for _ in range(rounds):
            progress(f"cluster, first batch, {actors} actors")
            training = _Training(Images(_SLEEP_SECONDS), actors)
            found.append(training.first_seconds)
            training.close()
        rows.append((actors, statistics.median(found), min(found), max(found)))
    text = "seconds from the start of the loader to its first batch, the start of the reader and of the actors in it"
    return Table("cluster_first", text, ("actors", "seconds", "lowest", "highest"), rows)
