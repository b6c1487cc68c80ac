"""Workers on other machines: predictions against hand-worked figures, and when the verdict names their number.

As measured, a batch of 8 takes two workers 128 ms of reading (10 ms an example), decoding (4) and augmentation (2), and 8 ms of
collation. A step takes 20 ms, and its copy 1 ms. An example from another machine costs half a millisecond here: 4 ms a batch.
"""

import heapq
import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from measured_stages import CACHED, LATENCY, MS, STAGES

from lightning_echo import EchoConfig
from lightning_echo.analysis.command import advice_yaml
from lightning_echo.analysis.measured import Spread
from lightning_echo.analysis.predict import TrainingSetting, predict
from lightning_echo.analysis.report import report, tables
from lightning_echo.analysis.result import StallAnalysis, promising
from lightning_echo.analysis.verdict import VerdictKind, judge
from lightning_echo.measure.control import TAKING_SECONDS

NONE = Spread.exactly(0.0)
LATER = {"factor": 2, "insertion_point": "after_augmentation"}
BATCHES = {"factor": 8, "insertion_point": "after_batching", "step_speedup": 10}
WORKING = {"prepare_cpu_share": 1.0, "read_cpu_share": 0.5, "cores": 2, "step_cpu_seconds": 4 * MS}

# What is changed of the stages, what is asked, the milliseconds of a step, and its limit. Two rates add up: 64 ms a batch here.
CASES = {
    "one lane more than two": ({}, {"cluster_workers": 1}, 128 / 3, "workers"),
    "as many there as here": ({}, {"cluster_workers": 2}, 32, "workers"),
    "as many as the step takes, copy included": ({}, {"cluster_workers": 5}, 21, "step"),
    "more workers here": ({}, {"workers": 4, "cluster_workers": 2}, 128 / 6, "workers"),
    "echoes": ({}, {**LATER, "cluster_workers": 1}, 64 / 3, "workers"),
    "echoes without a copy": ({}, {"factor": 4, "insertion_point": "after_transfer", "cluster_workers": 1}, 20.25, "step"),
    "one thread collates": ({}, {"step_speedup": 10, "cluster_workers": 62}, 8, "cores"),
    "batches are collated once": ({}, {**BATCHES, "cluster_workers": 2}, 4, "workers"),
    "trainings that share": ({}, {"shared_by": 3, "cluster_workers": 2}, 32, "workers"),
    # One thread takes 4 ms for a batch from there, and the workers here 64: 1 / (1 / 4 + 1 / 64).
    "the reader's thread": ({"collate": NONE}, {"step_speedup": 100, "cluster_workers": 4000}, 64 * 4 / 68, "cores"),
    "the reader's thread for two ranks": (
        *({"collate": NONE, "ranks": 2}, {"step_speedup": 100, "cluster_workers": 4000}),
        *(64 * 8 / 72, "cores"),
    ),
    # Half of the examples are in this machine's memory: 8 * (5.5 + 6) / 2 = 46 ms here, 64 there.
    "memory of this machine": ({}, {"cached_fraction": 0.5, "cluster_workers": 2}, 46 * 64 / 110, "workers"),
    "a faster storage": ({}, {"storage_speedup": 2, "cluster_workers": 2}, 22, "workers"),  # 44 here, 44 there
    # With four workers in all, a read takes twice as long: 8 * (20 + 6) / 4; with 18 in all 9 times: 8 * (90 + 6) / 18.
    "a storage that all share": ({"read_sharing": 1.0}, {"cluster_workers": 2}, 52, "workers"),
    "a storage that all share, and more of them": ({"read_sharing": 1.0}, {"cluster_workers": 16}, 8 * 96 / 18, "storage"),
    "nothing but a storage": ({"read_sharing": 1.0, "decode": NONE, "augment": NONE}, {"cluster_workers": 30}, 40, "storage"),
    # Two workers take twice as long as one: there 8 * (10 + 3) / 2 = 52, here 64.
    "processors that two workers share": ({"prepare_sharing": 1.0}, {"cluster_workers": 2}, 64 * 52 / 116, "workers"),
    # 8 * (10 + 12) / 2 = 88 ms here, while the training disturbs; 64 there.
    "a training that disturbs its workers": ({"contention": 2.0}, {"cluster_workers": 2}, 88 * 64 / 152, "workers"),
    # Threads read 8 * 0.625 = 5 ms a batch, the rest takes 8 * 6 / 2 = 24; there, one read after the other.
    "reads in flight": (LATENCY, {"reads_in_flight": 16, "step_speedup": 2, "cluster_workers": 2}, 24 * 64 / 88, "workers"),
    # Two reads under way take 8 * 5 = 40 ms a batch, which is more than the 24 of the rest.
    "few reads in flight": (LATENCY, {"reads_in_flight": 2, "step_speedup": 2, "cluster_workers": 2}, 40 * 64 / 104, "workers"),
    "no workers here": ({}, {"workers": 0, "cluster_workers": 2}, 128 * 64 / 192, "workers"),  # the reader has one
    # 88 ms of processor time for a batch made here, 4 for one from there, and 12 for collation and step, on two cores: a share y
    # from there takes 64 y = (100 - 84 y) / 2, so y = 50 / 106.
    "few cores": (WORKING, {"workers": 8, "cluster_workers": 2}, 64 * 50 / 106, "workers"),
    "few cores, and all from there": (WORKING, {"workers": 8, "cluster_workers": 64}, 21, "step"),
    # Eight trainings: 64 y = (184 - 84 y) / 2; with many workers there is nothing but 4 + 8 * 12 ms on two cores.
    "few cores for many trainings": (WORKING, {"workers": 8, "shared_by": 8, "cluster_workers": 2}, 64 * 92 / 106, "cores"),
    "no core but for trainings": (WORKING, {"workers": 8, "shared_by": 8, "cluster_workers": 999}, 50, "cores"),
}


@pytest.mark.parametrize(("changes", "setting", "milliseconds", "limit"), CASES.values(), ids=CASES)
def test_what_other_machines_make_adds_up_with_what_this_one_makes(changes, setting, milliseconds, limit):
    assert TAKING_SECONDS == 0.5 * MS, "the figures beside the cases"
    found = predict(replace(STAGES, **changes), TrainingSetting(**setting))
    assert (found.step_seconds, found.limit) == (pytest.approx(milliseconds * MS), limit)
    assert found.idle_fraction == pytest.approx(1 - 20 / setting.get("step_speedup", 1) / milliseconds)


def test_lanes_that_take_the_next_example_when_they_are_free_are_as_fast_as_predicted():
    """Two lanes of 22 ms here and three of 16 ms there, one example after the other."""
    free = [(22 * MS, 22 * MS)] * 2 + [(16 * MS, 16 * MS)] * 3
    heapq.heapify(free)
    for _ in range(8 * 1000):
        now, takes = heapq.heappop(free)
        heapq.heappush(free, (now + takes, takes))
    stages = replace(STAGES, contention=2.0, collate=NONE)
    assert predict(stages, TrainingSetting(step_speedup=4, cluster_workers=3)).step_seconds == pytest.approx(
        now / 1000, rel=0.001
    )


@pytest.mark.parametrize("changes", [{}, LATENCY, WORKING, {"workers": 0}, {"contention": 1.5, "read_sharing": 0.3}])
@pytest.mark.parametrize("setting", [{}, {"workers": 3}, {"shared_by": 2}, {"factor": 2}, {"cached_fraction": 0.5}])
def test_none_on_other_machines_changes_nothing_more_of_them_never_slow_down_and_no_step_is_faster_than_itself(changes, setting):
    stages = replace(STAGES, **changes)
    assert predict(stages, TrainingSetting(**setting, cluster_workers=0)) == predict(stages, TrainingSetting(**setting))
    seconds = [predict(stages, TrainingSetting(**setting, cluster_workers=number)).step_seconds for number in range(70)]
    assert all(later <= before * (1 + 1e-9) for before, later in pairwise(seconds))
    assert min(seconds) >= 21 * MS > 20 * MS  # step and copy
    assert seconds[-1] < seconds[0]


@pytest.mark.parametrize("number", [-1, 1.5, True, "7", None, math.nan])
def test_a_number_of_workers_on_other_machines_that_is_none_is_refused(number):
    with pytest.raises(ValueError, match=r"^cluster_workers must be a number of workers on other machines, 0 or more, got "):
        TrainingSetting(cluster_workers=number)


def test_what_no_reader_can_share_is_refused():
    with pytest.raises(ValueError, match="cluster_workers=2 and hold='raw' are impossible together: a cache in a reader is not"):
        TrainingSetting(cluster_workers=2, hold="raw", cached_fraction=0.5)
    with pytest.raises(ValueError, match="cluster_workers=2 does not fit insertion_point='after_read'"):
        TrainingSetting(cluster_workers=2, factor=2, insertion_point="after_read")
    stream = replace(STAGES, no_cluster_workers="what is shared is a batch")
    with pytest.raises(ValueError, match=r"^cluster_workers=2 is not possible here: what is shared is a batch$"):
        predict(stream, TrainingSetting(cluster_workers=2))
    assert predict(stream, TrainingSetting(cluster_workers=0)).step_seconds == pytest.approx(68 * MS)


# ---------------------------------------------------------------------- the verdict
# 8 * 56.5 = 452 ms of processor time to prepare a batch, 4 to collate it and 4 for the step: 460 ms in each 20 ms are 23 cores.
# With 16 cores and 5% of waiting, 16 * 20 / 0.95 = 336.8 ms are there for a step. So 123.2 of 448 ms must come from elsewhere
# (452 there cost 4 here), 27.5% of the examples: at least 0.275 * 452 / 21.05 = 5.9 workers, and 23 - 16 = 7 fill it up.

BUSY = replace(
    CACHED,
    read=NONE,
    read_cached=NONE,
    decode=Spread.exactly(50 * MS),
    augment=Spread.exactly(6.5 * MS),
    collate=Spread.exactly(4 * MS),
    hand_over=NONE,
    copy=NONE,
    prepare_cpu_share=1.0,
    step_cpu_seconds=4 * MS,
    cores=16,
    workers=16,
    points=("after_augmentation", "after_batching", "after_transfer"),
    in_cache={},
)
CAST = 'ShareConfig("train", cluster="ray", cluster_workers='


def judged(**changes):
    stages = replace(BUSY, **changes)
    return judge(stages, predict(stages, TrainingSetting()).step_seconds, {})


def test_the_cores_that_are_missing_are_named_beside_the_echo_factor():
    verdict = judged()
    assert (verdict.kind, verdict.setting) == (VerdictKind.echo, replace(verdict.setting, cluster_workers=0))
    assert verdict.setting.factor == pytest.approx(452 / (336.84 - 8) * 1.07, abs=0.02)  # 1.47
    assert verdict.message.startswith("Echo at insertion_point='after_augmentation' with factor 1.4")
    assert verdict.message.endswith(
        " Feeding it without echoes takes 23 cores, and this machine has 16: 7 on other machines would do, with "
        'ShareConfig("train", cluster="ray", cluster_workers=7).'
    )
    assert verdict.elsewhere == TrainingSetting(cluster_workers=7)
    assert (
        predict(BUSY, verdict.elsewhere).idle_fraction <= 0.05 < predict(BUSY, TrainingSetting(cluster_workers=5)).idle_fraction
    )


def test_other_machines_are_no_remedy_that_is_carried_out():
    verdict = judged()
    assert [remedy.name for remedy in verdict.remedies] == ["echo"]
    assert verdict.setting.lines == ['EchoCallback(factor=1.48, insertion_point="after_augmentation")']


def test_taking_examples_in_needs_workers_too():
    """4 ms each instead of 56.5: 32 for a batch, and 8 for collation and step: 40 ms in each 20 are two cores.

    One is here: 21.05 ms. So 18.95 of 28 ms must come from elsewhere (32 there cost 4 here), 67.7%: 0.677 * 32 / 21.05 = 1.03.
    """
    verdict = judged(decode=Spread.exactly(4 * MS), augment=NONE, cores=1, workers=1)
    assert verdict.elsewhere == TrainingSetting(cluster_workers=2)
    assert (
        "takes 2 cores, and this machine has 1: 2 on other machines (more than the difference, since taking their examples in "
        "costs cores here) would do, with"
    ) in verdict.message


NO_CURE = {
    "the machine suffices": {"cores": 22, "workers": 22},  # 460 / 22 = 20.9 ms
    "more workers suffice": {"cores": 32},
    "no other machine can read it": {"no_cluster_workers": "what is shared is a batch"},
    "waiting": {"prepare_cpu_share": 0.5},  # 12 cores: more workers than cores would help
    # 8 * 175 * 0.3 = 420 ms of processor time, and 4 of the step: 21.3 cores, of workers that wait for 70% of their time.
    "waiting and too few cores": {"decode": Spread.exactly(175 * MS), "augment": NONE, "prepare_cpu_share": 0.3},
    "unknown processor time": {"prepare_cpu_share": 0.0, "step_cpu_seconds": 0.0},  # a stream
    # Processors have 8 ms a batch to do.
    "reading waits": {"read": Spread.exactly(50 * MS), "decode": NONE, "augment": NONE, "read_sharing": 1.0},
    # More readers get no more out of the storage than the 8 * 50 / 16 = 25 ms a batch that all have now.
    "the storage is the limit": {"read": Spread.exactly(50 * MS), "read_sharing": 1.0},
    "collation": {"collate": Spread.exactly(60 * MS)},  # one thread collates, for three steps
    "cheaper to make than to take": {
        **{"decode": Spread.exactly(0.25 * MS), "augment": NONE, "cores": 1, "workers": 1},
        **{"step": Spread.exactly(4 * MS)},
    },
    "more than a reader can have": {"decode": Spread.exactly(300 * MS)},  # 8 * 306.5 + 8 ms in each 20 are 123 cores: 107 more
    "more than a thread takes in": {
        **{"decode": Spread.exactly(0.9 * MS), "augment": NONE, "batch_size": 200, "cores": 4, "workers": 4},  # 180 ms, or 100
    },
}


@pytest.mark.parametrize("changes", NO_CURE.values(), ids=NO_CURE)
def test_other_machines_are_not_named_where_they_are_no_cure_or_not_needed(changes):
    verdict = judged(**changes)
    assert verdict.elsewhere is None
    assert "other machines" not in verdict.message


def test_a_cache_that_is_enough_comes_before_other_machines():
    held = {"in_cache": {"loaded": CACHED.in_cache["loaded"]}, "points": CACHED.points}
    verdict = judged(**held, free_bytes=10**11)
    assert (verdict.kind, verdict.elsewhere) == (VerdictKind.cache, None)
    # 0.75 of 1 GB holds 11% of 6.3 GB, which saves 44 of 460 ms. The number is that without a cache.
    little = judged(**held, free_bytes=10**9)
    assert (little.kind, little.elsewhere) == (VerdictKind.cache_and_echo, TrainingSetting(cluster_workers=7))


def test_workers_of_this_machine_come_before_those_of_others():
    verdict = judged(workers=2)
    assert verdict.setting.workers == 16
    assert verdict.elsewhere == TrainingSetting(workers=16, cluster_workers=7)


def test_where_nothing_is_enough_other_machines_are_named_all_the_same():
    verdict = judged(points=())
    assert verdict.kind is VerdictKind.not_enough
    assert verdict.message.endswith(f"{CAST}7).")


def test_ranks_of_a_machine_have_a_part_of_its_cores_and_the_number_is_that_of_all():
    """Four ranks of 4 cores: 19 are missing for each. One thread takes in 32 examples for 20 ms, which is 16 ms."""
    one = StallAnalysis(replace(BUSY, cores=4, workers=4), Spread.exactly(120 * MS), None)
    analysis = StallAnalysis.of_ranks([one] * 4)
    assert analysis.stages.ranks == 4
    assert analysis.verdict.elsewhere.cluster_workers == 19
    assert analysis.verdict.message.endswith(
        "takes 23 cores, and a rank has 4: 19 on other machines for each of 4 ranks would do, with "
        'ShareConfig("train", cluster="ray", cluster_workers=76).'
    )
    # A reader has at most 96: of five ranks these are 95, of six 114.
    assert StallAnalysis.of_ranks([one] * 5).verdict.elsewhere is not None
    assert StallAnalysis.of_ranks([one] * 6).verdict.elsewhere is None


def test_where_a_cluster_is_known_its_workers_are_the_verdict_and_come_before_echoing():
    verdict = judged(has_cluster=True)
    assert (verdict.kind, verdict.setting) == (VerdictKind.cluster_workers, TrainingSetting(cluster_workers=7))
    assert verdict.message.startswith(
        "Take 7 workers of the cluster: the accelerator is busy only 70% of the time, and would be "
    )
    assert [(remedy.name, remedy.is_enough) for remedy in verdict.remedies] == [("cluster", True), ("echo", True)]
    assert verdict.remedies[1].setting == judged().setting, "echoing is what it would be without the cluster"
    assert verdict.options == {"factor": 1.0, "share": {"name": "train", "cluster": "ray", "cluster_workers": 7}}
    assert verdict.lines == ['EchoCallback(factor=1, share={"name": "train", "cluster": "ray", "cluster_workers": 7})']
    assert [setting.cluster_workers for setting in promising(verdict)] == [0], "it cannot be tried on this machine"


def test_workers_here_and_a_cache_stand_before_those_of_a_cluster():
    few = judged(has_cluster=True, workers=2)
    assert few.message.startswith("Set num_workers to 16 and take 7 workers of the cluster: ")
    assert few.lines[0] == "num_workers=16"
    assert [remedy.name for remedy in few.remedies] == ["workers", "cluster", "echo"]
    held = {"in_cache": {"loaded": CACHED.in_cache["loaded"]}, "points": CACHED.points}
    little = judged(**held, free_bytes=10**9, has_cluster=True)
    assert [remedy.name for remedy in little.remedies] == ["cache", "cluster", "echo"]
    assert little.setting == TrainingSetting(cluster_workers=7)
    enough = judged(**held, free_bytes=10**11, has_cluster=True)
    assert (enough.kind, [remedy.name for remedy in enough.remedies]) == (VerdictKind.cache, ["cache"])


@pytest.mark.parametrize("changes", NO_CURE.values(), ids=NO_CURE)
def test_a_cluster_that_is_no_cure_changes_nothing(changes):
    assert judged(**changes, has_cluster=True) == judged(**changes)


def test_the_report_and_the_file_have_a_cluster_in_its_place(tmp_path):
    one = StallAnalysis(replace(BUSY, cores=4, workers=4, has_cluster=True), Spread.exactly(120 * MS), None)
    analysis = StallAnalysis.of_ranks([one] * 4)
    (table,) = (each for each in tables(analysis) if each.title == "Remedies, in this order")
    step, idle = table.rows[0][1:3]
    assert (table.rows[0][0], table.rows[0][3]) == ("19 workers on other machines", "yes")
    assert table.rows[1][0].startswith("factor ")
    assert float(step) <= 21.1  # 20 / 0.95, rounded
    assert int(idle.rstrip("%")) <= 5
    assert "Take 76 workers of the cluster" in " ".join(report(analysis).split())
    analysis.to_json(tmp_path / "analysis.json")
    advice = json.loads((tmp_path / "analysis.json").read_text())["advice"]
    assert (advice["kind"], [each["name"] for each in advice["remedies"]]) == ("cluster_workers", ["cluster", "echo"])
    assert advice["options"]["share"]["cluster_workers"] == 76
    assert EchoConfig(**advice["options"]).share == advice["options"]["share"]
    assert "cluster_workers: 76" in advice_yaml(analysis).replace('"', "")
    assert StallAnalysis.from_json(tmp_path / "analysis.json") == analysis


def test_the_report_and_the_file_have_the_price(tmp_path):
    stages = replace(BUSY, read=Spread.exactly(0.1 * MS))
    analysis = StallAnalysis(stages, Spread.exactly(29 * MS), None)
    text = " ".join(report(analysis).split())
    assert "7 workers on other machines" in text
    assert "What a storage that they share can deliver" in text
    analysis.to_json(tmp_path / "analysis.json")
    assert json.loads((tmp_path / "analysis.json").read_text())["advice"]["cluster_workers"] == 7
    assert StallAnalysis.from_json(tmp_path / "analysis.json") == analysis
    enough = report(replace(analysis, stages=replace(stages, cores=32)))
    assert "other machines" not in enough
