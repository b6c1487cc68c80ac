"""How many items may be live: 16 batches by default, enough to fill a batch, and no more than memory holds.

If n batches are live, two uses of an example are about n batches apart. With 16 live batches instead of two, a language model
needed 0.69 times the fresh examples to reach its target, and image classification 0.86 times (docs/evidence.md, e = 4). Two
limits:

* At most a quarter of a short pass is live, because filling the buffer takes additional fresh examples.
* Four batches are live in device memory, which is scarce.
"""

from __future__ import annotations

from typing import Any

from lightning_echo.caching.free_memory import free_memory_bytes
from lightning_echo.insertion import InsertionPoint
from lightning_echo.planning.shape import smallest_buffer

__all__ = ["BufferSizing"]

_LEAST_BATCHES_PER_WORKER = 2
_LEAST_BATCHES = 4  # if whole batches are reused
_MOST_OF_A_PASS = 4  # the default takes at most a fourth of a pass
_DEFAULT_SHARE = 10  # the default takes at most a tenth of the free memory
_MIB, _GIB = 2**20, 2**30


class BufferSizing:
    """Chooses and checks the buffer size of one loader.

    Args:
        batch_size: Items in a batch; 1 if whole batches are the items.
        workers: Number of workers with a buffer each; 1 if the main process holds the items.
        item_bytes: Estimated memory of a live item, bytes; 0 if it is not known.
        by_batches: Whether whole batches are the items.
        usual: Live items by default, if memory is not short.
    """

    def __init__(self, batch_size: int, workers: int, item_bytes: int, by_batches: bool, usual: int) -> None:
        self._batch_size, self._workers, self._item_bytes = batch_size, workers, item_bytes
        self._what, self._usual = "batches" if by_batches else "examples", usual

    @classmethod
    def of(cls, loader: Any, item_bytes: int, point: InsertionPoint, items_per_pass: int | None) -> BufferSizing:
        """Makes one for a ``DataLoader``, or for any loader whose batches are the items.

        Args:
            loader: The loader.
            item_bytes: Estimated memory of a live item, bytes; 0 if it is not known.
            point: The insertion point, not ``auto``. It says how many batches are live by default.
            items_per_pass: Items in a pass on this rank; None if that is not known.
        """
        by_batches = point.by_batches
        batch_size, workers = (1, 1) if by_batches else (loader.batch_size, max(loader.num_workers, 1))
        least = _LEAST_BATCHES if by_batches else _LEAST_BATCHES_PER_WORKER * workers * batch_size
        most = point.properties.live_batches * batch_size
        if items_per_pass is not None:
            most = min(most, items_per_pass // _MOST_OF_A_PASS)
        return cls(batch_size, workers, item_bytes, by_batches, max(least, most))

    def default(self, factor: float) -> tuple[int, str]:
        """Returns the default size, and a warning if memory is too short for the usual one (else an empty string)."""
        size, free = self._usual, free_memory_bytes()
        if free is None or size * self._item_bytes <= free / _DEFAULT_SHARE:
            return size, ""
        least = max(smallest_buffer(self._batch_size, max(factor, 2.0), self._workers), 1)
        fitting = min(max(int(free / _DEFAULT_SHARE // self._item_bytes), least), size)
        if fitting == size:
            return size, ""
        return fitting, (
            f"buffer_size is {fitting} instead of {size}: {size} live {self._what} of {self._item_bytes / _MIB:.3g} MiB would "
            f"take more than a tenth of the {free / _GIB:.3g} GiB of free memory. Set buffer_size to choose another"
        )

    def check(self, size: int, factor: float) -> None:
        """Refuses a size that cannot fill a batch at this factor.

        Raises:
            ValueError: The message names the smallest size.
        """
        needed = smallest_buffer(self._batch_size, factor, self._workers)
        if size < needed:
            raise ValueError(
                f"buffer_size={size} is too small for factor={factor:g}: a batch of {self._batch_size} needs "
                f"{needed // self._workers} live {self._what} in each of {self._workers} workers. Use at least {needed}, or "
                "leave it out"
            )

    def check_fits(self, size: int) -> None:
        """Refuses a size that memory cannot hold.

        Raises:
            ValueError: The message names the free memory.
        """
        free = free_memory_bytes()
        if free is not None and size * self._item_bytes > free:
            raise ValueError(
                f"buffer_size={size} cannot fit: {size} live {self._what} of {self._item_bytes / _MIB:.3g} MiB need more than "
                f"the {free / _GIB:.3g} GiB of free memory. Use a smaller one, or a later insertion point"
            )
