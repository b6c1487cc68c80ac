"""The arithmetic of the comparison with other ways to echo: what lists of ids say, what counts as right, where tables go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from peers.arithmetic import coverage, duplicates_per_batch, overlap, resumed_at, steps_between_uses
from peers.loaders import Peer
from peers.verdicts import Facts, wrong

WHOLE = [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_what_lists_of_ids_say() -> None:
    assert duplicates_per_batch([[1, 1, 1, 2], [3, 3, 4, 4]]) == (3 + 4) / 2
    assert duplicates_per_batch([[1, 2], [1, 2]]) == 0  # in different batches
    assert steps_between_uses([[1, 2], [3, 4], [1, 5], [1, 6]]) == 1.5  # example 1: two steps, then one
    assert steps_between_uses([[1, 1, 2]]) == 0
    assert steps_between_uses(WHOLE) is None
    assert coverage([[[0, 1]], [[1, 2], [1, 2]]], 6) == 0.5
    assert overlap([[0, 1], [2, 3]], [[3], [4]]) == 0.5  # of the two of the second rank
    assert overlap([[0]], [[1]]) == 0


@pytest.mark.parametrize(
    ("resumed", "said"),
    [
        (WHOLE[2:], "exact"),
        (WHOLE[:2], "goes on with step 0, not 2"),
        ([[9, 8], [7, 6]], "goes on with other batches"),
        ([WHOLE[2], [9, 9]], "1 steps are the same, then others; 2 steps, not 2"),
        ([*WHOLE[2:], [0, 1]], "2 steps are the same, then others; 3 steps, not 2"),
        ([], "no step follows"),
    ],
    ids=str,
)
def test_a_resumed_run_is_exact_or_what_it_did_instead(resumed: list[list[int]], said: str) -> None:
    assert resumed_at(WHOLE, 2, resumed) == said


RIGHT = Facts(
    reads_per_example=0.25,
    duplicates_per_batch=0.0,
    steps_between_uses=4.0,
    edited=0.0,
    length=8,
    delivered=[8, 8],
    steps=[8, 8],
    resume="exact",
    seen=1.0,
    seen_twice=0.0,
)
PEER = Peer("any", loader=lambda data: None)
EXAMPLES = 64  # two batches, eight steps with the echoes; 512 examples in two epochs


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"reads_per_example": 0.626}, ["reads"]),
        ({"duplicates_per_batch": 0.1}, ["duplicates"]),
        ({"edited": 0.01}, ["edits"]),
        ({"length": None}, ["len"]),
        ({"delivered": [8, 0]}, ["len"]),
        ({"delivered": [800, 800], "length": 800, "reads_per_example": 0.246}, ["reads"]),
        ({"steps": [8, 2]}, ["steps"]),
        ({"resume": "goes on with step 0, not 5"}, ["resume"]),
        ({"seen": 0.99}, ["ranks"]),
        ({"seen_twice": 0.01}, ["ranks"]),
        ({"steps_between_uses": None}, []),
    ],
    ids=str,
)
def test_each_column_is_judged_by_itself(changed: dict[str, Any], said: list[str]) -> None:
    assert wrong(PEER, replace(RIGHT, **changed), EXAMPLES) == said
