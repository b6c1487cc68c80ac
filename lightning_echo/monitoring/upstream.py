"""`Upstream`: what the workers of one `EchoLoader` spend on a batch, and which steps show it; what several cost together.

Where a step takes a batch of each of several loaders, their workers run side by side: the step waits for the slowest loader,
whose costs are those of all. Without workers they take turns, and their costs add up. That is all the cost model can tell: with
workers for some only, with factors of their own, with loaders beside that are not echoed, or where steps do not take a batch of
each (``max_size``), nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_echo.loading.loader import EchoLoader
from lightning_echo.measuring.cost import PipelineCosts
from lightning_echo.training.collection import Echoed, EchoLoaders, parts_of

__all__ = ["NOT_KNOWN", "Stages", "Upstream", "costs_of"]

Stages = tuple[float, float, float]  # seconds of source, rest and collate per batch of fresh examples
NOT_KNOWN: Stages = (math.nan, math.nan, math.nan)


class Upstream:
    """Follows one loader through a training.

    Args:
        loader: As the training begins, or goes on.

    Attributes:
        stages: When last measured; None: never yet.
    """

    def __init__(self, loader: EchoLoader, stages: Stages | None = None) -> None:
        self.stages = stages
        self._delivered_before = (0, 0)  # examples and batches
        self._is_starting = True  # the first batch of the workers is still to come
        self._expect_start(loader)
        self.begin_epoch(loader)

    def begin_epoch(self, loader: EchoLoader) -> None:
        """An epoch begins, or goes on after a resume; with a loader that a reload may have made anew."""
        self._at_epoch_start = loader.delivered
        if not loader.is_running:
            self._expect_start(loader)
        self._mark(loader)

    def end_step(self, loader: EchoLoader) -> None:
        """A step is over."""
        if self._is_starting and loader.delivered > self._at_epoch_start:
            self._is_starting = False
            self._skip(loader.delivered - 1 - self._at_epoch_start)
        if loader.delivered == self._workers_run_at:
            self._mark(loader)  # the workers' first batches include their start

    def batches(self, loader: EchoLoader) -> int:
        """Delivered in the epoch."""
        return loader.delivered - self._at_epoch_start

    def judged_batches(self, loader: EchoLoader) -> int:
        """The last ones delivered that show the factor in force, and came from workers that run."""
        return loader.delivered - max(loader.settled_at, self._workers_run_at)

    def measure(self, loader: EchoLoader) -> Stages:
        """Worker seconds per batch of fresh examples since the epoch's start; NaN where they are not known."""
        spent = loader.seconds - self._seconds_before
        examples, batches = loader.counts.delivered - self._delivered_before[0], loader.delivered - self._delivered_before[1]
        if spent.examples and spent.batches:
            size = examples / batches
            self.stages = (spent.source / spent.examples * size, spent.rest / spent.batches, spent.collate / spent.batches)
        return self.stages or NOT_KNOWN

    def _expect_start(self, loader: EchoLoader) -> None:
        """The next batch of each worker is its first one."""
        self._workers_run_at = loader.delivered + loader.num_workers
        self._is_starting = True

    def _skip(self, batches: int) -> None:
        """The rest of a pass was left out, as where the data set has grown: batches have other numbers from here on."""
        self._at_epoch_start += batches
        self._workers_run_at += batches
        self._delivered_before = (self._delivered_before[0], self._delivered_before[1] + batches)

    def _mark(self, loader: EchoLoader) -> None:
        """What workers have spent up to here does not count."""
        self._seconds_before, self._delivered_before = loader.seconds, (loader.counts.delivered, loader.delivered)


def costs_of(
    echoed: Echoed, of_ranks: Mapping[str, Sequence[Stages]], device_seconds: float, *, in_step: bool
) -> PipelineCosts | None:
    """Of the slowest rank and loader; None where it cannot be told, see above.

    Args:
        echoed: The loader, or those that a step takes a batch of each of.
        of_ranks: By name of a loader what each rank has measured, NaN where it is not known.
        device_seconds: Time per step in which the device is busy.
        in_step: Whether each step of the epoch took a batch of each loader.
    """
    parts = parts_of(echoed)
    known = {
        name: [
            PipelineCosts(loader.insertion_point.value, *stages, device_seconds, loader.num_workers)
            for stages in of_ranks[name]
            if not any(map(math.isnan, stages))
        ]
        for name, loader in parts.items()
    }
    if not all(known.values()) or (isinstance(echoed, EchoLoaders) and not (in_step and echoed.fits_cost_model)):
        return None
    slowest = [max(costs, key=lambda each: each.host_seconds(echoed.factor)) for costs in known.values()]
    if slowest[0].workers:
        return max(slowest, key=lambda each: each.host_seconds(echoed.factor))
    total = [
        sum(values) for values in zip(*((c.source_seconds, c.rest_seconds, c.collate_seconds) for c in slowest), strict=True)
    ]
    return PipelineCosts(slowest[0].insertion_point, total[0], total[1], total[2], device_seconds, 0)
