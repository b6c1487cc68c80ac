"""The insertion points: where in the input pipeline the echo stage stands, what is reused and what is redone.

::

    index --read--> raw --decode--> example --augment--> example' --collate--> batch --transfer--> device batch --> step
                   ^               ^                    ^                     ^                    ^
           after_read  before_augmentation     after_augmentation      after_batching       after_transfer

Earlier is better for learning, later is cheaper (Choi et al. 2019, arXiv 1907.05550, section 3).
"""

from __future__ import annotations

from enum import Enum

__all__ = ["InsertionPoint"]


class InsertionPoint(str, Enum):
    """Where the echo stage stands. Members are lower-case: jsonargparse reads enums by their names.

    Attributes:
        after_read: The raw item (compressed bytes) is reused; decoding, augmentation, collation and transfer run for each use.
            Not chosen by ``auto``: for those who ask, where memory is short or decoding draws random numbers.
        before_augmentation: The decoded example is reused; augmentation, collation and transfer run for each use.
        after_augmentation: The augmented example is reused; collation and transfer run for each use.
        after_batching: The batch on the host is reused; only its transfer runs for each use.
        after_transfer: The batch on the device is reused, without a copy: ``transfer_batch_to_device`` and
            ``on_before_batch_transfer`` run once per fresh batch, ``on_after_batch_transfer`` for each use. Live batches take
            device memory, and host memory too, for a fresh transfer: in-place edits that the version counter of a tensor shows
            are answered by one. Edits past that counter are not seen, and reach the echo: through ``.data``, ``.numpy()`` of a
            tensor on the CPU, DLPack, or a kernel of one's own. Never chosen by ``auto``.
        auto: The earliest of these, from ``before_augmentation`` on, at which everything random comes after the echo stage.
    """

    after_read = "after_read"
    before_augmentation = "before_augmentation"
    after_augmentation = "after_augmentation"
    after_batching = "after_batching"
    after_transfer = "after_transfer"
    auto = "auto"

    @property
    def by_batches(self) -> bool:
        """Whether batches are the items that are echoed, and not examples."""
        return self in (InsertionPoint.after_batching, InsertionPoint.after_transfer)

    def __str__(self) -> str:
        return self.value
