"""Sharing as advice at the end of a run: its place among the remedies, its gain, and where it is left out."""

import ast

import pytest

from lightning_echo.measure.advice import Waiting, advise, advise_on_demand
from lightning_echo.measure.control import MOST_OF_READER, Decision, Observation, PipelineCosts, Reason
from lightning_echo.measure.summary import EpochReport
from lightning_echo.share.window import MOST_FAR_LANES

ECHO = Decision(2.0, Reason.starved, "")
CACHE, SHARED = "EchoCallback(cache=0.5)", 'EchoCallback(share="train")'
CLUSTER = 'EchoCallback(share={"name": "train", "cluster": "ray", "cluster_workers": 26})'
OTHER = "if the other run of train.py here trains on the same data"
OTHERS = "if the 2 other runs of train.py here train on the same data"
PLAIN = PipelineCosts.of_waiting(0.01625, 10 / 16.25, 1.0, workers=16)  # of a step of 16.25 ms, 6.25 are its work


def seen(costs, seconds=0.02, work=0.01, factor=1.0):
    """The last 100 steps, each of ``seconds`` with so much work."""
    return Observation(epoch=0, factor=factor, steps=100, idle_fraction=1 - work / seconds, step_seconds=seconds, costs=costs)


def waiting(others=2, **known):
    values = {"fraction": 0.0, "may_read_ahead": False, "workers": 2, **known}
    return Waiting(**values, program="train.py", other_runs=others)


@pytest.mark.parametrize(
    ("seconds", "costs", "others", "gain"),
    [
        (0.02, None, 2, "up to 2 times as fast"),  # 20 ms of loading become 6.7, and a step takes 10
        (0.06, None, 2, "up to 3 times as fast"),  # 60 become 20
        (0.06, None, 5, "up to 6 times as fast"),  # 10
        # Two workers need 120 ms. Collation takes 40 of them, and each training does that by itself: 20 + 40 / 3 ms.
        (0.06, PipelineCosts("after_augmentation", 0.08, 0.0, 0.04, 0.01, 2), 2, "up to 1.8 times as fast"),
        (0.02, PipelineCosts("after_augmentation", 0.0, 0.0, 0.0, 0.01, 2), 2, "up to 2 times as fast"),
    ],
)
def test_what_one_prepares_for_all_takes_a_part_of_the_time(seconds, costs, others, gain):
    alike = OTHERS.replace("2", str(others))
    verdict = advise(seen(costs, seconds), ECHO, 2, None, waiting(others))
    busy = f"the accelerator is busy only {100 * 0.01 / seconds:.0f}% of the time (last 100 steps)"
    assert verdict.message == f"Share the reading, {gain} {alike}: {busy}, and each of them reads and prepares by itself."
    assert verdict.next_line == SHARED
    assert verdict.others[0].startswith("EchoCallback(factor=2)")


def test_it_comes_after_a_cache_and_before_workers_of_a_cluster():
    known = waiting(1, workers=16, batch_size=8, has_cluster=True, cached_fraction=None)
    verdict = advise(seen(PLAIN, 0.01625, 0.00625), ECHO, 16, None, known)
    assert verdict.next_line == CACHE
    shared, cluster, echo = verdict.others
    assert shared == f"{SHARED}, up to 2 times as fast {OTHER}"
    assert cluster.startswith(CLUSTER)
    assert echo.startswith("EchoCallback(factor=2)")


@pytest.mark.parametrize(
    "chosen", [{"share": "sweep"}, {"insertion_point": "before_augmentation"}, {"cache": {"size": "1GiB", "partitioned": True}}]
)
def test_nothing_that_needs_a_reader_is_advised_to_a_run_that_has_one_or_can_have_none(chosen):
    known = waiting(workers=16, batch_size=8, has_cluster=True)
    verdict = advise(seen(PLAIN, 0.01625, 0.00625), ECHO, 16, chosen, known)
    assert verdict.message.startswith("Echo with factor 2")
    assert verdict.others == ()
    assert "other machines" not in verdict.message


def test_more_workers_of_a_cluster_than_a_reader_can_have_are_not_advised():
    """In steps of 10 ms, 16 workers need 1.1 s for a batch, or 1.2: 110 or 120 cores."""
    for seconds, is_advised in ((1.1, True), (1.2, False)):
        costs = PipelineCosts("after_augmentation", seconds, 0.0, 0.0, 0.01, 16)
        known = waiting(0, workers=16, batch_size=8, has_cluster=True)
        verdict = advise(seen(costs, seconds / 16), ECHO, 16, None, known)
        assert ("workers of the cluster" in verdict.message) is is_advised
        assert "other machines" not in verdict.message
    assert MOST_OF_READER == MOST_FAR_LANES


def test_the_line_keeps_what_the_user_has_chosen():
    chosen = {"factor": 2.0, "insertion_point": "after_batching", "cache": {"size": "1GiB", "hold": "raw"}}
    line = advise(seen(None, factor=2.0), Decision(4.0, Reason.starved, ""), 2, chosen, waiting()).next_line
    (call,) = (node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call))
    assert {each.arg: ast.literal_eval(each.value) for each in call.keywords} == {**chosen, "share": "train"}


def test_alone_or_where_a_step_waits_for_nothing_that_could_be_shared_it_is_not_advised():
    assert advise(seen(None), ECHO, 2, None, waiting(0)).message.startswith("Echo with factor 2")
    collates = PipelineCosts("after_augmentation", 0.001, 0.0, 0.039, 0.01, 2)
    assert advise(seen(collates), ECHO, 2, None, waiting()).message.startswith("Echo with factor 2")


def test_on_demand_it_would_make_more_examples_fresh():
    report = EpochReport(0, 400, 4.0, 800, 2400, max_factor=8.0, effective_factor=4.0)
    fed = seen(PipelineCosts("after_augmentation", 0.08, 0.0, 0.0, 0.01, 2), 0.01, factor=8.0)
    verdict = advise_on_demand([report], fed, 2, {"factor": "demand"}, waiting())
    assert verdict.message.endswith(f"; sharing, {OTHERS}, would make more of them fresh.")
    assert verdict.next_line == 'EchoCallback(factor="demand", share="train")'
