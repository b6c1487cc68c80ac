"""The benchmark of proofs: its clock, its grid, and all of it in its quickest form."""

from __future__ import annotations

import types
from collections.abc import Iterator
from itertools import accumulate

import pytest
import tune

from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.result import ProvedGain


def clocked(
    monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float], epochs: list[int], **options: float
) -> tuple[tune._Clock, bool]:
    """A clock after epochs of so many steps that take these seconds, and whether it ended the training."""
    now = accumulate(seconds)
    monkeypatch.setattr(tune, "time", types.SimpleNamespace(perf_counter=lambda: next(now)))
    clock, trainer = tune._Clock(**{"steps": 1000, "most_seconds": 1000.0, "filling": 0, **options}), types.SimpleNamespace()
    trainer.should_stop = False
    for steps in epochs:
        clock.on_train_epoch_start()
        for _ in range(steps):
            clock.on_train_batch_end(trainer)
    return clock, trainer.should_stop


def test_the_first_eight_steps_of_an_epoch_do_not_count_and_the_others_do_in_groups_of_eight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    epoch = [100.0] * 8 + [1.0] * 16 + [50.0] * 3
    clock, ended = clocked(monkeypatch, iter(epoch * 2), [27, 27])
    assert (clock.steps, clock.seconds, ended) == (32, 32.0, False)


def test_steps_in_which_a_cache_is_filled_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, _ = clocked(monkeypatch, iter([100.0] * 32 + [1.0] * 8), [40], filling=32)
    assert (clock.steps, clock.seconds) == (8, 8.0)


@pytest.mark.parametrize("enough", [{"steps": 16}, {"most_seconds": 10.0}])
def test_the_training_ends_after_the_steps_or_their_seconds(monkeypatch: pytest.MonkeyPatch, enough: dict[str, float]) -> None:
    assert clocked(monkeypatch, iter([1.0] * 23), [23], **enough)[1] is False
    assert clocked(monkeypatch, iter([1.0] * 24), [24], **enough)[1] is True


def test_the_grid_has_each_setting_that_a_pipeline_can_have_once() -> None:
    cells = {pipeline.name: list(tune._grid(pipeline, tune._POINTS)) for pipeline in tune._PIPELINES}
    assert all(len(set(each)) == len(each) for each in cells.values())
    assert sorted(map(len, cells.values())) == [15] * 6 + [30] * 2  # 3 numbers of workers, 1 + 2 * 2 echoes; two of them twice
    assert all(cell.reads_in_flight == 1 and cell.hold is None for cell in cells["a very slow source"])
    assert TrainingSetting(0) in cells["not starved"]


@pytest.mark.parametrize(("low", "high", "covered"), [(1.9, 2.1, "yes"), (2.01, 2.3, "no")])
def test_a_gain_is_covered_if_the_mean_ratio_of_the_turns_is_in_the_interval(low: float, high: float, covered: str) -> None:
    row = tune._gain(tune._PIPELINES[0], 1, ProvedGain(TrainingSetting(2), 2.1, low, high, 4), [1.0, 4.0], [1.0, 1.0])
    assert row[-4:] == (pytest.approx(2.0), pytest.approx(69.31, rel=1e-3), covered, "")


@pytest.mark.program
@pytest.mark.slow
def test_all_of_it_runs() -> None:
    tables = {table.name: table for table in tune.tune(quick=True)}
    assert list(tables) == ["tune", "tune_gains"]
    for table in tables.values():
        assert {len(row) for row in table.rows} == {len(table.columns)}
    row = dict(zip(tables["tune"].columns, tables["tune"].rows[0], strict=True))
    assert 45 < row["plain ms"] < 90  # eight reads of 6 ms
    assert 29 < row["step alone ms"] < 60
