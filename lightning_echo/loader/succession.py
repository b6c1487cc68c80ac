"""Succession: if a user makes a new `EchoLoader` for each epoch, the new one continues the run of the one before.

A hook may return a new `EchoLoader` each time that it is called (``reload_dataloaders_every_n_epochs=1``), or each of several
short trainings may make one. Each loader would begin a run of its own, and all would deliver the same part of the data. The
loader is not informed directly, but there are two signs:

* Lightning calls ``set_epoch`` of a loader's samplers. So an `EchoLoader` has a ``batch_sampler`` that receives it
  (`EpochListener`).
* A loader finds the run of the loader that was made before it over the same data set, if that run is alive (`predecessor_of`).
  How that run began is known as long as the data set is alive (`Beginning`).

If a loader is at the start of its run and Lightning sets a later epoch than the first, it continues the run of its predecessor.
The loader warns if there is no predecessor, or if two trainings begin with the same part of the data.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar


@dataclass
class Beginning:
    """How a run began. It shows whether a later run delivers the same batches, and it does not keep the loader alive.

    Attributes:
        epochs: Number of epochs that were begun.
        seed: Seed in use; None before the first batch.
        heard_epoch: The epoch that Lightning set last; -1 if it set none.
        share: Share of a pass that the first epoch delivers, without the examples that fill the buffer.
        before: Beginning of the run that was made before over the same data. None once this run begins.
    """

    epochs: int = 0
    seed: int | None = None
    heard_epoch: int = -1
    share: float = 0.0
    before: Beginning | None = None


class Follower(Protocol):
    """What this needs of an `EchoRun`."""

    @property
    def beginning(self) -> Beginning: ...

    @property
    def predecessor(self) -> Any: ...


_Run = TypeVar("_Run", bound=Follower)


class _Last(NamedTuple):
    """The run that was made last over some data. It keeps neither alive."""

    data: weakref.ref[Any]
    run: weakref.ref[Any]
    beginning: Beginning


# By the data set's identity: equal data sets are not the same, and tensors do not compare to True or False.
_last: dict[int, _Last] = {}


class EpochListener:
    """Receives the epoch from Lightning, which calls ``loader.batch_sampler.sampler.set_epoch``.

    DeepSpeed reads ``batch_size`` here.
    """

    def __init__(self, batch_size: int, set_epoch: Callable[[int], None]) -> None:
        self.batch_size, self.set_epoch = batch_size, set_epoch

    @property
    def sampler(self) -> EpochListener:
        """The object on which Lightning calls ``set_epoch``: this one."""
        return self


def predecessor_of(run: _Run, loader: Any) -> _Run | None:
    """Returns the last run that was made over the same data, if it is alive, and remembers ``run`` in its place.

    ``run.beginning.before`` then has the beginning of the earlier run, even if that is not alive.
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
    found: _Run | None = last.run()
    if last.beginning.epochs:
        run.beginning.before = last.beginning
        return found
    run.beginning.before = last.beginning.before  # the last run was never begun, so take the one before it
    return None if found is None else found.predecessor


def begins_alike(before: Beginning | None, seed: int | None, heard_epoch: int) -> bool:
    """Returns whether a run delivers the same batches as the one before: that has delivered an epoch shorter than a pass."""
    return (
        before is not None
        and (seed is not None and before.seed is not None and seed == before.seed)
        and before.epochs == 1
        and before.heard_epoch == heard_epoch == 0
        and before.share < 1
    )
