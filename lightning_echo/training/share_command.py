"""``python train.py share``: starts a reader by hand, with the data of the same configuration as ``fit``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_echo.sharing.serving import serve
from lightning_echo.sharing.share_config import ShareConfig
from lightning_echo.training.collection import is_collection

__all__ = ["Shares", "sharing", "shown_in_place"]


class Shares:
    """A Trainer that can read for others."""

    def share(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        name: str = "",
        window: str = "1GiB",
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Reads for the trainings that share a name, and shows these trainings. It ends when it is interrupted (Ctrl-C).

        Args:
            model: The model, whose training loader is read if there is no data module.
            datamodule: The data.
            name: The name that the trainings share.
            window: Memory for examples that are prepared and that not all trainings have taken.
            ckpt_path: Not used. It is here because a configuration that fit has saved may have it.
            weights_only: Not used, for the same reason.

        Raises:
            ValueError: There is no name, or the loader cannot be shared.
            MisconfigurationException: There is no single training loader.
        """
        if not name:
            raise ValueError("name is missing: train.py share --name sweep, as in fit --echo.share sweep")
        source = model if datamodule is None else datamodule
        if datamodule is not None:
            datamodule.prepare_data()
            datamodule.setup("fit")
        loader = source.train_dataloader()
        if is_collection(loader):
            raise MisconfigurationException(
                f"share={name!r} is impossible for several loaders: a reader reads one. Return one from train_dataloader"
            )
        with shown_in_place() as show:
            serve(loader, ShareConfig(name, window=window), show=show)


@contextmanager
def shown_in_place() -> Iterator[Callable[[str], None]]:
    """Gives a function that shows texts. On a terminal with rich, each text replaces the one before; otherwise they follow."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        yield print
        return
    live = import_module("rich.live").Live(auto_refresh=False)
    text = import_module("rich.text").Text
    with live:
        yield lambda shown: live.update(text(shown), refresh=True)


def sharing(trainer_class: type[pl.Trainer]) -> type[pl.Trainer]:
    """Returns a subclass that can read for others. It has the same name, so that configurations and messages do not change."""
    if issubclass(trainer_class, Shares):
        return trainer_class
    names = {name: getattr(trainer_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(trainer_class.__name__, (Shares, trainer_class), names)
