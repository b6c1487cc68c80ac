"""Ray Train whose ranks share: on one node and on two they take their parts of one reader, which has a worker on another node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from nodes_runs import BATCH_SIZE  # noqa: E402
from ray import train as ray_train  # noqa: E402
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer  # noqa: E402
from ray.train.torch import TorchTrainer  # noqa: E402
from ray_runs import Recording, cluster_of  # noqa: E402
from ray_worker_runs import LENGTH as SHARED  # noqa: E402
from ray_worker_runs import Noted, reads  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from lightning_echo import EchoDataModule  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

RANKS = 2


def shares(config: dict[str, Any]) -> None:
    """What each worker of Ray Train runs whose ranks take from one reader, which has a worker on another node."""
    torch.set_num_threads(1)
    folder, model = Path(config["folder"]), Recording()
    share = {"name": "ranks", "cluster": "ray", "cluster_workers": 1, "linger_seconds": 1}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        max_epochs=3,
        **quiet,
    )
    data = Noted(folder / "reads", 0.02)
    loader = DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=1)
    prepare_trainer(trainer).fit(model, datamodule=EchoDataModule.from_dataloaders(loader, factor=1, share=share))
    node = Path(os.environ["LIGHTNING_ECHO_SHARED"]).name
    torch.save({"epochs": model.epochs, "node": node}, folder / f"rank-{trainer.global_rank}.pt")


@pytest.mark.parametrize(
    ("cpus", "placed"),
    [
        ({"a": 2, "c": 1}, {"resources_per_worker": {"CPU": 1, "a": 1}}),
        ({"a": 1, "b": 1, "c": 1}, {"resources_per_worker": {"CPU": 1}, "placement_strategy": "STRICT_SPREAD"}),
    ],
    ids=["on one node", "on two nodes"],
)
def test_ranks_take_their_parts_of_one_reader_with_a_worker_on_another_node(tmp_path, tmp_path_factory, cpus, placed):
    with cluster_of(tmp_path_factory.mktemp("n"), cpus) as nodes:
        TorchTrainer(
            shares,
            train_loop_config={"folder": str(tmp_path)},
            scaling_config=ray_train.ScalingConfig(num_workers=RANKS, **placed),
            run_config=ray_train.RunConfig(name="shares", storage_path=str(tmp_path / "storage")),
        ).fit()
        ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in range(RANKS)]
        of_training = {rank["node"] for rank in ranks}
        assert len(of_training) == len(cpus) - 1
        for epochs in zip(*(rank["epochs"] for rank in ranks), strict=True):
            assert len({len(epoch) for epoch in epochs}) == 1, "equally many steps"
            assert sorted(index for epoch in epochs for index in epoch) == list(range(SHARED)), "each example once"
        read = reads(tmp_path / "reads")
        (source,) = {each.node for each in read if not each.is_actor}
        assert source in of_training
        assert {each.node for each in read if each.is_actor} == set(cpus) - of_training
        log = nodes.log(source, "ranks")
        assert "this node reads for all nodes" in log
        assert "has begun" in log
