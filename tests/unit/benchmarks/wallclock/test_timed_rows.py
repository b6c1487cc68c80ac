import importlib.util
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from learning.store import Store
from wallclock.timed import TimedRow, factor_changes
from wallclock_rows import POINT, row, stage

from lightning_echo.measuring.report import EpochReport

MAIN = Path(__file__).parents[4] / "benchmarks" / "wallclock" / "__main__.py"


@pytest.fixture(scope="module")
def main() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wallclock_main", MAIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_row_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    runs, rate = Store(tmp_path, "runs", TimedRow), 1e-2 / 3
    one = TimedRow(**{**vars(row("e=2", float("inf"))), "rate": rate, "idle": 0.25})
    runs.add(one)
    assert Store(tmp_path, "runs", TimedRow).rows == [one]


def test_only_runs_that_are_missing_are_run(main: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = []

    def run(task: Any, plan: Any, stage: Any) -> TimedRow:
        ran.append((plan.arm, plan.rate, stage.ratio))
        return TimedRow(**{**vars(row("e=4", 2.0)), **vars(plan)})

    monkeypatch.setattr(main, "timed_run", run)
    stages, runs = main.Store(tmp_path, "stages", main.Stage), main.Store(tmp_path, "runs", main.TimedRow)
    stages.add(stage(0))
    stages.add(stage(4.0))
    done, other = row("e=4", 2.0), row("e=8", 2.0)
    tuned_anew = TimedRow(**{**vars(done), "rate": 0.5})
    runs.add(done)
    task = next(iter(main._TASKS.values()))
    main.run_due(task, [done.plan, other.plan, tuned_anew.plan], stages, runs)
    assert ran == [(f"{POINT}, e=8", 0.01, 4.0), (f"{POINT}, e=4", 0.5, 4.0)]
    again = main.Store(tmp_path, "runs", main.TimedRow)
    main.run_due(task, [done.plan, other.plan, tuned_anew.plan], stages, again)
    assert len(ran) == 2


def test_where_the_factor_changed_is_said_by_epoch() -> None:
    reports = [EpochReport(epoch, 16, factor, 0, 0) for epoch, factor in enumerate([1.0, 4.28, 4.28, 4.1, 4.28])]
    assert factor_changes(reports) == "0:1 1:4.28 3:4.1 4:4.28"


@pytest.mark.parametrize(("quick", "is_written"), [(False, True), (True, False)])
def test_the_report_goes_to_files_and_only_as_evidence_into_the_page(
    main: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick: bool, is_written: bool
) -> None:
    page = tmp_path / "docs" / "evidence.md"
    page.parent.mkdir()
    page.write_text("<!-- wallclock:begin --><!-- wallclock:end -->")
    monkeypatch.setattr(main, "_PAGE", page)
    rows = [
        row("no echo, source not slowed", 1.0, ratio=0),
        row("no echo", 4.0),
        row("e=4", 3.0, steps=200),  # 200 steps of 10 ms: learning allows 2 s
        row("TargetIdle", 3.1),
    ]
    failures = main.report([stage(0), stage(4.0)], rows, tmp_path / "results", Namespace(quick=quick, out=None))
    assert failures == 1  # 1.33 of a bound of 2; TargetIdle is within 10 %
    written = {path.name for path in (tmp_path / "results").glob("*.csv")}
    assert written == {f"wallclock_{name}.csv" for name in ("stages", "times", "bound", "target_idle")}
    assert (page.parent / "wallclock.png").exists() == is_written
    assert (tmp_path / "results" / "wallclock.png").exists() != is_written
    assert ("| t | 4 | after_batching | 1 | e=4 | 3 [3, 3] | 3.1 [3.1, 3.1] |" in page.read_text()) == is_written
    assert ("![Time to the target against R](wallclock.png)" in page.read_text()) == is_written
