"""Where the host's time goes, in seconds. They are measured where the work is done, and sent together with the batches.

* ``source`` is the work before the insertion point, once per fresh example.
* ``rest`` is the work after it in the workers, once per use: augmentation, copies, lookups.
* ``collate`` is the work of making a batch from examples, once per batch.

If whole batches are reused, all three come before the insertion point, once per fresh batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Report", "StageSeconds"]


class Report(NamedTuple):
    """What a batch cost. It is sent beside the batch.

    A named tuple, since ``pin_memory`` rebuilds tuples and does not look into dataclasses.

    Attributes:
        fresh: Number of fresh examples.
        echoed: Number of echoed examples.
        refetched: Number of examples that were read again, see `EchoCounts`.
        source: Seconds of ``source``.
        rest: Seconds of ``rest``.
        collate: Seconds of ``collate``.
        note: A warning for the user; mostly empty.
        hits: Number of fresh examples that the cache held.
        misses: Number of fresh examples that a cache did not hold.
        received: Number of hits that came from other nodes.
        waited: Seconds of ``source`` in which a worker waited for examples of other nodes.
    """

    fresh: int = 0
    echoed: int = 0
    refetched: int = 0
    source: float = 0.0
    rest: float = 0.0
    collate: float = 0.0
    note: str = ""
    hits: int = 0
    misses: int = 0
    received: int = 0
    waited: float = 0.0


@dataclass
class StageSeconds:
    """Seconds that workers have spent on the batches delivered so far on this rank, added up over workers.

    Attributes:
        source: Seconds before the insertion point.
        rest: Seconds after it, except those of collate.
        collate: Seconds of making batches from examples.
        examples: Number of examples that were read. ``source`` was measured for these. If whole batches are reused, ``rest`` was
            measured for these, too.
        batches: Number of batches for which ``collate`` was measured.

    Example:
        >>> seconds = StageSeconds(source=0.5, rest=0.1, collate=0.2, examples=64, batches=16)
        >>> seconds.source / seconds.examples
        0.0078125
    """

    source: float = 0.0
    rest: float = 0.0
    collate: float = 0.0
    examples: int = 0
    batches: int = 0

    def __sub__(self, earlier: StageSeconds) -> StageSeconds:
        """Returns what was added since an earlier time."""
        return StageSeconds(
            self.source - earlier.source,
            self.rest - earlier.rest,
            self.collate - earlier.collate,
            self.examples - earlier.examples,
            self.batches - earlier.batches,
        )
