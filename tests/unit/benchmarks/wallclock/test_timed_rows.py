import importlib.util
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from learning.store import Store
from wallclock.plans import FIXED, NO_ECHO, SETTLED, STEP, STEP_STEPS, TARGET_IDLE, Plan
from wallclock.timed import TimedRow, factor_changes
from wallclock_rows import row, seed_rows, stage

from lightning_echo.measure.summary import EpochReport

MAIN = Path(__file__).parents[4] / "benchmarks" / "wallclock" / "__main__.py"


@pytest.fixture(scope="module")
def main() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wallclock_main", MAIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("is_reached", [True, False])
def test_a_row_comes_back_from_its_file_as_it_was(tmp_path: Path, is_reached: bool) -> None:
    runs = Store(tmp_path, "runs", TimedRow)
    one = row(FIXED, 1.5, rate=1e-2 / 3, is_reached=is_reached)
    runs.add(one)
    assert Store(tmp_path, "runs", TimedRow).rows == [one]


def test_only_runs_that_are_missing_are_run(main: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = []

    def run(study: Any, plan: Plan, stage: Any) -> TimedRow:
        ran.append((plan.arm, plan.factor, plan.steps, stage.ratio))
        of_plan = {name: value for name, value in vars(plan).items() if name != "steps"}
        return replace(row(plan.arm, 2.0), **of_plan, wanted_steps=plan.steps, last_factor=5.5)

    monkeypatch.setattr(main, "timed_run", run)
    stages, runs = main.Store(tmp_path, "stages", main.Stage), main.Store(tmp_path, "runs", main.TimedRow)
    stages.add(stage(8))
    runs.add(row(NO_ECHO, 8.0))
    options, rates = Namespace(seeds=[1], ratios=[8]), {"glyphs": {1.0: 0.1, 8.0: 0.8}}
    main.run_due([main.STUDIES["glyphs"]], rates, stages, runs, options)
    assert ran == [(STEP, 32, STEP_STEPS, 8), (FIXED, 8, 0, 8), (TARGET_IDLE, 1, 0, 8), (SETTLED, 5.5, 100, 8)]
    main.run_due([main.STUDIES["glyphs"]], rates, stages, main.Store(tmp_path, "runs", main.TimedRow), options)
    assert len(ran) == 4


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
    failures = main.report([stage()], seed_rows(idle=1.6), tmp_path / "results", Namespace(quick=quick, out=None))
    assert failures == 1  # TargetIdle takes 1.6 s where 1.5 s are its factor's
    written = {path.name for path in (tmp_path / "results").glob("*.csv")}
    names = ("stages", "times", "allowed", "replay", "target_idle", "headline")
    assert written == {f"wallclock_{name}.csv" for name in names}
    assert (page.parent / "wallclock.png").exists() == is_written
    assert (tmp_path / "results" / "wallclock.png").exists() != is_written
    assert ("| glyphs | 8 | 1 | 100 [100, 100] | 6 [6, 6] | 1.6 [1.6, 1.6] |" in page.read_text()) == is_written
    assert ("![Time to the target against R](wallclock.png)" in page.read_text()) == is_written
