"""Two ranks of a node with different free memory settle on one buffer size, and have the same plan (buffer_ranks_runs.py)."""

from __future__ import annotations

from typing import Any

import buffer_ranks_runs
import node_launch
import pytest
from buffer_ranks_runs import FREE, RANKS

pytestmark = pytest.mark.program

LEAST = min(FREE) / RANKS  # KiB that the poorer rank may count on: what is free is divided among the two
TENTH = 4 * 8  # of its 50 examples, as a power of two of batches


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return node_launch.once(
        tmp_path_factory, "buffer_ranks", lambda folder: node_launch.side_by_side(RANKS, folder, buffer_ranks_runs.__file__)
    )


def of(ranks: list[dict[str, Any]], scenario: str, name: str) -> list[Any]:
    return [rank[scenario][name] for rank in ranks]


@pytest.mark.parametrize(
    ("scenario", "size"),
    [
        ("scenario_share", LEAST * 0.3),
        ("scenario_default_of_each", LEAST / 10),
        ("scenario_resumed_without_room_on_one_rank", 170 / RANKS // 10),
        ("before_the_job", TENTH),
    ],
)
def test_both_have_the_size_that_the_poorer_one_has_room_for_and_one_plan(
    ranks: list[dict[str, Any]], scenario: str, size: float
) -> None:
    assert of(ranks, scenario, "size") == [size, size]
    first, second = of(ranks, scenario, "state")
    assert first == second
    assert first["buffer_size"] == size
    assert first["plan"]["number"] == first["delivered"] > 0


def test_before_it_is_settled_each_says_what_it_would_take_alone(ranks: list[dict[str, Any]]) -> None:
    assert of(ranks, "scenario_share", "before") == [free * 0.3 for free in FREE]


def test_the_first_rank_says_that_another_one_has_less_memory(ranks: list[dict[str, Any]]) -> None:
    said, other = of(ranks, "scenario_default_of_each", "said")
    assert len(said) == 1
    assert said[0] == "lightning_echo: buffer_size is 50 instead of 128: another rank has less free memory"
    assert other == [], "once in a job"
    assert of(ranks, "before_the_job", "said") == [[], []]


def test_a_run_that_cannot_keep_its_size_on_one_rank_is_inexact_on_both(ranks: list[dict[str, Any]]) -> None:
    said, _ = of(ranks, "scenario_resumed_without_room_on_one_rank", "said")
    assert any("the state was saved with buffer_size=90 (now 8)" in each for each in said)


def test_a_share_that_is_too_small_on_one_rank_is_refused_on_both(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["scenario_refused_on_all"] for rank in ranks)
    assert first == second
    assert first.startswith("buffer_size=0.9 (4 live examples) is too small for factor=4")


def test_workers_may_be_started_again_on_one_rank_alone(ranks: list[dict[str, Any]]) -> None:
    assert [rank["scenario_started_again_on_one_rank_alone"] for rank in ranks] == [TENTH] * RANKS
