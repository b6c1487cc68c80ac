"""The speed-up that a summary claims: from what the run did, as an interval, and only where there is something to claim."""

import pytest

from lightning_echo.measure.control import Observation, PipelineCosts
from lightning_echo.measure.summary import EpochReport, RunVerdict, fresh_step_seconds, speedup_of, summarize

JITTER = 1.15  # both ends of an interval are so far beyond what was measured


def costs(source, rest=0.0, collate=0.0, workers=1, point="before_augmentation", **known):
    return PipelineCosts(point, source, rest, collate, device_seconds=0.01, workers=workers, **known)


@pytest.mark.parametrize(
    ("costs", "factor", "idle", "step", "cores", "fresh"),
    [
        # fed: what two workers took for a batch, and what the step takes where that is longer
        (costs(0.4, 0.03, 0.01, workers=2), 8.0, 0.0, 0.1, 2, (0.22, 0.22)),
        (costs(0.4, 0.03, 0.01, workers=2), 8.0, 0.05, 0.4, 2, (0.38, 0.38)),
        # more workers than cores, some of which rested: they may have to take turns
        (costs(0.4, workers=4), 8.0, 0.0, 0.05, 2, (0.1, 0.2)),
        # waiting: a step lasts as long as the host needs with everything, 0.2 s where 0.3 / 2 + 0.01 s were measured
        (costs(0.3, 0.01), 2.0, 0.5, 0.2, 1, (0.31, 0.31 * 0.2 / 0.16)),
        (costs(0.3, 0.01), 2.0, 0.5, 0.1, 1, (0.31, 0.31)),  # batches that were made before the first step
        (costs(0.3, 0.01, 0.02, point="after_batching"), 3.0, 0.5, 0.22, 1, (0.33, 0.66)),
        # waiting for something else, while the workers rest
        (costs(0.3, 0.01, keeps_up=True), 2.0, 0.5, 0.2, 1, (0.31, 0.31)),
        # without workers loading and training take turns
        (costs(0.3, 0.01, workers=0), 2.0, 0.5, 0.32, 2, (0.47, 0.47)),
    ],
)
def test_fresh_examples_alone_take_what_the_workers_took_or_what_explains_the_waiting(costs, factor, idle, step, cores, fresh):
    seen = Observation(0, factor, steps=100, idle_fraction=idle, step_seconds=step, costs=costs)
    assert fresh_step_seconds(seen, cores) == pytest.approx(fresh)


def test_without_times_or_costs_of_the_workers_nothing_is_known_of_fresh_examples():
    assert fresh_step_seconds(Observation(0, 2.0, steps=3, costs=costs(0.3))) is None
    assert fresh_step_seconds(Observation(0, 2.0, steps=100, idle_fraction=0.5, step_seconds=0.2)) is None


def epoch(steps=200, uses=4.0, fresh=(0.03, 0.03), *, waited=0.002, worked=0.008):
    """An epoch whose steps took 10 ms."""
    times = {"data_wait_seconds": waited, "step_seconds": worked}
    return EpochReport(0, steps, uses, 800, 2400, effective_factor=uses, fresh_step_seconds=fresh, **times)


@pytest.mark.parametrize(
    ("epochs", "claim"),
    [
        ([epoch()], (3 / JITTER, 3 * JITTER)),
        ([epoch(fresh=(0.02, 0.03))], (2 / JITTER, 3 * JITTER)),
        ([epoch(fresh=(0.01, 0.01))], (1 / JITTER, 1 * JITTER)),
        # never more than the uses of a fresh example, whatever the workers took
        ([epoch(fresh=(0.038, 0.05))], (3.8 / JITTER, 4.0)),
        ([epoch(fresh=(0.09, 0.09))], (4.0 / JITTER, 4.0)),
        # 100 steps of 30 ms at factor 1, then 300 of 10 ms that would have taken 30 ms: 12 s in place of 6 s
        ([epoch(100, 1.0, waited=0.022), epoch(300)], (2 / JITTER, 400 / (100 + 75))),
        # epochs whose times are not known do not count, as long as they are not the most
        ([epoch(), epoch(150, fresh=None)], (3 / JITTER, 3 * JITTER)),
        ([epoch(40), epoch(40), epoch(20)], (3 / JITTER, 3 * JITTER)),
    ],
)
def test_the_claim_joins_all_epochs(epochs, claim):
    assert speedup_of(epochs) == pytest.approx(claim)


@pytest.mark.parametrize(
    "epochs",
    [
        [],
        [epoch(fresh=None)],
        [epoch(uses=1.0)],  # nothing was echoed
        [epoch(99)],
        [epoch(100), epoch(101, fresh=None)],
        [epoch(900, uses=100.0)],  # nine batches of fresh examples
        [
            EpochReport(0, 200, 4.0, 800, 2400, effective_factor=4.0, fresh_step_seconds=(0.03, 0.03))
        ],  # how long it took is unknown
    ],
)
def test_without_echoes_or_from_too_little_there_is_no_claim(epochs):
    assert speedup_of(epochs) is None


def test_the_summary_says_the_interval_and_names_no_factor():
    said = EpochReport(0, 200, 8.0, 800, 2400, speedup=(1.84, 2.23))
    line = "1.8 to 2.2 times as fast as with fresh examples alone (estimated from what the workers took for them)"
    assert f" {line}" in " ".join(summarize([said], RunVerdict("Advice.")).split())
    assert "times as fast" not in summarize([EpochReport(0, 200, 8.0, 800, 2400)], RunVerdict("Advice."))
