"""The arithmetic of the comparison with other ways to echo: what lists of ids say, what counts as right, where tables go."""

from __future__ import annotations

import doctest
import multiprocessing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from peers import arithmetic, speed, tables, verdicts
from peers.arithmetic import coverage, duplicates_per_batch, overlap, resumed_at, steps_between_uses
from peers.data import CountedReads
from peers.loaders import LIVE_BATCHES, OURS, PEERS, Peer, Repeated
from peers.verdicts import Facts, expected_steps, standing, wrong
from report import Table
from workloads import BATCH_SIZE, Sleeping

WHOLE = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("module", [arithmetic, verdicts])
def test_the_examples_in_docstrings_run(module: Any) -> None:
    assert doctest.testmod(module).attempted > 0
    assert doctest.testmod(module).failed == 0


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
        (WHOLE[2:3], "1 steps are the same, then others; 1 steps, not 2"),
        ([*WHOLE[2:], [0, 1]], "2 steps are the same, then others; 3 steps, not 2"),
        ([[5, 4], [7, 6]], "goes on with other batches"),
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
        ({"reads_per_example": 0.625}, []),  # 192 examples more: six batches
        ({"reads_per_example": 0.626}, ["reads"]),
        ({"duplicates_per_batch": 0.1}, ["duplicates"]),
        ({"edited": 0.01}, ["edits"]),
        ({"length": None}, ["len"]),
        ({"length": 2}, ["len"]),
        ({"delivered": [8, 0]}, ["len"]),
        ({"delivered": [800, 800], "length": 800, "reads_per_example": 0.254}, ["reads"]),
        ({"delivered": [800, 800], "length": 800, "reads_per_example": 0.246}, ["reads"]),
        ({"delivered": [800, 800], "length": 800, "reads_per_example": 0.2537}, []),
        ({"steps": [8, 2]}, ["steps"]),
        ({"steps": [8]}, ["steps"]),
        ({"resume": "goes on with step 0, not 5"}, ["resume"]),
        ({"seen": 0.99}, ["ranks"]),
        ({"seen_twice": 0.01}, ["ranks"]),
        ({"steps_between_uses": None}, []),
    ],
    ids=str,
)
def test_each_column_is_judged_by_itself(changed: dict[str, Any], said: list[str]) -> None:
    assert wrong(PEER, replace(RIGHT, **changed), EXAMPLES) == said


def test_of_live_examples_three_quarters_of_the_uses_may_be_left_at_factor_four() -> None:
    """18 batches of 32: 576 of 51,200 examples are 0.01125 of them."""
    ours = replace(RIGHT, delivered=[800, 800], length=800, steps=[8, 8])
    for reads, said in ((0.2612, []), (0.2613, ["reads"])):
        assert wrong(replace(PEER, live_batches=16), replace(ours, reads_per_example=reads), EXAMPLES) == said


def test_the_buffers_that_are_compared_are_as_large_as_our_default() -> None:
    data = Sleeping(0.0, 4096)
    assert PEERS["after_augmentation"].loader(data).buffer_size == LIVE_BATCHES * BATCH_SIZE
    assert PEERS["after_batching"].loader(data).buffer_size == LIVE_BATCHES


def test_a_peer_is_expected_to_take_the_steps_of_its_own_documentation() -> None:
    assert expected_steps(PEER, EXAMPLES) == 8
    assert expected_steps(PEERS["bare"], EXAMPLES) == 2
    assert expected_steps(PEERS["timm"], EXAMPLES) == 2
    assert wrong(PEERS["bare"], replace(RIGHT, reads_per_example=1.0, steps=[2, 2]), EXAMPLES) == []


def test_facts_are_put_together_from_one_process_and_two_ranks() -> None:
    alone = {name: value for name, value in vars(RIGHT).items() if not name.startswith("seen")}
    ranks = [{"batches": [[0, 1], [2, 3]]}, {"batches": [[4, 5], [0, 1]]}]  # the second half is not compared
    assert Facts.of(alone, ranks, 6) == RIGHT
    assert Facts.of(alone, ranks, 12).seen == 0.5
    assert Facts.of(alone, [ranks[0], ranks[0]], 4).seen_twice == 1


def test_ours_is_ahead_or_behind_only_where_all_rounds_agree() -> None:
    assert [standing(ratios) for ratios in ([1.01, 2], [1, 2], [0.9, 2], [0.9, 1], [0.9, 0.99])] == [
        *("ahead", "level", "level", "level", "behind")
    ]


def test_each_peer_is_compared_with_one_of_ours() -> None:
    for name, peer in PEERS.items():
        assert (peer.ours in OURS) != (name in OURS), name


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


def test_the_naive_repeat_begins_anew_in_each_epoch() -> None:
    loader = Repeated([1, 2], 2)
    assert [list(loader), list(loader)] == [[1, 1, 2, 2]] * 2


def test_what_is_not_installed_has_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "missing", Peer("a peer", lambda data: None, ("no-such-package-as-this",)))
    table = tables.correctness(["missing"], EXAMPLES)
    assert len(table.columns) == len(table.rows[0])
    assert table.rows == [("a peer", "", *["-"] * (len(table.columns) - 3), "not installed")]
    assert PEERS["bare"].version == f"torch {version('torch')}"


def test_only_rows_of_ours_that_are_not_right_count_as_failures() -> None:
    ours, other = PEERS[OURS[0]].title, PEERS["naive"].title
    for said, expected in (("nothing", 0), ("resume", 1), ("dies: MemoryError", 1)):
        assert tables.failures(Table("peers", "", ("peer", "wrong"), [(ours, said), (other, "len")])) == expected


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


def test_the_markdown_has_each_row_and_keeps_bars_in_cells() -> None:
    table = Table("any", "what it is", ("a", "b"), [("x|y", 1.23456), ("z", 2)])
    assert table.markdown() == "what it is\n\n| a | b |\n| --- | ---: |\n| x\\|y | 1.235 |\n| z | 2 |\n"
