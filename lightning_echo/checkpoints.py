"""Checkpoints between runs with and without echoing: a state of the other kind of run is handed on or dropped.

Lightning keeps the states of training loaders in the checkpoint of its loop, and the state of a data module under the name of its
class. It raises an error if there is a loader state but no stateful loader. It says nothing if there is no state for a data
module.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_echo.datamodule import EchoDataModule
from lightning_echo.loading.state import is_state
from lightning_echo.saved import entry, state_of

__all__ = ["adapt_checkpoint"]

_ECHOED = EchoDataModule.__qualname__


def adapt_checkpoint(
    checkpoint: dict[str, Any], datamodule: pl.LightningDataModule | None, *, echoed_before: bool, echoes: bool
) -> None:
    """Makes a checkpoint fit the run that resumes from it.

    Args:
        checkpoint: The checkpoint as Lightning has loaded it. It is changed in place.
        datamodule: The data module of the run that resumes; None if it has none.
        echoed_before: Whether `EchoCallback` or `EchoDataModule` echoed the run that was saved. False if only an `EchoLoader` of
            the user's did.
        echoes: Whether one of the two echoes the run that resumes.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    _adapt_loader_states(loop, echoed_before=echoed_before, echoes=echoes)
    if datamodule is not None:
        _hand_on_state(checkpoint, datamodule)


def _adapt_loader_states(loop: dict[str, Any], *, echoed_before: bool, echoes: bool) -> None:
    """Drops the loader states that the run cannot take."""
    states = loop.get("combined_loader", [])  # of all stateful loaders of a collection, echoed or not
    are_ours = [is_state(state) for state in states]
    fit = any(are_ours) if echoed_before else all(are_ours)
    if (echoes and not fit) or (echoed_before and not echoes):
        others = [] if echoes else [state for state in states if not is_state(state)]
        loop.pop("combined_loader", None)
        if others:
            loop["combined_loader"] = others


def _hand_on_state(checkpoint: dict[str, Any], datamodule: pl.LightningDataModule) -> None:
    """Gives the user's data module its state, if the checkpoint has it where the other kind of run saves it."""
    if isinstance(datamodule, EchoDataModule):
        name = type(datamodule.datamodule).__qualname__
        if _ECHOED not in checkpoint and name in checkpoint:
            datamodule.datamodule.load_state_dict(checkpoint[name])
    elif type(datamodule).__qualname__ not in checkpoint and _ECHOED in checkpoint:
        with state_of(_ECHOED):
            users = entry(checkpoint[_ECHOED], "datamodule", dict)
        datamodule.load_state_dict(users)
