"""One rank of a job on several nodes, or the process that starts all ranks.

It is run by ``python nodes_runs.py FOLDER STRATEGY NODES DEVICES SCENARIO ...``.

Each rank writes what it saw in a scenario to ``FOLDER/SCENARIO-rank-R.pt``. It writes at the end of training, since with some
strategies the process that has called ``fit`` is none of the ranks; what that one has then is in ``SCENARIO-parent.pt``.
Checkpoints are ``step-N.ckpt`` in the folder. ``resumed`` takes that of the folder that ``CHECKPOINTS`` names, if it is set.

A scenario is a function named ``scenario_...``. All ranks run the chosen ones in the same order.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from idle_runs import Sleeper, Sleeping
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.multiprocessing.spawn import ProcessException
from torch.utils.data import DataLoader
from trainer_runs import Data, Killed, Recorder, SaveAt, Scans, trainer

from lightning_echo import Controller, EchoCallback, EchoConfig
from lightning_echo.measure.control import Decision, Observation, Reason

LENGTH, BATCH_SIZE = 61, 4  # odd: DistributedSampler fills the last places up
EPOCHS, SAVED = 8, 10  # the checkpoint is that of a step within an epoch, and within a pass
FACTORS = (1.5, 2.0)  # in turn, as rank 0 decides
STRATEGIES: Mapping[str, Any] = {
    "model_parallel_4x1": lambda: ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1),
    "model_parallel_2x2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2),
}


class Cards(Scans):
    """The same examples in every process; counts the reads of this one."""

    def __init__(self) -> None:
        super().__init__(LENGTH)
        self.reads = [0] * LENGTH

    def read(self, index: Any) -> Any:
        self.reads[index] += 1
        return f"{index} 0".encode()


class Deck(Data):
    """A data module with `Cards`."""

    def __init__(self) -> None:
        super().__init__(batch_size=BATCH_SIZE)
        self.cards = Cards()

    def train_dataloader(self) -> Any:
        return DataLoader(self.cards, self.batch_size, shuffle=True)


class OneTensor(Recorder):
    """A model whose weights are one tensor.

    From the second step on, DDP sends several tensors in another order than in the first step. Gloo then adds up the gradients of
    three or more ranks in another order, which may round the sum differently. So the weights of a resumed run, with any loader,
    may differ in their last bits, unless there is nothing to reorder.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.constant_(self.layer.weight, 0.5)


class Sharded(Recorder):
    """A model whose weights are divided among the data-parallel ranks, by PyTorch's FSDP2."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard  # not in the oldest torch

        if not isinstance(self, FSDPModule):
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            fully_shard(self.layer, mesh=mesh)
            fully_shard(self, mesh=mesh)


class OfRank(Controller):
    """Decides by the epoch, and otherwise on each rank."""

    def __init__(self) -> None:
        self.shown: list[tuple[Any, ...]] = []

    def decide(self, observation: Observation) -> Decision:
        rank = torch.distributed.get_rank()
        self.shown.append((observation.epoch, observation.batches, observation.steps, observation.idle_fraction))
        return Decision(FACTORS[(observation.epoch + 1) % 2] + rank / 10, Reason.custom, f"of rank {rank}")


class Witness(pl.Callback):
    """Writes what a rank saw."""

    def __init__(self, path: Path, said: list[warnings.WarningMessage]) -> None:
        self.path, self.said = path, said

    def on_train_end(self, trainer: pl.Trainer, model: Any) -> None:
        echo: Any = next(callback for callback in trainer.callbacks if isinstance(callback, EchoCallback))  # type: ignore[attr-defined]
        loader: Any = trainer.train_dataloader
        loader.close()
        torch.distributed.barrier()  # no worker of any rank adds to a cache from here on
        cache = loader.cache_counts
        torch.distributed.barrier()
        found = {
            "batches": model.batches,
            "steps": model.steps,
            "weights": [_whole(each).flatten().tolist() for each in model.parameters()],
            "fresh": loader.counts.fresh,
            "reports": [report.state() for report in echo.reports],
            "shown": echo.controller.shown,
            "cache": None if cache is None else (cache.examples, cache.bytes, cache.hits, cache.misses),
            "reads": loader.loader.dataset.reads,
            "share": trainer.distributed_sampler_kwargs,
            "place": (trainer.node_rank, trainer.local_rank, type(trainer.strategy.cluster_environment).__name__),  # type: ignore[attr-defined]
            "said": [str(each.message) for each in self.said if "the state was saved" in str(each.message)],
        }
        torch.save(found, f"{self.path}-rank-{trainer.global_rank}.pt")


def _whole(parameter: Any) -> Any:
    """A parameter, or all of one that is divided among ranks."""
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


class Job(NamedTuple):
    """What the arguments say."""

    folder: Path
    strategy: str
    nodes: int
    devices: int

    def trainer(self, **options: Any) -> pl.Trainer:
        strategy = STRATEGIES.get(self.strategy, lambda: self.strategy)()
        return trainer(strategy=strategy, num_nodes=self.nodes, devices=self.devices, limit_val_batches=0, **options)

    def fit(self, name: str, *callbacks: Any, ckpt_path: Any = None, workers: int = 0, cache: Any = None, **options: Any) -> None:
        config = EchoConfig(FACTORS[0], "after_augmentation", seed=7, cache=cache)
        echo = EchoCallback(OfRank(), echo=config, summary=False)
        model = Sharded() if self.strategy.startswith("model_parallel") else OneTensor()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run = self.trainer(max_epochs=EPOCHS, callbacks=[echo, Witness(self.folder / name, said), *callbacks], **options)
            run.fit(model, datamodule=Deck(), ckpt_path=ckpt_path)
        if not torch.distributed.is_initialized():
            metrics = {name: float(value) for name, value in run.callback_metrics.items()}
            found = {"weights": [model.weights], "metrics": metrics, "reports": echo.reports, "batches": model.batches}
            torch.save(found, self.folder / f"{name}-parent.pt")


def scenario_whole(job: Job) -> None:
    job.fit("whole", logger=CSVLogger(job.folder, name="logs", version=""))


def scenario_killed(job: Job) -> None:
    """Leaves a checkpoint."""
    try:
        job.fit("killed", SaveAt(job.folder, [SAVED], dies=True))
    except (Killed, ProcessException):
        return
    raise AssertionError("it has not died")


def scenario_resumed(job: Job) -> None:
    job.fit("resumed", ckpt_path=str(Path(os.environ.get("CHECKPOINTS", job.folder)) / f"step-{SAVED}.ckpt"))


def scenario_cached(job: Job) -> None:
    job.fit("cached", cache="1MiB")


def scenario_slow_node(job: Job) -> None:
    """The loaders of the second node's ranks take 60 ms for a batch."""
    echo = EchoCallback()
    run = job.trainer(max_epochs=1, callbacks=[echo])
    waits = [0.06 if run.node_rank == 1 else 0.0] * 12
    run.fit(Sleeper(0.0, Sleeping(waits)))
    torch.save({"reports": [report.state() for report in echo.reports]}, job.folder / f"slow_node-rank-{run.global_rank}.pt")


def main(folder: str, strategy: str, nodes: str, devices: str, *names: str) -> None:
    torch.set_num_threads(1)
    for name in names:
        globals()[f"scenario_{name}"](Job(Path(folder), strategy, int(nodes), int(devices)))


if __name__ == "__main__":
    main(*sys.argv[1:])
    if sys.argv[2].startswith("model_parallel"):
        # With groups of ranks on gloo, torch 2.14 aborts now and then when the interpreter ends: "terminate called without an
        # active exception". All has been written by then.
        torch.distributed.barrier()
        sys.stdout.flush()
        os._exit(0)
