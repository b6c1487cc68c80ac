"""An analysis as a value: shares of the real run by difference, and a file that says the same."""

import json
from dataclasses import replace

import pytest
from measured_stages import CACHED, MS, STAGES, uneven

from lightning_echo.analysis.measured import CachedExample, Pinning, Spread
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.result import CheckedSetting, StallAnalysis
from lightning_echo.analysis.verdict import VerdictKind

NONE = Spread.exactly(0.0)


def analysis(real, cached, step=20, copy=0):
    stages = replace(STAGES, step=Spread.exactly(step * MS), copy=Spread.exactly(copy * MS))
    in_memory = None if cached is None else Spread.exactly(cached * MS)
    notes = () if cached is not None else ("fetch rate: a reason",)
    return StallAnalysis(stages, Spread(real * MS, 0.9 * real * MS, 1.1 * real * MS), in_memory, {"RandomCrop": 1 * MS}, notes)


def cached_analysis(**changes):
    """Memory holds 0.30 of the raw items, and no more than 0.05 of the loaded examples."""
    stages = replace(CACHED, copy=NONE, hand_over=NONE, **{"free_bytes": 424 * 10**6, **changes})
    return StallAnalysis(stages, Spread.exactly(68 * MS), Spread.exactly(50 * MS))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "analysis.json"


@pytest.mark.parametrize(
    ("real", "cached", "copy", "fetch", "prep", "copied"),
    [
        (80, 50, 4, 30 / 80, 26 / 80, 4 / 80),  # 20 ms are the step's, 30 more stay in memory, 30 more do not
        (80, 20, 0, 60 / 80, 0, 0),
        (80, 19, 0, 60 / 80, 0, 0),  # noise: no run is faster than its steps
        (19, 25, 0, 0, 0, 0),
        (80, 85, 0, 0, 60 / 80, 0),
        (21, 20, 4, 0, 0, 1 / 21),  # the copy is longer than all that is waited
    ],
)
def test_stalls_are_shares_of_the_real_run_by_difference(real, cached, copy, fetch, prep, copied):
    found = analysis(real, cached, copy=copy)
    shares = (found.fetch_stall_fraction, found.prep_stall_fraction, found.copy_fraction)
    assert shares == pytest.approx((fetch, prep, copied))
    assert found.idle_fraction == pytest.approx(max(0, 1 - 20 / real)) == pytest.approx(sum(shares))


def test_it_can_be_asked():
    found = analysis(80, 50)
    assert found.predict(factor=4, insertion_point="after_transfer").step_seconds == pytest.approx(20 * MS)
    # a half would leave 1.07 * (136 - 112 * 0.5) / 4 = 21.4 ms, for 20 / 0.95; 0.6 leaves 18.4
    advised = TrainingSetting(4, cached_fraction=0.6, hold="loaded")
    assert (found.verdict.kind, found.verdict.setting) == (VerdictKind.cache, advised)
    with pytest.raises(TypeError, match="worker"):
        found.predict(worker=3)


def test_a_file_says_the_same_with_what_caches_cost_and_what_was_tried(path):
    for found in (analysis(80, None), cached_analysis()):
        found = found.with_check(CheckedSetting(found.verdict.setting, Spread.exactly(21 * MS)))
        found.to_json(path)
        assert StallAnalysis.from_json(path) == found
        assert json.loads(path.read_text())["lightning_echo_analysis"] == 4
    read = StallAnalysis.from_json(path)
    assert read.stages.in_cache["raw"] == CachedExample(100_000, NONE)
    assert read.checked[0].setting.cache_size == "301MiB"


def test_a_file_has_the_advice_for_other_programs_with_the_remedies_in_their_order(path):
    """Steps of 136 / 4 = 34 ms with four workers, (136 - 24) / 4 = 28 with the cache, (56 / 2.13 + 56) / 4 with a factor."""
    cached_analysis().to_json(path)
    advice = json.loads(path.read_text())["advice"]
    assert (advice["kind"], advice["message"]) == ("cache_and_echo", cached_analysis().verdict.message)
    factor = advice["options"]["factor"]
    assert factor == pytest.approx(2.13, abs=0.01)
    cache = {"size": "301MiB", "hold": "raw"}
    assert advice["options"] == {"factor": factor, "insertion_point": "after_read", "cache": cache}
    remedies = advice["remedies"]
    assert [(each["name"], each["is_enough"]) for each in remedies] == [("workers", False), ("cache", False), ("echo", True)]
    seconds = [each["step_seconds"] for each in remedies]
    assert seconds == [pytest.approx(34 * MS), pytest.approx(28 * MS), pytest.approx((56 / factor + 56) / 4 * MS)]
    assert [each["idle_fraction"] for each in remedies] == [pytest.approx(1 - 20 * MS / each) for each in seconds]
    settings = [each["setting"] for each in remedies]
    assert [(each["workers"], each["cached_fraction"], each["factor"]) for each in settings] == [
        (4, 0.0, 1.0),
        (4, 0.3, 1.0),
        (4, 0.3, factor),
    ]


def test_of_several_machines_the_cache_fits_into_the_one_with_the_least_memory():
    memory = ((8 * 10**9, 10), (2 * 10**9, 1), (None, 2))
    ranks = [cached_analysis(free_bytes=free, read=Spread.exactly(read * MS)) for free, read in memory]
    found = StallAnalysis.of_ranks(ranks)
    assert (found.stages.read.median, found.stages.free_bytes) == (10 * MS, 2 * 10**9)
    assert found.stages.free_shared_bytes is None
    shared = [cached_analysis(free_shared_bytes=free) for free in (3 * 10**9, None, 10**9)]
    assert StallAnalysis.of_ranks(shared).stages.free_shared_bytes == 10**9


def test_a_file_has_what_prefetching_and_pinning_were_predicted_from(path):
    pinning = Pinning(Spread.exactly(3 * MS), Spread.exactly(1 * MS))
    stages = replace(STAGES, **uneven(free_bytes=10**9, free_shared_bytes=10**9), prefetch_factor=2, pinning=pinning)
    found = StallAnalysis(stages, Spread.exactly(26 * MS), None)
    found = found.with_check(CheckedSetting(TrainingSetting(prefetch_factor=8, pin_memory=True), Spread.exactly(21 * MS)))
    found.to_json(path)
    assert StallAnalysis.from_json(path) == found
    assert json.loads(path.read_text())["advice"]["remedies"][0]["setting"]["prefetch_factor"] == 4


def test_of_several_ranks_it_is_that_of_the_slowest_whatever_it_waits_for():
    """Of both ranks a step takes 80 ms, and the fast one's workers seem to take as long as the slow one's."""
    slow = analysis(80, 50)  # 68 ms of its loader alone
    fast = replace(slow, stages=replace(STAGES, read=Spread.exactly(2 * MS), contention=3.0), transforms={})  # 36 ms
    found = StallAnalysis.of_ranks([fast, slow])
    assert (found.stages, found.transforms) == (replace(slow.stages, ranks=2), slow.transforms)
    assert [rank.host_seconds for rank in found.ranks] == [pytest.approx(36 * MS), pytest.approx(68 * MS)]
    assert found.slow_rank == 1
    assert StallAnalysis.of_ranks([slow, slow, slow]).slow_rank is None
    assert StallAnalysis.of_ranks([slow]) is slow


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is not an analysis: it is not JSON"),
        (b"\xff\xfe\x00", "it is not JSON"),
        (b'{"stages": 1}', "is not an analysis: write one with"),
    ],
)
def test_a_file_of_something_else_is_refused(text, message, path):
    path.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        StallAnalysis.from_json(path)


@pytest.mark.parametrize(
    ("within", "changes", "message"),
    [
        (None, {"lightning_echo_analysis": 5}, "has version 5 of the format, and only version 4 is known: update"),
        (None, {"real": None}, "is damaged: "),
        ("real", {"median": "slow"}, "is damaged: real.median must be a number, got str 'slow'"),
        ("real", {"median": 0}, "is damaged: .*real must take time"),
        ("stages", {"workers": -1}, "workers must be a number >= 0, got -1"),
        ("stages", {"points": ["auto"]}, "must be insertion points, got 'auto'"),
        (None, {"transforms": {"Crop": "?"}}, r"transforms\['Crop'\] must be a number, got str '\?'"),
        (
            None,
            {"ranks": [{"host_seconds": None, "step_seconds": 1}]},
            r"ranks\[0\]\.host_seconds must be a number, got NoneType",
        ),
    ],
)
def test_a_damaged_file_or_one_of_a_later_version_is_refused(within, changes, message, path):
    analysis(80, 50).to_json(path)
    state = json.loads(path.read_text())
    (state if within is None else state[within]).update(changes)
    path.write_text(json.dumps(state))
    with pytest.raises(ValueError, match=message):
        StallAnalysis.from_json(path)
