"""What a training's workers wait for, and what else the advice on them needs to know of a loader."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_echo.data.machine import busy_seconds, free_memory_bytes, has_no_request
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.measure.advice import CACHE_SHARE
from lightning_echo.pipeline.kinds import Indexed, Kind
from lightning_echo.split.describe import cut, describe
from lightning_echo.split.staged import batched
from lightning_echo.training.loaders import Echoed, leaves_of

# ---------------------------------------------------------------------- worker waits
# A worker that reads one example after the other waits for most of its time if its storage has latency. Then more reads under way
# help more than anything else. A plain run shows that, too: its worker processes are children of this process. They are looked at
# after 4, 8, 16 ... steps of an epoch, while they are alive. Other children count as idle workers would, so only the busiest
# ones are taken, as many as the loader has workers.
#
# A worker also waits if it has done all that it was asked for, as in a training that does not wait for its loader. So one of
# them is looked at now and then: what does it wait for?

FIRST_LOOK = 4  # steps
_BETWEEN_GLANCES = 0.05  # seconds: a glance takes twenty to forty microseconds
_ENOUGH_GLANCES, _MOST_GLANCES = 20, 1000  # the latest ones of a worker are kept


class WorkerWaits:
    """Measures, in an epoch, the share of their time in which the ``workers`` of a loader wait (0: they are not looked at)."""

    def __init__(
        self,
        workers: int,
        clock: Callable[[], float] = time.perf_counter,
        busy: Callable[[], Mapping[int, float | None]] | None = None,
        has_no_request: Callable[[int], bool | None] = has_no_request,
    ) -> None:
        self._workers, self._clock, self._busy = workers, clock, busy or _busy_children  # a Trainer may pickle its callbacks
        self._has_no_request = has_no_request
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self._steps, self._look_at = 0, FIRST_LOOK
        self._first: tuple[float, Mapping[int, float | None]] | None = None
        self._glances: dict[int, deque[bool]] = {}  # whether it had no request, by process, the next one to look at first
        self._next_glance = 0.0
        self._busiest: list[int] = []
        self.fraction = math.nan  # of the time from the first look to the last one; NaN if unknown

    @property
    def no_request(self) -> float:
        """The share of the time in which the workers had nothing to do, since no request was open; NaN if unknown."""
        seen = list(chain.from_iterable(self._glances.get(pid, ()) for pid in self._busiest))
        return sum(seen) / len(seen) if len(seen) >= _ENOUGH_GLANCES else math.nan

    def end_step(self) -> None:
        self._steps += 1
        if not self._workers:
            return
        if self._glances and (now := self._clock()) >= self._next_glance:
            self._glance(now)
        if self._steps < self._look_at:
            return
        self._look_at *= 2
        now, busy = self._clock(), self._busy()
        if self._first is None:
            self._first, self._glances = (now, busy), {pid: deque(maxlen=_MOST_GLANCES) for pid in busy}
            return
        began, before = self._first
        spent = {pid: used - was for pid, used in busy.items() if used is not None and (was := before.get(pid)) is not None}
        if len(spent) >= self._workers and now > began:
            self._busiest = sorted(spent, key=spent.__getitem__)[-self._workers :]
            most = sum(spent[pid] for pid in self._busiest)
            self.fraction = min(max(1 - most / (self._workers * (now - began)), 0.0), 1.0)

    def _glance(self, now: float) -> None:
        self._next_glance = now + _BETWEEN_GLANCES
        pid = next(iter(self._glances))
        seen = self._glances.pop(pid)
        if (found := self._has_no_request(pid)) is not None:  # else it has ended, or cannot be looked at
            seen.append(found)
            self._glances[pid] = seen


def _busy_children() -> dict[int, float | None]:
    return {child.pid: busy_seconds(child.pid) for child in multiprocessing.active_children() if child.pid is not None}


def cached_fraction(kind: Kind, loader: Echoed | None) -> float | None:
    """Returns the share of the data that a cache in half of the free memory would hold; 0: nothing. None: that is not known.

    Whether the data set can be cut is looked up; only a loader that echoes has proved it, and knows what an example weighs.
    """
    if not isinstance(kind, Indexed) or batched(kind.loader.dataset) is not None:
        return 0.0
    split = loader.split if isinstance(loader, EchoLoader) else None
    try:
        kind.check_cache()
        if split is None:
            cut(describe(kind.loader.dataset), raw=False)
    except ValueError:  # a SplitRefused, too
        return 0.0
    if split is None:
        return None
    indices, free = kind.readable_indices, free_memory_bytes()
    whole = split.packed_bytes * (len(kind.loader.dataset) if indices is None else len(indices))
    return min(1.0, CACHE_SHARE * free / whole) if free is not None and whole else None


def watched_loader(loaders: Any) -> DataLoader[Any] | None:
    """Returns the loader whose workers may wait for reads: a single one, read by index, in which no threads read ahead."""
    leaves = list(leaves_of(loaders).values())
    leaf = leaves[0] if len(leaves) == 1 else None
    if isinstance(leaf, EchoLoader):
        leaf = None if leaf.reads_ahead or leaf.sharing is not None else leaf.loader
    if not isinstance(leaf, DataLoader) or isinstance(leaf.dataset, IterableDataset) or not leaf.num_workers:
        return None
    return leaf
