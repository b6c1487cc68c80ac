"""Error diffusion against its definition in exact fractions; seeds from a published hash; the live items against a plain list."""

import random
from fractions import Fraction
from itertools import product
from math import ceil, floor

from hypothesis import given
from hypothesis import strategies as st

from lightning_echo.plan.each import Buffer, Live
from lightning_echo.plan.plan import Call, EchoRatio, mix, named_seed

ratios = st.tuples(st.integers(1, 400), st.integers(1, 100)).map(lambda pair: Fraction(1) + Fraction(pair[0] - 1, pair[1]))


def ratio_of(factor):
    return EchoRatio(factor.numerator, factor.denominator)


def test_a_factor_is_the_fraction_that_its_digits_say_or_one_within_a_millionth_of_a_millionth():
    for factor in (1, 1.1, 1.5, 2.37, 3.3, 7.25, 8):
        assert Fraction(*EchoRatio.of(factor)) == Fraction(str(factor))
    factor = 2.718281828459045
    assert abs(Fraction(*EchoRatio.of(factor)) - Fraction(factor)) < Fraction(1, 10**12)


@given(ratios, st.integers(1, 10_000))
def test_of_n_items_one_in_e_is_fresh_rounded_down_and_of_a_batch_its_share_rounded(factor, count):
    ratio = ratio_of(factor)
    assert (ratio.fresh_among(count), ratio.most_fresh(count)) == (floor(count / factor), ceil(count / factor))
    most = ratio.most_items(count)  # the most that so many fresh ones pay for
    assert (ratio.fresh_among(most), ratio.fresh_among(most + 1)) == (count, count + 1)


@given(ratios, st.integers(0, 1000), st.integers(0, 200))
def test_the_first_i_fresh_items_get_floor_i_e_uses_wherever_one_begins(factor, first, count):
    ratio = ratio_of(factor)
    left = ratio.uses_left(first, count)
    assert len(left) == count
    assert sum(left) + count == floor((first + count) * factor) - floor(first * factor)
    assert {uses + 1 for uses in left} <= {floor(factor), ceil(factor)}


@given(ratios, st.integers(20, 300))
def test_the_uses_that_fill_a_buffer_are_spread_evenly_and_in_no_order(factor, total):
    """As in the middle of a run: between more than none and all that an item has left after its first use, half on average."""
    ratio = ratio_of(factor)
    left = ratio.staggered(0, total, total)
    assert sorted(left) == [ceil((factor - 1) * Fraction(2 * i + 1, 2 * total)) for i in range(total)]
    middle = total // 2
    assert ratio.staggered(0, middle, total) + ratio.staggered(middle, total - middle, total) == left
    if len(set(left)) > 2:
        assert left != sorted(left)


def test_mixing_is_splitmix64_and_tells_numbers_and_their_places_apart():
    assert mix(0) == 0xE220A8397B1DCDAF  # the first number of the published generator seeded with 0
    pairs = list(product(range(-10, 50), range(100)))
    assert len({mix(*pair) for pair in pairs}) == len(pairs)


def test_a_name_makes_a_seed_its_own_and_no_name_leaves_it():
    assert named_seed(7, "") == 7
    names = ["a", "b", "ab", "ba", "a/0", "a/1", "\u00e9", "labelled", "unlabelled"]
    seeds = {named_seed(seed, name) for name in names for seed in range(100)}
    assert len(seeds) == 900
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert named_seed(7, "a") == mix(7, 97) // 2  # the same on every machine, unlike hash()


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
