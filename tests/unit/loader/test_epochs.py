"""Progress counts epochs and batches; an iteration begins its epoch with its first batch, and only the last one may go on."""

from dataclasses import asdict, replace

import pytest
from states import echo_state

from lightning_echo.loader.epochs import Epoch, Iterations, Progress, TrainerPlace, limited


def saved(progress, trainer=None, **fields):
    """A state of a run that stands there."""
    return echo_state(**asdict(progress), trainer=None if trainer is None else trainer.state(), **fields)


class Run:
    """Delivers the numbers of its batches, in epochs of ``length``."""

    def __init__(self, length):
        self.length, self.progress, self.iterations = length, Progress(), Iterations()

    def __iter__(self):
        epoch = Epoch(self, self.begin, self.fetch)
        self.iterations.add(epoch)
        return epoch

    def begin(self, epoch):
        self.iterations.check_alone(epoch)
        self.progress.begin(self.length)

    def fetch(self):
        self.progress.delivered += 1
        self.progress.in_epoch += 1
        return self.progress.delivered


@pytest.mark.parametrize(
    ("limit", "resuming"), [(None, True), (3, True), (2, False), (0.5, False), (0.7, False), (0.75, True), (9, True)]
)
def test_a_limit_decides_whether_an_epoch_was_at_its_end(limit, resuming):
    state = saved(Progress(epoch=1, epoch_batches=4, in_epoch=2, delivered=6))
    progress = Progress.from_state(state, limit)
    assert progress.resuming == resuming
    progress.begin(4)
    assert (progress.epoch, progress.in_epoch) == ((1, 2) if resuming else (2, 0))


@pytest.mark.parametrize("in_epoch", [2, 4])
@pytest.mark.parametrize("goes_on", [True, False])
def test_where_several_loaders_make_up_an_epoch_the_state_says_whether_it_goes_on(goes_on, in_epoch):
    state = saved(Progress(epoch=1, epoch_batches=4, in_epoch=in_epoch, delivered=6), epoch_goes_on=goes_on)
    progress = Progress.from_state(state, limit=3)
    assert progress.resuming is goes_on
    progress.begin(4)
    assert (progress.epoch, progress.in_epoch) == ((1, in_epoch) if goes_on else (2, 0))


def test_an_iteration_goes_on_with_a_state_that_is_loaded_meanwhile():
    """Lightning 2.5.0 keeps the iterator of a learning rate trial for the training that follows."""
    run = Run(3)
    iteration = iter(run)
    assert next(iteration) == 1
    run.progress = Progress.from_state(saved(Progress(epoch=4, epoch_batches=3, in_epoch=1, delivered=13)), None)
    assert list(iteration) == [14, 15]
    iteration = iter(run)
    assert next(iteration) == 16
    run.progress = Progress()
    assert list(iteration) == [1, 2, 3], "the very start: a whole epoch"


def place(in_epoch, epoch_batches=-1, *, ended=1, is_over=False, in_step=False, resumes=True, limit=1.0):
    return TrainerPlace(in_epoch, in_epoch, epoch_batches, ended, is_over, in_step, resumes, limit)


def test_an_epoch_is_where_the_trainers_is():
    progress = Progress(epoch=1, epoch_batches=6, in_epoch=6, delivered=12)
    progress.begin(6, place=place(0, 6))
    assert progress == Progress(epoch=2, epoch_batches=6, in_epoch=0, delivered=12)
    progress.begin(6, place=place(0, 9))
    assert progress.epoch_batches == 9, "who was told another length gets as many"
    progress.begin(6, place=place(0, 3))
    assert progress.epoch_batches == 6, "a limit is the Trainer's business"


@pytest.mark.parametrize("in_epoch", [0, 4])
def test_a_resumed_epoch_goes_on_only_where_the_trainer_goes_on(in_epoch):
    progress = Progress.from_state(saved(Progress(epoch=1, epoch_batches=6, in_epoch=4, delivered=10)), None)
    progress.begin(6, place=place(in_epoch, 6))
    assert progress == Progress(epoch=1 if in_epoch else 2, epoch_batches=6, in_epoch=in_epoch, delivered=10)


def test_an_epoch_that_the_trainer_has_stopped_is_over():
    state = saved(Progress(epoch=1, epoch_batches=6, in_epoch=4, delivered=10), place(4, is_over=True))
    assert not Progress.from_state(state, None).resuming
    assert Progress.from_state(replace(state, trainer=place(4).state()), None).resuming


@pytest.mark.parametrize(("length", "heard"), [(6, 6), (5, 5), (7, 13), (18, 24)])
def test_a_trainer_that_counts_on_hears_of_what_it_counted_already(length, heard):
    """Saved in ``on_train_batch_end`` of the last of 6 steps; the next epoch has another length."""
    progress = Progress.from_state(saved(Progress(0, 6, 6, 6), place(6, in_step=True)), None)
    assert progress.trainers_length(length, place(6)) == heard
    assert progress.trainers_length(length, place(6, resumes=False)) == length
    assert progress.trainers_length(length, None) == length
    progress.begin(length, place=place(6, heard) if heard > length else place(0, heard))
    assert progress.epoch_batches - progress.in_epoch == length
    assert progress.trainers_length(length, place(6)) == length


@pytest.mark.parametrize(
    ("limit", "counted", "length", "heard"), [(0.5, 3, 6, 6), (0.5, 3, 12, 18), (0.3, 2, 10, 17), (4, 4, 12, 12)]
)
def test_also_where_it_takes_only_a_part_of_an_epoch(limit, counted, length, heard):
    state = saved(Progress(0, 6, counted, counted), place(counted, in_step=True))
    progress = Progress.from_state(state, limit)
    told = progress.trainers_length(length, place(counted, limit=limit))
    assert told == heard
    taken = limited(told, limit)
    assert taken - (counted if taken > counted else 0) == limited(length, limit)


def test_a_trainer_that_ends_its_epoch_first_hears_of_its_length_until_it_has():
    progress = Progress.from_state(saved(Progress(0, 6, 6, 6), place(6, ended=0)), None)
    assert progress.trainers_length(12, place(6, ended=0)) == 6
    assert progress.trainers_length(12, place(0, ended=0)) == 6, "asked before its loops are restored"
    assert progress.trainers_length(12, place(6, ended=1)) == 12
