"""Workers on other machines: one training fed by its reader's own two workers and by Ray actors (``cluster_workers``).

The cluster is simulated on this machine: a head without processors, and two nodes of eight, each with a raylet of its own. All
share the real cores and the loopback network. So these figures show what the way through Ray costs, not what a network does.
These rules were fixed before the first run:

* `cluster`: a source that sleeps 20 ms an example, of 150 KB, so that two cores are enough for sixteen actors. 0, 4, 8 and 16
  actors in turn, several rounds. The rate is measured over some seconds, when all actors are at work, each time over as many
  batches as there are workers, since these may all come at once. ``n`` workers in all are linear if they give ``n / 2`` times the
  rate of the two alone in the same round. The median must be at least 0.9 of that.
* Beside it, in the same rounds, with so many workers and not the two of the training, over a source that sleeps as long: Ray Data
  over the same data set (``map_batches``, ``iter_torch_batches``; its input are indices that are there, since reading them would
  take a CPU from the actors), and tf.data service (a dispatcher and the workers, each a process of its own; dynamic sharding; a
  worker makes whole batches, and sleeps in TensorFlow's own code, in one thread). TensorFlow is that of ``.venv-peers``: where it
  is missing the cells say "not installed", and if it dies or hangs they say that. Nothing is required of either.
* `cluster_costs`: JPEG files that make an example of 150 KB. Processor time of an example, of all processes together, with two
  workers here, and with one worker here and two actors. What an example through an actor takes more must be at most 0.5 ms. Then
  the same with examples that cost nothing: the most that one reader takes in. And arrays of 128 examples that an actor sends, and
  nobody looks at: what Ray alone takes to carry an example.
* `cluster_first`: seconds from the start of the loader to its first batch, with 0 and 4 actors.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import Cell, Table, progress, verdict
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
_MOST_BEGINNING_SECONDS = 300.0
_COLUMNS = (
    *("actors", "workers in all", "examples/s", "of linear", "lowest", "required"),
    *("Ray Data, examples/s", "Ray Data, of linear", "tf.data service, examples/s", "tf.data service, of linear", "passed"),
)
_QUIET = {
    **{"RAY_DEDUP_LOGS": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
    **{"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"},  # nobody else uses this cluster
}
_NO_TOKENS = ".*sends examples through a Ray cluster without tokens"
_HERE = Path(__file__).resolve().parent
_PEERS = _HERE.parent / ".venv-peers"  # has TensorFlow; `make peers` makes it
_MOST_TENSORFLOW_SECONDS = 180.0  # beside those that are measured: up to seventeen processes start
_RAY_DATA_BATCHES = 1000


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
    import ray
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ.update(_QUIET)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": _STORE_BYTES})
    try:
        for _ in range(_NODES):
            cluster.add_node(num_cpus=_CPUS, object_store_memory=_STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _NO_TOKENS, UserWarning)
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
        self._workers = workers + actors
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
        return _rate(self._batches, self._workers, seconds)

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


def _rate(batches: Iterator[Any], workers: int, seconds: float) -> float:
    """Examples a second, over as many batches as there are workers each time."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(workers):
            next(batches)
            count += BATCH_SIZE
    return count / (time.perf_counter() - began)


def _cpu_seconds(reader: int) -> float:
    """Processor seconds of this process, of the reader, of all their processes, and of all that Ray has started."""
    import psutil  # the other benchmarks do without it

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
    ours: dict[int, list[float]] = {each: [] for each in numbers}
    others: dict[str, dict[int, list[float | str]]] = {name: {each: [] for each in numbers if each} for name in _OTHERS}
    for number in range(rounds):
        for actors in numbers:
            progress(f"cluster, round {number + 1}: {actors} actors")
            training = _Training(Images(_SLEEP_SECONDS), actors)
            ours[actors].append(training.rate(seconds))
            training.close()
            for name, rate in _OTHERS.items() if actors else ():
                progress(f"cluster, round {number + 1}: {name}, {actors} workers")
                others[name][actors].append(rate(actors, seconds))
    rows = rows_of(ours, *others.values())
    tensorflow = _version_of_tensorflow()
    text = (
        f"examples/s of one training with {WORKERS} workers here and so many actors; a source that sleeps "
        f"{1e3 * _SLEEP_SECONDS:g} ms, examples of {IMAGE_BYTES:,} bytes, batch {BATCH_SIZE}; as a share of linear, from "
        f"{WORKERS} workers alone in the same round; Ray Data (Ray {version('ray')}) and tf.data service "
        f"({f'TensorFlow {tensorflow}' if tensorflow else 'not installed'}) with so many workers, and not the {WORKERS} here; "
        "medians of the rounds"
    )
    return Table("cluster", text, _COLUMNS, rows)


def rows_of(ours: dict[int, list[float]], *others: dict[int, list[float | str]]) -> list[tuple[Cell, ...]]:
    """Returns the rows of the table, from the rates of each round by the number of actors. Words say why one has no rate."""
    rows: list[tuple[Cell, ...]] = []
    for actors, rates in ours.items():
        shares = _shares(rates, ours[0], WORKERS + actors)
        share = statistics.median(shares)
        theirs = [cell for other in others for cell in _cells(other.get(actors, []), ours[0], actors)]
        passed = verdict(share >= _LEAST_OF_LINEAR) if actors else "yes"
        required = f">= {_LEAST_OF_LINEAR}" if actors else ""
        rows.append((actors, WORKERS + actors, statistics.median(rates), share, min(shares), required, *theirs, passed))
    return rows


def _cells(rates: Sequence[float | str], alone: list[float], workers: int) -> tuple[Cell, Cell]:
    """The median of another one's rates and its share of linear. One round without a rate leaves only the words for that."""
    said = [each for each in rates if isinstance(each, str)]
    if said or not rates:
        return "".join(said[:1]), ""
    numbers = [float(each) for each in rates]
    return statistics.median(numbers), statistics.median(_shares(numbers, alone, workers))


def _shares(rates: list[float], alone: list[float], workers: int) -> list[float]:
    """What linear is follows from the two workers alone in the same round."""
    return [rate / (one * workers / WORKERS) for rate, one in zip(rates, alone, strict=True)]


def _ray_data_rate(actors: int, seconds: float) -> float:
    """Examples a second of Ray Data's own way, with so many actors that read the same data set."""
    import ray
    from ray.data import ActorPoolStrategy, DataContext

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.wait_for_min_actors_s = round(_MOST_BEGINNING_SECONDS)  # for all actors: those that have begun would be measured
    dataset = Images(_SLEEP_SECONDS)

    class Reads:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"image": np.stack([dataset[int(index)].numpy() for index in batch["item"]])}

    indices = ray.data.from_items(list(range(_RAY_DATA_BATCHES * BATCH_SIZE)), override_num_blocks=_RAY_DATA_BATCHES)
    images = indices.map_batches(Reads, batch_size=BATCH_SIZE, compute=ActorPoolStrategy(size=actors), num_cpus=1)
    batches = iter(images.iter_torch_batches(batch_size=BATCH_SIZE, prefetch_batches=4))
    for _ in range(2 * actors + 4):
        next(batches)
    rate = _rate(batches, actors, seconds)
    del batches
    return rate


def tensorflow_rate(workers: int, seconds: float) -> float | str:
    """Examples a second of tf.data service, with so many workers; or why there is none."""
    if not _version_of_tensorflow():
        return "not installed"
    options = {"workers": workers, "seconds": seconds, "sleep_seconds": _SLEEP_SECONDS}
    options |= {"example_bytes": IMAGE_BYTES, "batch_size": BATCH_SIZE}
    command = [str(_PEERS / "bin" / "python"), str(_HERE / "cluster_tf.py"), json.dumps(options)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            found, said = process.communicate(timeout=seconds + _MOST_TENSORFLOW_SECONDS)
        except subprocess.TimeoutExpired:
            return "hung"
        finally:
            with suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        return f"died: {(said.strip().splitlines() or ['without a word'])[-1][:120]}"
    return float(found.splitlines()[-1])


def _version_of_tensorflow() -> str:
    """Empty if it is not installed."""
    folders = [str(folder) for folder in _PEERS.glob("lib/python*/site-packages")]
    found = [each.version for name in ("tensorflow-cpu", "tensorflow") for each in distributions(name=name, path=folders)]
    return found[0] if found else ""


_OTHERS: dict[str, Callable[[int, float], float | str]] = {"Ray Data": _ray_data_rate, "tf.data service": tensorflow_rate}


_ARRAY = 128  # examples that an actor sends at most for one call


def _ray_alone(seconds: float) -> float:
    """Processor seconds of an example, of all processes together, if an actor sends arrays and this process only gets them."""
    import psutil
    import ray

    @ray.remote(num_cpus=1)
    class Sends:
        def __init__(self) -> None:
            self.array = np.ones(_ARRAY * IMAGE_BYTES, np.uint8)

        def send(self) -> Any:
            return self.array

    actor = Sends.remote()
    ray.get(actor.send.remote())
    asked = [actor.send.remote() for _ in range(2)]
    before, start, count = _cpu_seconds(psutil.Process().pid), time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        ray.get(asked.pop(0))
        asked.append(actor.send.remote())
        count += _ARRAY
    spent = _cpu_seconds(psutil.Process().pid) - before
    ray.kill(actor)
    return spent / count


def _costs(folder: str, rounds: int, seconds: float) -> Table:
    jpegs, free = Jpegs(folder), Images()
    here, more, most, bare = list[float](), list[float](), list[float](), list[float]()
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
        bare.append(1e3 * _ray_alone(seconds))
    extra, rate = statistics.median(more), statistics.median(most)
    rows = [
        ("processor time of an example, two workers here, ms", statistics.median(here), "", "yes"),
        ("more, through an actor, ms", extra, f"<= {_MOST_MORE_MS}", verdict(extra <= _MOST_MORE_MS)),
        ("of it, by Ray alone, which only carries the bytes, ms", statistics.median(bare), "", "yes"),
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
