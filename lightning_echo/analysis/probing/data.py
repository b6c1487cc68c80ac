"""The data for the trainings of an analysis: copies of the user's data, set up once. Any loader can take the place of its own.

The data module's hooks for transferring batches belong to a step, so the data module takes part in every training. Everything
that an analysis calls, iterates, reads or trains on is a copy (protecting/copies.py). Two kinds of objects are copied:

    the data module, or the loaders         when the analysis begins
    what ``train_dataloader`` returns       when Lightning asks for it: perhaps only the hook refers to it

The copies are used without echoing. All copies together may hold

* a gibibyte of tensors, arrays and images, and at most a fourth of the free memory, and
* a million members of containers.

A larger object is shared with the user's data; a note in the analysis names it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_echo.caching.free_memory import free_memory_bytes
from lightning_echo.datamodule import EchoDataModule
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.protecting.copies import ThrowAwayCopies
from lightning_echo.training.collection import leaves_of, with_leaves
from lightning_echo.training.refusals import refuse_other_package

__all__ = ["TrainingData", "nothing"]

_MOST_MEMBERS = 1_000_000
_MOST_BYTES = 2**30
_FREE_MEMORY_DIVISOR = 4  # a fourth of the free memory
_HOOK = "train_dataloader"


class TrainingData:
    """Copies of the user's data, for any number of trainings.

    Args:
        data: A data module, loaders, or None. If it is echoed, it is used without echoing.

    Raises:
        TypeError: ``data`` is a data module of the package ``pytorch_lightning``.
    """

    def __init__(self, data: Any) -> None:
        refuse_other_package("datamodule", data)
        free = free_memory_bytes()
        self._copies = ThrowAwayCopies(
            _MOST_MEMBERS, _MOST_BYTES if free is None else min(_MOST_BYTES, free // _FREE_MEMORY_DIVISOR)
        )
        data = data.datamodule if isinstance(data, EchoDataModule) else data
        self._module: pl.LightningDataModule | None = None
        if isinstance(data, pl.LightningDataModule):
            self._data = self._module = self._copies.of(data, sharing=[data.trainer])
        else:
            self._data = _of_loaders(data, self._copies)

    @property
    def instances(self) -> list[Any]:
        """The objects, beside the model, whose hooks Lightning may call."""
        return [] if self._module is None else [self._module]

    @property
    def too_large(self) -> list[str]:
        """Classes and attributes that are shared with the user's data, since they are too large to be copied."""
        return self._copies.too_large

    def as_given(self, model: pl.LightningModule) -> Any:
        """Returns the data for the first training, whose hooks prepare the data and set it up.

        Args:
            model: The copy of the model, which is trained. If the user has given no loaders, they come from this model.
        """
        if self._data is None and is_overridden(_HOOK, model):
            self._copy_what_is_returned(model)
        if self._module is not None:
            # The data module is torn down with this object, and not after a training: other trainings use the same data set.
            weakref.finalize(self, type(self._module).teardown, self._module, "fit")
            vars(self._module).update(teardown=nothing)
            self._copy_what_is_returned(self._module)
        return self._data

    def over(self, loader: Any) -> Any:
        """Returns the data with this training loader in place of its own. Nothing is set up again."""
        if self._module is None:
            return loader
        vars(self._module).update(prepare_data=nothing, setup=nothing, train_dataloader=lambda: loader)
        return self._module

    def echoed(self, loader: Any, **options: Any) -> EchoDataModule:
        """Returns the data with this training loader, echoed. The options are those of `EchoDataModule`."""
        if self._module is None:
            return EchoDataModule.from_dataloaders(loader, **options)
        return EchoDataModule(self.over(loader), **options)

    def _copy_what_is_returned(self, instance: Any) -> None:
        """Replaces the instance's hook by one that returns copies of the loaders."""
        ask: Callable[[], Any] = getattr(instance, _HOOK)
        copies = self._copies  # the hook must not refer to self: the finalizer refers to the data module, and so to the hook
        vars(instance)[_HOOK] = lambda: _of_loaders(ask(), copies)


def _of_loaders(loaders: Any, copies: ThrowAwayCopies) -> Any:
    """Returns copies of loaders, in the same collection, without echoing."""
    leaves = leaves_of(loaders)
    plain = {name: leaf.loader if isinstance(leaf, EchoLoader) else leaf for name, leaf in leaves.items()}
    return with_leaves(loaders, {name: copies.of(leaf) for name, leaf in plain.items()})


def nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing, in place of a hook."""
