"""The table of sharing with the workers of all: what passes, and what does not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import sharing_workers
from sharing_workers import Counted, Round, rows_of


def named(cells: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(sharing_workers._COLUMNS, cells, strict=True))


def test_rates_are_divided_by_those_of_one_alone_in_the_same_round_and_the_median_counts() -> None:
    found = {1: [Round(100, 1.0), Round(50, 1.02), Round(80, 1.01)], 4: [Round(380, 1.0), Round(210, 1.2), Round(160, 1.05)]}
    alone, four = map(named, rows_of(found))
    assert (alone["of k = 1"], alone["workers"], alone["examples/s"], alone["passed"]) == (1, 2, 80, "yes")
    assert (four["lowest"], four["of k = 1"], four["highest"]) == (2, 3.8, 4.2)
    assert (four["workers"], four["examples/s"], four["required"]) == (8, 210, ">= 3.6")
    assert (four["reads per example"], four["passed"]) == (1.05, "yes")


@pytest.mark.parametrize("two", [Round(179, 1.0), Round(200, 1.11)], ids=["slow", "reads more"])
def test_what_is_slower_or_reads_more_than_the_rule_says_has_not_passed(two: Round) -> None:
    _, cells = rows_of({1: [Round(100, 1.0)], 2: [two]})
    assert named(cells)["passed"] == "NO"


def test_each_read_is_counted(tmp_path: Path) -> None:
    dataset = Counted(str(tmp_path / "reads"), 0.0)
    for index in range(3):
        dataset[index]
    assert os.stat(dataset.path).st_size == 3
