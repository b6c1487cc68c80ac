"""What echoes belongs to one ``fit`` at a time: it follows one Trainer's epochs, limits and factor.

Lightning itself does not mind two Trainers that train over one data module at once, each in a thread of its own.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

__all__ = ["is_in_fit", "refuse_second_fit"]


def is_in_fit(trainer: Any) -> bool:
    """Whether a Trainer's ``fit`` is under way; None is no Trainer."""
    return trainer is not None and trainer.state.fn == TrainerFn.FITTING and trainer.state.status == TrainerStatus.RUNNING


def refuse_second_fit(what: str, trainer: Any, other: Any) -> None:
    """Refuses to begin a ``fit`` over what another Trainer's is under way over.

    Args:
        what: What both have in hands.
        trainer: Begins, or does something else than ``fit``.
        other: Had it in hands before; None: nobody had.

    Raises:
        MisconfigurationException: With the ways out.
    """
    if other is not trainer and is_in_fit(trainer) and is_in_fit(other):
        raise MisconfigurationException(
            f"{what} is in use by another Trainer, whose fit is under way: echoing follows one training at a time. Give each "
            "Trainer a data module, and an EchoDataModule or EchoCallback, of its own, or let one fit end before the next begins"
        )
