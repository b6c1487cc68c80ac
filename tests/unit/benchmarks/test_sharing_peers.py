"""Sharing beside TensorSocket: what is counted of a run, and that none of them lasts."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sharing_peers
import torch
from sharing_peers import OURS, SHARERS, Outcome, Plan, Sharer, row
from workloads import BATCH_SIZE

COLUMNS = sharing_peers._COLUMNS
PLAN = Plan(trainings=1, batches=3, passes=2)  # 86 examples
OTHER = SHARERS[1]


def ran(seconds: float, *passes: tuple[int, int, int], own: float = 0.0, reader: float = 0.0) -> dict[str, Any]:
    return {"passes": [list(each) for each in passes], "seconds": seconds, "own": own, "reader": reader}


def named(cells: tuple[Any, ...]) -> dict[str, Any]:
    assert len(cells) == len(COLUMNS)
    return dict(zip(COLUMNS, cells, strict=True))


@pytest.fixture(params=["", "1.0"], ids=["not installed", "installed"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Sharer, "version", property(lambda sharer: request.param if sharer.package else "-"))
    return request.param


def test_the_examples_in_docstrings_run() -> None:
    assert doctest.testmod(sharing_peers).attempted > 0
    assert doctest.testmod(sharing_peers).failed == 0


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


def test_the_readers_processor_time_is_divided_among_the_trainings() -> None:
    facts = ran(1.0, (2, 50, 50), (2, 50, 50), own=0.5, reader=2.0)
    assert named(row(OURS, PLAN, [Outcome("ran", [facts])], [Outcome("ran", [facts])]))["us per example"] == 50_000
    assert sharing_peers.microseconds(Outcome("ran", [facts] * 4)) == pytest.approx(20_000)


def test_who_hangs_has_a_row_that_says_so() -> None:
    found = named(row(OTHER, PLAN, [Outcome("hung after 0 batches")], [Outcome("ran", [ran(1.0, (3, 86, 86))])]))
    assert (found["runs"], found["delivered"], found["examples/s"]) == ("hung after 0 batches", "-", "-")


def test_who_is_not_installed_or_not_run_has_a_row_that_says_so(version: str) -> None:
    found = named(row(OTHER, PLAN, [], []))
    assert (found["version"], found["runs"]) == ((version, "not run") if version else ("not installed", "-"))


def test_only_who_is_installed_is_run_and_only_for_as_many_trainings_as_fit(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, int]] = []

    def outcome(sharer: Sharer, plan: Plan) -> Outcome:
        asked.append((sharer.name, plan.trainings, plan.batches))
        return Outcome("ran", [ran(1.0, *[(plan.batches, plan.examples, plan.examples)] * plan.passes)] * plan.trainings)

    monkeypatch.setattr(sharing_peers, "outcome", outcome)
    table = sharing_peers.sharing_peers(quick=False)
    assert {len(each) for each in table.rows} == {len(COLUMNS)}
    assert [(each[0], each[2]) for each in table.rows] == [(sharer.name, k) for k in (1, 2, 3, 1) for sharer in SHARERS]
    counts = {(who.name, k): asked.count((who.name, k, 30)) for who in SHARERS for k in (1, 2, 3)}
    expected = 3 if version else 0
    assert counts == {(who.name, k): 3 if who is OURS else expected * (k <= who.most) for who in SHARERS for k in (1, 2, 3)}
    assert asked.count((OURS.name, 1, 8)) == 1


# ---------------------------------------------------------------------- one run


def of_python(code: str, folder: Path, name: str) -> subprocess.Popen[bytes]:
    with open(folder / f"{name}.log", "w") as log:
        return subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log, start_new_session=True)


@pytest.mark.parametrize(
    ("code", "seen", "said"),
    [
        ("import time; time.sleep(60)", "7", "hung after 7 batches"),
        ("raise ValueError('a bad example')", "0", "training died: ValueError: a bad example"),
        ("", "0", "training died: without a word"),
    ],
)
def test_a_training_that_does_not_go_on_ends_the_run(code: str, seen: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "training-0.seen").write_text(seen)
    process = of_python(code, tmp_path, "training-0")
    try:
        if "sleep" not in code:
            process.wait()
        quiet = 0.2 if "sleep" in code else 60.0
        assert sharing_peers._watch({"training-0": process}, ["training-0"], tmp_path, quiet) == said
    finally:
        sharing_peers._end([process])
    assert process.poll() is not None


def test_no_run_lasts_even_if_something_arrives_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing_peers, "_MOST_SECONDS", 0.3)
    counts = iter(range(1, 10**6))
    monkeypatch.setattr(sharing_peers, "_text", lambda file: str(next(counts)))
    process = of_python("import time; time.sleep(60)", tmp_path, "training-0")
    try:
        said = sharing_peers._watch({"training-0": process}, ["training-0"], tmp_path, 60.0)
    finally:
        sharing_peers._end([process])
    assert said.startswith("hung after ")


def test_a_producer_that_dies_ends_the_run(tmp_path: Path) -> None:
    codes = {"producer": "1 / 0", "training-0": "import time; time.sleep(60)"}
    processes = {name: of_python(code, tmp_path, name) for name, code in codes.items()}
    try:
        processes["producer"].wait()
        said = sharing_peers._watch(processes, ["training-0"], tmp_path, 60.0)
    finally:
        sharing_peers._end(processes.values())
    assert said == "producer died: ZeroDivisionError: division by zero"
    assert processes["training-0"].poll() is not None


def test_a_training_says_how_far_it_is_and_what_it_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 107.0])  # at the end of the first pass, and of the last one
    monkeypatch.setattr(sharing_peers.time, "perf_counter", lambda: next(now))
    plan = Plan(trainings=1, batches=3, passes=3)
    passes = iter([[torch.arange(4), torch.arange(3)], [torch.arange(4)], [torch.arange(2)]])

    class Loader:
        def __iter__(self) -> Any:
            return ((None, numbers) for numbers in next(passes))

    sharing_peers.take_passes(plan, "training-0", tmp_path, Loader(), os.getpid())
    facts = json.loads((tmp_path / "training-0.json").read_text())
    assert facts["passes"] == [[2, 7, 4], [1, 4, 4], [1, 2, 2]]
    assert facts["seconds"] == 7.0
    assert (tmp_path / "training-0.seen").read_text() == "4"
    assert set(facts) == {"passes", "seconds", "own", "reader"}


def test_a_plan_goes_to_the_processes_and_comes_back_the_same() -> None:
    plan = Plan(2, 20, 3, together=8, ports=sharing_peers._free_ports(4), reader=7)
    assert len(set(plan.ports)) == 4
    back = Plan(**json.loads(json.dumps(asdict(plan))))
    assert replace(back, ports=tuple(back.ports)) == plan


@pytest.mark.slow
@pytest.mark.program
@pytest.mark.parametrize("sharer", SHARERS, ids=str)
def test_ours_gives_each_training_all_examples_and_tensorsocket_all_but_the_last_batches(sharer: Sharer) -> None:
    if sharer.package and find_spec(sharer.package) is None:
        pytest.skip(f"{sharer.package} is not installed")
    found = sharing_peers.outcome(sharer, Plan(trainings=1, batches=10, passes=2))
    assert found.said == "ran"
    delivered = 10 - ((10 - 1) % sharer.together + 1) if sharer.together else 10
    examples = 10 * BATCH_SIZE - 10 if delivered == 10 else delivered * BATCH_SIZE
    assert found.facts[0]["passes"] == [[delivered, examples, examples]] * 2


@pytest.mark.slow
@pytest.mark.program
def test_a_pass_of_eight_batches_is_a_hang_of_tensorsocket_and_none_of_ours() -> None:
    if find_spec("tensorsocket") is None:
        pytest.skip("tensorsocket is not installed")
    assert sharing_peers.outcome(OTHER, Plan(trainings=1, batches=8, passes=2), quiet_seconds=5) == Outcome(
        "hung after 0 batches"
    )
