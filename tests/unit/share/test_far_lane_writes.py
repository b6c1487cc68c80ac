"""A lane of a worker on another machine: what its thread writes, what it does not ask for, and what it hands over."""

from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share import ray_actor
from lightning_echo.share import window as window_module
from lightning_echo.share.config import ShareConfig
from lightning_echo.share.packing import Chunk as Packed
from lightning_echo.share.packing import Piece
from lightning_echo.share.parts import Chunk
from lightning_echo.share.process import payload_of
from lightning_echo.share.ray_actor import KEY_BYTES, RECORD, DiffersThere, Maker, Sent, versions
from lightning_echo.share.ray_workers import Actor, FarLane, _Call
from lightning_echo.share.reading import Reading
from lightning_echo.share.window import CHUNK, MOST_LANES, Closed, Lane, Window

ASKED = [Chunk(0, [0, 2], [5, 6, 7], [], [])]


@pytest.fixture
def far():
    """A lane whose reading, workers and actor only note what they are told."""
    window, kept, handed = Window.create(2**14, 1, 0), [], []
    workers = SimpleNamespace(
        keep_record=lambda key, record: kept.append((key, bytes(record))),
        lose=lambda actor, why: None,
        other_than=lambda lost, run: None,
        calls_ahead=1,
        most_ahead_bytes=2**20,
        reads_chunks=False,
    )
    reading = SimpleNamespace(
        window=window, deal_no_more=lambda number: None, hand_over=lambda number, pieces: handed.append((number, list(pieces)))
    )
    lane = FarLane(workers, Actor(None, "b", 0, 0.0, "b"), reading, 1)
    lane._number = 0
    return SimpleNamespace(lane=lane, window=window, kept=kept, handed=handed)


@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 0), (1, 2)], ids=["one is missing", "none came", "they are others"])
def test_examples_that_were_not_asked_for_are_not_written(far, first, count):
    with pytest.raises(RuntimeError, match="b has sent other examples than it was asked for"):
        far.lane._write(Lane(far.window, 0), ASKED, Packed(first, [Piece(0, b"x")] * count))
    assert far.window.last_written == -1


def test_records_that_come_behind_the_examples_go_to_the_readers_cache(far):
    record = Piece(RECORD, (6).to_bytes(KEY_BYTES, "little") + b"held")
    far.lane._write(Lane(far.window, 0), ASKED, Packed(0, [Piece(0, b"five"), Piece(1, b"seven"), record]))
    assert [far.window.copy(item) for item in (0, 1, 2)] == [(0, b"five"), None, (1, b"seven")]
    assert (far.kept, far.window.at(0)) == ([(6, b"held")], 3)


def test_what_nobody_wants_is_not_asked_for_and_the_lane_leaves_it_behind(far):
    far.lane._chunks = iter([Chunk(0, [], list(range(CHUNK)), [], []), Chunk(CHUNK, [], list(range(CHUNK)), [], [])])
    far.lane._take_all()  # the actor, which is None here, could not be asked
    assert far.window.at(0) == 2 * CHUNK


def test_who_gets_what_a_lost_actor_had_was_told_nothing_ahead(far):
    had, next_one, later = (Chunk(CHUNK * number, [CHUNK * number], [number], [8], [9]) for number in range(3))
    far.lane._calls.append(_Call([had], None))
    far.lane._pieces.append(next_one)
    far.lane._chunks = iter([later])
    assert not far.lane._go_elsewhere("is lost")
    assert far.handed == [(0, [each._replace(ahead=[], dropped=[]) for each in (had, next_one, later)])]


def test_a_lane_is_left_for_each_worker_here_that_is_still_to_begin():
    reading = Reading(kind_of(DataLoader(range(100), num_workers=1)), 0, 0, 2**16, pytest.fail)
    reading.start()
    reading._far.update(range(1, MOST_LANES - 1))
    reading._most = 2  # one of them has not begun
    assert reading.open_lane() is None
    reading._most = 1
    opened = reading.open_lane()
    assert opened is not None
    assert opened[0] == MOST_LANES - 1
    reading.close()


@pytest.mark.parametrize(("options", "last"), [({}, 0.001), ({"most_look_seconds": 0.016}, 0.016)])
def test_a_lane_that_waits_for_room_looks_seldom_but_not_too_seldom(far, monkeypatch, options, last):
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        far.window.is_closed = len(looks) == 12

    monkeypatch.setattr(window_module.time, "sleep", sleep)
    lane = Lane(far.window, 0, **options)
    lane.put(0, 0, [bytes(2**14)], 2**14)
    with pytest.raises(Closed):
        lane.put(1, 0, [bytes(2**14)], 2**14)
    assert (looks[0], looks[-1], max(looks)) == (0.001, last, last)


def test_another_code_there_is_refused(monkeypatch):
    payload = payload_of(ShareConfig("a"), kind_of(DataLoader(range(8))), {"data set": "range"})
    monkeypatch.setattr(ray_actor, "difference_of_code", lambda sent, parts: "mine.py: line 3")
    with pytest.raises(DiffersThere, match=r"^mine\.py: line 3 \(the training's, and there\)$"):
        Maker(payload.to_bytes(), Sent(versions(), 0, 128, 129, "b"))
