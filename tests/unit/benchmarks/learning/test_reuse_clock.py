"""The replayed time, caches, and counts as text: against models of their own."""

from __future__ import annotations

import heapq
import random

import pytest
from learning.reuse.clock import cached_reads, pack_counts, replayed_time, unpack_counts


def events(fresh: list[int], ratio: float, batch_size: int) -> float:
    """Two processes that pass tokens, by a queue of events: one reads examples, the other steps."""
    arrived, heap = 0.0, []
    for number, count in enumerate(fresh):
        for _ in range(count):
            arrived += ratio / batch_size
        heapq.heappush(heap, (number, arrived))
    end = 0.0
    while heap:
        _, at = heapq.heappop(heap)
        end = at if at > end + 1 else end + 1
    return end


def test_time_is_that_of_a_reader_and_a_stepper_event_by_event() -> None:
    chance = random.Random(1)
    for _ in range(50):
        fresh = [chance.choice((0, 0, 1, 4, 16)) for _ in range(60)]
        ratio = chance.uniform(0.3, 20)
        assert replayed_time(fresh, 16, ratio) == pytest.approx(events(fresh, ratio, 16))


def test_a_cache_saves_nothing_in_the_first_pass_and_its_share_of_each_later_one() -> None:
    reads = list(cached_reads([10] * 12, pass_length=40, cached=10))
    assert reads == pytest.approx([10] * 4 + [7.5] * 8)


def test_counts_come_back_from_their_text() -> None:
    chance = random.Random(2)
    for _ in range(40):
        counts = [chance.choice((0, 1, 12)) for _ in range(chance.randrange(40))]
        counts += [0, 0, 1] * chance.randrange(30) + counts
        assert unpack_counts(pack_counts(counts)) == counts
    assert pack_counts([]) == ""
