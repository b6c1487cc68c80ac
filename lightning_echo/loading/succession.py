"""What happens if a user makes a new `EchoLoader` for each epoch: the new one continues the run of the one before.

A hook may return a new `EchoLoader` each time that it is called (``reload_dataloaders_every_n_epochs=1``), or each of several
short trainings may make one. Each loader would begin a run of its own, and all would deliver the same part of the data. Nothing
tells the loader directly, but there are two signs:

* Lightning tells the epoch to the samplers of a loader. So an `EchoLoader` has a ``batch_sampler`` that receives it
  (`EpochListener`).
* A loader finds the run of the loader that was made before it over the same data set, if that run is alive
  (`predecessor_of`). How that run began is known as long as the data set is alive (`Beginning`).

If a loader is at the start of its run and Lightning tells it a later epoch than the first, it continues the run of its
predecessor. The loader warns if there is no predecessor, or if two trainings begin with the same part of the data.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

__all__ = ["Beginning", "EpochListener", "Succeeding", "predecessor_of"]


@dataclass
class Beginning:
    """How a run began. It shows whether a later run delivers the same batches, and it does not keep the loader alive.

    Attributes:
        epochs: Number of epochs that were begun.
        seed: Seed in use; None before the first batch.
        heard_epoch: The epoch that Lightning told last; -1 if it told none.
        share: Share of a pass that the first epoch delivers, without the examples that fill the buffer.
        before: Beginning of the run that was made before over the same data. None once this run begins.
    """

    epochs: int = 0
    seed: int | None = None
    heard_epoch: int = -1
    share: float = 0.0
    before: Beginning | None = None

    def note_epoch(self, heard_epoch: int, seed: int | None, fresh_batches: float, pass_batches: int) -> None:
        """Notes that an epoch begins.

        Args:
            heard_epoch: The epoch that Lightning told.
            seed: Seed in use.
            fresh_batches: Number of batches of fresh examples in the epoch; below 0 if its length is not known.
            pass_batches: Number of batches in a pass; 0 if that is not known.
        """
        self.epochs += 1
        self.heard_epoch, self.seed = heard_epoch, seed
        if self.epochs == 1:
            self.share = fresh_batches / pass_batches if pass_batches and fresh_batches > 0 else 1.0

    def is_repeated(self, seed: int | str | None, heard_epoch: int) -> bool:
        """Returns whether a later run delivers what this one has delivered.

        It does if both have the same seed, and this one has delivered one epoch that is shorter than a pass.
        """
        same_seed = seed is not None and self.seed is not None and int(seed) == self.seed
        return same_seed and self.epochs == 1 and self.heard_epoch == heard_epoch == 0 and self.share < 1


class Succeeding(Protocol):
    """A run that another run may continue, see `EchoRun` for the attributes."""

    beginning: Beginning
    predecessor: Any


Run = TypeVar("Run", bound=Succeeding)


class _Last(NamedTuple):
    """The run that was made last over some data. It keeps neither alive."""

    data: weakref.ref[Any]
    run: weakref.ref[Any]
    beginning: Beginning


# By the data set's identity: equal data sets are not the same, and tensors do not compare to True or False.
_last: dict[int, _Last] = {}


class EpochListener:
    """Receives the epoch from Lightning, which calls ``loader.batch_sampler.sampler.set_epoch``.

    Args:
        batch_size: Batch size of the loader. DeepSpeed reads it here.
        set_epoch: Called with the number of the epoch.
    """

    def __init__(self, batch_size: int, set_epoch: Callable[[int], None]) -> None:
        self.batch_size, self.set_epoch = batch_size, set_epoch

    @property
    def sampler(self) -> EpochListener:
        """The object on which Lightning calls ``set_epoch``: this one."""
        return self


def predecessor_of(run: Run, loader: Any) -> Run | None:
    """Returns the run of the loader that was made last over the same data, if that run is alive.

    Remembers ``run`` in its place. ``run.beginning.before`` then says how the earlier run began, even if it is not alive.

    Args:
        run: Run of the new loader.
        loader: The user's loader.
    """
    data = getattr(loader, "dataset", loader)
    key = id(data)
    last = _last.get(key)
    try:
        alive = weakref.ref(data, lambda _: _last.pop(key, None))
    except TypeError:  # the data set allows no weak reference, as a list
        return None
    _last[key] = _Last(alive, weakref.ref(run), run.beginning)
    if last is None or last.data() is not data:
        return None
    found: Run | None = last.run()
    if last.beginning.epochs:
        run.beginning.before = last.beginning
        return found
    run.beginning.before = last.beginning.before  # the last run was never begun, so take the one before it
    earlier: Run | None = None if found is None else found.predecessor
    return earlier
