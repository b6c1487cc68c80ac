"""The comparison with other ways to echo: the rows that need no further package, as `make peers` measures them."""

from __future__ import annotations

from typing import Any

import pytest
from peers import speed
from peers.loaders import OURS, PEERS
from peers.tables import correctness
from report import Table

NAMES = [*OURS, "bare", "naive"]
EXAMPLES = 512  # 16 batches, 64 steps with the echoes


@pytest.fixture(scope="module")
def table() -> Table:
    return correctness(NAMES, EXAMPLES)


def row(table: Table, name: str) -> dict[str, Any]:
    found = next(row for row in table.rows if row[0] == PEERS[name].title)
    return dict(zip(table.columns, found, strict=True))


@pytest.mark.program
@pytest.mark.parametrize("point", OURS)
def test_ours_is_right_in_all_columns(table: Table, point: str) -> None:
    found = row(table, point)
    assert found["wrong"] == "nothing"
    assert 512 * 2 <= found["reads per example"] * 4096 < 512 * 2 + 256  # of two passes, and what is read ahead or live
    assert found["duplicates per batch"] == found["edited %"] == 0
    assert found["len"] == 64
    assert found["delivered"] == found["steps in Lightning"] == found["expected"] == "64 + 64"
    assert found["resume"] == "exact"
    assert (found["two ranks saw %"], found["both saw %"]) == (100, 0)


@pytest.mark.program
def test_a_naive_repeat_has_no_length_begins_again_and_repeats_edits_and_ranks(table: Table) -> None:
    found = row(table, "naive")
    assert found["wrong"] == "edits, len, resume, ranks"
    assert found["reads per example"] == 0.25
    assert found["steps between uses"] == 1
    assert found["edited %"] == 75
    assert found["len"] == "none"
    assert found["steps in Lightning"] == "64 + 64"
    assert found["resume"] == "goes on with step 0, not 13"
    assert (found["two ranks saw %"], found["both saw %"]) == (50, 100)


@pytest.mark.program
def test_a_bare_loader_only_resumes_wrong(table: Table) -> None:
    found = row(table, "bare")
    assert found["wrong"] == "resume"
    assert (found["reads per example"], found["len"], found["delivered"]) == (1, 16, "16 + 16")


@pytest.mark.program
def test_rates_are_measured_here_and_in_a_process_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that does other things, too: only that there are rates, not which."""
    monkeypatch.setattr(speed, "_source", lambda step_seconds: (speed.Sleeping(0.0, 4096), 4.0))
    monkeypatch.setattr(speed, "_STEP_SECONDS", 0.001)
    beside = {**vars(PEERS["naive"]), "own_process": True}
    monkeypatch.setitem(PEERS, "naive", type(PEERS["naive"])(**beside))
    timed_here: list[Any] = []
    timing = speed.seconds_per_batch
    monkeypatch.setattr(speed, "seconds_per_batch", lambda loader, *args: timed_here.append(loader) or timing(loader, *args))
    table = speed.speed(["after_batching", "naive"], speed.Extent(rounds=1, steps=20))
    assert [type(loader).__name__ for loader in timed_here] == ["EchoLoader"]
    for found in table.rows:
        assert 0 < found[2] < 1000  # a step takes a thousandth of a second at least
        assert found[2] == found[3] == found[4]
    assert table.rows[1][-1] in ("ahead", "behind")
