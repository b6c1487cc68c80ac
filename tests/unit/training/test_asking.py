"""After which steps a controller is asked within an epoch. All that it knows are numbers of batches."""

from types import SimpleNamespace

import pytest

from lightning_echo.measure.control import Moment
from lightning_echo.training.counts import AskingSteps
from lightning_echo.training.loaders import EchoLoaders


def controller(first=None, every=None, after=()):
    return SimpleNamespace(first_after_steps=first, every_n_steps=every, asked_after=after)


def loader(epoch_length="fixed", has_length=True):
    return SimpleNamespace(epoch_length=epoch_length, has_length=has_length)


def asked(steps, *, epoch=1000, batches=200, before=0):
    """Numbers of batches of the run after which somebody is asked, and why."""
    found = {}
    for number in range(before + 1, batches + 1):
        in_epoch = (number - 1) % epoch + 1
        if (moment := steps.after_step(in_epoch, number, ends_epoch=in_epoch == epoch)) is not None:
            found[number] = moment
    return found


def started(asking, its_loader):
    asking.start(its_loader)
    return asking


def test_nobody_is_asked_without_a_controller_or_one_that_does_not_want_to_be():
    assert asked(started(AskingSteps(None), loader())) == {}
    assert asked(started(AskingSteps(controller()), loader())) == {}


def test_early_is_after_so_many_batches_of_the_run_and_each_time_that_their_number_has_doubled():
    found = asked(started(AskingSteps(controller(first=7)), loader()))
    assert found == dict.fromkeys([7, 14, 28, 56, 112], Moment.early)
    assert asked(started(AskingSteps(controller(first=7)), loader()), epoch=30) == found, "in whatever epoch"


def test_it_ends_where_every_so_many_batches_begins():
    found = asked(started(AskingSteps(controller(first=7, every=56)), loader()))
    assert found == {7: Moment.early, 14: Moment.early, 28: Moment.early, **dict.fromkeys([56, 112, 168], Moment.within_epoch)}
    found = asked(started(AskingSteps(controller(first=7, every=60)), loader()), epoch=50)
    assert found == dict.fromkeys([7, 14, 28, 56], Moment.early), "epochs that are shorter end with a decision"
    assert asked(started(AskingSteps(controller(first=60, every=60)), loader()), epoch=50) == {}


@pytest.mark.parametrize("before", [1, 6, 7, 8, 100])
def test_a_resumed_run_is_asked_after_the_same_batches(before):
    whole = asked(started(AskingSteps(controller(first=7, every=50)), loader()), epoch=130)
    resumed = asked(started(AskingSteps(controller(first=7, every=50)), loader()), epoch=130, before=before)
    assert resumed == {number: moment for number, moment in whole.items() if number > before}


def test_every_so_many_batches_are_counted_in_the_epoch():
    found = asked(started(AskingSteps(controller(every=30)), loader()), epoch=70)
    assert found == dict.fromkeys([30, 60, 100, 130, 170, 200], Moment.within_epoch)


def test_at_the_end_of_an_epoch_nobody_is_asked_here():
    found = asked(started(AskingSteps(controller(every=35)), loader()), epoch=70)
    assert found == dict.fromkeys([35, 105, 175], Moment.within_epoch)
    assert list(asked(started(AskingSteps(controller(first=35)), loader()), epoch=70)) == [35]


def test_chosen_batches_are_counted_in_the_run():
    found = asked(started(AskingSteps(controller(after=[20, 70, 95])), loader()), epoch=70)
    assert found == {20: Moment.within_epoch, 95: Moment.within_epoch}


@pytest.mark.parametrize(
    "its", [None, loader(epoch_length="full_pass"), EchoLoaders({"a": loader(), "b": loader(epoch_length="full_pass")})]
)
def test_nobody_is_asked_where_nothing_is_echoed_or_a_new_length_could_not_be_told(its):
    assert asked(started(AskingSteps(controller(first=5, every=10, after=[7])), its)) == {}


def test_where_a_pass_ends_an_epoch_the_trainer_needs_no_length():
    its = loader(epoch_length="full_pass", has_length=False)
    assert list(asked(started(AskingSteps(controller(every=100)), its))) == [100, 200]


@pytest.mark.parametrize(
    ("after", "error", "message"),
    [
        (None, TypeError, r"asked_after must be a collection of numbers of batches, such as \(100, 1000\), got None"),
        ([100.5], TypeError, r"each of SimpleNamespace.asked_after must be a number of steps \(an integer\), or None, got 100.5"),
        ([0], ValueError, "each of SimpleNamespace.asked_after must be a number of steps >= 1, got 0"),
    ],
)
def test_chosen_batches_that_are_no_numbers_are_refused(after, error, message):
    with pytest.raises(error, match=message):
        AskingSteps(controller(after=after))
