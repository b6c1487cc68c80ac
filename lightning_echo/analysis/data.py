"""What the trainings of an analysis run on: the user's data module, set up once, with any loader in the place of its own.

Hooks of the data module that transfer batches belong to a step, so that it takes part in every training. What is used is a
shallow copy, whose attributes can be set.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_echo.collection import leaves_of
from lightning_echo.datamodule import EchoDataModule
from lightning_echo.echoing.loader import EchoLoader
from lightning_echo.other_package import refuse_other_package

__all__ = ["TrainingData", "nothing"]


class TrainingData:
    """The user's data for as many trainings as are wanted.

    Args:
        data: A data module, loaders, or None; echoing around it is taken off.

    Raises:
        TypeError: It is a data module of the package ``pytorch_lightning``.
    """

    def __init__(self, data: Any) -> None:
        refuse_other_package("datamodule", data)
        if isinstance(data, EchoDataModule):
            data = data.datamodule
        self._data = data.loader if isinstance(data, EchoLoader) else data
        self._module: pl.LightningDataModule | None = None
        if isinstance(data, pl.LightningDataModule):
            self._data = self._module = copy.copy(data)

    @property
    def instances(self) -> list[Any]:
        """Whom Lightning may ask for hooks, beside the model."""
        return [] if self._module is None else [self._module]

    def as_given(self, show: Callable[[Any], None]) -> Any:
        """For the first training: its hooks prepare the data and set it up.

        Args:
            show: Called with each training loader before it is iterated.
        """
        if self._module is None:
            return self._data if self._data is None else _shown(self._data, show)
        # Torn down when nobody needs it any more, and not after a training: others follow, over the same data set.
        weakref.finalize(self, type(self._module).teardown, self._module, "fit")
        made = self._module.train_dataloader
        vars(self._module).update(teardown=nothing, train_dataloader=lambda: _shown(made(), show))
        return self._module

    def over(self, loader: Any) -> Any:
        """With this training loader in place of its own; nothing is set up again."""
        if self._module is None:
            return loader
        vars(self._module).update(prepare_data=nothing, setup=nothing, train_dataloader=lambda: loader)
        return self._module

    def echoed(self, loader: Any, **options: Any) -> EchoDataModule:
        """The same with echoing; options are those of `EchoDataModule`."""
        if self._module is None:
            return EchoDataModule.from_dataloaders(loader, **options)
        return EchoDataModule(self.over(loader), **options)


def _shown(loaders: Any, show: Callable[[Any], None]) -> Any:
    """The same loaders."""
    for loader in leaves_of(loaders).values():
        show(loader)
    return loaders


def nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a hook."""
