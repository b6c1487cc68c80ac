"""What workers of a node see of what other nodes have sent: when they wait, what they find, and when they find nothing."""

import multiprocessing
import threading

import numpy as np
import pytest

from lightning_echo.cache import board as board_module
from lightning_echo.cache.board import Board, FromOthers, Shape

SHAPE = Shape(keys=50, ranks=2, rounds=8, ring_bytes=4096)


def send(board, start, number, records, begin=0):
    """Puts the records of a round into the ring, as the leader does."""
    count, at = len(records), begin + 24 * len(records)
    directory = np.frombuffer(board.ring, np.int64, 3 * count, begin).reshape(3, count)
    for place, (key, record) in enumerate(records.items()):
        directory[:, place] = key, at, len(record)
        board.ring[at : at + len(record)] = record
        at += len(record)
    board.show(start, number, begin, count)


@pytest.fixture
def board():
    made = Board.create(SHAPE)
    made.begin(1)
    return made


def worker(board, rank=0, start=1, number=0):
    found = FromOthers(board, node=1, rank=rank, start=start)
    found.begin(number)
    return found


def as_sent(key, record):
    return bytes(record)


def test_a_worker_finds_what_has_come_for_its_round_by_key(board):
    send(board, 1, 0, {7: b"seven", 30: b"thirty", 9: b""})
    others = worker(board)
    assert others.take([5, 30, None, 9, 30], as_sent) == {1: b"thirty", 3: b"", 4: b"thirty"}
    assert others.received == 3
    assert others.take([7], as_sent) == {0: b"seven"}, "a batch may ask several times"
    assert worker(board, number=-1).take([7], as_sent) == {}, "a request that has no round"
    assert worker(Board.attach(board.address)).take([7], as_sent) == {0: b"seven"}, "in another process"


def test_a_worker_waits_until_its_round_has_come(board):
    others, found = worker(board, number=1), []
    thread = threading.Thread(target=lambda: found.append(others.take([7], as_sent)))
    thread.start()
    send(board, 1, 0, {7: b"earlier"})
    assert not found
    send(board, 1, 1, {7: b"seven"}, begin=1000)
    thread.join(30)
    assert found == [{0: b"seven"}]
    assert others.waited > 0


@pytest.mark.parametrize("ends", ["exchange", "rank"])
def test_waiting_ends_with_the_exchange_and_with_the_rank(board, ends):
    others, found = worker(board, rank=1), []
    thread = threading.Thread(target=lambda: found.append(others.take([7], as_sent)))
    thread.start()
    if ends == "exchange":
        board.end(1, has_failed=False)
    else:
        board.close_rank(0, 1)  # which is another one
        assert not found
        board.close_rank(1, 1)
    thread.join(30)
    assert found == [{}]


def test_who_has_waited_in_vain_waits_for_less_from_then_on(board, monkeypatch):
    monkeypatch.setattr(board_module, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(board_module, "_LITTLE_PATIENCE_SECONDS", 0.005)
    others = worker(board)
    assert others.take([7], as_sent) == {}
    assert others.waited >= 0.01
    others.begin(1)
    assert others.take([7], as_sent) == {}
    send(board, 1, 0, {})
    send(board, 1, 1, {})
    send(board, 1, 2, {7: b"seven"})
    others.begin(2)
    assert others.take([7], as_sent) == {0: b"seven"}


def test_a_round_of_an_earlier_start_is_never_taken_for_that_of_a_later_one(board):
    send(board, 1, 0, {7: b"old"})
    board.end(1, has_failed=False)
    board.begin(2)
    board.end(2, has_failed=False)
    assert worker(board, start=2).take([7], as_sent) == {}
    assert worker(board, start=1).take([7], as_sent) == {}, "nor the other way round: somebody may have written over it"


def test_what_is_copied_while_the_next_start_begins_is_thrown_away(board):
    send(board, 1, 0, {7: b"seven"})

    def decode(key, record):
        board.begin(2)
        return bytes(record)

    assert worker(board).take([7], decode) == {}


def test_a_round_is_free_when_the_rank_has_marked_all_rounds_up_to_it(board):
    assert board.taken(1, 0, 0) == 0
    for number in (1, 0, 3):
        worker(board, number=number).end()
    assert board.taken(1, 0, 0) == 2
    assert board.taken(1, 1, 0) == 0, "another rank marks for itself"
    assert board.taken(2, 0, 0) == 0, "what was marked in an earlier start does not count"
    board.close_rank(1, 1)
    assert board.taken(1, 1, 0) > 10**9


def test_a_node_keeps_what_it_is_the_keeper_of_and_anything_once_the_exchange_has_failed(board):
    others = worker(board)
    board.keepers[7] = 2  # node 1
    board.keepers[8] = 1
    assert [others.may_keep(key) for key in (7, 8, 9)] == [True, False, False]
    board.end(1, has_failed=True)
    assert [others.may_keep(key) for key in (7, 8, 9)] == [True, True, True]
    board.begin(2)
    assert not others.may_keep(7), "at a new start nobody is a keeper"


def test_counts_of_all_ranks_are_added_up(board):
    board.count(0, 3, 0.5)
    board.count(1, 4, 0.25)
    board.count(0, 1, 0.25)
    board.count_exchange(1.5)
    assert board.counted == (8, 1.0, 1.5)


def _takes(others, key, answers):
    others.begin(0)
    answers.put(others.take([key], as_sent))
    others.end()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_worker_process_sees_it_however_it_was_started(board, method):
    send(board, 1, 0, {7: b"seven"})
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    process = context.Process(target=_takes, args=(FromOthers(board, 0, 1, 1), 7, answers))
    process.start()
    assert answers.get() == {0: b"seven"}
    process.join(60)
    assert board.taken(1, 1, 0) == 1
    assert process.exitcode == 0
