"""Where a training enters that comes late, and what it gets of the pass that has begun."""

import pytest

from lightning_echo.share.parts import Wanted, all_bits, union_of
from lightning_echo.share.server import Training, Trainings

LENGTH, FASTEST = 100, 130


def training(group, **options):
    defaults = {"pid": 1, "label": group, "behind": "wait", "join": "now", "wait_for": 1, "wish": None}
    return Training(**{**defaults, "goes_on": False, "group": group, "ranks": 1, "late": 0.3, **options})


def at_work(cursor=FASTEST):
    trainings = Trainings(LENGTH)
    trainings.all.append(training("first"))
    trainings.entries(0, 0)
    trainings.all[0].cursor = cursor
    return trainings


def entering(trainings, low, kept, wanted=None, **options):
    """Lets one more training come, while the window still has the items from ``kept`` on. Returns its entry."""
    trainings.all.append(training(f"g{len(trainings.all)}", **options))
    return trainings.entries(0, low, wanted, lambda item: min(low, max(item, kept)))[-1]


@pytest.mark.parametrize(
    ("options", "kept", "place", "there", "is_late"),
    [
        ({}, 0, 100, 100, False),  # from the window, all of it
        ({}, 110, 100, 110, False),  # the first ten are read again
        ({}, 130, 100, 130, False),
        ({"late": 0.29}, 0, 130, 130, True),
        ({"late": 0.0}, 0, 130, 130, True),
        ({"join": "pass"}, 0, 200, 200, True),
        ({"behind": "skip"}, 0, 130, 130, True),
        ({"wish": 115}, 0, 115, 115, False),  # a run that is resumed
        ({"wish": 115}, 125, 115, 125, False),
        ({"wish": 100}, 130, 100, 130, False),
        ({"wish": 99}, 0, 130, 130, True),
        ({"wish": 131}, 0, 130, 130, True),  # it is ahead of the others
        ({"wish": 115, "goes_on": True}, 125, 115, 125, False),
        ({"wish": 140, "goes_on": True}, 125, 140, 140, False),
        ({"wish": 99, "goes_on": True}, 125, 130, 130, True),
    ],
)
def test_it_gets_what_it_has_missed_if_that_is_little(options, kept, place, there, is_late):
    trainings = at_work()
    entry = entering(trainings, FASTEST, kept, **options)
    assert (entry.place, entry.there, entry.is_late) == (place, there, is_late)
    late = entry.training
    assert (late.cursor, late.catching_up, late.at) == (there, place if place < there else None, place)
    assert trainings.low(0, 0.0) == min(there, FASTEST), "the window keeps what it takes after that"


def test_without_reaching_back_it_begins_where_the_others_are():
    trainings = at_work()
    trainings.all.append(training("second"))
    (entry,) = trainings.entries(0, FASTEST)
    assert (entry.place, entry.there, entry.is_late) == (130, 130, True)


def test_all_ranks_of_a_training_enter_at_one_place():
    trainings = at_work()
    trainings.all += [training("ranks", ranks=2), training("ranks", ranks=2)]
    entries = trainings.entries(0, FASTEST, None, lambda item: min(FASTEST, max(item, 120)))
    assert [(entry.place, entry.there, entry.is_late) for entry in entries] == [(100, 120, False)] * 2


def test_what_was_read_for_others_alone_is_read_again_for_it():
    """The window has all from item 96 on, but until item 128 only what the first training takes was read."""
    half = all_bits(LENGTH).copy()
    half[6:] = 0
    wanted = Wanted(0)
    wanted.change(half)
    wanted.settle(128, list(range(28)))
    trainings = at_work()
    trainings.all[0].part = half
    other = all_bits(LENGTH) & ~half
    wanted.change(union_of([half, other]))
    entry = entering(trainings, FASTEST, 96, wanted, part=other)
    assert (entry.place, entry.there) == (100, 128)
    assert entering(trainings, FASTEST, 96, wanted, part=half).there == 100


def test_a_training_that_catches_up_is_not_the_slowest_for_those_that_come_then():
    """Where others enter follows from the window's items alone."""
    trainings = at_work()
    entering(trainings, FASTEST, 120)
    entry = entering(trainings, 120, 110, late=0.0)
    assert (entry.place, entry.there) == (FASTEST, FASTEST)
