"""A Ray cluster of several nodes on this machine, and trainings on it.

A simulated node has a raylet of its own, and a folder of its own for the sockets of readers (``LIGHTNING_ECHO_SHARED``): real
nodes have their own machines. The head has no CPUs, so that nothing runs on it. Readers join the cluster by the raylet of the
head, since Ray chooses that one among several on a machine.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from lightning.pytorch import LightningModule
from ray.cluster_utils import Cluster
from sharing_runs import Numbers, epochs_of, kill_reader, loader_of, status, wait_until
from torch.utils.data import get_worker_info

from lightning_echo.share.config import names

STORE_BYTES = 100 * 2**20
HERE = Path(__file__).parent
SILENT = {"RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}


class Nodes:
    """A cluster that has begun; each node has a folder of its name in a folder."""

    def __init__(self, folder: Path, cluster: Any) -> None:
        self._folder, self._cluster, self._nodes = folder, cluster, dict[str, Any]()

    def add(self, name: str, cpus: int) -> None:
        self.folder(name).mkdir(mode=0o700)
        own = {"LIGHTNING_ECHO_SHARED": str(self.folder(name))}
        options = {"num_cpus": cpus, "resources": {name: 100}, "object_store_memory": STORE_BYTES, "env_vars": own}
        self._nodes[name] = self._cluster.add_node(**options)

    def folder(self, name: str) -> Path:
        """The folder for the sockets of a node."""
        return self._folder / name

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Looks at the readers of a node in this process."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LIGHTNING_ECHO_SHARED", str(self.folder(name)))
            yield

    def log(self, name: str, share: str) -> str:
        """The log of the latest reader of a node."""
        return (self.folder(name) / f"{share}.log").read_text()

    def status(self, name: str, share: str) -> dict[str, Any] | None:
        """What the reader of a node says of itself; None if there is none now."""
        with self.on(name):
            try:
                return status(share)
            except (ConnectionError, FileNotFoundError, TimeoutError):
                return None

    def written(self, share: str, *names: str) -> int:
        """How many items each of these nodes has in its window, or had: the least of them."""
        return min((self.status(name, share) or {"written": 0})["written"] for name in names)

    def kill_reader(self, name: str, share: str) -> int:
        """Kills the reader of a node; returns its process number."""
        with self.on(name):
            return kill_reader(share)

    def leave(self, name: str, *, is_told: bool = False) -> None:
        """Takes a node out of the cluster, with all that Ray has there. Ray is told to end if it ``is_told``, else killed."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=is_told)

    def lose(self, name: str, share: str) -> None:
        """Lets a machine fail: the reader, and all that Ray has there."""
        reader = self.status(name, share)
        assert reader is not None
        self.leave(name)
        os.kill(reader["pid"], signal.SIGKILL)

    def end_readers(self) -> None:
        """Ends the readers of all nodes."""
        for folder in self._folder.iterdir():
            with self.on(folder.name):
                for share in names():
                    try:
                        kill_reader(share)
                    except (ConnectionError, FileNotFoundError, TimeoutError, ProcessLookupError):
                        continue


@contextmanager
def cluster_of(folder: Path, nodes: dict[str, int], **variables: str) -> Iterator[Nodes]:
    """Gives a cluster of these nodes (names, and CPUs of each), which this process has joined."""
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        root = HERE.parents[1]
        paths = [root, HERE, root / "tests" / "unit" / "helpers", *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
        for name, value in {**SILENT, **variables}.items():
            patch.setenv(name, value)
        patch.delenv("LIGHTNING_ECHO_SHARED", raising=False)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES})
        found = Nodes(folder, cluster)
        try:
            for name, cpus in nodes.items():
                found.add(name, cpus)
            ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
            yield found
        finally:
            found.end_readers()
            ray.shutdown()
            cluster.shutdown()


class Noted(Numbers):
    """Notes each read by a worker of a reader: the index, and the node. What a training looks at before it is not noted."""

    def __init__(self, length: int, log: Path, seconds: float = 0.0) -> None:
        super().__init__(length, seconds)
        self.log = log

    def __getitem__(self, index: int) -> dict[str, Any]:
        if get_worker_info() is not None and b"lightning_echo.share." in Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
            with self.log.open("a") as file:
                file.write(f"{index} {Path(os.environ['LIGHTNING_ECHO_SHARED']).name}\n")
        return super().__getitem__(index)


def reads(log: Path) -> list[tuple[int, str]]:
    """What was read, and on which node."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(int(index), node) for index, node in lines]


@ray.remote(num_cpus=0.5, max_retries=0)
def trains(dataset: Any, batch_size: int, epochs: int, pause: float, gate: Path | None, share: dict[str, Any]) -> list[Any]:
    """What a training on a node delivers: for each epoch its batches."""
    torch.set_num_threads(1)
    loader = loader_of(dataset, batch_size, **share)

    def before_batch() -> None:
        wait_until(lambda: gate is None or gate.exists(), "the gate is open")
        time.sleep(pause)

    try:
        return epochs_of(loader, epochs, before_batch)
    finally:
        loader.close()


def training(
    node: str, dataset: Any, batch_size: int, epochs: int = 3, *, pause: float = 0.0, gate: Path | None = None, **share: Any
) -> Any:
    """Begins a training on a node, which pauses before each batch and waits for a gate; returns what `ray.get` takes."""
    return trains.options(resources={node: 1}).remote(dataset, batch_size, epochs, pause, gate, share)


class Recording(LightningModule):
    """Notes the indices of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.epochs = torch.nn.Linear(1, 1), list[list[int]]()

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.epochs[-1] += batch["index"].tolist()
        loss = self.layer(batch["noise"][:, None]).sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
