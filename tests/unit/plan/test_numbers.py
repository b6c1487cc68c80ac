"""Error diffusion against its definition in exact fractions; seeds from a published hash; the sizes of a plan."""

from fractions import Fraction
from itertools import product
from math import ceil, floor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger import plain_batch_sizes, shape_of

from lightning_echo.plan.plan import EchoRatio, PlanShape, mix, named_seed, smallest_buffer

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


def test_the_smallest_buffer_holds_the_echoes_of_a_batch_for_each_worker():
    for batch_size, factor in product([1, 7, 10, 32], [1, 1.1, 2, 2.37, 3.3, 100]):
        echoes = batch_size - floor(batch_size / Fraction(str(factor)))
        assert [smallest_buffer(batch_size, factor, workers) for workers in (0, 1, 3)] == [echoes, echoes, 3 * echoes]


@pytest.mark.parametrize(("length", "drop_last"), [(320, False), (325, False), (325, True), (5, False)])
def test_batches_have_the_sizes_of_the_plain_loader_pass_after_pass(length, drop_last):
    sizes = plain_batch_sizes(length, 8, drop_last)
    shape = shape_of(sizes, 8, 2, 32)
    assert [shape.size_of(number) for number in range(3 * len(sizes))] == 3 * sizes
    assert shape.pass_length == sum(sizes)


def test_a_short_pass_leaves_the_next_one_freedom_to_be_shuffled():
    """400 examples, four workers with two batches of 32 each: keeping indices a whole pass apart would freeze the order."""
    shape = PlanShape(batch_size=32, last_batch_size=16, batches_per_pass=13, workers=4, buffer_size=256, seed=0)
    assert shape.buffer_size + shape.batch_size <= shape.max_age <= shape.pass_length - 50
