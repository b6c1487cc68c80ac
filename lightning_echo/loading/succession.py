"""An `EchoLoader` that is made anew for each epoch: where it goes on, and how it learns that it should.

A hook may return a new `EchoLoader` each time that it is asked (``reload_dataloaders_every_n_epochs=1``), or each of several
short trainings may be given one of its own. Each begins a run of its own, and all deliver the same part of the data. Nobody says
so to a loader, but two signs do:

* Lightning tells the samplers of a loader the epoch. So a loader has a ``batch_sampler`` that hears it;
* of two loaders over the same data set, the later one knows the run of the earlier while that lives (`predecessor_of`), and what
  it had begun with for as long as the data set lives (`Beginning`).

A loader that is told a later epoch than the first, and is at the start of its run, goes on with the run of its predecessor. Where
there is none, or two trainings begin with the same part of the data, a warning says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

__all__ = ["Beginning", "EpochListener", "Succeeding", "predecessor_of"]


@dataclass
class Beginning:
    """How a run began: enough to see that a later one delivers the same, and nothing that keeps its loader alive.

    Attributes:
        epochs: That were begun.
        seed: In use; None before the first batch.
        heard_epoch: The epoch that Lightning told it last; -1: none.
        share: Of a pass, that its first epoch delivers, but for what fills the buffer.
        before: Of the run that was made before over the same data, until this one begins.
    """

    epochs: int = 0
    seed: int | None = None
    heard_epoch: int = -1
    share: float = 0.0
    before: Beginning | None = None


class Succeeding(Protocol):
    """A run that another one may go on with."""

    beginning: Beginning
    predecessor: Any  # the run that was made before over the same data, while it lives and until this one begins


Run = TypeVar("Run", bound=Succeeding)

_last: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], Beginning]] = weakref.WeakKeyDictionary()


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

    How it began is noted with this one's own beginning, whether it lives or not.

    Args:
        run: Of the new loader.
        loader: What it wraps.
    """
    data = getattr(loader, "dataset", loader)
    try:
        last = _last.get(data)
        _last[data] = (weakref.ref(run), run.beginning)
    except TypeError:  # it cannot be referred to weakly, or hashed: a list
        return None
    if last is None:
        return None
    found: Run | None = last[0]()
    if last[1].epochs:
        run.beginning.before = last[1]
        return found
    run.beginning.before = last[1].before  # made and never used: there is nothing in it to go on with
    earlier: Run | None = None if found is None else found.predecessor
    return earlier
