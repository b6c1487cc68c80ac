"""What is right of the facts of a peer, and what is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workloads import BATCH_SIZE, WORKERS

from peers.arithmetic import coverage, overlap
from peers.facts import EPOCHS
from peers.loaders import Peer

_BATCHES_AHEAD = 2 * WORKERS + 2  # that workers and a thread may have read for the next pass at the end


@dataclass(frozen=True)
class Facts:
    """The facts of one peer, from one process and from two ranks.

    Attributes:
        reads_per_example: Reads of the source per example delivered.
        duplicates_per_batch: Examples of a batch that are in it more than once, mean.
        steps_between_uses: Median; 0 within a batch.
        edited: Share of the examples delivered that carry an in-place edit, made in an earlier batch.
        length: What ``len`` says; None if there is none.
        delivered: Batches of each epoch, by itself.
        steps: Optimizer steps of each epoch in a Trainer.
        resume: ``"exact"``, or what came instead.
        seen: Share of the data set that two ranks saw together, while they used as many examples as a pass and its echoes have.
        seen_twice: Share of what a rank saw in the first half of these steps that the other saw, too: a pass may end a little
            earlier than its last step, with what comes next dealt out anew.
    """

    reads_per_example: float
    duplicates_per_batch: float
    steps_between_uses: float | None
    edited: float
    length: int | None
    delivered: list[int]
    steps: list[int]
    resume: str
    seen: float
    seen_twice: float

    @classmethod
    def of(cls, alone: dict[str, Any], ranks: list[dict[str, Any]], examples: int) -> Facts:
        one, two = (rank["batches"] for rank in ranks)
        half = len(one) // 2
        return cls(**alone, seen=coverage([one, two], examples), seen_twice=overlap(one[:half], two[:half]))


def expected_steps(peer: Peer, examples: int) -> int:
    """Steps of an epoch, by the peer's own documentation."""
    return round(peer.factor * peer.epoch_passes * examples / BATCH_SIZE)


def wrong(peer: Peer, facts: Facts, examples: int) -> list[str]:
    """The columns in which the peer is not right; empty if it is in all."""
    delivered = sum(facts.delivered) * BATCH_SIZE
    unused = (_BATCHES_AHEAD + peer.live_batches * (1 - 1 / peer.factor)) * BATCH_SIZE  # a live example has had a use at least
    checks = {
        "reads": abs(facts.reads_per_example - 1 / peer.factor) * delivered <= unused,
        "duplicates": facts.duplicates_per_batch == 0,
        "edits": facts.edited == 0,
        "len": facts.delivered == [facts.length] * EPOCHS,
        "steps": facts.steps == [expected_steps(peer, examples)] * EPOCHS,
        "resume": facts.resume == "exact",
        "ranks": facts.seen == 1 and facts.seen_twice == 0,
    }
    return [name for name, is_right in checks.items() if not is_right]


def standing(ratios: list[float]) -> str:
    """Of ours, whose rate was divided by a peer's in each round: the same in all rounds, or level.

    Example:
        >>> standing([1.1, 1.2]), standing([0.9, 1.2]), standing([0.8, 0.9])
        ('ahead', 'level', 'behind')
    """
    if min(ratios) > 1:
        return "ahead"
    return "behind" if max(ratios) < 1 else "level"
