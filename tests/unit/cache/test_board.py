"""Who keeps, holds and sends what in a partitioned cache, and what workers of a node see of what other nodes have sent."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_echo.cache.board import BEING_WRITTEN, NOT_HELD, Board, FromOthers, Partition, RingSpace, Shape, told, transfers_of

SHAPE = Shape(keys=50, ranks=2, rounds=8, ring_bytes=4096)


def send(board, start, number, records, begin=0):
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


KEYS, NODES = 12, 3
PLENTY = [10**9] * NODES


def integers(values):
    return np.array(list(values), dtype=np.int64)


def said_by(holders, keys):
    """What all nodes tell of keys, where ``holders`` gives for a key the node that holds it and the length there."""
    mine = [told(integers(holders[key][1] if key in holders and holders[key][0] == node else NOT_HELD for key in keys), node)
            for node in range(NODES)]  # fmt: skip
    return np.max(mine, axis=0) if len(keys) else integers([])


needs = st.lists(st.tuples(st.integers(0, KEYS - 1), st.integers(0, NODES - 1)), max_size=30)
holdings = st.dictionaries(st.integers(0, KEYS - 1), st.tuples(st.integers(0, NODES - 1), st.integers(0, 200)))


class TestKeeping:
    @settings(max_examples=25, deadline=None)
    @given(st.lists(needs, max_size=4), st.lists(st.booleans(), min_size=NODES, max_size=NODES))
    def test_what_nobody_holds_is_kept_by_the_first_node_that_needs_it_and_is_not_full(self, rounds, is_full):
        keepers, expected = np.zeros(KEYS, np.int16), {}
        partition = Partition(keepers)
        for of_round in rounds:
            keys, nodes = integers(key for key, _ in of_round), integers(node for _, node in of_round)
            partition.settle(keys, nodes, said_by({}, keys), is_full)
            for key, node in of_round:
                if not is_full[node]:
                    expected.setdefault(key, node)
        assert {key: keeper - 1 for key, keeper in enumerate(keepers.tolist()) if keeper} == expected

    @settings(max_examples=25, deadline=None)
    @given(needs, holdings)
    def test_a_node_that_holds_an_example_is_its_keeper_whatever_was_decided_before(self, of_round, holders):
        keepers = np.full(KEYS, 1, np.int16)
        keys, nodes = integers(key for key, _ in of_round), integers(node for _, node in of_round)
        Partition(keepers).settle(keys, nodes, said_by(holders, keys), [False] * NODES)
        for key in set(keys.tolist()):
            assert keepers[key] - 1 == (holders[key][0] if key in holders else 0)

    def test_what_a_node_could_not_keep_before_it_was_full_may_be_kept_by_the_next_one_that_needs_it(self):
        keepers = np.zeros(KEYS, np.int16)
        partition = Partition(keepers)
        key, nothing = integers([5]), integers([0])
        partition.settle(key, integers([0]), nothing, [False, False, False])
        partition.settle(key, integers([1]), nothing, [False, False, False])
        assert keepers[5] - 1 == 0, "the first one may be reading it"
        partition.settle(key, integers([1]), nothing, [True, False, False])
        assert keepers[5] - 1 == 1


class TestSending:
    @settings(max_examples=25, deadline=None)
    @given(needs, holdings)
    def test_each_node_gets_once_what_it_needs_and_another_holds(self, of_round, holders):
        keys, nodes = integers(key for key, _ in of_round), integers(node for _, node in of_round)
        found = transfers_of(keys, nodes, said_by(holders, keys), PLENTY)
        sent = list(zip(*(column.tolist() for column in found), strict=True))
        expected = {
            (holders[key][0], node, key, holders[key][1]) for key, node in of_round if key in holders and holders[key][0] != node
        }
        assert len(sent) == len(expected)
        assert set(sent) == expected
        assert [each[:2] for each in sent] == sorted(each[:2] for each in sent), "as all_to_all_single lays them out"

    @settings(max_examples=25, deadline=None)
    @given(needs, holdings, st.lists(st.integers(0, 700), min_size=NODES, max_size=NODES))
    def test_what_a_node_gets_for_a_round_fits_into_its_empty_ring(self, of_round, holders, capacities):
        keys, nodes = integers(key for key, _ in of_round), integers(node for _, node in of_round)
        found, whole = (transfers_of(keys, nodes, said_by(holders, keys), each) for each in (capacities, PLENTY))
        assert all(size <= capacity for size, capacity in zip(found.block_bytes(NODES), capacities, strict=True))
        for node, capacity in enumerate(capacities):
            sent, wanted = (each.keys[each.targets == node].tolist() for each in (found, whole))
            assert sent == wanted[: len(sent)], "in order, up to the first that has no room"
            if len(sent) < len(wanted):
                sizes = whole.lengths[whole.targets == node][: len(sent) + 1]
                assert sum(-(-size // 64) * 64 + 24 for size in sizes.tolist()) + 64 > capacity


@settings(max_examples=25, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 40), st.none()), max_size=60), st.integers(1, 100))
def test_no_block_lies_over_another_one_and_none_beyond_the_end(sizes, capacity):
    """A size is placed; None frees the oldest block."""
    space, blocks, number, oldest = RingSpace(capacity), {}, 0, 0
    for size in sizes:
        if size is None:
            blocks.pop(oldest, None)
            oldest = min(oldest + 1, number)
            space.free(oldest)
            continue
        has_room = space.has_room(size)
        begin = space.place(number, size)
        assert has_room == (begin is not None)
        if begin is not None:
            assert 0 <= begin <= begin + size <= capacity
            assert all(begin + size <= first or last <= begin for first, last in blocks.values())
            blocks[number] = begin, begin + size
            number += 1


@pytest.mark.parametrize("node", [0, 1, 2**15 - 1])
def test_what_is_told_first_by_nobody_is_less_than_anything_that_is_held(node):
    assert told(integers([NOT_HELD]), node).tolist() == [0]
    assert told(integers([BEING_WRITTEN]), node)[0] > 0
    assert told(integers([0]), 0)[0] > told(integers([BEING_WRITTEN]), node)[0], "what can be sent counts first"
