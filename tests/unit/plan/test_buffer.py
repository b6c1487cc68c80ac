"""The live items of a worker, against a plain list of them: ``[position, uses left, uses so far]``, oldest first."""

import random
from math import ceil, floor

from hypothesis import given
from hypothesis import strategies as st

from lightning_echo.plan.each import Buffer, Live
from lightning_echo.plan.plan import Call

LEFT = st.lists(st.integers(1, 4), min_size=1, max_size=30)


def filled(left):
    """Returns a buffer whose items have so many uses left, at the positions 0, 1, 2, ...; each was used once."""
    buffer = Buffer()
    for position, uses in enumerate(left):
        item = Live(position, uses, 1, Call(position, 1))
        buffer.put(item)
        buffer.by_age.append(item)
    return buffer


def rows(buffer):
    return sorted([item.position, item.left, item.used] for item in buffer)


@given(LEFT, st.floats(0, 1), st.integers(0, 9))
def test_as_many_items_are_drawn_as_asked_for_each_once_and_of_all_uses_left_by_their_share(left, share, seed):
    """Strata of two or more uses left, one after the other: up to each border the share is even."""
    buffer, count, ones = filled(left), round(share * len(left)), left.count(1)
    items = buffer.draw(count, 0, len(left), random.Random(seed).random)
    positions, drawn = [item.position for item in items], [item.left for item in items]
    assert len(set(positions)) == len(positions) == count == len(left) - len(buffer)
    assert sorted(positions + [position for position, _, _ in rows(buffer)]) == list(range(len(left)))
    exact, others, rest = ones * count / len(left), len(left) - ones, count - drawn.count(1)
    assert floor(exact) <= drawn.count(1) <= ceil(exact) or drawn.count(1) == max(count - others, 0)
    for border in (2, 3) if others else ():
        passed = sum(1 < uses <= border for uses in left) * rest / others
        assert floor(passed) <= sum(1 < uses <= border for uses in drawn) <= ceil(passed)


@given(LEFT, st.floats(0, 1), st.integers(0, 4), st.integers(0, 4), st.integers(0, 9))
def test_places_are_freed_as_the_caller_needs_it(left, share, least, most, seed):
    buffer, ones = filled(left), left.count(1)
    count, least = round(share * len(left)), min(least, most)
    freed = [item.left for item in buffer.draw(count, least, most, random.Random(seed).random)].count(1)
    others = len(left) - ones
    assert freed >= min(least, ones, count)
    assert freed <= max(most, count - others), "more than asked for only where the others do not suffice"


def test_each_item_is_drawn_with_the_same_probability():
    rand, drawn, tries = random.Random(1).random, [0] * 10, 8_000
    for _ in range(tries):
        for item in filled([1, 1, 1, 2, 2, 2, 2, 3, 3, 4]).draw(4, 0, 10, rand):
            drawn[item.position] += 1
    deviation = (tries * 0.4 * 0.6) ** 0.5
    assert all(abs(times - tries * 0.4) < 5 * deviation for times in drawn)


@given(LEFT, st.integers(1, 5))
def test_a_lower_factor_takes_uses_away_and_drops_what_had_as_many_already(left, most):
    buffer = filled(left)  # each was used once
    buffer.restrict(most)
    assert rows(buffer) == [[at, min(uses, most - 1), 1] for at, uses in enumerate(left) if most > 1]
    assert buffer.forget == ([] if most > 1 else list(range(len(left))))
    assert [item.position for item in buffer.by_age] == [at for at, _, _ in rows(buffer)]


@given(LEFT, st.integers(1, 6), st.integers(1, 40))
def test_urgent_is_what_cannot_be_used_up_in_time_unless_every_batch_from_now_on_uses_it(left, step, max_age):
    """Counted batch by batch: while the stream moves on by ``step``, how many more batches may an item be drawn in?"""
    buffer, newest = filled(left), len(left) - 1
    urgent = {item.position for item in buffer.urgent(newest, max_age, step, max(left))}
    for position, uses in enumerate(left):
        chances, at = 0, newest + 1
        while at - position <= max_age:
            chances, at = chances + 1, at + step
        assert (position in urgent) is (chances <= uses), (chances, uses)
