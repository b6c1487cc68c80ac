"""Checkpoints between runs with and without echoing: what belongs to the other kind of run is translated or dropped.

Lightning keeps the states of the training loaders in the checkpoint of its loop, and that of a data module under the name of its
class. It refuses loader states for which there is no stateful loader, and says nothing where a data module finds no state.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_echo.datamodule import EchoDataModule
from lightning_echo.loading.state import is_state

__all__ = ["adapt_checkpoint"]


def adapt_checkpoint(
    checkpoint: dict[str, Any], datamodule: pl.LightningDataModule | None, *, echoed_before: bool, echoes: bool
) -> None:
    """Makes a checkpoint fit the run that resumes from it.

    Args:
        checkpoint: As Lightning has loaded it; changed in place.
        datamodule: Of the run that resumes.
        echoed_before: Whether the run that was saved was echoed by `EchoCallback` or `EchoDataModule`, not by the user's loader.
        echoes: Whether the run that resumes is.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    states = loop.get("combined_loader", [])  # of all stateful loaders of a collection, echoed or not
    are_ours = [is_state(state) for state in states]
    fit = any(are_ours) if echoed_before else all(are_ours)
    if (echoes and not fit) or (echoed_before and not echoes):
        theirs = [state for state in states if not echoes and not is_state(state)]
        loop.pop("combined_loader", None)
        if theirs:
            loop["combined_loader"] = theirs
    if isinstance(datamodule, EchoDataModule):
        name = type(datamodule.datamodule).__qualname__
        if EchoDataModule.__qualname__ not in checkpoint and name in checkpoint:
            datamodule.datamodule.load_state_dict(checkpoint[name])
    elif datamodule is not None and type(datamodule).__qualname__ not in checkpoint and EchoDataModule.__qualname__ in checkpoint:
        datamodule.load_state_dict(checkpoint[EchoDataModule.__qualname__]["datamodule"])
