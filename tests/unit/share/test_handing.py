"""What the actor runs, called as Ray would call it, beside a reader of this process."""

import threading
import time

import pytest
from torch.utils.data import DataLoader

from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share import ray as handing
from lightning_echo.share.process import ReaderError, run_reader
from lightning_echo.share.ray import Chunk, Handing
from lightning_echo.share.sharing import status_of
from lightning_echo.share.window import unpack

LENGTH = 50
PRINT = {"data set": "numbers"}
DEADLINE_SECONDS = 20


@pytest.fixture
def own_folder(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("s")
    folder.chmod(0o700)
    monkeypatch.setenv("LIGHTNING_ECHO_SHARED", str(folder))


@pytest.fixture
def reader(own_folder):
    """A reader of 50 numbers in the order of their indices, whose window holds a few of them."""
    source, failures, ready = kind_of(DataLoader(range(LENGTH), num_workers=1)), [], threading.Event()

    def run():
        try:
            options = {"data_print": PRINT, "window_bytes": 4096, "linger_seconds": 0.2, "when_ready": ready.set}
            run_reader("n", source, **options)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(DEADLINE_SECONDS)
    yield
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert failures == []


def until(holds):
    end = time.monotonic() + DEADLINE_SECONDS
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


def chunk(actor, relay, needed=0):
    """The examples that a relay is given when it asks, with their items."""
    first, pieces, _, _ = Chunk.from_array(actor.take(relay, needed))
    return [(first + place, unpack(kind, bytearray(data))) for place, (kind, data) in enumerate(pieces)]


def taken(actor, relay, count):
    """So many examples of a relay or more; it needs all of them."""
    found = []
    until(lambda: found.extend(chunk(actor, relay)) or len(found) >= count)
    return found


def test_each_relay_has_each_item_once_and_in_order(reader):
    actor = Handing("n", "node 1", "10.0.0.1", PRINT)
    try:
        for relay in "ab":
            actor.enter(relay, f"node {relay}", 0, False, "now")
        found = {"a": [], "b": []}
        until(lambda: status_of("n")["count"] == 2)
        # Each relay connects in a thread of its own, so either may be first.
        assert sorted(one["label"] for one in status_of("n")["trainings"]) == ["node a", "node b"]

        def ask_both():
            for relay, items in found.items():
                items += chunk(actor, relay, len(items))
            return min(map(len, found.values())) >= 2 * LENGTH

        until(ask_both)
        for items in found.values():
            assert [item for item, _ in items] == list(range(len(items)))
            assert [value for _, value in items] == [item % LENGTH for item, _ in items]
        assert actor.stay("a", 0) == 1, "the other relay: no training of this node"
    finally:
        actor.leave("a")
        actor.leave("b")


def test_a_relay_that_says_nothing_is_let_go(reader, monkeypatch):
    actor = Handing("n", "node 1", "10.0.0.1", PRINT)
    actor.enter("a", "node a", 0, False, "now")
    taken(actor, "a", 1)
    monkeypatch.setattr(handing, "MOST_SILENT_SECONDS", 0.3)
    until(lambda: status_of("n") is None or status_of("n")["count"] == 0)
    with pytest.raises(ReaderError, match=r"10\.0\.0\.1 has let this node go, since it was silent"):
        actor.take("a", 0)
    with pytest.raises(ReaderError, match="has let this node go"):
        actor.stay("a", 0)


def test_without_a_reader_none_is_started_and_the_relay_hears_of_it(own_folder):
    actor = Handing("n", "node 1", "10.0.0.1", PRINT)
    actor.enter("a", "node a", 0, False, "now")
    with pytest.raises(ReaderError, match=r"the reader of share='n' on 10\.0\.0\.1 has ended"):
        until(lambda: not len(actor.take("a", 0)))
    actor.leave("a")
    assert status_of("n") is None


def test_it_says_where_it_is_and_what_differs():
    actor = Handing("n", "node 1", "10.0.0.1", PRINT)
    assert actor.meet(PRINT) == {"node": "node 1", "where": "10.0.0.1", "differs": ""}
    assert actor.meet({"data set": "letters"})["differs"] == "data set: letters and numbers"


def test_a_relay_that_follows_a_dead_one_of_its_node_is_one(reader):
    actor = Handing("n", "node 1", "10.0.0.1", PRINT)
    actor.enter("dead", "node a", 0, False, "now")
    before = taken(actor, "dead", 3)
    actor.enter("next", "node a", before[-1][0] + 1, True, "now")
    try:
        assert taken(actor, "next", 3)[0][0] == before[-1][0] + 1
        until(lambda: status_of("n")["count"] == 1)
        with pytest.raises(ReaderError, match="has let this node go"):
            actor.take("dead", 0)
    finally:
        actor.leave("next")
