"""`TargetIdle` looks after 10, 20, 40, ... steps of a simulated pipeline: it finds its factor soon, and noise raises none.

A step takes 1 s. An epoch never ends, unless its steps are given.
"""

import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from pipeline import TARGET, Pipeline, World, ideal_factor, train_and_look

from lightning_echo.measure.control import Reason
from lightning_echo.measure.target_idle import TargetIdle
from lightning_echo.plan.plan import Reuse

RUN, ENDLESS = 640, 1_000_000  # steps


def world_of(ratio, workers=2, **options):
    """All workers together take ``ratio`` seconds for a fresh batch."""
    return World(point="after_augmentation", source=ratio * workers, workers=workers, reuse=Reuse.memory, **options)


def starting(world, kind=Pipeline):
    return kind(world, skips=world.workers)


def raises(decided):
    """The steps after which the factor was raised."""
    factors = {0: 1.0, **{step: decision.factor for step, decision in decided.items()}}
    steps = sorted(factors)
    return [now for before, now in pairwise(steps) if factors[now] > factors[before]]


@pytest.mark.grid
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("epoch", [ENDLESS, 130, 16, 5])
def test_where_the_source_keeps_up_noise_never_raises_the_factor(workers, epoch):
    """R = 0.9, and batches that take 30% more or less: 200 runs of 1,000 steps."""
    for seed in range(200 if epoch == ENDLESS else 30):
        decided = train_and_look(starting(world_of(0.9, workers, jitter=0.3, seed=seed)), TargetIdle(), 1000, epoch)
        assert {decision.factor for decision in decided.values()} == {1.0}, seed


def longer(world, under_way, steps=RUN, kind=Pipeline):
    """By how much a run takes longer than one with its last factor from the start, beyond what has to be."""
    pipeline = starting(world, kind)
    train_and_look(pipeline, TargetIdle(), steps)
    known = kind(world, pipeline.factor)
    known.epoch(steps)
    upstream = world.source / world.workers
    return pipeline.seconds / known.seconds - (1 + under_way * (upstream - world.device) / known.seconds)


@pytest.mark.grid
@pytest.mark.parametrize("ratio", [1.25, 1.5, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("jitter", [0, 0.1])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_takes_hardly_longer_than_one_with_its_last_factor_from_the_start(workers, jitter, ratio):
    """What has to be: 16 batches are under way at factor 1 before a decision after ten steps counts."""
    for seed in range(10 if jitter else 1):
        assert longer(world_of(ratio, workers, jitter=jitter, seed=seed), 16) <= 0.03, seed


@pytest.mark.parametrize("ratio", [1.25, 1.5, 2, 3, 4, 8, 16])
def test_behind_much_noise_so_does_the_median_of_longer_runs(ratio):
    assert statistics.median(longer(world_of(ratio, jitter=0.3, seed=seed), 16, 1000) for seed in range(20)) <= 0.03


@pytest.mark.parametrize("ratio", [2, 3, 8])
@pytest.mark.parametrize(("workers", "look"), [(4, 20), (8, 40), (16, 80)])
def test_more_workers_need_four_rounds_until_their_bursts_are_no_chance(workers, look, ratio):
    """All workers deliver at the same time."""
    assert raises(train_and_look(starting(world_of(ratio, workers)), TargetIdle(), RUN))[0] == look


@pytest.mark.parametrize("ratio", [2, 3, 4, 8, 16])
def test_with_four_workers_thirty_batches_are_under_way_before_it_counts(ratio):
    assert longer(world_of(ratio, workers=4), 30) <= 0.03


def test_the_first_raise_comes_after_ten_steps_and_is_close_to_what_is_enough():
    decided = train_and_look(starting(world_of(4)), TargetIdle(), RUN)
    assert list(decided) == [10, 20, 40, 80, 160, 320, 500]
    ideal = ideal_factor(replace(world_of(4), reuse=Reuse.each), TARGET)
    assert ideal <= decided[10].factor <= 1.1 * ideal
    assert raises(decided) == [10]


class Warming(Pipeline):
    """Its first steps take a third more, as those of a processor whose caches are cold."""

    def _step(self):
        return 1.35 if self._number <= 14 else 1.0


@pytest.mark.parametrize("ratio", [2, 3, 4, 6, 8])
def test_a_factor_that_was_chosen_by_cold_steps_is_corrected_at_the_next_looks(ratio):
    """The costs of warm steps foresee that the device waits, and a few steps in which it does are enough."""
    worlds = [world_of(ratio, jitter=0.1, seed=seed) for seed in range(8)]
    assert statistics.median(longer(world, 16, kind=Warming) for world in worlds) <= 0.02


class ColdDevice(Pipeline):
    """Its first step takes half a minute, in which workers and thread fill their queues."""

    def _deliver(self):
        wait = super()._deliver()
        self._now += 30.0 if self._number == 0 else 0.0
        return wait


def test_steps_before_devices_are_warm_are_forgotten_at_the_next_look():
    decided = train_and_look(starting(world_of(4), ColdDevice), TargetIdle(), RUN)
    assert decided[10].reason is Reason.not_measured
    assert raises(decided) == [20]
    assert decided[20].factor == pytest.approx(4.07, abs=0.1)  # 4 * 0.95 * 1.07


class Hiccup(Pipeline):
    """The source stands still for a minute, once."""

    def _deliver(self):
        wait = super()._deliver()
        lost = 60.0 if self._number == self.at else 0.0
        self._now += lost
        return wait + lost


@pytest.mark.parametrize("at", [5, 15, 70, 130, 420])
def test_one_long_wait_proves_nothing(at):
    pipeline = starting(world_of(0.5), Hiccup)
    pipeline.at = at
    assert raises(train_and_look(pipeline, TargetIdle(), RUN)) == []


@pytest.mark.parametrize("epoch", [1, 3, 12, 60])
def test_short_epochs_prove_it_together(epoch):
    decided = train_and_look(starting(world_of(3)), TargetIdle(), 200, epoch)
    assert raises(decided)[0] <= 40
    assert list(decided.values())[-1].factor >= ideal_factor(world_of(3), TARGET) * 0.99


@pytest.mark.parametrize("epoch", [ENDLESS, 130, 16])
def test_a_run_that_is_stopped_and_resumed_at_any_look_decides_the_same(epoch, tmp_path):
    class Resumed(TargetIdle):
        def decide(self, observation):
            torch.save(self.state_dict(), tmp_path / "state.ckpt")
            resumed = TargetIdle()
            resumed.load_state_dict(torch.load(tmp_path / "state.ckpt", weights_only=True))
            decision = resumed.decide(observation)
            self.load_state_dict(resumed.state_dict())
            return decision

    world = world_of(1.5, jitter=0.3)
    decided = train_and_look(starting(world), TargetIdle(), 1200, epoch)
    assert raises(decided)
    assert train_and_look(starting(world), Resumed(), 1200, epoch) == decided
