"""A Lightning training under Ray Train: two workers on two nodes, metrics, and a worker that is killed and goes on exactly."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from nodes_runs import LENGTH, Deck, OneTensor  # noqa: E402
from ray import train as ray_train  # noqa: E402
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer  # noqa: E402
from ray.train.torch import TorchTrainer  # noqa: E402
from ray_runs import cluster_of  # noqa: E402
from trainer_runs import fresh_stream  # noqa: E402

from lightning_echo import EchoCallback, EchoConfig  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

FACTOR, MAX_EPOCHS = 1.5, 4
RANKS = 2
SAVE_EVERY, KILLED_AT = 5, 18  # batches of the run; checkpoints lie within epochs


class Saves(pl.Callback):
    """Reports a checkpoint every few steps, on all ranks."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        del args
        if trainer.global_step % SAVE_EVERY:
            return
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(os.path.join(folder, "checkpoint.ckpt"))
            checkpoint = ray_train.Checkpoint.from_directory(folder) if trainer.is_global_zero else None
            ray_train.report({"step": trainer.global_step}, checkpoint=checkpoint)


class Dies(pl.Callback):
    """Kills the process of rank 1 at a step, once."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        del args
        if trainer.global_rank == 1 and trainer.global_step == KILLED_AT and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Witness(pl.Callback):
    """Writes what a rank saw, at the end."""

    def __init__(self, path: str) -> None:
        self.path, self.begun_at = path, 0

    def on_train_start(self, trainer: pl.Trainer, model: Any) -> None:
        del model
        self.begun_at = trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, model: Any) -> None:
        echo: Any = next(callback for callback in trainer.callbacks if isinstance(callback, EchoCallback))
        found = {
            "batches": model.batches,
            "weights": model.weights,
            "node": ray.get_runtime_context().get_node_id(),
            "begun_at": self.begun_at,
            "job": (trainer.world_size, type(trainer.strategy).__name__),
            "reports": [report.state() for report in echo.reports],
        }
        torch.save(found, f"{self.path}-rank-{trainer.global_rank}.pt")


def loop(config: dict[str, Any]) -> None:
    """What each worker of Ray Train runs."""
    torch.set_num_threads(1)
    folder, name = Path(config["folder"]), config["name"]
    echo = EchoCallback(echo=EchoConfig(FACTOR, "after_augmentation", seed=7), summary=False)
    saving: list[Any] = [RayTrainReportCallback()] if name == "whole" else [Saves(), Dies(folder / "died")]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[echo, Witness(str(folder / name)), *saving],
        max_epochs=MAX_EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    checkpoint = ray_train.get_checkpoint()
    fit = prepare_trainer(trainer).fit
    if checkpoint is None:
        fit(OneTensor(), datamodule=Deck())
        return
    with checkpoint.as_directory() as saved:
        fit(OneTensor(), datamodule=Deck(), ckpt_path=os.path.join(saved, "checkpoint.ckpt"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="module")
def results(folder, tmp_path_factory):
    """What Ray Train returns of a whole run, and of one of which a worker is killed."""
    with cluster_of(tmp_path_factory.mktemp("n"), {"a": 1, "b": 1}):
        yield {name: run(folder, name) for name in ("whole", "killed")}


def run(folder: Path, name: str) -> Any:
    trainer = TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder), "name": name},
        scaling_config=ray_train.ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 1}),
        run_config=ray_train.RunConfig(
            name=name, storage_path=str(folder / "storage"), failure_config=ray_train.FailureConfig(max_failures=1)
        ),
    )
    return trainer.fit()


def seen(folder: Path, name: str) -> list[Any]:
    return [torch.load(folder / f"{name}-rank-{rank}.pt", weights_only=False) for rank in range(RANKS)]


def test_two_workers_on_two_nodes_divide_the_data(results, folder):
    whole = seen(folder, "whole")
    assert len({rank["node"] for rank in whole}) == 2
    assert [rank["job"] for rank in whole] == [(RANKS, "RayDDPStrategy")] * RANKS
    assert len({len(rank["batches"]) for rank in whole}) == 1, "equally many steps"
    first, second = (fresh_stream(rank["batches"]) for rank in whole)
    share = -(-LENGTH // RANKS)
    assert set(first[:share]) | set(second[:share]) == set(range(LENGTH))
    metrics = results["whole"].metrics
    assert (metrics["epoch"], metrics["echo/factor"]) == (MAX_EPOCHS - 1, FACTOR)
    assert metrics["echo/fresh_examples"] == whole[0]["reports"][-1]["fresh_examples"]


def test_a_worker_that_is_killed_is_restored_exactly(results, folder):
    assert (folder / "died").exists()
    assert results["killed"].error is None
    for whole, restored in zip(seen(folder, "whole"), seen(folder, "killed"), strict=True):
        assert restored["begun_at"] in (5, 10, 15), "the last checkpoint that had reached Ray"
        assert restored["batches"] == whole["batches"][restored["begun_at"] :]
        assert len(restored["batches"]) > KILLED_AT - restored["begun_at"]
        assert restored["weights"] == whole["weights"]
