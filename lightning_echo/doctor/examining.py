"""``python train.py doctor``: the subcommand that `EchoCLI` adds, with the data of the same configuration as ``fit``."""

from __future__ import annotations

import sys

import lightning.pytorch as pl

from lightning_echo.doctor.command import examine

__all__ = ["Examines", "examining"]


class Examines:
    """A Trainer that can look at the data of a training without training."""

    def doctor(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        json: bool = False,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Says what on this machine, or of the data, would go wrong. The exit status is 1 if there is an error.

        Args:
            model: The model, whose training loader is looked at if there is no data module.
            datamodule: The data.
            json: Whether to print a document for programs.
            ckpt_path: Not used. A configuration that fit has saved may have it.
            weights_only: Not used, for the same reason.
        """
        source = model if datamodule is None else datamodule
        if isinstance(self, pl.Trainer):  # a data module may ask its Trainer how many ranks there are
            source.trainer = self
        if status := examine(lambda: source, as_json=json):
            sys.exit(status)


def examining(trainer_class: type[pl.Trainer]) -> type[pl.Trainer]:
    """Returns a subclass that can examine. It has the same name, so that configurations and messages do not change."""
    if issubclass(trainer_class, Examines):
        return trainer_class
    names = {name: getattr(trainer_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(trainer_class.__name__, (Examines, trainer_class), names)
