"""Two processes on gloo that share the work on the same data: ``python tensor_parallel_runs.py FOLDER``, see ddp_runs.py.

Lightning's ``ModelParallelStrategy`` with a mesh of one data-parallel group and two ranks in it. The model has nothing that is
split: what matters here is which data each of them gets.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from trainer_runs import Data, Recorder, trainer

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader

OPTIONS: dict[str, Any] = {"factor": 2.0, "insertion_point": "after_augmentation", "seed": 7}


class Shared(Recorder):
    def configure_model(self) -> None:
        """The strategy asks for it."""


def fit(data: Any, data_parallel_size: int = 1, **options: Any) -> dict[str, Any]:
    """What this rank trained on, and what the Trainer says its share is."""
    strategy = ModelParallelStrategy(data_parallel_size, 2 // data_parallel_size, process_group_backend="gloo")
    run, model = trainer(devices=2, strategy=strategy, limit_val_batches=0, max_epochs=2, **options), Shared()
    model.validation_step = pl.LightningModule.validation_step.__get__(model)  # type: ignore[method-assign]
    if isinstance(data, pl.LightningDataModule):
        run.fit(model, datamodule=data)
    else:
        run.fit(model, data)
    return {"batches": model.batches, "share": run.distributed_sampler_kwargs}


def bare(**options: Any) -> EchoLoader:
    return EchoLoader(Data().train_dataloader(), **OPTIONS, **options)


def scenario_bare_without_tensor_parallelism(folder: Path) -> Any:
    """First, since older versions of torch keep a mesh for good."""
    return fit(bare(), data_parallel_size=2)


def scenario_plain(folder: Path) -> Any:
    return fit(Data().train_dataloader())


def scenario_module(folder: Path) -> Any:
    return fit(EchoDataModule(Data(), **OPTIONS))


def scenario_callback(folder: Path) -> Any:
    return fit(Data(), callbacks=[EchoCallback(echo=EchoConfig(**OPTIONS))])


def scenario_bare_with_ranks(folder: Path) -> Any:
    return fit(bare(num_replicas=1, rank=0))


def scenario_bare(folder: Path) -> Any:
    try:
        fit(bare())
    except RuntimeError as error:
        return str(error)


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {name: scenario(folder) for name, scenario in globals().items() if name.startswith("scenario_")}
    torch.save(found, folder / f"rank-{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
