"""Figures in words: the digits that are left, the singular, and what is left out."""

import pytest

from lightning_echo.measure.control import (
    busy,
    fewer_fresh,
    no_workers,
    number_of,
    over_last,
    percent,
    three_digits,
)


@pytest.mark.parametrize(
    ("number", "digits"),
    [(0, "0"), (0.00012345, "0.000123"), (1.0, "1"), (9.999, "10"), (99.94, "99.9"), (100, "100"), (1234567.8, "1,234,568")],
)
def test_a_number_has_three_digits_or_its_whole_integer_part(number, digits):
    assert three_digits(number) == digits


@pytest.mark.parametrize(("number", "words"), [(0, "0 passes"), (1, "1 pass"), (1.001, "1 pass"), (1.5, "1.5 passes")])
def test_what_is_read_as_one_is_in_the_singular(number, words):
    assert number_of(number, "pass", "passes") == words


def test_a_number_of_steps_that_is_not_known_is_left_out():
    assert over_last(0) == ""
    assert over_last(1) == " (last 1 step)"
    assert busy(0.5) == "the accelerator is busy 50% of the time"
    assert busy(0.5, last=20).endswith("of the time (last 20 steps)")


def test_shares_are_rounded_to_percent():
    assert (percent(0.004), percent(0.996), percent(2)) == ("0%", "100%", "200%")
    assert fewer_fresh(3) == "each step then has 33% as many fresh examples"


def test_the_advice_without_workers_names_their_number_and_the_steps():
    advice = no_workers(3, 0.75, last=8)
    assert advice.startswith("Set num_workers to 3 or more first")
    assert advice.endswith("the accelerator is busy 25% of the time (last 8 steps).")
