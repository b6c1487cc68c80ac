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

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_echo.echoing.course import Course

__all__ = ["EpochListener", "begins_again", "predecessor_of"]

_last: weakref.WeakKeyDictionary[Any, weakref.ref[Course]] = weakref.WeakKeyDictionary()


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


def predecessor_of(course: Course, loader: Any) -> Course | None:
    """Returns the run of the loader that was made last over the same data, if it lives, and remembers this one in its place.

    Args:
        course: Of the new loader.
        loader: What it wraps.
    """
    data = getattr(loader, "dataset", loader)
    try:
        before = _last.get(data)
        _last[data] = weakref.ref(course)
    except TypeError:  # it cannot be referred to weakly, or hashed: a list
        return None
    found = None if before is None else before()
    # One that was made and never used has nothing to go on from, but may itself have one before it.
    return found.predecessor if found is not None and found.is_at_start else found


def begins_again(course: Course, before: Course) -> bool:
    """Whether a run delivers what the one before it has: the same seed, and no more than an epoch of that within a pass."""
    seed = course.seed if course.seed is not None else os.environ.get("PL_GLOBAL_SEED")
    same_seed = seed is not None and before.seed is not None and int(seed) == before.seed
    first_epoch = before.heard_epoch == course.heard_epoch == 0 and before.delivery.progress.epoch == 0
    return same_seed and first_epoch and before.passes < 1 and before.factor.value > 1
