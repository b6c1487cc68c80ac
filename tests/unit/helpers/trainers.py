"""A Trainer that has its progress and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


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
