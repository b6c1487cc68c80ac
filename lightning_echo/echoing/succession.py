"""An `EchoLoader` that is made anew for each epoch: where it goes on, and how it learns that it should.

A hook may return a new `EchoLoader` each time that it is asked (``reload_dataloaders_every_n_epochs=1``), or each of several
short trainings may be given one of its own. Each begins a run of its own, and all deliver the same part of the data. Nobody says
so to a loader, but two signs do:

* Lightning tells the samplers of a loader the epoch. So a loader has a ``batch_sampler`` that hears it;
* of two loaders over the same data set, the later one knows the run of the earlier (`predecessor_of`).

A loader that is told a later epoch than the first, and is at the start of its run, goes on with the run of its predecessor. Where
there is none, or two trainings begin with the same part of the data, a warning says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

__all__ = ["EpochListener", "Succeeding", "predecessor_of"]


class Succeeding(Protocol):
    """A run that another one may go on with."""

    @property
    def is_at_start(self) -> bool:
        """Whether nothing was delivered."""

    @property
    def predecessor(self) -> Any:
        """The run that it may go on with itself."""


Run = TypeVar("Run", bound=Succeeding)

_last: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


class EpochListener:
    """Stands where Lightning looks for a sampler to be told the epoch: ``loader.batch_sampler.sampler.set_epoch``.

    Args:
        batch_size: Of the loader: DeepSpeed asks for it here.
        set_epoch: Is told the epoch.
    """

    def __init__(self, batch_size: int, set_epoch: Callable[[int], None]) -> None:
        self.batch_size, self.set_epoch = batch_size, set_epoch

    @property
    def sampler(self) -> EpochListener:
        """What is told."""
        return self


def predecessor_of(run: Run, loader: Any) -> Run | None:
    """Returns the run of the loader that was made last over the same data, if it lives, and remembers this one in its place.

    Args:
        run: Of the new loader.
        loader: What it wraps.
    """
    data = getattr(loader, "dataset", loader)
    try:
        before = _last.get(data)
        _last[data] = weakref.ref(run)
    except TypeError:  # it cannot be referred to weakly, or hashed: a list
        return None
    found: Run | None = None if before is None else before()
    if found is not None and found.is_at_start:  # made and never used: there is nothing in it to go on with
        earlier: Run | None = found.predecessor
        return earlier
    return found
