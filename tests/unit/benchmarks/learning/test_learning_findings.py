"""Verdicts of runs whose results were written down, not run."""

from __future__ import annotations

import dataclasses

import pytest
from learning import plots
from learning.arms import Arm, first_arms, further_arms
from learning.defaults import default_comparisons
from learning.due import Progress
from learning.findings import Finding, Runs, findings
from learning.report import arm_table, finding_table, headline, interval_text, summary_table, write_report
from learning.rules import FULL, Interval
from learning_cases import SMALL, row, tuned

POINT = "before_augmentation"
# fresh examples to the target
RESULTS = {
    Arm(): 1000,
    **{Arm(e, POINT): {2: 550, 4: 300, 8: 295}[e] for e in (2, 4, 8)},
    **{Arm(e, "after_augmentation"): {2: 700, 4: 500, 8: 500}[e] for e in (2, 4, 8)},
    **{Arm(e, "after_batching"): {2: 700, 4: 490, 8: 300}[e] for e in (2, 4, 8)},
    **{Arm(cached_share=1 / e): 900 for e in (2, 4, 8)},
    Arm(4, POINT, buffer="small"): 400,
    **{Arm(e, POINT, buffer="large"): {2: 500, 4: 300, 8: 290}[e] for e in (2, 4, 8)},
    Arm(batch_multiple=4): 2000,
    Arm(4, POINT, batch_multiple=4): 700,
    Arm(8, POINT, batch_multiple=4): 400,
}


def runs_of(results: dict[Arm, float], qualities: dict[Arm, float] | None = None, task=SMALL) -> Runs:
    rows = []
    for arm, fresh in results.items():
        rows += tuned(arm, FULL.tuning, fresh)
        rows += [row(arm, seed, fresh * (1 + seed / 100), quality=(qualities or {}).get(arm, 95.0)) for seed in FULL.report]
    return Runs(task, Progress(task, FULL, rows), FULL.report)


def found(number: int, runs: Runs) -> list[Finding]:
    return [finding for finding in findings(runs) if finding.number == number]


def test_all_arms_are_in_this_test() -> None:
    assert set(RESULTS) == {*first_arms(SMALL), *further_arms(SMALL, POINT)}


def test_fewer_fresh_examples_at_the_variant_that_tuning_chose() -> None:
    (finding,) = found(1, runs_of(RESULTS))
    assert (finding.tested, finding.verdict) == ("before_augmentation, e=2 / no echo", "confirmed")
    assert finding.interval == pytest.approx((0.55, 0.55, 0.55))


def test_earlier_points_at_the_factor_where_tuning_says_they_differ_most() -> None:
    first, second = found(2, runs_of(RESULTS))
    assert (first.tested, first.verdict) == ("before_augmentation, e=8 / after_augmentation, e=8", "confirmed")
    assert first.interval.middle == pytest.approx(0.59)
    assert (second.tested, second.verdict) == ("after_augmentation, e=2 / after_batching, e=2", "open")


def test_the_benefit_ends_where_doubling_saves_no_more() -> None:
    by_point = {one.tested.split(":")[0]: (one.tested, one.verdict) for one in found(3, runs_of(RESULTS))}
    assert by_point == {
        "before_augmentation": ("before_augmentation: e=8 / e=4", "confirmed"),
        "after_augmentation": ("after_augmentation: e=8 / e=4", "confirmed"),
        "after_batching": ("after_batching: e=8 / e=4", "contradicted"),
    }


def test_larger_batches_bear_larger_factors() -> None:
    (finding,) = found(4, runs_of(RESULTS))
    assert finding.interval.middle == pytest.approx((400 / 2000) / (295 / 1000))
    assert finding.verdict == "confirmed"


def test_more_shuffling_helps() -> None:
    (finding,) = found(5, runs_of(RESULTS))
    assert finding.interval.middle == pytest.approx(0.75)
    assert found(5, runs_of({**RESULTS, Arm(4, POINT, buffer="large"): 500}))[0].verdict == "contradicted"


def test_quality_is_not_worse_within_the_margin() -> None:
    arm = Arm(2, POINT)
    for quality, verdict in ((95.3, "confirmed"), (94.6, "confirmed"), (94.4, "contradicted")):
        finding = found(6, runs_of(RESULTS, {arm: quality}))[0]
        assert finding.verdict == verdict
        assert finding.interval.middle == pytest.approx(95 - quality)


def test_quality_of_a_falling_metric_is_worse_when_higher() -> None:
    task = dataclasses.replace(SMALL, is_higher_better=False, margin=0.5)
    finding = found(6, runs_of(RESULTS, {Arm(2, POINT): 95.6}, task))[0]
    assert finding.verdict == "contradicted"


def test_reuse_saves_data_not_steps() -> None:
    finding = found(7, runs_of(RESULTS))[0]
    assert finding.interval.middle == pytest.approx(1000 / (2 * 550))
    assert finding.verdict == "confirmed"


def test_what_has_not_run_is_not_said() -> None:
    assert findings(runs_of({Arm(): 1000})) == []


def test_a_supporting_task_has_few_arms_and_no_say_in_the_rest() -> None:
    task = dataclasses.replace(SMALL, full=False)
    arms = first_arms(task)
    assert [arm.name for arm in arms] == [
        "no echo",
        "before_augmentation, e=2",
        "before_augmentation, e=4",
        "after_augmentation, e=2",
        "after_batching, e=2",
        "fixed 1/2 of the data",
        "fixed 1/4 of the data",
    ]
    assert {one.number for one in findings(runs_of({arm: RESULTS[arm] for arm in arms}, task=task))} == {1, 2, 7}


def test_tables_hold_every_arm_and_every_finding(tmp_path) -> None:
    runs = runs_of(RESULTS)
    lines = arm_table(runs).splitlines()
    assert len(lines) == 2 + len(RESULTS)
    assert "| before_augmentation, e=2 | 0.2 | 8 of 8 |" in lines[3]
    assert "0.55 [0.55, 0.55]" in lines[3]
    assert len(finding_table(findings(runs)).splitlines()) == 2 + len(findings(runs))
    assert "(1) e = 2 needs fewer fresh examples | 1 confirmed |" in summary_table(findings(runs))
    write_report([runs], tmp_path, is_quick=True)
    assert arm_table(runs) in (tmp_path / "evidence.md").read_text()
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")


def test_defaults_are_compared_with_what_they_were_and_with_the_factors_beside() -> None:
    found = {(question, tested): interval.middle for question, tested, interval in default_comparisons(runs_of(RESULTS))}
    assert found == pytest.approx(
        {
            ("16 live batches", f"{POINT}, e=2, large buffer / {POINT}, e=2"): 500 / 550,
            ("16 live batches", f"{POINT}, e=4, large buffer / {POINT}, e=4"): 300 / 300,
            ("16 live batches", f"{POINT}, e=8, large buffer / {POINT}, e=8"): 290 / 295,
            ("max_factor", f"{POINT}, e=4, large buffer / {POINT}, e=2, large buffer"): 300 / 500,
            ("max_factor", f"{POINT}, e=8, large buffer / {POINT}, e=4, large buffer"): 290 / 300,
        }
    )
    assert list(default_comparisons(runs_of({Arm(): 1000}))) == []


def test_the_plot_has_a_line_for_each_point_and_a_dashed_one_for_the_default_buffer(tmp_path, monkeypatch) -> None:
    figures = []
    monkeypatch.setattr(plots.plt, "close", figures.append)
    plots.save_plot([runs_of(RESULTS)], tmp_path / "plot.png")
    (figure,) = figures
    (legend,) = figure.legends
    names = ["before augmentation", "after augmentation", "after batching", "best point, large buffer", "fixed share"]
    assert [text.get_text() for text in legend.get_texts()] == names
    fresh = figure.axes[0]
    drawn = {container.get_label(): container.lines[0] for container in fresh.containers}
    assert drawn["best point, large buffer"].get_ydata() == pytest.approx([0.5, 0.3, 0.29])
    assert drawn["before augmentation"].get_ydata() == pytest.approx([0.55, 0.3, 0.295])
    assert [name for name, line in drawn.items() if line.get_linestyle() == "--"] == ["best point, large buffer"]
    assert drawn["best point, large buffer"].get_color() == drawn["before augmentation"].get_color()


def test_passes_of_training_without_echoing_stand_above_the_table() -> None:
    """1,045 of 1,197 examples until the target, median of eight seeds."""
    runs = runs_of(RESULTS)
    assert runs.passes(Arm()) == pytest.approx([(1000 + 10 * seed) / 1197 for seed in FULL.report])
    assert "Without echoing the target is reached after 0.87 [" in headline(runs)
    assert headline(runs_of({Arm(2, POINT): 500})).endswith("Not run yet.")


def test_a_miss_is_called_never() -> None:
    assert interval_text(Interval(1234.0, 12.3456, float("inf"))) == "12.3 [1,234, never]"
