"""The arithmetic of the comparison with other ways to echo: what lists of ids say, what counts as right, where tables go."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peers import speed
from peers.arithmetic import coverage, duplicates_per_batch, overlap, resumed_at, steps_between_uses
from peers.data import CountedReads
from peers.loaders import Peer
from peers.verdicts import Facts, wrong

WHOLE = [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_duplicates_are_all_uses_of_what_is_in_a_batch_more_than_once() -> None:
    assert duplicates_per_batch([[1, 1, 1, 2], [3, 3, 4, 4]]) == (3 + 4) / 2
    assert duplicates_per_batch([[1, 2], [1, 2]]) == 0  # in different batches


def test_steps_between_uses_are_counted_from_use_to_use() -> None:
    assert steps_between_uses([[1, 2], [3, 4], [1, 5], [1, 6]]) == 1.5  # example 1: two steps, then one
    assert steps_between_uses([[1, 1, 2]]) == 0
    assert steps_between_uses(WHOLE) is None


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


def test_what_two_ranks_saw() -> None:
    assert coverage([[[0, 1]], [[1, 2], [1, 2]]], 6) == 0.5
    assert overlap([[0, 1], [2, 3]], [[3], [4]]) == 0.5  # of the two of the second rank
    assert overlap([[0]], [[1]]) == 0


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


def _read(data: CountedReads) -> None:
    for index in range(50):
        assert data[index][1] == index


def test_reads_of_several_processes_are_all_counted(tmp_path: Path) -> None:
    data = CountedReads(tmp_path / "reads.txt", 100)
    assert data.reads() == []
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=_read, args=(data,)) for _ in range(4)]
    for other in others:
        other.start()
    for other in others:
        other.join()
        assert other.exitcode == 0
    assert sorted(data.reads()) == sorted(4 * list(range(50)))


def test_speed_is_compared_round_by_round_with_ours_at_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is not asked: the third round is a slow one for both."""
    rates = {"after_batching": iter([200.0, 220.0, 110.0]), "naive": iter([100.0, 200.0, 100.0])}
    monkeypatch.setattr(speed, "rate", lambda name, data, steps: next(rates[name]))
    monkeypatch.setattr(speed, "_source", lambda step_seconds: (speed.Sleeping(0.001), 4.0))
    monkeypatch.setattr(speed, "real_sleep", lambda seconds: 0.004)
    table = speed.speed(["after_batching", "naive"], speed.Extent(rounds=3, steps=8))
    ours, naive = table.rows
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert ours[2:] == (200.0, 110.0, 220.0, 0.8, "", "", "", "", "")
    assert naive[2:] == (100.0, 100.0, 200.0, 0.4, "after_batching", pytest.approx(1.1), pytest.approx(1.1), 2.0, "ahead")
