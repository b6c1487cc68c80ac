"""A Trainer that has its progress and nothing else."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus


def counted(**numbers: int) -> Any:
    """A progress of Lightning's."""
    return SimpleNamespace(current=SimpleNamespace(**{"ready": 0, "started": 0, "processed": 0, "completed": 0, **numbers}))


def trainer_at(
    batches: int = 0, *, length: float = 10, done: int | None = None, epochs: tuple[int, int, int] = (1, 1, 0), **attributes: Any
) -> Any:
    """Returns a Trainer that has made ``batches`` ready, of which ``done`` are completed, in an epoch of ``length``.

    Args:
        batches: Of the epoch.
        length: Batches that the epoch will have.
        done: Default: all.
        epochs: Those that are ready, started and processed.
        **attributes: What else it has.
    """
    done = batches if done is None else done
    ready, started, processed = epochs
    return SimpleNamespace(
        **{
            "fit_loop": SimpleNamespace(
                epoch_progress=counted(ready=ready, started=started, processed=processed),
                epoch_loop=SimpleNamespace(batch_progress=counted(ready=batches, processed=done, completed=done)),
                batch_idx=batches - 1,
                total_batch_idx=100 + batches - 1,
            ),
            "training": True,
            "sanity_checking": False,
            "num_training_batches": length,
            "is_last_batch": batches == length,
            "ckpt_path": None,
            "limit_train_batches": 0.5,
            "lightning_module": None,
            **attributes,
        }
    )


class Strategy:
    """Remembers the loaders that it was given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def process_dataloader(self, dataloader: Any) -> Any:
        self.given.append(dataloader)
        return dataloader


def trainer_in_fit(datamodule: Any = None, **attributes: Any) -> Any:
    """Returns a Trainer in its ``fit``, before its first epoch."""
    told = {
        "datamodule": datamodule,
        "strategy": Strategy(),
        "state": SimpleNamespace(fn=TrainerFn.FITTING, status=TrainerStatus.RUNNING),
        "optimizers": [],
        "train_dataloader": None,
        "reload_dataloaders_every_n_epochs": 0,
        "overfit_batches": 0,
        "max_epochs": -1,
        "distributed_sampler_kwargs": None,
    }
    return trainer_at(length=math.inf, epochs=(0, 0, 0), **{**told, **attributes})


def asked_by_lightning(trainer: Any, instance: Any) -> Any:
    """Returns what a Trainer trains on that asks this instance: what it gets goes through the strategy at once."""
    return trainer.strategy.process_dataloader(instance.train_dataloader())
