"""Each message names the argument, the value and the way out; tests/integration has them through `EchoLoader`."""

import math
import re

import numpy as np
import pytest

from lightning_echo import config as options
from lightning_echo.insertion import InsertionPoint


@pytest.mark.parametrize("factor", [0.5, 0, -1, math.nan, math.inf, -math.inf, 0.999])
def test_a_factor_below_1_or_not_finite(factor):
    with pytest.raises(ValueError, match=rf"factor must be a finite number >= 1, got {factor!r}; use 1 to switch echoing off"):
        options.check_factor(factor)


@pytest.mark.parametrize("factor", ["2x", "2", None, True, [2], 2j])
def test_a_factor_that_is_no_number(factor):
    with pytest.raises(TypeError, match=r"factor must be a real number >= 1 \(1: no echoing\), got"):
        options.check_factor(factor)


@pytest.mark.parametrize("factor", [1, 2.5, np.float32(2.5), np.int64(3)])
def test_numbers_of_any_library(factor):
    assert options.check_factor(factor) == float(factor)
    assert type(options.check_factor(factor)) is float


@pytest.mark.parametrize("point", ["before", "AUTO", 3, None])
def test_an_unknown_point(point):
    with pytest.raises(ValueError, match="insertion_point must be one of") as caught:
        options.check_point(point)
    assert all(repr(member.value) in str(caught.value) for member in InsertionPoint)
    assert repr(point) in str(caught.value)


def test_known_points_by_name_or_member():
    for member in InsertionPoint:
        assert options.check_point(member.value) is options.check_point(member) is member


@pytest.mark.parametrize(
    ("size", "error"),
    [
        *[(number, ValueError) for number in (0, -3, 0.0, 1.0, 2.0, -0.5, float("nan"), float("inf"))],
        *[(text, ValueError) for text in ("8", "", "GiB", "8 apples", "-1GiB", "0GiB", "0.5B", "0.5")],
        *[(other, TypeError) for other in (True, [8], {"size": 8})],
    ],
)
def test_an_impossible_buffer_size(size, error):
    with pytest.raises(error, match=rf"buffer_size must be .* got {re.escape(repr(size))}"):
        options.check_buffer_size(size)


@pytest.mark.parametrize(
    ("size", "plain"),
    [
        (8, 8),
        (np.int64(8), 8),
        (0.25, 0.25),
        (np.float32(0.25), 0.25),
        ("4GiB", "4GiB"),
        (np.str_("1.5 kB"), "1.5 kB"),
        (None, None),
    ],
)
def test_a_buffer_size_of_any_kind_is_a_plain_value(size, plain):
    found = options.check_buffer_size(size)
    assert (found, type(found)) == (plain, type(plain))


@pytest.mark.parametrize("epoch_length", ["full", "FIXED", None, 100])
def test_an_unknown_epoch_length(epoch_length):
    with pytest.raises(ValueError, match=rf"epoch_length must be 'fixed' or 'full_pass', got {epoch_length!r}"):
        options.check_epoch_length(epoch_length)


@pytest.mark.parametrize("seed", ["1", 1.0, True, [1]])
def test_an_impossible_seed(seed):
    with pytest.raises(TypeError, match="seed must be an integer, or None"):
        options.check_seed(seed)


@pytest.mark.parametrize(("replicas", "rank"), [(2, None), (None, 0)])
def test_one_of_replicas_and_rank_alone(replicas, rank):
    with pytest.raises(ValueError, match=r"num_replicas and rank must be given together, got .* leave both out"):
        options.check_ranks(replicas, rank)


@pytest.mark.parametrize(("replicas", "rank"), [(2, 2), (0, 0), (2, -1)])
def test_a_rank_that_does_not_exist(replicas, rank):
    with pytest.raises(
        ValueError, match=rf"rank must be in 0 \.\. num_replicas - 1, got rank={rank} and num_replicas={replicas}"
    ):
        options.check_ranks(replicas, rank)


@pytest.mark.parametrize(("replicas", "rank", "name"), [("2", 0, "num_replicas"), (2.5, 0, "num_replicas"), (2, "0", "rank")])
def test_ranks_that_are_no_integers(replicas, rank, name):
    with pytest.raises(TypeError, match=f"{name} must be an integer, got .* leave both out"):
        options.check_ranks(replicas, rank)


def test_integers_of_any_library():
    for check in (options.check_seed, options.check_buffer_size):
        assert check(np.int64(3)) == 3
        assert type(check(np.int64(3))) is int
    assert options.check_ranks(np.int64(2), np.int32(1)) == (2, 1)


def test_a_factor_beyond_all_sense():
    with pytest.raises(ValueError, match=r"factor must be at most 1,000,000, got 1e\+30"):
        options.check_factor(1e30)
