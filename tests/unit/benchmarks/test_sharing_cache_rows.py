"""The benchmark of a cache in the reader: what its row says of the rounds."""

from __future__ import annotations

from typing import Any

import pytest
import sharing_cache
from sharing_cache import Seen, row


def named(cells: tuple[Any, ...]) -> dict[str, Any]:
    assert len(cells) == len(sharing_cache._COLUMNS)
    return dict(zip(sharing_cache._COLUMNS, cells, strict=True))


def without(*seconds: float) -> list[Seen]:
    return [Seen(each, 100, 0, 0) for each in seconds]


def held(*seconds: float) -> list[Seen]:
    """Half of the ten examples were held, and half of what was delivered came from the cache."""
    return [Seen(each, 100, 50, 5) for each in seconds]


def test_the_slowest_training_of_a_round_is_compared_with_that_of_the_same_round() -> None:
    rounds = [(without(1, 2), held(1, 0.5)), (without(4, 1), held(2, 1)), (without(1, 1), held(0.4, 0.4))]
    found = named(row(rounds, 10))
    assert (found["k"], found["held"], found["read"], found["bound"]) == (2, 0.5, 0.5, 2.0)
    assert (found["examples/s without"], found["examples/s with"]) == (50, 100)
    assert (found["lowest"], found["speed-up"], found["highest"]) == (2.0, 2.0, pytest.approx(2.5))
    assert found["reached"] == 1.0
    assert "MISSED" not in found["passed"]


def test_less_than_nine_tenths_of_the_bound_is_missed() -> None:
    found = named(row([(without(1.0), held(0.57))], 10))
    assert found["reached"] == pytest.approx(0.877, abs=0.001)
    assert found["passed"] != named(row([(without(1.0), held(0.55))], 10))["passed"]
