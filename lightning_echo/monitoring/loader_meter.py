"""`LoaderMeter`: measures what the workers of one `EchoLoader` spend on a batch; `costs_of` joins what several loaders cost.

If each step takes a batch of each of several loaders:

* With workers, the workers of all loaders run at the same time. The step waits for the slowest loader. Its costs are taken as the
  costs of all.
* Without workers, the loaders take turns. Their costs are added.

The cost model knows no other case. No costs are returned if

* only some of the loaders have workers,
* the loaders have different echo factors,
* a loader of the collection is not echoed, or
* a step does not take a batch of each loader (``max_size``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_echo.loading.loader import EchoLoader
from lightning_echo.measuring.cost import PipelineCosts
from lightning_echo.training.collection import Echoed, EchoLoaders, parts_of

__all__ = ["NOT_KNOWN", "LoaderMeter", "SecondsPerBatch", "costs_of"]


class SecondsPerBatch(NamedTuple):
    """Worker seconds per batch of fresh examples.

    Attributes:
        source: Before the insertion point.
        rest: After the insertion point, without collate.
        collate: Collate: to make a batch from examples.
    """

    source: float
    rest: float
    collate: float

    @property
    def is_known(self) -> bool:
        """Whether they were measured. Otherwise they are NaN."""
        return not any(map(math.isnan, self))


NOT_KNOWN = SecondsPerBatch(math.nan, math.nan, math.nan)


class LoaderMeter:
    """Follows one loader through a training.

    Args:
        loader: The loader when the training begins or continues.
        seconds_per_batch: The seconds measured before a resume; None: not measured yet.

    Attributes:
        seconds_per_batch: The seconds measured last; None: not measured yet.
    """

    def __init__(self, loader: EchoLoader, seconds_per_batch: SecondsPerBatch | None = None) -> None:
        self.seconds_per_batch = seconds_per_batch
        self._examples_before = self._batches_before = 0  # delivered before the batches that count
        self._is_starting = True  # the workers have not delivered their first batch yet
        self._expect_start(loader)
        self.begin_epoch(loader)

    def begin_epoch(self, loader: EchoLoader) -> None:
        """Notes that an epoch begins, or continues after a resume. A reload may have made the loader anew."""
        self._at_epoch_start = loader.delivered_batches
        if not loader.is_running:
            self._expect_start(loader)
        self._mark(loader)

    def end_step(self, loader: EchoLoader) -> None:
        """Notes that a step is over."""
        if self._is_starting and loader.delivered_batches > self._at_epoch_start:
            self._is_starting = False
            self._skip(loader.delivered_batches - 1 - self._at_epoch_start)
        if loader.delivered_batches == self._workers_started_at:
            self._mark(loader)  # the workers' first batches include their start

    def begin_stretch(self, loader: EchoLoader) -> None:
        """Notes that a stretch of the epoch begins. It is measured separately."""
        self._mark(loader)

    def batches(self, loader: EchoLoader) -> int:
        """Returns the number of batches delivered in the epoch."""
        return loader.delivered_batches - self._at_epoch_start

    def judged_batches(self, loader: EchoLoader) -> int:
        """Returns how many of the last batches show the factor in force, and came from workers that had started."""
        return loader.delivered_batches - max(loader.settled_at, self._workers_started_at)

    def measure(self, loader: EchoLoader) -> SecondsPerBatch:
        """Returns the seconds since the start of the epoch, or of the stretch.

        If no batch counts, it returns the seconds measured before, or `NOT_KNOWN` if there are none.
        """
        spent = loader.seconds - self._seconds_before
        batches = loader.delivered_batches - self._batches_before
        if spent.examples and spent.batches and batches > 0:  # a stream that is resumed may report what it has read again
            batch_size = (loader.counts.delivered - self._examples_before) / batches
            self.seconds_per_batch = SecondsPerBatch(
                source=spent.source / spent.examples * batch_size,
                rest=spent.rest / spent.batches,
                collate=spent.collate / spent.batches,
            )
        return self.seconds_per_batch or NOT_KNOWN

    def _expect_start(self, loader: EchoLoader) -> None:
        """Notes that the next batch of each worker is its first one."""
        self._workers_started_at = loader.delivered_batches + loader.num_workers
        self._is_starting = True

    def _skip(self, batches: int) -> None:
        """Notes that the rest of a pass was left out, so that batch numbers jump. A data set that has grown is one reason."""
        self._at_epoch_start += batches
        self._workers_started_at += batches
        self._batches_before += batches

    def _mark(self, loader: EchoLoader) -> None:
        """Starts to measure here: what the workers have spent before does not count."""
        self._seconds_before = loader.seconds
        self._examples_before, self._batches_before = loader.counts.delivered, loader.delivered_batches


def costs_of(
    echoed: Echoed, of_ranks: Mapping[str, Sequence[SecondsPerBatch]], device_seconds: float, *, in_step: bool
) -> PipelineCosts | None:
    """Returns the costs of the slowest rank and loader; None if the cost model cannot tell them, see above.

    Args:
        echoed: The loader, or the loaders of which a step takes a batch each.
        of_ranks: What each rank has measured, by the name of the loader. NaN if it is not known.
        device_seconds: Time per step in which the device is busy.
        in_step: Whether each step of the epoch took a batch of each loader.
    """
    parts = parts_of(echoed)
    known = {
        name: [
            PipelineCosts(loader.insertion_point.value, *seconds, device_seconds, loader.num_workers)
            for seconds in of_ranks[name]
            if seconds.is_known
        ]
        for name, loader in parts.items()
    }
    if not all(known.values()) or (isinstance(echoed, EchoLoaders) and not (in_step and echoed.fits_cost_model)):
        return None
    slowest = [max(costs, key=lambda each: each.host_seconds(echoed.factor)) for costs in known.values()]
    if slowest[0].workers:
        return max(slowest, key=lambda each: each.host_seconds(echoed.factor))
    return PipelineCosts(
        slowest[0].insertion_point,
        source_seconds=sum(each.source_seconds for each in slowest),
        rest_seconds=sum(each.rest_seconds for each in slowest),
        collate_seconds=sum(each.collate_seconds for each in slowest),
        device_seconds=device_seconds,
        workers=0,
    )
