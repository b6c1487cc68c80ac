"""After which steps a controller is asked within an epoch. The loaders have only numbers; `largest` stands for the ranks."""

from types import SimpleNamespace

import pytest

from lightning_echo.measure.control import Moment
from lightning_echo.training.counts import SETTLING_STEPS, AskingSteps
from lightning_echo.training.loaders import EchoLoaders


def controller(first=None, every=None, after=()):
    return SimpleNamespace(first_after_steps=first, every_n_steps=every, asked_after=after)


def loader(ahead=6, settled_at=0, delivered=0, epoch_length="fixed", has_length=True):
    return SimpleNamespace(
        planned_ahead=ahead, settled_at=settled_at, delivered_batches=delivered, epoch_length=epoch_length, has_length=has_length
    )


def asked(steps, *, epoch=1000, batches=200, before=0):
    """Numbers of batches of the run after which somebody is asked, and why."""
    found = {}
    for number in range(before + 1, batches + 1):
        in_epoch = (number - 1) % epoch + 1
        if (moment := steps.after_step(in_epoch, number, ends_epoch=in_epoch == epoch)) is not None:
            found[number] = moment
            steps.has_asked = True
    return found


def started(asking, its_loader, largest=lambda value: value):
    asking.start(its_loader, largest)
    return asking


def test_nobody_is_asked_without_a_controller_or_one_that_does_not_want_to_be():
    assert asked(started(AskingSteps(None), loader())) == {}
    assert asked(started(AskingSteps(controller()), loader())) == {}


@pytest.mark.parametrize(
    ("its", "skipped"),
    [(loader(ahead=6), 6), (loader(ahead=2, settled_at=17), 17), (loader(ahead=2, settled_at=17, delivered=9), 8)],
)
def test_the_steps_before_an_early_decision_are_not_those_of_queues_and_of_filling_a_buffer(its, skipped):
    found = asked(started(AskingSteps(controller(first=50)), its))
    assert found == {skipped + SETTLING_STEPS + 50: Moment.early}


def test_of_several_loaders_and_ranks_the_slowest_one_counts():
    loaders = EchoLoaders({"a": loader(ahead=6), "b": loader(ahead=12)})
    assert asked(started(AskingSteps(controller(first=50)), loaders)) == {12 + 10 + 50: Moment.early}
    told = []

    def largest(value):
        told.append(value)
        return 40

    assert asked(started(AskingSteps(controller(first=50)), loaders, largest)) == {40 + 10 + 50: Moment.early}
    assert told == [12]


def test_early_is_only_the_first_decision_of_a_run():
    asking = AskingSteps(controller(first=50))
    asking.has_asked = True  # resumed
    assert asked(started(asking, loader())) == {}
    asking = started(AskingSteps(controller(first=50)), loader())
    asking.after_step(1, 1, ends_epoch=False)
    asking.has_asked = True  # the epoch was over
    assert asked(asking, before=1) == {}


def test_every_so_many_batches_are_counted_in_the_epoch():
    found = asked(started(AskingSteps(controller(every=30)), loader()), epoch=70)
    assert found == dict.fromkeys([30, 60, 100, 130, 170, 200], Moment.within_epoch)


def test_at_the_end_of_an_epoch_nobody_is_asked_here():
    found = asked(started(AskingSteps(controller(every=35)), loader()), epoch=70)
    assert found == dict.fromkeys([35, 105, 175], Moment.within_epoch)
    assert asked(started(AskingSteps(controller(first=54)), loader()), epoch=70) == {}, "70 = 6 + 10 + 54"


def test_chosen_batches_are_counted_in_the_run():
    found = asked(started(AskingSteps(controller(after=[20, 70, 95])), loader()), epoch=70)
    assert found == {20: Moment.within_epoch, 95: Moment.within_epoch}


@pytest.mark.parametrize(
    "its", [None, loader(epoch_length="full_pass"), EchoLoaders({"a": loader(), "b": loader(epoch_length="full_pass")})]
)
def test_nobody_is_asked_where_nothing_is_echoed_or_a_new_length_could_not_be_told(its):
    assert asked(started(AskingSteps(controller(first=5, every=10, after=[7])), its, pytest.fail)) == {}


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
