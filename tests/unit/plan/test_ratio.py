"""Error diffusion against its definition in exact fractions: which items are fresh, and how often each is used."""

from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_echo.plan.plan import EchoRatio

ratios = st.tuples(st.integers(1, 400), st.integers(1, 100)).map(lambda pair: Fraction(1) + Fraction(pair[0] - 1, pair[1]))


def ratio_of(factor):
    return EchoRatio(factor.numerator, factor.denominator)


@pytest.mark.parametrize("factor", [1, 1.1, 1.5, 2.37, 3.3, 7.25, 8])
def test_a_factor_is_the_fraction_that_its_digits_say(factor):
    assert Fraction(*EchoRatio.of(factor)) == Fraction(str(factor))


def test_a_factor_that_is_no_short_fraction_is_met_to_a_millionth_of_a_millionth():
    factor = 2.718281828459045
    assert abs(Fraction(*EchoRatio.of(factor)) - Fraction(factor)) < Fraction(1, 10**12)


@given(ratios, st.integers(0, 10_000))
def test_of_the_first_n_items_one_in_e_is_fresh_rounded_down(factor, delivered):
    assert ratio_of(factor).fresh_among(delivered) == floor(delivered / factor)


@given(ratios, st.integers(0, 3000))
def test_so_many_items_are_the_most_that_so_many_fresh_ones_pay_for(factor, fresh):
    ratio = ratio_of(factor)
    most = ratio.most_items(fresh)
    assert (ratio.fresh_among(most), ratio.fresh_among(most + 1)) == (fresh, fresh + 1)


@given(ratios, st.integers(1, 500))
def test_a_batch_has_the_floor_or_the_ceiling_of_its_share(factor, size):
    ratio = ratio_of(factor)
    assert (ratio.fresh_among(size), ratio.most_fresh(size)) == (floor(size / factor), ceil(size / factor))
    shares = {ratio.fresh_among(first + size) - ratio.fresh_among(first) for first in range(0, 20 * size, size)}
    assert shares <= {ratio.fresh_among(size), ratio.most_fresh(size)}


@given(ratios, st.integers(0, 1000), st.integers(0, 200))
def test_the_first_i_fresh_items_get_floor_i_e_uses_wherever_one_begins(factor, first, count):
    ratio = ratio_of(factor)
    left = ratio.uses_left(first, count)
    assert len(left) == count
    assert sum(left) + count == floor((first + count) * factor) - floor(first * factor)
    assert {uses + 1 for uses in left} <= {floor(factor), ceil(factor)}
    assert ratio.uses_left(first, 7) + ratio.uses_left(first + 7, count) == ratio.uses_left(first, 7 + count)


@given(ratios, st.integers(20, 300))
def test_the_uses_that_fill_a_buffer_are_spread_evenly_and_in_no_order(factor, total):
    """As in the middle of a run: between more than none and all that an item has left after its first use, half on average."""
    ratio = ratio_of(factor)
    left = ratio.staggered(0, total, total)
    further = factor - 1
    assert sorted(left) == [ceil(further * Fraction(2 * i + 1, 2 * total)) for i in range(total)]
    middle = total // 2
    assert ratio.staggered(0, middle, total) + ratio.staggered(middle, total - middle, total) == left
    if len(set(left)) > 2:
        assert left != sorted(left)
