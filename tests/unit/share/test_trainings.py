"""Who enters where, and what may be overwritten."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_echo.share.server import Training, Trainings


def training(**options):
    defaults = {"pid": 1, "label": "one", "behind": "wait", "join": "now", "wait_for": 1, "wish": None}
    return Training(**{**defaults, "goes_on": False, "group": str(id(object())) + str(len(options)), "ranks": 1, **options})


def come(trainings, begin=0, low=0, **options):
    """Lets a training come; returns its entry, or None if it waits."""
    trainings.all.append(training(group=f"g{len(trainings.all)}", **options))
    return next((one for one in trainings.entries(begin, low) if one.training is trainings.all[-1]), None)


def test_a_reader_begins_when_so_many_have_come_or_one_of_them_has_waited_for_long_enough():
    trainings = Trainings(100)
    for group in "aa":  # another rank is not another training
        trainings.all.append(training(wait_for=2, group=group))
        assert trainings.begin_at(0.0) is None
    trainings.all.append(training(wait_for=2, group="b"))
    assert trainings.begin_at(0.0) == 0
    assert [entry.is_late for entry in trainings.entries(0, 0)] == [False] * 3
    trainings.all = [training(wait_for=3, group=group, patient_until=until) for group, until in (("a", 70.0), ("b", 90.0))]
    assert [trainings.begin_at(now) for now in (0.0, 69.9, 70.0)] == [None, None, 0]


@pytest.mark.parametrize("place", [0, 37])
def test_the_first_one_enters_at_the_start_or_where_it_wishes_and_before_anything_was_taken_nobody_is_late(place):
    trainings = Trainings(100)
    trainings.all.append(training(wish=place or None))
    assert trainings.begin_at(0.0) == place
    (entry,) = trainings.entries(place, place)
    assert (entry.place, entry.others, entry.is_late) == (place, 0, False)
    assert come(trainings, begin=place, low=place, wish=place).is_late is False


@pytest.mark.parametrize(
    ("join", "wish", "goes_on", "place", "is_late"),
    [
        ("now", None, False, 130, True),  # where the fastest is
        ("pass", None, False, 200, True),  # or at the next pass
        # One that stood somewhere goes on there if that is there.
        *[("now", 60, False, 60, False), ("now", 40, False, 130, True), ("now", 150, False, 130, True)],
        *[("now", 150, True, 150, False), ("now", 40, True, 50, True)],
    ],
)
def test_where_one_enters_that_comes_when_others_are_at_work(join, wish, goes_on, place, is_late):
    trainings = Trainings(100)
    come(trainings).training.cursor = 130
    come(trainings).training.cursor = 50
    entry = come(trainings, low=50, join=join, wish=wish, goes_on=goes_on)
    assert (entry.place, entry.others, entry.is_late) == (place, 2, is_late)


@pytest.mark.parametrize(("join", "place"), [("now", 130), ("pass", 200)])
def test_one_that_comes_with_or_after_those_of_a_dead_reader_finds_them_at_work(join, place):
    trainings = Trainings(100)
    come(trainings, begin=130, low=130, wish=130, goes_on=True)
    entry = come(trainings, begin=130, low=130, join=join)
    assert (entry.place, entry.is_late) == (place, True), "though nothing was taken"
    trainings = Trainings(100)
    trainings.all += [training(group="new", join=join), training(group="old", wish=130, goes_on=True)]
    assert trainings.begin_at(0.0) == 130
    old, new = trainings.entries(130, 130)
    assert (old.training.group, old.place, old.is_late, old.others) == ("old", 130, False, 0)
    assert (new.training.group, new.place, new.is_late, new.others) == ("new", place, True, 1)


def test_ranks_enter_together():
    trainings = Trainings(100)
    trainings.all.append(training(group="a", ranks=2))
    assert trainings.begin_at(0.0) is None
    assert trainings.entries(0, 0) == []
    trainings.all.append(training(group="a", ranks=2))
    assert [entry.place for entry in trainings.entries(0, 0)] == [0, 0]
    assert trainings.count == 1


@given(st.lists(st.tuples(st.sampled_from(["wait", "skip"]), st.integers(0, 100)), max_size=6), st.integers(0, 50))
def test_low_is_that_of_the_slowest_that_is_waited_for_and_never_falls(cursors, before):
    trainings = Trainings(100)
    trainings.all = [training(behind=behind, group=str(number)) for number, (behind, _) in enumerate(cursors)]
    for one, (_, cursor) in zip(trainings.all, cursors, strict=True):
        one.cursor = cursor
    waited_for = [cursor for behind, cursor in cursors if behind == "wait"]
    low = trainings.low(before, 0.0)
    if waited_for:
        assert low == max(before, min(waited_for))
        assert trainings.slowest().cursor == min(waited_for)
    else:
        assert low == max([before, *(cursor for _, cursor in cursors)])
        assert trainings.slowest() is None


def test_the_need_that_others_reckon_with_is_that_of_the_slowest_that_is_waited_for():
    trainings = Trainings(100)
    for behind, cursor, need in (("wait", 5, 300), ("wait", 7, 200), ("skip", 1, 900), ("wait", None, 800)):
        trainings.all.append(training(behind=behind, cursor=cursor, need_nanoseconds=need))
    assert trainings.slowest_need() == 300
    assert Trainings(100).slowest_need() == 0
