"""Workers on other machines, as the reader sees them: their lanes, and the actors and Ray itself played by the test."""

import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker as worker_of_torch

from lightning_echo.cache.reads import Keys
from lightning_echo.data.randomness import preserved_random_states
from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share import ray_workers
from lightning_echo.share.config import ShareConfig
from lightning_echo.share.packing import ERROR, unpack
from lightning_echo.share.packing import Chunk as Packed
from lightning_echo.share.parts import Chunk
from lightning_echo.share.process import Payload, payload_of
from lightning_echo.share.ray_actor import Collected, DiffersThere, Maker, Sent, SentRecords, versions
from lightning_echo.share.ray_workers import Actor, FarLane, RayWorkers
from lightning_echo.share.reading import Preparation, Reading, Recipe
from lightning_echo.share.window import CHUNK

LENGTH, SEED = 61, 3
DEADLINE_SECONDS = 60
WHERE = "10.0.0.2 (node b)"

# ---------------------------------------------------------------------- chunks in pieces


@given(
    first=st.integers(0, 100),
    is_wanted=st.lists(st.booleans(), min_size=1, max_size=CHUNK),
    most=st.integers(1, CHUNK + 3),
)
def test_the_pieces_of_a_chunk_are_that_chunk(first, is_wanted, most):
    indices = [f"i{item}" for item in range(first, first + len(is_wanted))]
    chunk = Chunk(first, [item for item, wanted in enumerate(is_wanted, first) if wanted], indices, ["later"], ["not"])
    pieces = chunk.cut(most)
    assert all(1 <= len(piece.indices) <= most for piece in pieces)
    assert [index for piece in pieces for index in piece.indices] == indices
    assert [item for piece in pieces for item in piece.wanted] == chunk.wanted
    assert [piece.index_of(item) for piece in pieces for item in piece.wanted] == [f"i{item}" for item in chunk.wanted]
    assert [piece.first for piece in pieces] == list(range(first, chunk.end, most))
    assert pieces[-1].end == chunk.end
    assert [(piece.ahead, piece.dropped) for piece in pieces] == [(["later"], ["not"])] + [([], [])] * (len(pieces) - 1)


# ---------------------------------------------------------------------- in the actor


def test_what_is_put_in_an_actor_is_a_copy_since_a_data_set_may_use_its_memory_again():
    lane, memory = Collected(), bytearray(b"one")
    lane.put(4, 1, [memory, b"!"], 4)
    memory[:] = b"two"
    lane.put(5, 0, [memory], 3)
    found = Packed.from_array(lane.array(4, 7, 8))
    assert [(kind, bytes(data)) for kind, data in found.pieces] == [(1, b"one!"), (0, b"two")]
    assert (found.first, found.nanoseconds, found.cpu_nanoseconds) == (4, 7, 8)
    lane.note_prepared(2, 10, 5)
    assert lane.spent == (2, 10, 5)
    lane.begin()
    assert (Packed.from_array(lane.array(9, 0, 0)).pieces, lane.spent) == ([], (0, 0, 0))


def test_records_that_come_with_a_call_are_found_and_others_go_back_once():
    records = SentRecords(10)
    records.begin({3: b"three"}, True)
    assert (3 in records, 4 in records, records.get(3), records.get(4)) == (True, False, b"three", None)
    assert [records.put(key, [b"a", b"b"]) for key in (3, 4, 4)] == [False, True, False]
    assert (records.get(4), records.added, records.counts.is_frozen) == (b"ab", [(4, b"ab")], False)
    records.begin({}, False)
    assert (4 in records, records.added, records.counts.is_frozen) == (False, [], True)


class Squares:
    """Example ``i`` is its square, noise, and what the worker knows of itself."""

    def __init__(self, offset=0):
        self.offset = offset

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        if index == 13:
            raise ValueError("this example is broken")
        info = get_worker_info()
        known = (0, 0, False) if info is None else (info.id, info.num_workers, info.dataset is self)
        return {"square": index * index + self.offset, "noise": torch.rand(()), "known": known}


def payload(dataset, digests=None):
    """What a training sends of a data set. ``digests``: of examples that it has looked at."""
    fingerprint = {"data set": "Squares", **(digests or {})}
    kind = kind_of(DataLoader(dataset, shuffle=True, num_workers=1))
    return payload_of(ShareConfig("played"), kind, fingerprint)


SENT = Sent(versions(), SEED, 130, 131, WHERE)


@pytest.fixture
def as_worker(monkeypatch):
    """Lets this process be an actor until the test ends."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(worker_of_torch, "_worker_info", None)
    with preserved_random_states():
        yield
    torch.set_num_threads(threads)


def maker(dataset, sent=SENT, **options):
    found = Maker(payload(dataset, **options).to_bytes(), sent)
    found.attend(1, ray_workers.cloudpickle.dumps(Recipe(SEED)))
    return found


def test_an_actor_makes_what_a_worker_makes_and_knows_which_worker_it_is(as_worker):
    chunk = Chunk(32, [32, 34, 35], [7, 8, 9, 13], [], [])
    local = Collected()
    Preparation(Squares(), lambda: local, Recipe(SEED)).fetch(chunk)
    local_pieces = Packed.from_array(local.array(32, 0, 0)).pieces
    made = Packed.from_array(maker(Squares()).make(1, [chunk], {}, False))
    assert made.first == 32
    (noise, other), kinds = (
        [[unpack(kind, bytearray(data))["noise"] for kind, data in pieces[:2]] for pieces in (local_pieces, made.pieces)],
        [piece.kind for piece in made.pieces],
    )
    assert noise == other
    assert kinds == [0, 0, ERROR]
    assert unpack(0, bytearray(made.pieces[0].data))["known"] == (130, 131, True)
    with pytest.raises(
        ValueError, match=r"this example is broken \(reading example 13 of the data set, on 10\.0\.0\.2 \(node b\)\)"
    ):
        unpack(ERROR, bytearray(made.pieces[2].data))
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("torch", "1.0", rf"torch is {versions()['torch']} there, and 1\.0 in the reader"),
        ("Python", "2.7", r"Python is 3\.\d+ there, and 2\.7 in the reader"),
        ("nothing", "2.0", r"nothing is not installed there, and 2\.0 in the reader"),
    ],
)
def test_other_versions_there_are_named(as_worker, name, version, message):
    with pytest.raises(DiffersThere, match=message):
        maker(Squares(), SENT._replace(versions={**versions(), name: version}))


def test_another_example_there_is_named(as_worker):
    with pytest.raises(DiffersThere, match="example 4 is another one there, read under the same seeds: there are other files"):
        maker(Squares(), digests={"example 4": "0" * 32}).compare()


# ---------------------------------------------------------------------- in the reader


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__(str(cause))
        self.cause = cause


class GetTimeoutError(RayError):
    pass


class Answer:
    """What Ray returns for a call. It is ready when it has a value."""

    def __init__(self, value=None, is_ready=True):
        self.value, self.is_ready = value, is_ready


class PlayedHandle:
    """An actor that makes examples, until it has made ``dies_after`` pieces, or is killed; then it hangs if it ``hangs``."""

    def __init__(self, dataset, dies_after=10**9, hangs=False, seconds=0.0):
        self._preparation, self._lane = Preparation(dataset, lambda: self._lane, Recipe(SEED)), Collected()
        self.left, self.hangs, self.seconds, self.pieces, self.is_killed = dies_after, hangs, seconds, [], False
        self.attended, self.calls = [], []
        self.attend = SimpleNamespace(remote=lambda run, recipe: self.attended.append(run))
        self.make = SimpleNamespace(remote=self._make)
        self.lock = threading.RLock()

    def _make(self, run, pieces, records, takes_records):
        assert run == self.attended[-1]
        with self.lock, preserved_random_states():
            self.pieces += pieces
            self.calls.append(sum(len(piece.indices) for piece in pieces))
            self.left -= 1
            if self.left < 0 or self.is_killed:
                return Answer(RayError("it is dead"), is_ready=not self.hangs)
            self._lane.begin()
            for piece in pieces:
                self._preparation.fetch(piece)
            time.sleep(self.seconds)
            return Answer(self._lane.array(pieces[0].first, 10**6, 10**5).copy())  # as Ray copies it


def get(answer, timeout):
    if isinstance(answer.value, Exception):
        raise answer.value
    return answer.value


def wait(answers, timeout):
    ready = [answer for answer in answers if answer.is_ready]
    if not ready:
        time.sleep(0.01)
    return ready, [answer for answer in answers if not answer.is_ready]


@pytest.fixture
def played_ray(monkeypatch):
    def kill(handle):
        handle.is_killed = True

    errors = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, GetTimeoutError=GetTimeoutError)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(wait=wait, get=get, kill=kill, exceptions=errors))
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)


class Numbers:
    """Example ``i`` is its index and noise; ``size`` bytes more."""

    def __init__(self, size=0, large=None):
        self.size, self.large = size, large

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        if index == self.large:
            return bytes(2**17)
        return {"index": index, "noise": torch.rand(()), "more": bytes(self.size)}


@contextmanager
def reading_of(dataset, end=None, window_bytes=2**16):
    """A reading with one worker here, and what was lost."""
    lost = []
    kind = kind_of(DataLoader(dataset, shuffle=True, num_workers=1))
    reading = Reading(kind, SEED, 0, window_bytes, lost.append, end=end)
    reading.start()
    try:
        yield reading, lost
    finally:
        reading.close()


def taken(reading, first, end, lost):
    """Items, as a training takes them."""
    found, ends = [], time.monotonic() + DEADLINE_SECONDS
    for item in range(first, end):
        while (copied := reading.window.copy(item)) is None:
            assert time.monotonic() < ends, f"item {item} does not come"
            assert lost == []
            reading.want(1)  # as the server does, in its loop
            time.sleep(0.001)
        found.append(copied)
        reading.window.low = item + 1
    return found


def until(holds):
    end = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


COUNT = 5 * LENGTH


@pytest.fixture(scope="module")
def local():
    """What a worker here makes alone."""
    with reading_of(Numbers()) as (reading, lost):
        return taken(reading, 0, COUNT, lost)


def workers_of(reading, *handles):
    """The workers on other machines of a reader: these actors, which have begun."""
    workers = RayWorkers("played", {"node": "here"}, payload(Squares()), SEED)
    workers.attend(reading)
    for number, handle in enumerate(handles):
        where = f"10.0.0.{number} (node b)"
        handle.lock = reading._dealing.lock  # they are threads of this process, which has one state of random numbers
        actor = Actor(handle, "b", number, 0.0, where, is_placed=True, has_begun=True, is_ready=True)
        workers._actors.append(actor)
    for actor in list(workers._actors):
        workers._let_work(actor)
    return workers


def items_of(handle):
    return [item for piece in handle.pieces for item in piece.wanted]


def test_what_actors_make_is_in_the_window_as_what_a_worker_here_makes(played_ray, local):
    handles = [PlayedHandle(Numbers()) for _ in range(2)]
    with reading_of(Numbers()) as (reading, lost):
        workers = workers_of(reading, *handles)
        assert taken(reading, 0, COUNT, lost) == local
        assert reading.window.lanes == 3
    for handle, told in zip(handles, workers.status(), strict=True):
        assert len(items_of(handle)) > CHUNK
        assert told["examples"] > 0
        assert told["cpu_seconds"] == pytest.approx(1e-4)
        assert handle.calls[:2] == [2, 2], "as long as it is not known how long one takes"
        assert max(handle.calls) > 2
    items = items_of(handles[0]) + items_of(handles[1])
    assert len(set(items)) == len(items), "each item is asked for once"


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("dies_after", [0, 1, 2])
def test_what_a_lost_actor_had_is_made_by_another_one_or_else_by_a_worker_here(played_ray, local, monkeypatch, hangs, dies_after):
    monkeypatch.setattr(ray_workers, "_LEAST_SILENT_SECONDS", 0.3)
    handles = [PlayedHandle(Numbers(), dies_after, hangs), PlayedHandle(Numbers())]
    with reading_of(Numbers()) as (reading, lost):
        workers = workers_of(reading, *handles)
        assert taken(reading, 0, COUNT, lost) == local
        until(lambda: reading.window.lanes == 2)  # its lane has ended
        assert [actor.handle for actor in workers._actors] == handles[1:]
        assert handles[0].is_killed
        assert reading.workers == 1, "no worker here had to begin"
    again = items_of(handles[0])[-1]  # had not come
    assert again in items_of(handles[1])


def test_if_all_actors_are_lost_workers_here_make_what_they_had(played_ray, local):
    handles = [PlayedHandle(Numbers(), dies_after) for dies_after in (1, 2)]
    with reading_of(Numbers()) as (reading, lost):
        workers = workers_of(reading, *handles)
        assert taken(reading, 0, COUNT, lost) == local
        assert workers._actors == []
        until(lambda: reading.window.lanes == reading.workers == 1)
        assert reading._far == set()


def test_an_actor_that_is_given_back_first_makes_what_it_was_asked_for(played_ray, local):
    handle = PlayedHandle(Numbers())
    with reading_of(Numbers()) as (reading, lost):
        workers = workers_of(reading, handle)
        assert taken(reading, 0, LENGTH, lost) == local[:LENGTH]
        until(lambda: handle.pieces)
        workers.want(0, 0)
        workers._judge()
        workers._give_back()
        rest = taken(reading, LENGTH, COUNT, lost)
        assert rest == local[LENGTH:]
        until(lambda: reading.window.lanes == 1)
        workers._give_back()
        assert workers._actors == []
        assert handle.is_killed


def test_an_error_of_the_actor_itself_ends_the_reading_and_names_the_node(played_ray):
    handle = PlayedHandle(Numbers())
    handle.make = SimpleNamespace(remote=lambda *args: Answer(RayTaskError(AssertionError("the reading is over"))))
    with reading_of(Numbers()) as (reading, lost):
        workers_of(reading, handle)
        until(lambda: lost)
        assert str(lost[0]) == "10.0.0.0 (node b): the reading is over"


def test_an_example_larger_than_the_window_is_an_error_at_its_item(played_ray):
    handle = PlayedHandle(Numbers(large=5))
    with reading_of(Numbers(large=5)) as (reading, lost):
        workers_of(reading, handle)
        found = taken(reading, 0, COUNT, lost)
    errors = [data for kind, data in found if kind == ERROR]
    assert len(errors) == COUNT // LENGTH
    for data in errors:
        with pytest.raises(Exception, match=r"the example takes 131,\d+ bytes, and the window has 65,536 bytes"):
            unpack(ERROR, data)


def test_there_is_no_lane_where_nothing_is_left_to_deal():
    with reading_of(Numbers(), end=40) as (reading, lost):
        until(lambda: reading.window.has(39))
        assert reading.open_lane() is None
        assert lost == []


def test_a_lane_that_is_handed_over_is_written_to_its_end(local):
    with reading_of(Numbers()) as (reading, lost):
        number, chunks = reading.open_lane()
        mine = [next(chunks), next(chunks)]
        reading.deal_no_more(number)
        assert list(chunks) == []
        reading.hand_over(number, mine)
        assert taken(reading, 0, COUNT, lost) == local
        until(lambda: reading.workers == reading.window.lanes == 1)


def test_a_lane_that_is_closed_can_be_opened_again(local):
    found = []
    with reading_of(Numbers()) as (reading, lost):

        def has_ended():
            """Takes what is there: a full window has no room for what was handed over."""
            while (copied := reading.window.copy(len(found))) is not None:
                found.append(copied)
                reading.window.low = len(found)
            return not reading.want(1) and reading.workers == reading.window.lanes == 1

        for _ in range(3):
            number, chunks = reading.open_lane()
            reading.deal_no_more(number)
            mine = list(chunks)
            reading.hand_over(number, mine)
            until(has_ended)
        found += taken(reading, len(found), COUNT, lost)
    assert found[:COUNT] == local


def test_what_the_cache_holds_goes_with_a_piece_and_is_not_read_ahead():
    workers, arena = RayWorkers("played", {"node": "here"}, payload(Squares()), SEED), SentRecords(LENGTH)
    arena.begin({4: b"four", 6: b"six", 7: b"seven"}, True)
    piece = Chunk(32, [32, 34], [4, 7, 5], [6, 8, 7], [])
    assert workers.with_records([piece]) == ([piece], {}, False), "there is no cache"
    workers._store, workers._keys = SimpleNamespace(arena=arena), Keys(range(LENGTH))
    assert workers.with_records([piece]) == ([piece._replace(ahead=[8])], {4: b"four"}, True)
    arena.counts.is_frozen = True
    assert workers.with_records([piece])[2] is False


def test_a_lost_lane_goes_to_the_actor_that_has_least_to_do_and_stays():
    workers = RayWorkers("played", {"node": "here"}, payload(Squares()), SEED)
    ready = {"is_ready": True, "lane": 1, "run": 2}
    lost, busy, free = (Actor(None, "b", number, 0.0, WHERE, calls=calls, **ready) for number, calls in enumerate((0, 3, 1)))
    others = [
        Actor(None, "b", number, 0.0, WHERE, **{**ready, **other})
        for number, other in enumerate(({"is_ready": False}, {"lane": None}, {"run": 1}, {"is_leaving": True}), 3)
    ]
    workers._actors = [lost, busy, free, *others]
    assert workers.other_than(lost, 2) is free
    workers._actors = [lost, *others]
    assert workers.other_than(lost, 2) is None


# ---------------------------------------------------------------------- how much, and how many


@pytest.mark.parametrize(
    ("examples", "seconds", "size", "items"),
    [
        (0, 0.0, 0.0, 2),  # nothing is known
        (10, 0.1, 100.0, 100),  # 10 ms: a hundred take a second
        (10, 0.001, 100.0, 4 * CHUNK),  # no more at once
        (10, 1.0, 100.0, 10),  # 100 ms
        (10, 50.0, 100.0, 1),  # 5 s
        (10, 0.1, 2.0**20, 16),  # 1 MiB: 16 MiB at once
        (10, 0.1, 2.0**25, 1),
        (10, 2.0, 2.0**22, 4),  # the smaller one of both
        (10, 0.1, 2.0**14, 64),  # two calls of each of four lanes fit into the window
    ],
)
def test_a_call_takes_about_a_second_and_sixteen_megabytes_at_most(played_ray, examples, seconds, size, items):
    ring_bytes = 2**23 if size == 2.0**14 else 2**40
    window = SimpleNamespace(bytes_per_example=size, ring_bytes=ring_bytes, lanes=4)
    reading = SimpleNamespace(window=window, dataset=Numbers())
    actor = Actor(None, "b", 0, 0.0, WHERE, examples=examples, seconds=seconds)
    assert FarLane(SimpleNamespace(), actor, reading, 1)._items_of_call() == items


def test_lanes_that_wait_in_vain_at_once_make_the_next_wait_twice_as_long():
    workers = RayWorkers("played", {"node": "here"}, payload(Squares()), SEED)
    before = workers.most_silent_seconds
    for _ in range(5):
        workers.be_patient(before)
    assert workers.most_silent_seconds == 2 * before
    workers.be_patient(before)
    workers.be_patient(2 * before)
    assert workers.most_silent_seconds == 4 * before


LOOKS = int(ray_workers._JUDGED_SECONDS / ray_workers._BETWEEN_LOOKS_SECONDS)


class PlayedWindow:
    is_open, low = 1, 0

    def __init__(self):
        self.is_full = self.is_there = False

    def has(self, item):
        return self.is_there


def judged(between, seen, is_ready=True):
    """The numbers of actors that are wanted, after what is ``seen`` of the window: ``w`` (waits), ``f`` (full) or ``-`` each."""
    workers, window = RayWorkers("played", {"node": "here"}, payload(Squares()), SEED), PlayedWindow()
    workers._reading = SimpleNamespace(window=window)
    workers.want(0, 0)
    workers._thread = threading.current_thread()  # none begins
    workers.want(*between)
    found = [workers._target]
    for each in seen:
        for _ in range(LOOKS):
            window.is_full, window.is_there = each == "f", each != "w"
            ready = is_ready and range(workers._target)
            workers._actors = [Actor(None, "b", number, 0.0, WHERE, is_ready=True) for number in ready or ()]
            workers._judge()
        found.append(workers._target)
    return found


def test_there_are_more_while_trainings_wait_and_fewer_while_the_window_is_full():
    assert judged((0, 3), "www") == [0, 1, 2, 3]
    assert judged((0, 3), "wwwww") == [0, 1, 2, 3, 3, 3], "not more than the larger number"
    assert judged((8, 16), "www") == [8, 10, 13, 16], "a quarter more at once"
    assert judged((1, 3), "wwfff-") == [1, 2, 3, 2, 1, 1, 1], "not fewer than the smaller number"
    assert judged((1, 3), "--") == [1, 1, 1]
    assert judged((4, 4), "wf") == [4, 4, 4]
    assert judged((1, 3), "ww", is_ready=False) == [1, 1, 1], "those that begin are waited for"


def test_a_smaller_number_takes_actors_back_at_once():
    workers = RayWorkers("played", {"node": "here"}, payload(Squares()), SEED)
    workers._thread = threading.current_thread()
    workers.want(8, 8)
    workers._judge()
    assert workers._target == 8
    workers.want(2, 4)
    assert workers._target == 4


def test_a_payload_goes_to_the_actors_as_it_came():
    sent = payload(Squares(4))
    again = Payload.from_bytes(sent.to_bytes())
    assert (again.paths, again.loader) == (sent.paths, sent.loader)
    assert again.options["fingerprint"] == sent.options["fingerprint"]


def test_a_cluster_without_a_free_cpu_is_no_wait_and_is_said_once(played_ray, monkeypatch, caplog):
    node = {"NodeID": "b", "Alive": True, "Resources": {"CPU": 2.0}, "NodeManagerAddress": "10.0.0.2"}
    monkeypatch.setattr(sys.modules["ray"], "nodes", lambda: [node], raising=False)
    workers = RayWorkers("played", {"node": "here"}, payload(Squares()), SEED)
    monkeypatch.setattr(workers, "_room", lambda now: Counter())
    workers._thread = threading.current_thread()
    workers.want(2, 2)
    assert not workers.has_settled, "nobody has looked yet"
    for _ in range(3):
        workers._look()
    assert workers.has_settled
    assert caplog.text.count("the cluster has no free CPU") == 1
