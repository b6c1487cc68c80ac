import math
from dataclasses import replace

import pytest
from report import Table
from wallclock.goals import Case, all_tables
from wallclock.plans import FIXED
from wallclock.timed import TimedRow
from wallclock_rows import row, seed_rows, stage

INF = math.inf


def table(name: str, rows: list[TimedRow]) -> list[dict[str, str]]:
    found: Table = next(one for one in all_tables([stage()], rows) if one.name == f"wallclock_{name}")
    return [dict(zip(found.columns, cells, strict=True)) for cells in found.cells()]


def only(name: str, rows: list[TimedRow]) -> dict[str, str]:
    (found,) = table(name, rows)
    return found


def test_a_step_is_that_of_the_run_that_never_waits_without_its_first_batch() -> None:
    assert Case(stage(), seed_rows()).step_seconds == [pytest.approx(0.011)]


@pytest.mark.parametrize(("seconds", "passed"), [(1.27, "yes"), (1.28, "NO")])  # 110 steps of 11 ms are 1.21 s
def test_095_of_what_learning_allows_are_wanted(seconds: float, passed: str) -> None:
    found = only("allowed", [each for seed in (1, 2, 3) for each in seed_rows(seed, fixed=seconds)])
    share, alone = f"{1.21 / seconds:.3g}", f"{1.10 / seconds:.3g}"
    assert found["of what learning allows"] == f"{share} [{share}, {share}]"
    assert found["by the step alone"] == f"{alone} [{alone}, {alone}]"
    assert (found["d (ms)"], found["passed"]) == ("11 [11, 11]", passed)


def test_where_reading_takes_longer_than_the_step_it_is_what_is_allowed() -> None:
    slower = stage(16)  # of which an e-th takes 10 ms, too
    rows = [replace(each, ratio=16) for each in seed_rows(step=0.1 + 0.009 * 200)]
    assert Case(slower, rows).allowed([0.009]) == [pytest.approx(1.10 / 1.25)]


def test_what_is_missing_is_split() -> None:
    """Of 2 s 1.21 s are steps; three batches were read at once, and later batches waited for 0.4 s."""
    rows = seed_rows(fixed=2.0)
    long = row(FIXED, 2.0, 110, first_batch_seconds=0.2, idle_seconds=0.4)
    fresh = "8*3 1*107"
    rows[2] = replace(long, fresh=fresh)
    found = Case(stage(), rows).missing()
    # the replay: three batches are read in 0.24 s, then 107 steps, one of them at 0.24 s at the earliest
    filling = (0.24 + 107 * 0.011) - 1.21 - 0.08  # the first of the three is that of "first batch"
    assert found["first batch"] == [pytest.approx(0.2 / 2)]
    assert found["filling"] == [pytest.approx(filling / 2, abs=1e-9)]
    assert found["idle"] == [pytest.approx((0.4 - filling) / 2)]
    assert sum(each[0] for each in found.values()) == pytest.approx(1 - 1.21 / 2)


def test_the_replay_is_of_both_runs() -> None:
    """Without echoing 100 batches are read in 8 s; `FIXED` takes 110 steps, of which each waits for an eighth of a batch."""
    found = only("replay", seed_rows())
    assert found["time / no echo"].startswith("0.156 ")  # 1.25 / 8
    assert found["replayed"].startswith("0.151 ")  # 1.21 / 8
    assert found["measured / replayed"].startswith("1.03 ")
    assert found["no echo: measured / replayed"].startswith("1 ")
    assert found["passed"] == "yes"
    assert only("replay", seed_rows(fixed=1.28))["passed"] == "NO"  # 1.058
    assert only("replay", seed_rows(fixed=1.14))["passed"] == "NO"  # 0.942


@pytest.mark.parametrize(("seconds", "passed"), [(1.57, "yes"), (1.58, "NO")])
def test_target_idle_may_take_5_percent_longer_than_the_factor_that_it_settles_on(seconds: float, passed: str) -> None:
    found = only("target_idle", seed_rows(idle=seconds))
    assert (found["settled on"], found["passed"]) == ("6 [6, 6]", passed)


@pytest.mark.parametrize(("seconds", "passed"), [(2.0, "yes"), (2.01, "NO"), (INF, "NO")])
def test_the_headline_needs_a_fourth_of_the_time(seconds: float, passed: str) -> None:
    assert only("headline", seed_rows(idle=seconds))["passed"] == passed


def test_a_run_that_misses_the_target_takes_infinitely_long_also_where_the_base_does() -> None:
    rows = seed_rows()
    rows[3] = replace(rows[3], is_reached=False)
    found = only("headline", rows)
    assert (found["TargetIdle / no echo"], found["passed"]) == ("inf [inf, inf]", "NO")
    rows[0] = replace(rows[0], is_reached=False)
    assert only("headline", rows)["passed"] == "NO"
    assert [each["missed"] for each in table("times", rows)] == ["1 of 1", "0 of 1", "0 of 1", "1 of 1", "0 of 1"]


def test_a_seed_that_lacks_an_arm_is_left_out_until_it_has_run() -> None:
    assert Case(stage(), [*seed_rows(1), *seed_rows(2)[:-1]]).seeds == [1]
    assert all_tables([stage()], seed_rows()[:-1])[1].rows == []


def test_figures_are_medians_over_the_seeds() -> None:
    rows = [each for seed, seconds in ((1, 1.21), (2, 1.25), (3, 2.42)) for each in seed_rows(seed, fixed=seconds)]
    assert only("allowed", rows)["of what learning allows"] == "0.968 [0.5, 1]"
