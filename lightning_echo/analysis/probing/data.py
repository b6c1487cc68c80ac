"""What the trainings of an analysis run on: copies of the user's data, set up once, with any loader in the place of its own.

Hooks of the data module that transfer batches belong to a step, so that it takes part in every training. What an analysis calls,
iterates, reads or trains on is a copy (protecting/copies.py), made where it comes into the analysis:

    the data module, or loaders             when the analysis begins
    what a ``train_dataloader`` returns     when it is asked: only the hook may refer to it

Echoing around them is taken off. Copies take memory: at most a gibibyte, and a fourth of what is free, of tensors, arrays and
images in all, and a million members of containers. What is larger is shared, and said.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_echo.datamodule import EchoDataModule
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.loading.sizing import free_memory_bytes
from lightning_echo.protecting.copies import ThrowAwayCopies
from lightning_echo.training.collection import leaves_of, with_leaves
from lightning_echo.training.refusals import refuse_other_package

__all__ = ["TrainingData", "nothing"]

_MOST_MEMBERS = 1_000_000
_MOST_BYTES = 2**30
_SHARE_OF_FREE = 4  # a fourth at most
_HOOK = "train_dataloader"


class TrainingData:
    """Copies of the user's data for as many trainings as are wanted.

    Args:
        data: A data module, loaders, or None; echoing around it is taken off.

    Raises:
        TypeError: It is a data module of the package ``pytorch_lightning``.
    """

    def __init__(self, data: Any) -> None:
        refuse_other_package("datamodule", data)
        free = free_memory_bytes()
        self._copies = ThrowAwayCopies(_MOST_MEMBERS, _MOST_BYTES if free is None else min(_MOST_BYTES, free // _SHARE_OF_FREE))
        data = data.datamodule if isinstance(data, EchoDataModule) else data
        self._module: pl.LightningDataModule | None = None
        if isinstance(data, pl.LightningDataModule):
            self._data = self._module = self._copies.of(data, sharing=[data.trainer])
        else:
            self._data = _of_loaders(data, self._copies)

    @property
    def instances(self) -> list[Any]:
        """Whom Lightning may ask for hooks, beside the model."""
        return [] if self._module is None else [self._module]

    @property
    def too_large(self) -> list[str]:
        """What is not copied but shared with the user's, for its size: classes and attributes."""
        return self._copies.too_large

    def as_given(self, model: pl.LightningModule) -> Any:
        """For the first training: its hooks prepare the data and set it up.

        Args:
            model: Is trained; a copy. Asked for loaders where the user has given none.
        """
        if self._data is None and is_overridden(_HOOK, model):
            self._copy_what_is_returned(model)
        if self._module is not None:
            # Torn down when nobody needs it any more, and not after a training: others follow, over the same data set.
            weakref.finalize(self, type(self._module).teardown, self._module, "fit")
            vars(self._module).update(teardown=nothing)
            self._copy_what_is_returned(self._module)
        return self._data

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

    def _copy_what_is_returned(self, instance: Any) -> None:
        """By the hook of an instance."""
        ask: Callable[[], Any] = getattr(instance, _HOOK)
        copies = self._copies  # not self: the finalizer holds the data module, which holds its hook
        vars(instance)[_HOOK] = lambda: _of_loaders(ask(), copies)


def _of_loaders(loaders: Any, copies: ThrowAwayCopies) -> Any:
    """Copies of loaders, in the same collection, without echoing."""
    leaves = leaves_of(loaders)
    plain = {name: leaf.loader if isinstance(leaf, EchoLoader) else leaf for name, leaf in leaves.items()}
    return with_leaves(loaders, {name: copies.of(leaf) for name, leaf in plain.items()})


def nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a hook."""
