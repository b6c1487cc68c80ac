"""Sharing beside TensorSocket: what is counted of a run, and that none of them lasts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sharing_peers
from sharing_peers import OURS, SHARERS, Outcome, Plan, row

COLUMNS = sharing_peers._COLUMNS
PLAN = Plan(trainings=1, batches=3, passes=2)  # 86 examples
OTHER = SHARERS[1]


def ran(seconds: float, *passes: tuple[int, int, int], own: float = 0.0, reader: float = 0.0) -> dict[str, Any]:
    return {"passes": [list(each) for each in passes], "seconds": seconds, "own": own, "reader": reader}


def named(cells: tuple[Any, ...]) -> dict[str, Any]:
    assert len(cells) == len(COLUMNS)
    return dict(zip(COLUMNS, cells, strict=True))


def test_what_a_training_has_least_of_in_any_pass_of_any_round_is_its_row() -> None:
    first = Outcome("ran", [ran(2.0, (3, 86, 86), (3, 86, 86)), ran(4.0, (3, 86, 86), (2, 64, 60))])
    second = Outcome("ran", [ran(1.0, (3, 86, 86), (3, 86, 86)), ran(2.0, (3, 86, 86), (3, 86, 86))])
    found = named(row(OURS, replace(PLAN, trainings=2), [first, second], [first, second]))
    assert (found["batches a pass"], found["delivered"]) == (3, 2)
    assert (found["examples a pass"], found["missed"], found["twice"]) == (86, 26, 4)
    assert (found["lowest"], found["examples/s"], found["highest"]) == (16.0, 29.5, 43.0)  # of the slower training
    assert (found["of ours"], found["runs"]) == (1, "ran")


def test_rates_are_divided_by_those_of_ours_in_the_same_round() -> None:
    mine = [Outcome("ran", [ran(seconds, (2, 50, 50), (2, 60, 60))]) for seconds in (1.0, 2.0)]
    theirs = [Outcome("hung after 3 batches"), Outcome("ran", [ran(6.0, (2, 50, 50), (2, 60, 60))])]
    found = named(row(OTHER, PLAN, theirs, mine))
    assert (found["examples/s"], found["of ours"]) == (10.0, pytest.approx(1 / 3))
    assert found["runs"] == "hung after 3 batches 1 of 2, ran 1 of 2"
