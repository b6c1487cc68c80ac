"""Where the host's time goes: seconds of source, rest and collate, measured where they run and sent along with the batches.

``source`` is what runs before the insertion point, once per fresh example; ``rest`` what runs after it in the workers, per use
(augmentation, protection, looking up); ``collate`` runs once per batch. Where batches are reused all three come before the
insertion point, once per fresh batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Report", "StageSeconds"]


class Report(NamedTuple):
    """What travels beside a batch: a named tuple, since ``pin_memory`` rebuilds tuples and does not look into dataclasses.

    Attributes:
        fresh: Fresh examples.
        echoed: Echoed ones.
        refetched: Examples that were read again, see `EchoCounts`.
        source: Seconds of it.
        rest: Seconds of it.
        collate: Seconds of it.
        note: What the user should hear; mostly empty.
    """

    fresh: int = 0
    echoed: int = 0
    refetched: int = 0
    source: float = 0.0
    rest: float = 0.0
    collate: float = 0.0
    note: str = ""


@dataclass
class StageSeconds:
    """Seconds that workers have spent on the batches delivered so far on this rank, added up over workers.

    Attributes:
        source: Before the insertion point.
        rest: After it, except collate.
        collate: Making batches of examples.
        examples: Examples that ``source`` and ``rest`` of whole batches, or ``source`` alone, were measured for: those read.
        batches: Batches that ``collate`` was measured for.

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
        """What was added since an earlier moment."""
        return StageSeconds(
            self.source - earlier.source,
            self.rest - earlier.rest,
            self.collate - earlier.collate,
            self.examples - earlier.examples,
            self.batches - earlier.batches,
        )
