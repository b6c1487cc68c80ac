"""The replayed time, caches, and counts as text: against models of their own."""

from __future__ import annotations

import doctest
import heapq
import random

import pytest
from learning.reuse import clock, falling, rules, studies
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


@pytest.mark.parametrize("module", [clock, falling, rules, studies])
def test_examples_in_docstrings_run(module) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted
    assert not outcome.failed


def test_without_echoing_the_time_is_that_of_the_slower_of_reading_and_stepping() -> None:
    assert replayed_time([32] * 100, 32, ratio=8) == pytest.approx(800)
    assert replayed_time([32] * 100, 32, ratio=0.5) == pytest.approx(100)


def test_at_a_factor_of_r_only_the_first_batch_is_waited_for() -> None:
    # the first batch takes 8 steps to read; from there on reading and stepping take equally long
    assert replayed_time([32] + [4] * 99, 32, ratio=8) == pytest.approx(8 + 99)


def test_what_is_read_ahead_is_not_waited_for() -> None:
    # read by 4; stepped by 8; the last batch is read by 8, and the step of it ends with 9
    assert replayed_time([8, 0, 0, 0, 0, 8], 8, ratio=4) == 9


def test_time_scales_with_the_step() -> None:
    fresh = [8, 1, 0, 3, 8, 0]
    assert replayed_time(fresh, 8, 5, step=0.25) == pytest.approx(0.25 * replayed_time(fresh, 8, 5))


def test_time_is_that_of_a_reader_and_a_stepper_event_by_event() -> None:
    chance = random.Random(1)
    for _ in range(50):
        fresh = [chance.choice((0, 0, 1, 4, 16)) for _ in range(60)]
        ratio = chance.uniform(0.3, 20)
        assert replayed_time(fresh, 16, ratio) == pytest.approx(events(fresh, ratio, 16))


def test_a_cache_saves_nothing_in_the_first_pass_and_its_share_of_each_later_one() -> None:
    reads = list(cached_reads([10] * 12, pass_length=40, cached=10))
    assert reads == pytest.approx([10] * 4 + [7.5] * 8)


def test_a_batch_that_ends_a_pass_is_read_as_far_as_it_is_new() -> None:
    assert list(cached_reads([10, 10], pass_length=15, cached=15)) == pytest.approx([10, 5])
    assert list(cached_reads([10, 10], pass_length=15, cached=99)) == pytest.approx([10, 5])
    assert list(cached_reads([10, 10], pass_length=15, cached=0)) == pytest.approx([10, 10])


def test_counts_come_back_from_their_text() -> None:
    chance = random.Random(2)
    for _ in range(40):
        counts = [chance.choice((0, 1, 12)) for _ in range(chance.randrange(40))]
        counts += [0, 0, 1] * chance.randrange(30) + counts
        assert unpack_counts(pack_counts(counts)) == counts
    assert pack_counts([]) == ""


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([32] + [4] * 900, "32*1 4*900"),
        ([8] + [0, 1] * 400, "8*1 0,1*400"),
        ([8] + [0, 0, 0, 1] * 200, "8*1 0,0,0,1*200"),
    ],
)
def test_counts_of_a_level_share_are_a_short_text(counts: list[int], text: str) -> None:
    assert pack_counts(counts) == text


@pytest.mark.parametrize("text", ["4", "4*", "*3", "4*3,", "a*3", "-4*3", "4,*3"])
def test_a_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="counts must be patterns"):
        unpack_counts(f"8*2 {text}")
