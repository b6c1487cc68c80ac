"""An epoch's own examples and the slices of its time: against sums of what a fake loader and clock did, also after a resume."""

import random
from itertools import pairwise

import pytest
import torch
from meters import BATCH, Loader, Run

from lightning_echo.measure.timing import IdleFraction


@pytest.mark.parametrize("steps", [1, 9, 10, 25, 1000])
def test_the_slices_of_an_epoch_have_the_times_of_their_steps(steps):
    chance = random.Random(steps)
    waited = [chance.choice((0.0, 0.25, 0.5)) for _ in range(steps)]
    seconds = [each + chance.choice((0.25, 1.0)) for each in waited]  # binary fractions: their sums are exact
    idle = IdleFraction()
    idle.update(waited, seconds)
    count = max(1, min(40, steps // 10))
    ends = [steps * number // count for number in range(count + 1)]
    expected = [(sum(waited[begin:end]), sum(seconds[begin:end])) for begin, end in pairwise(ends)]
    assert idle.slices() == expected


def test_of_several_ranks_a_slice_has_the_longest_waits_and_never_more_than_its_time():
    idle = IdleFraction()
    idle.update([1.0, 0.0, 0.5], [1.0, 1.0, 1.0])
    idle.per_step = torch.stack([idle.per_step, torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 0.5]])])  # gathered: (ranks, 2, steps)
    assert idle.slices() == [(3.0, 3.0)]
    idle.per_step = torch.tensor([[[2.0, 2.0], [0, 1], [1.0, 1.0]]], dtype=torch.float64)  # joined: waits, ranks, seconds
    assert idle.slices() == [(2.0, 2.0)]


def test_an_epoch_without_steps_has_no_slices():
    assert IdleFraction().slices() == []


def test_an_epoch_tells_its_slices_and_that_all_of_it_was_counted():
    run = Run(Loader())
    first = run.epoch(25, fresh=4)
    assert first.slices == [(pytest.approx(11 * 0.25), pytest.approx(11 * 0.25 + 12 * 0.75)), (13 * 0.25, 13.0)]
    assert (first.fresh, first.echoed, first.is_counted) == (100, 100, True)
    second = run.epoch(8, fresh=2)
    assert (second.fresh, second.echoed, second.is_counted) == (16, 48, True)


def resumed(run, *, keeps_state):
    """The run as it continues within an epoch: with the loader's counts, and with or without the meter's."""
    loader = Loader()
    loader.counts, loader.delivered_batches = run.loader.counts, run.loader.delivered_batches
    return Run(loader, state=run.meter.state_dict(run.loader) if keeps_state else None)


def go_on(run, steps, *, at, fresh=4):
    """Trains the rest of an epoch, whose next batch is number ``at``."""
    for number in range(at, at + steps):
        run.loader.deliver(fresh, (0.4, 0.2, 0.1))
        run.now += 1.0
        run.meter.end_step(run.loader, BATCH, number)
    return run.meter.end_epoch(run.loader)


def began(steps=3):
    """A run with a whole epoch, and so many steps of the next one."""
    run = Run(Loader())
    run.epoch(8)
    run.meter.begin_epoch(run.loader)
    for _ in range(steps):
        run.step()
    return run


def test_after_a_resume_an_epoch_has_all_its_examples():
    measures = go_on(resumed(began(), keeps_state=True), 5, at=3)
    assert (measures.fresh, measures.echoed, measures.is_counted) == (32, 32, True)


def test_without_the_state_the_epoch_in_which_it_began_is_not_counted_and_the_next_one_is():
    run = resumed(began(), keeps_state=False)
    assert not go_on(run, 5, at=3).is_counted
    run.meter.begin_epoch(run.loader)
    after = go_on(run, 8, at=0, fresh=2)
    assert (after.fresh, after.echoed, after.is_counted) == (16, 48, True)


def test_a_run_that_begins_with_an_epoch_has_counted_it_whatever_was_before():
    run = resumed(began(0), keeps_state=False)
    measures = go_on(run, 8, at=0)
    assert (measures.fresh, measures.echoed, measures.is_counted) == (32, 32, True)


@pytest.mark.parametrize("first_of_epoch", [0, 3])
def test_a_state_remembers_whether_the_beginning_was_seen(first_of_epoch):
    run = resumed(began(first_of_epoch), keeps_state=False)
    run.loader.deliver(4, (0.4, 0.2, 0.1))
    run.meter.end_step(run.loader, BATCH, first_of_epoch)
    again = resumed(run, keeps_state=True)
    assert go_on(again, 4, at=first_of_epoch + 1).is_counted == (first_of_epoch == 0)


def test_batches_without_a_size_are_not_counted():
    run = Run(workers=0)
    run.meter.begin_epoch(None)
    run.step()
    run.meter.has_unknown_sizes = True
    assert not run.meter.end_epoch(None).is_counted
