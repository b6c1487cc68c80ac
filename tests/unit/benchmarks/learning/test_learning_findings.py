"""Verdicts of runs whose results were written down, not run."""

from __future__ import annotations

import pytest
from learning.arms import Arm
from learning.due import Progress
from learning.findings import Finding, Runs, findings
from learning.rules import FULL
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


def test_quality_is_not_worse_within_the_margin() -> None:
    arm = Arm(2, POINT)
    for quality, verdict in ((95.3, "confirmed"), (94.6, "confirmed"), (94.4, "contradicted")):
        finding = found(6, runs_of(RESULTS, {arm: quality}))[0]
        assert finding.verdict == verdict
        assert finding.interval.middle == pytest.approx(95 - quality)


def test_what_has_not_run_is_not_said() -> None:
    assert findings(runs_of({Arm(): 1000})) == []
