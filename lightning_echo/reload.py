"""`Reload`: lets a Trainer ask for its training loader again, once; the only public way to a new length of epochs."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Attached", "Reload"]


class Attached(Protocol):
    """What knows the Trainer of the run."""

    @property
    def trainer(self) -> Any:
        """The Trainer, None while there is none."""


class Reload:
    """Sets ``trainer.reload_dataloaders_every_n_epochs``, and gives the user's setting back.

    Args:
        attached: Asked for the Trainer.
    """

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._users: int | None = None  # the Trainer's setting while ours stands in its place

    def order(self) -> None:
        """From the next epoch on Lightning asks for the loader again."""
        trainer = self._attached.trainer
        if self._users is None and trainer is not None:
            self._users = trainer.reload_dataloaders_every_n_epochs
            trainer.reload_dataloaders_every_n_epochs = 1

    def end(self) -> bool:
        """Gives the Trainer's setting back; whether only we have asked for this reload."""
        users, self._users = self._users, None
        if users is None:
            return False
        trainer = self._attached.trainer
        if trainer is not None:
            trainer.reload_dataloaders_every_n_epochs = users
        return not users
