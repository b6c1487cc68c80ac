"""Batches that are reused on the device: the point ``after_transfer``.

What travels to whoever trains is no batch but a `BatchUse`: a `LiveBatch`, the same one for all its uses, and, until it is
prepared, the host batch. It becomes a batch where the transfer takes place:

    BatchUse --prepare--> the host batch, changed once    on_before_batch_transfer
             --transfer-> the device batch, moved once    transfer_batch_to_device
             ----------> aliases of it, for each use      on_after_batch_transfer, then the step

The plan lets go of the `LiveBatch`, and with it goes the device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_echo.fetching.batches import BatchEcho
from lightning_echo.fetching.requests import BatchRequests
from lightning_echo.protecting.aliases import LentBatch, rebuild, separate
from lightning_echo.protecting.protect import copy_example

__all__ = ["BatchUse", "LiveBatch", "LiveBatchEcho"]


class BatchUse(NamedTuple):
    """One use of a live batch.

    A named tuple, because a precision plugin of Lightning's converts the tensors of what the loader yields: it rebuilds tuples,
    and so finds the host batch, and passes by a `LiveBatch`.

    Attributes:
        live: The batch.
        host: The batch as it was read, until it is prepared; then None.
        is_last: Whether no use comes after this one.
    """

    live: LiveBatch
    host: Any
    is_last: bool


class LiveBatch:
    """A batch with uses left, on the host and, from its transfer on, on the device.

    Args:
        host: The batch as it was read.

    Example:
        >>> live = LiveBatch([1.0])
        >>> for is_last in (False, True):
        ...     use = live.use(is_last)
        ...     live.prepare(use.host, lambda batch: [*batch, 2.0])
        ...     print(use.host, live.transfer(tuple, is_last=use.is_last))
        [1.0] (1.0, 2.0)
        None (1.0, 2.0)
    """

    __slots__ = ("_device", "_host", "_is_prepared")

    def __init__(self, host: Any) -> None:
        self._host, self._is_prepared = host, False
        self._device: LentBatch | None = None

    def use(self, is_last: bool) -> BatchUse:
        """For whoever trains, made when it is handed over: a use that is never made must not lose the host batch."""
        return BatchUse(self, None if self._is_prepared else self._host, is_last)

    def prepare(self, host: Any, change: Callable[[Any], Any]) -> None:
        """Applies ``change`` to the host batch, at the first use only.

        Args:
            host: That of the `BatchUse`.
            change: Returns what is to be transferred.
        """
        if not self._is_prepared:
            self._host, self._is_prepared = change(host), True

    @property
    def nbytes(self) -> int:
        """Memory that is kept on the device, bytes."""
        return 0 if self._device is None else self._device.nbytes

    def let_go_if_edited(self) -> bool:
        """Lets go of a device batch that was edited in place, so that the next `transfer` is a fresh one; whether it was."""
        is_edited = self._device is not None and self._device.is_edited()
        if is_edited:
            self._device = None
        return is_edited

    def transfer(self, move: Callable[[Any], Any], *, is_last: bool) -> Any:
        """The batch on the device.

        Args:
            move: Transfers a host batch; called where there is no device batch yet.
            is_last: Whether this use is the last one: then nothing is kept.
        """
        host, device = self._host, self._device
        if is_last:
            self._host = self._device = None
            return move(host) if device is None else device.batch
        if device is None:
            device = self._device = LentBatch(move(rebuild(host)))
            self._host = separate(host, device)  # where the device is the host, it would be edited along with the device batch
        return device.hand_out()


class LiveBatchEcho(BatchEcho):
    """Iterates over uses of live batches; the rest is as in `BatchEcho`.

    Args:
        requests: See there.
        read: See there.
        are_owned: Whether nobody else uses the memory of the batches that are read, so that they need not be copied.
    """

    def __init__(
        self,
        requests: BatchRequests,
        read: Callable[[int], tuple[Any, tuple[float, float, float]]],
        *,
        are_owned: bool = False,
    ) -> None:
        super().__init__(requests, read)
        self._are_owned = are_owned

    def _first_use(self, batch: Any, *, is_last: bool) -> tuple[BatchUse, LiveBatch]:
        live = LiveBatch(batch if is_last or self._are_owned else copy_example(batch))
        return BatchUse(live, None, is_last), live

    def _further_use(self, held: LiveBatch, *, is_last: bool) -> BatchUse:
        return BatchUse(held, None, is_last)
