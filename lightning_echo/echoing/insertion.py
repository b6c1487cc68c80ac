"""The insertion points: where in the input pipeline the echo stage stands, what is reused and what is redone.

::

    index --read--> raw --decode--> example --augment--> example' --collate--> batch --transfer--> device batch --> step
                   ^               ^                    ^                     ^
           after_read  before_augmentation     after_augmentation      after_batching

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
        auto: The earliest of these, from ``before_augmentation`` on, at which everything random comes after the echo stage.
    """

    after_read = "after_read"
    before_augmentation = "before_augmentation"
    after_augmentation = "after_augmentation"
    after_batching = "after_batching"
    auto = "auto"

    def __str__(self) -> str:
        return self.value
