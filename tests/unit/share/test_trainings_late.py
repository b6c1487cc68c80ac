"""Where a training enters that comes late, and what it gets of the pass that has begun."""

import threading
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share import reading
from lightning_echo.share.config import new_socket
from lightning_echo.share.parts import Wanted, all_bits, union_of
from lightning_echo.share.places import Training, Trainings
from lightning_echo.share.server import Server

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


def ranks(*wishes, **options):
    return [training("ranks", ranks=len(wishes), wish=wish, **options) for wish in wishes]


def found(trainings, low, kept, wanted=None):
    """Lets all enter that wait, while the window still has the items from ``kept`` on; the places, by group."""
    reached = [low]

    def reach_back(item):
        reached.append(min(reached[-1], max(item, kept)))
        return reached[-1]

    return [(entry.training.group, entry.place, entry.there) for entry in trainings.entries(0, low, wanted, reach_back)]


@pytest.mark.parametrize(
    ("wishes", "low", "places"),
    [
        ((120, 124), 130, [(120, 130), (124, 130)]),  # one rank had more of the dead reader's items than the other
        ((124, 120), 130, [(124, 130), (120, 130)]),
        ((120, 136), 130, [(120, 130), (136, 136)]),  # and one needs none of those that are gone
        ((99, 124), 130, [(130, 130), (130, 130)]),  # one of them has missed too much: all jump
        ((124, 99), 130, [(130, 130), (130, 130)]),
        ((99, 136), 130, [(136, 136), (136, 136)]),  # and the other one has had all up to there
        ((136, 99), 130, [(136, 136), (136, 136)]),
    ],
)
def test_ranks_that_need_different_items_after_a_death_all_get_theirs_or_all_jump(wishes, low, places):
    trainings = at_work()
    trainings.all += ranks(*wishes, goes_on=True)
    assert found(trainings, low, low) == [("ranks", *place) for place in places]


@pytest.mark.parametrize("late", [0.0, 0.3])
@pytest.mark.parametrize("behind", ["wait", "skip"])
@pytest.mark.parametrize("wishes", [(98, 124), (98, 136), (136, 98), (124, 124)])
def test_what_one_rank_has_had_of_a_dead_readers_items_the_others_take_too_or_later_ones_in_their_place(wishes, behind, late):
    """They ask for the rounds that they need next. Then all miss the same."""
    trainings = at_work()
    trainings.all += ranks(*wishes, goes_on=True, behind=behind, late=late)
    trainings.entries(0, FASTEST, None, lambda item: FASTEST, now=5.0)
    agreement, end, low = trainings.agreements["ranks"], max(wishes) + 1, 150
    assert [agreement.answer(wish, wish + 8, low, 6.0) for wish in wishes] == [(False, end)] * 2
    assert [agreement.answer(end, end + 8, later, 6.0) for later in (low, low + 10)] == [(True, low)] * 2


def test_what_ranks_have_agreed_on_by_their_dead_reader_is_held_for_a_moment():
    trainings = at_work()
    trainings.all += ranks(124, 128, goes_on=True, behind="skip")
    trainings.entries(0, 120, now=5.0)
    trainings.all[0].cursor = 150
    assert [trainings.low(120, now) for now in (5.1, 6.0)] == [124, 150]


def test_ranks_find_one_window_although_another_training_comes_between_them():
    """It comes late, so that the window keeps more from then on."""
    trainings = at_work()
    first, second = ranks(115, 115, late=0.0)
    trainings.all += [first, training("late"), second]
    assert found(trainings, FASTEST, 0) == [("ranks", 115, 115), ("late", 100, 100), ("ranks", 115, 115)]


@pytest.mark.parametrize(("read_for_others", "place"), [(128, (100, 128)), (160, (160, 160))])
def test_what_was_read_ahead_for_others_alone_counts_too_in_how_much_is_read_again(read_for_others, place):
    """At most 30 items are. If the reader is further ahead with another part, this training begins there, as without ``late``."""
    half = all_bits(LENGTH).copy()
    half[6:] = 0
    other, wanted = all_bits(LENGTH) & ~half, Wanted(0)
    wanted.change(half)
    wanted.settle(read_for_others, list(range(28)))
    trainings = at_work()
    trainings.all[0].part = half
    wanted.change(union_of([half, other]))
    trainings.all.append(training("other", part=other))
    assert found(trainings, FASTEST, 0, wanted) == [("other", *place)]


# ---------------------------------------------------------------------- the server, which reads again


class Read:
    """Stands for workers that read again. ``start`` may fail."""

    def __init__(self, fails=None):
        self.fails, self.is_closed, self.wanted, self.workers = fails, False, Wanted(0), 1
        self.window, self.has_lost_worker = SimpleNamespace(), lambda: isinstance(fails, RuntimeError)

    def want(self, workers):
        self.workers = workers

    def start(self):
        if self.fails is not None:
            raise self.fails

    def close(self):
        self.is_closed = True

    lost_at = cache_state = about_cache = staticmethod(lambda: None)


@pytest.fixture
def late_server(monkeypatch):
    """Returns a function that lets a training come late; the server, and what it tells. The window has nothing before item 4.

    Another training is at item 4 of 20.
    """
    made = []

    def comes(*others, **options):
        data = {"data_fingerprint": {}, "window_bytes": 8192, "linger_seconds": 0.2}
        server = Server(new_socket(), kind_of(DataLoader(range(20), num_workers=1, shuffle=True)), seed=0, **data)
        made.append(server)
        window = SimpleNamespace(begin=0, low=4, reach_back=lambda item: max(item, 4), bytes_per_example=100)
        window.noted = {}
        window.note_agreement = lambda group, end, *_: window.noted.update({group: end})
        server._reading = SimpleNamespace(window=window, wanted=None, cache_state=None, has_lost_worker=lambda: False, close=int)
        server._trainings.all += [training("first"), *others]
        server._trainings.all[0].cursor = 4
        told, said = [], []
        monkeypatch.setattr(server, "_peers", {each: SimpleNamespace(training=each, knows_place=False) for each in range(9)})
        for each, peer in zip(server._trainings.all, server._peers.values(), strict=False):
            peer.training = each
        monkeypatch.setattr(server, "_tell_place", lambda peer, reading, entry: told.append(entry))
        monkeypatch.setattr(server, "_try_to_send", lambda peer, message: said.append(message))
        return server, told, said

    yield comes
    for server in made:
        server._peers.clear()
        server._trainings.all.clear()
        server.close()


def test_more_workers_read_again_for_all_ranks_what_any_of_them_lacks(late_server, monkeypatch):
    """Ranks of a training whose reader has died may need different items first."""
    server, told, _ = late_server(*ranks(1, 3, goes_on=True, workers=2))
    asked, read = [], Read()
    monkeypatch.setattr(server, "_read", lambda kind, seed, first, *_, end: asked.append((first, end)) or read)
    server._let_enter_or_fail()
    assert [(entry.place, entry.there, entry.is_late) for entry in told] == [(1, 4, False), (3, 4, False)]
    assert (asked, read.workers, read.window.low) == ([(1, 4)], 4, 1)


def test_if_nothing_can_be_read_again_for_ranks_they_enter_at_one_place(late_server, monkeypatch):
    """One of them needs nothing of that."""
    server, told, _ = late_server(*ranks(1, 6, goes_on=True))
    monkeypatch.setattr(server, "_read", lambda *_, end: Read(OSError("no process")))
    server._let_enter_or_fail()
    assert [(entry.place, entry.there, entry.is_late) for entry in told] == [(6, 6, True)] * 2
    assert [(one.cursor, one.catching_up) for one in server._trainings.all[1:]] == [(6, None)] * 2
    assert server._reading.window.noted == {"ranks": 7}, "what one of them has had, if this reader dies before they ask"


@pytest.mark.parametrize(
    ("workers", "asked", "late", "main", "again"),
    [
        ("sum", [3, 4], 0, 7, []),
        ("sum", [3, 4], 1, 3, [4]),
        ("sum", [3, 4, 5], 2, 3, [4, 5]),
        ("sum", [1, 200], 1, 64, [64]),  # a reader has at most 128
        ("sum", [1, 40, 40, 40, 40], 4, 28, [25] * 4),
        (8, [3, 4], 1, 4, [4]),
        (8, [1, 1, 1, 1, 1], 4, 4, [1] * 4),
        (2, [1, 1, 1], 2, 1, [1, 1]),  # each has one at least
        ("starter", [6, 9], 1, 1, [1]),  # the loader of the server has one
    ],
)
def test_a_reader_has_no_more_workers_because_trainings_catch_up(late_server, monkeypatch, workers, asked, late, main, again):
    server, *_ = late_server(*(training(f"late {number}", workers=own) for number, own in enumerate(asked[1:])))
    monkeypatch.setattr(server, "_workers", workers)
    server._trainings.all[0].workers = asked[0]
    server._reading = Read()
    for number in range(late):
        server._again[f"late {len(asked) - 1 - late + number}"] = Read()
    server._want_workers()
    assert (server._reading.workers, [each.workers for each in server._again.values()]) == (main, again)


def test_what_was_read_again_is_ended_though_no_thread_is_left_for_that(late_server, monkeypatch):
    server, _, _ = late_server(training("late"))
    read = server._again["late"] = Read()
    read.window.free = lambda: None

    def start(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        server._move_low()
    assert (read.is_closed, server._again) == (True, {})


@pytest.mark.parametrize(("free", "is_read"), [(799, False), (800, True), (None, True)])
def test_what_would_take_more_than_half_of_the_free_memory_is_not_read_again(late_server, monkeypatch, caplog, free, is_read):
    server, told, _ = late_server(training("late"))  # it lacks four examples of 100 bytes
    monkeypatch.setattr(server, "_read", lambda *_, end: Read())
    monkeypatch.setattr(reading, "free_memory_bytes", lambda: free)
    server._let_enter_or_fail()
    assert [(entry.place, entry.there, entry.is_late) for entry in told] == [(0, 4, False) if is_read else (4, 4, True)]
    assert ("late comes late, and what it has missed is not read again: that takes 400 bytes," in caplog.text) is not is_read


@pytest.mark.parametrize("reason", ["no process", "others"])
def test_if_nothing_can_be_read_again_it_begins_with_what_the_window_has(late_server, monkeypatch, reason):
    server, told, _ = late_server(training("late"))
    read = Read(OSError("no process"))
    monkeypatch.setattr(server, "_read", lambda *_, end: read)
    if reason == "others":
        for number in range(4):
            server._again[f"catching up {number}"] = Read()
            server._trainings.all.append(training(f"catching up {number}"))
            server._trainings.all[-1].cursor, server._trainings.all[-1].catching_up = 4, 2
    server._let_enter_or_fail()
    assert [(entry.place, entry.there, entry.is_late) for entry in told] == [(4, 4, True)]
    assert told[0].training.catching_up is None
    assert read.is_closed is (reason == "no process")
    assert "late" not in server._again


def test_a_worker_that_dies_while_it_is_started_to_read_again_keeps_nobody_out(late_server, monkeypatch):
    """torch raises its error in the main thread. The trainings continue with the next reader."""
    server, _, _ = late_server(training("late"))
    monkeypatch.setattr(server, "_read", lambda *_, end: Read(RuntimeError("DataLoader worker (pid 3) is killed by signal")))
    with pytest.raises(RuntimeError, match="is killed by signal") as found:
        server._let_enter_or_fail()
    assert type(found.value) is RuntimeError
