"""Progress counts epochs and batches; an iteration begins its epoch with its first batch, and only the last one may go on."""

import pytest

from lightning_echo.echoing.epochs import Epoch, Iterations, Progress


class Run:
    """Delivers the numbers of its batches, in epochs of ``length``."""

    def __init__(self, length):
        self.length, self.progress, self.iterations = length, Progress(), Iterations()

    def __iter__(self):
        epoch = Epoch(lambda: self.progress, self.begin, self.fetch)
        self.iterations.add(epoch)
        return epoch

    def begin(self, epoch):
        self.iterations.check_alone(epoch)
        self.progress.begin(self.length)

    def fetch(self):
        self.progress.count()
        return self.progress.delivered


def test_epochs_follow_one_another_and_take_the_length_of_their_beginning():
    run = Run(3)
    assert list(run) == [1, 2, 3]
    run.length = 2
    assert list(run) == [4, 5]
    assert run.progress == Progress(epoch=1, epoch_batches=2, in_epoch=2, delivered=5)


def test_an_iteration_that_is_not_begun_changes_nothing():
    run = Run(3)
    iter(run), iter(run)
    assert run.progress == Progress()
    assert list(run) == [1, 2, 3]


def test_a_second_iteration_beside_a_running_one_is_refused_with_the_way_out():
    run = Run(3)
    first, second = iter(run), iter(run)
    assert next(first) == 1
    with pytest.raises(RuntimeError, match=r"iterated already.*EchoLoader\.loader"):
        next(second)
    assert list(first) == [2, 3]
    assert list(second) == [], "a refused iteration is over"


@pytest.mark.parametrize(
    ("limit", "resuming"), [(None, True), (3, True), (2, False), (0.5, False), (0.7, False), (0.75, True), (9, True)]
)
def test_a_limit_decides_whether_an_epoch_was_at_its_end(limit, resuming):
    state = Progress(epoch=1, epoch_batches=4, in_epoch=2, delivered=6).state()
    progress = Progress.from_state(state, limit)
    assert progress.resuming == resuming
    progress.begin(4)
    assert (progress.epoch, progress.in_epoch) == ((1, 2) if resuming else (2, 0))


@pytest.mark.parametrize("in_epoch", [2, 4])
@pytest.mark.parametrize("goes_on", [True, False])
def test_where_several_loaders_make_up_an_epoch_the_state_says_whether_it_goes_on(goes_on, in_epoch):
    state = {**Progress(epoch=1, epoch_batches=4, in_epoch=in_epoch, delivered=6).state(), "epoch_goes_on": goes_on}
    progress = Progress.from_state(state, limit=3)
    assert progress.resuming is goes_on
    progress.begin(4)
    assert (progress.epoch, progress.in_epoch) == ((1, in_epoch) if goes_on else (2, 0))


def test_a_kept_length_is_given_up_with_the_first_epoch_that_begins_unless_it_is_kept_on():
    progress = Progress()
    progress.kept_length = 3
    progress.begin(3, keeps_length=True)
    assert progress.kept_length == 3
    progress.begin(3)
    assert progress.kept_length is None


def test_an_iteration_goes_on_with_a_state_that_is_loaded_meanwhile():
    """Lightning 2.5.0 keeps the iterator of a learning rate trial for the training that follows."""
    run = Run(3)
    iteration = iter(run)
    assert next(iteration) == 1
    run.progress = Progress.from_state(Progress(epoch=4, epoch_batches=3, in_epoch=1, delivered=13).state(), None)
    assert list(iteration) == [14, 15]
    iteration = iter(run)
    assert next(iteration) == 16
    run.progress = Progress()
    assert list(iteration) == [1, 2, 3], "the very start: a whole epoch"
