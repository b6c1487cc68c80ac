"""Each option is checked: a plain value of any library is taken, a message names the argument, the value and the way out."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest

from lightning_echo import config as options
from lightning_echo.insertion import InsertionPoint

FACTOR_IS = "factor must be a finite number >= 1, got {}; use 1 to switch echoing off"
SIZE_IS = 'an integer (live examples per rank), a string with a unit such as "4GiB", or a share of the free memory such as 0.2'
REFUSED = [
    *[("factor", value, ValueError, FACTOR_IS) for value in (0.5, 0, -1, math.nan, math.inf, -math.inf, 0.999)],
    *[
        ("factor", value, TypeError, "factor must be a real number >= 1 (1: no echoing), got {}")
        for value in ("2", True, None, 2j)
    ],
    ("factor", 1e30, ValueError, "factor must be at most 1,000,000, got {}"),
    *[("buffer_size", value, ValueError, "buffer_size must be at least 1, got {}; leave it out") for value in (0, -3)],
    *[("buffer_size", value, ValueError, "between 0 and 1 if it is a share") for value in (0.0, 1.0, -0.5, math.nan, math.inf)],
    *[
        ("buffer_size", text, ValueError, f"buffer_size must be {SIZE_IS}, got {{}}")
        for text in ("8", "", "-1GiB", "0.5B", "0.5")
    ],
    *[("buffer_size", value, TypeError, f"buffer_size must be {SIZE_IS} or None, got {{}}") for value in (True, [8])],
    *[
        ("epoch_length", value, ValueError, "epoch_length must be 'fixed' or 'full_pass', got {}")
        for value in ("FIXED", None, 100)
    ],
    *[("seed", value, TypeError, "seed must be an integer, or None") for value in ("1", 1.0, True)],
    ("reuse", "all", ValueError, "reuse must be 'each'"),
]


@pytest.mark.parametrize(("name", "value", "error", "said"), REFUSED, ids=str)
def test_an_impossible_value_is_refused_with_what_is_possible(name, value, error, said):
    with pytest.raises(error, match=re.escape(said.format(repr(value)))) as refused:
        getattr(options, f"check_{name}")(value)
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize(
    ("factor", "error", "said"),
    [
        (
            "auto",
            ValueError,
            "factor='auto' is impossible here: .* Give 'demand' or a number, or .* EchoCallback\\(factor='auto'\\)",
        ),
        ("Demand", TypeError, "factor must be a real number >= 1 .*, 'demand' or a Replay, got 'Demand'"),
    ],
)
def test_a_loader_without_a_trainer_takes_no_other_word_than_demand(factor, error, said):
    with pytest.raises(error, match=said):
        options.check_demand(factor, None)


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        *[("factor", value, float(value)) for value in (1, 2.5, np.float32(2.5), np.int64(3), Fraction(5, 2))],
        *[("buffer_size", value, value) for value in (8, 0.25, "4GiB", None)],
        *[("buffer_size", np.int64(8), 8), ("buffer_size", np.float32(0.25), 0.25), ("buffer_size", np.str_("1.5 kB"), "1.5 kB")],
        *[("seed", np.int64(3), 3), ("seed", None, None)],
    ],
)
def test_a_value_of_any_library_becomes_a_plain_one(name, value, plain):
    found = getattr(options, f"check_{name}")(value)
    assert (found, type(found)) == (plain, type(plain))


def test_points_are_known_by_name_or_member_and_others_are_refused_with_a_list():
    for member in InsertionPoint:
        assert options.check_point(member.value) is options.check_point(member) is member
    for point in ("before", "AUTO", 3, None):
        with pytest.raises(ValueError, match="insertion_point must be one of") as refused:
            options.check_point(point)
        assert all(repr(each) in str(refused.value) for each in (point, *(member.value for member in InsertionPoint)))


@pytest.mark.parametrize(
    ("replicas", "rank", "error", "said"),
    [
        *[(*each, ValueError, "given together, got .* leave both out .* or give 1 and 0") for each in ((2, None), (None, 0))],
        *[(*each, ValueError, r"rank must be in 0 \.\. num_replicas - 1, got rank=") for each in ((2, 2), (0, 0), (2, -1))],
        *[
            (*each, TypeError, "num_replicas must be an integer, got .* leave both out")
            for each in (("2", 0), (2.5, 0), (True, 0))
        ],
        (2, "0", TypeError, "rank must be an integer, got '0'; leave both out"),
    ],
)
def test_ranks_that_do_not_exist_are_refused(replicas, rank, error, said):
    with pytest.raises(error, match=said):
        options.check_ranks(replicas, rank)
    assert options.check_ranks(np.int64(2), np.int32(1)) == (2, 1)
