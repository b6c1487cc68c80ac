"""Two mistakes that are refused wherever a Trainer meets echoing: a second ``fit`` over the same data, and another package.

* Echoing follows one ``fit`` at a time: its epochs, its limits and its factor. Lightning itself lets two Trainers, in two
  threads, train over one data module.
* Lightning comes as two packages with the same classes, ``lightning`` and ``pytorch_lightning``. Their objects cannot be mixed.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

__all__ = ["is_in_fit", "refuse_other_package", "refuse_second_fit"]


def is_in_fit(trainer: Any) -> bool:
    """Returns whether a Trainer is running ``fit``; False for None."""
    return trainer is not None and trainer.state.fn == TrainerFn.FITTING and trainer.state.status == TrainerStatus.RUNNING


def refuse_second_fit(what: str, trainer: Any, other: Any) -> None:
    """Refuses a ``fit`` while another Trainer's ``fit`` uses the same object. Anything but a ``fit`` is allowed.

    Args:
        what: The object that both Trainers use, for the error message.
        trainer: The Trainer that begins.
        other: The Trainer that used the object before; None if there was none.

    Raises:
        MisconfigurationException: Both Trainers are running ``fit``.
    """
    if other is not trainer and is_in_fit(trainer) and is_in_fit(other):
        raise MisconfigurationException(
            f"{what} is in use by another Trainer, whose fit is still running: echoing follows one training at a time. Give each "
            "Trainer a data module, and an EchoDataModule or EchoCallback, of its own, or let one fit end before the next begins"
        )


def refuse_other_package(name: str, value: Any) -> None:
    """Refuses an object of ``pytorch_lightning``. Without this check it would fail later, with a message about something else.

    Args:
        name: Name of the argument, for the error message.
        value: The argument.

    Raises:
        TypeError: The class of ``value``, or a base of it, comes from ``pytorch_lightning``.
    """
    if any(base.__module__.split(".")[0] == "pytorch_lightning" for base in type(value).__mro__):
        raise TypeError(
            f"{name} {type(value).__name__} comes from the separate package pytorch_lightning, but this package extends "
            "lightning: change 'import pytorch_lightning as pl' to 'import lightning.pytorch as pl', or pass "
            "EchoLoader(loader, factor) to fit, which works in either package"
        )
