"""Which index stands where; the model is what a sampler yields pass by pass, dealt out as ``DistributedSampler`` documents it."""

import copy
import math
import tracemalloc
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from samplers import BATCH_SAMPLERS, SAMPLERS, dealt, generator, kept_of, passes_of
from torch.utils.data import DistributedSampler, RandomSampler

from lightning_echo.pipeline.requests import ExampleRequests, SamplerOrder
from lightning_echo.plan.each import EachPlan
from lightning_echo.plan.order import SequentialOrder, ShuffledOrder, entry_key, permute, spread
from lightning_echo.plan.plan import PlanShape


def shuffled(length, pass_length=None, replicas=1, rank=0, distance=0, seed=1):
    return ShuffledOrder(length, length if pass_length is None else pass_length, replicas, rank, distance, seed=seed)


def permuted(length, key):
    return permute(np.arange(length, dtype=np.uint64), length, key)


def assert_equally_often(counts, expected, freedom):
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 6 * math.sqrt(2 * freedom)


class TestPermutations:
    def test_hold_each_number_once(self):
        for length in (*range(1, 70), 128, 1000, 4097):
            for key in range(3):
                assert sorted(permuted(length, key)) == list(range(length))

    @pytest.mark.parametrize("length", [5, 13])
    def test_put_every_number_in_every_slot_equally_often(self, length):
        keys = 100 * length
        counts = np.zeros((length, length))
        for key in range(keys):
            counts[np.arange(length), permuted(length, key)] += 1
        assert_equally_often(counts, keys / length, (length - 1) ** 2)

    def test_are_all_equally_likely(self):
        counts = Counter(tuple(permuted(4, key).tolist()) for key in range(200 * 24))
        assert_equally_often(np.array([counts[order] for order in permutations(range(4))]), 200, 23)

    def test_do_not_keep_neighbours_together(self):
        """In how many of 1,000 permutations of 50 does 42 follow 41 at once? In one of 50."""
        found = [permuted(50, key).tolist() for key in range(1000)]
        assert 3 <= sum(values.index(42) == values.index(41) + 1 for values in found) <= 45


def test_a_shuffled_order_depends_on_seed_and_position_alone():
    state, whole = torch.get_rng_state(), shuffled(100, seed=3).take(300)
    order, second = shuffled(100, seed=3), shuffled(100, seed=3)
    assert [index for count in [1, 0, 3, 96, 100, 7, 93] for index in order.take(count)] == whole
    second.seek(100)
    assert second.take(200) == whole[100:]
    assert shuffled(100, seed=4).take(300) != whole
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("batch_size", [0, 5], ids=["whole", "cut to batches of 5"])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_indices_are_dealt_out_as_a_distributed_sampler_deals_them(replicas, batch_size):
    for length in (1, 2, 3, 12, 13, 31):
        sampler = RandomSampler(range(length), generator=generator(2))
        kept = kept_of(length, replicas, max(batch_size, 1), drop_last=batch_size > 0)
        for rank in range(replicas if kept else 0):
            sequential, sharded, whole = (
                SequentialOrder(length, kept, replicas, rank),
                shuffled(length, kept, replicas, rank),
                shuffled(length),
            )
            torchs = list(DistributedSampler(range(length), replicas, rank, shuffle=False))[:kept]
            assert [sequential.take(kept) for _ in range(3)] == 3 * [torchs]
            assert [sharded.take(kept) for _ in range(3)] == [dealt(whole.take(length), replicas, rank)[:kept] for _ in range(3)]
            sampled = SamplerOrder(copy.deepcopy(sampler), length, kept, replicas, rank, seed=0)
            expected = [dealt(indices, replicas, rank)[:kept] for indices in passes_of(copy.deepcopy(sampler), 3)]
            assert [sampled.take(kept) for _ in range(3)] == expected


# By name: length, and what makes the order of a run; `start` is 0 for the run that began, 1 for a new process.
ORDERS = {
    "shuffled": (21, lambda start, *args: ShuffledOrder(*args, seed=1)),
    "sequential": (21, lambda start, *args: SequentialOrder(*args)),
    "lent a generator": (21, lambda start, *args: SamplerOrder(RandomSampler(range(21)), *args, seed=4)),
} | {
    name: (len(make(0)), lambda start, *args, make=make: SamplerOrder(make(start), *args, seed=0))
    for name, make in {**SAMPLERS, **BATCH_SAMPLERS}.items()
}


@pytest.mark.grid
@pytest.mark.parametrize("distance", [0, 3, 8])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", ORDERS)
def test_an_order_that_knows_the_state_alone_goes_on_at_every_position(name, replicas, distance):
    length, make = ORDERS[name]
    distance = 0 if name in BATCH_SAMPLERS else distance
    for pass_length in {math.ceil(length / replicas), length // replicas - 1}:
        dealt_out = (length, pass_length, replicas, replicas - 1, distance)
        total = 4 * pass_length
        for lead in (0, 5):
            order, states, stream = make(0, *dealt_out), [], []
            if distance:
                order.begin_spreading()
            for position in range(total):
                stream += order.take(position + lead - len(stream))
                order.prune(position)
                states.append(copy.deepcopy(order.state(position)))
            stream += order.take(1)
            for position, state in enumerate(states):
                # Before the first item no pass was asked for: it is the sampler as it was made.
                resumed = make(1 if position or lead else 0, *dealt_out)
                resumed.load(state)
                resumed.seek(position)
                assert resumed.position == position
                rest = resumed.take(total - position)
                assert rest[: len(stream) - position] == stream[position:total], f"from position {position}"


def orders_of_ranks(kind, length, replicas, distance, drops):
    """The orders of all ranks, and the positions of a pass."""
    pass_length = length // replicas if drops else -(-length // replicas)
    make = ORDERS[kind][1]
    return [make(0, length, pass_length, replicas, rank, distance) for rank in range(replicas)], pass_length


@pytest.mark.grid
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(("before", "now"), [(4, 2), (4, 1), (1, 3), (3, 8)])
@pytest.mark.parametrize("kind", ["shuffled", "RandomSampler"])
def test_a_pass_that_goes_on_with_another_number_of_ranks_has_the_slots_that_nobody_has_taken(kind, before, now, drops):
    """At each place of two passes; and again, from a state of the run with the other number of ranks."""
    length = 23
    for offset in range(2 * -(-length // before)):
        orders, pass_length = orders_of_ranks(kind, length, before, 2, drops)
        for order in orders:
            order.begin_spreading()
        number, taken = divmod(pass_length + offset, pass_length)
        earlier = [order.take(pass_length + offset) for order in orders]
        mine = {index for of_rank in earlier for index in of_rank[number * pass_length :]}
        state = {**orders[0].state(pass_length + offset), "ends": [[number, pass_length * before]]}
        others, other_length = orders_of_ranks(kind, length, now, 4, drops)
        skipped = min(taken * before // now, other_length)
        rest = []
        for other in others:
            other.load(state)
            other.seek(number * other_length + skipped)
            other.begin_spreading()
            rest.append(other.take(2 * other_length - skipped))
        whole = [length] * 2 if not drops else [min(pass_length * before, other_length * now), other_length * now]
        assert len(mine | {index for of_rank in rest for index in of_rank[: other_length - skipped]}) >= whole[0]
        assert len({index for of_rank in rest for index in of_rank[other_length - skipped :]}) == whole[1]
        again = orders_of_ranks(kind, length, now, 4, drops)[0]
        for rank, other in enumerate(again):
            other.load(others[0].state(number * other_length + skipped))
            other.seek(number * other_length + skipped)
            assert other.take(2 * other_length - skipped) == rest[rank]


def test_a_shuffled_order_forgets_the_pass_that_it_had_rearranged_when_a_state_is_loaded():
    """The state says otherwise than the order did whether that pass is spread."""
    plain, spread_out = shuffled(20, distance=6), shuffled(20, distance=6)
    spread_out.begin_spreading()
    expected = spread_out.take(40)
    assert plain.take(40) != expected
    plain.load(spread_out.state(20))
    plain.seek(20)
    assert plain.take(20) == expected[20:]


def test_a_state_from_before_there_were_lanes_says_how_far_apart_the_slots_of_all_ranks_are():
    """Then a pass was spread as if it were that of a single rank, with the distance of all slots."""
    whole = shuffled(40, distance=7)
    whole.load({"distances": [[0, 0], [1, 7]]})
    expected = [whole.take(40) for _ in range(3)]
    for rank in range(2):
        order = shuffled(40, 20, 2, rank, 3)
        order.load({"distances": [[0, 0], [1, 7]]})
        assert [order.take(20) for _ in range(3)] == [indices[rank::2] for indices in expected]
    order.begin_spreading()
    assert order.state(60)["distances"] == [[0, 0], [1, 7], [4, 3, 2]]


def test_spreading_by_another_distance_takes_the_place_of_the_one_that_a_state_holds():
    order = shuffled(20, distance=6)
    order.load({"distances": [[0, 0], [1, 4]]})
    order.begin_spreading()
    assert order.state(0)["distances"] == [[0, 0], [1, 6]]


@pytest.mark.parametrize(
    ("entries", "last_seen", "expected"),
    [
        # The pass before ended with a, b, c, d; each must stay away for three slots.
        ("dxcaybz", {"b": 3, "c": 2, "d": 1}, "xcdaybz"),
        ("abcdefgh", {"g": 1, "h": 3}, "abcdefgh"),
        ("aaa", {"a": 1}, "aaa"),  # a sampler itself asks again too soon
    ],
)
def test_the_start_of_a_pass_is_what_was_not_seen_for_long_enough_and_comes_first(entries, last_seen, expected):
    places, looked_at = spread(iter(entries), last_seen, 3)
    assert sorted(places) == list(range(len(places)))
    assert "".join([looked_at[place] for place in places]) + entries[len(looked_at) :] == expected


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (torch.tensor(3), torch.tensor(3), torch.tensor(4)),
        (np.int64(3), 3, 4),
        ([1, torch.tensor(2)], (1, 2), [1, 3]),
        ({"a": 1}, {"a": 1}, {"a": 2}),
        ("3", "3", 3),
    ],
)
def test_entries_are_the_same_index_where_they_are_equal(one, same, other):
    assert entry_key(one) == entry_key(same) != entry_key(other)
    assert hash(entry_key(one)) == hash(entry_key(same))


@st.composite
def passes(draw):
    length, replicas = draw(st.integers(1, 60)), draw(st.integers(1, 4))
    pass_length = draw(st.integers(max(math.ceil(length / replicas) - 6, 1), math.ceil(length / replicas)))
    distance = draw(st.integers(1, pass_length))
    return length, replicas, pass_length, distance, draw(st.integers(0, 3 * pass_length)), draw(st.integers(0, 1000))


@settings(max_examples=50)
@given(passes(), st.sampled_from(["sequential", "shuffled", "sampler"]))
def test_no_index_returns_to_a_rank_before_the_distance_and_passes_stay_complete(passes, kind):
    length, replicas, pass_length, distance, begin, seed = passes
    assume(kind == "shuffled" or distance * replicas + replicas - 1 <= length)  # else there are too few indices for it
    streams = []
    for rank in range(replicas):
        dealt_out = (length, pass_length, replicas, rank, distance)
        order = {
            "sequential": lambda args=dealt_out: SequentialOrder(*args),
            "shuffled": lambda args=dealt_out: ShuffledOrder(*args, seed=seed),
            "sampler": lambda args=dealt_out: SamplerOrder(
                RandomSampler(range(length), generator=generator(seed)), *args, seed=0
            ),
        }[kind]()
        stream = order.take(begin)
        order.begin_spreading()
        streams.append(stream + order.take(8 * pass_length - begin))
    for rank, stream in enumerate(streams):
        if kind == "shuffled" and -(-(length - rank) // replicas) < distance:
            continue  # it has too few indices of its own
        last = {}
        for position, index in enumerate(stream):
            if position >= (begin // pass_length + 1) * pass_length:  # in the passes after the one in which it began
                assert position - last.get(index, -99) >= distance
            last[index] = position
    for number in range(8):
        counts = Counter(index for stream in streams for index in stream[number * pass_length : (number + 1) * pass_length])
        assert len(counts) == min(length, pass_length * replicas)
        assert sum(counts.values()) == pass_length * replicas


@pytest.mark.parametrize("kind", ["shuffled", "sampler"])
def test_spreading_moves_only_the_start_of_a_pass(kind):
    def stream(spreading):
        order = shuffled(500, distance=20)
        if kind == "sampler":
            order = SamplerOrder(RandomSampler(range(500), generator=generator(3)), 500, 500, distance=20, seed=0)
        if spreading:
            order.begin_spreading()
        return [order.take(500) for _ in range(4)]

    spread_out, plain = stream(True), stream(False)
    assert spread_out[0] == plain[0]
    assert spread_out != plain
    for ours, theirs in zip(spread_out, plain, strict=True):
        assert ours[40:] == theirs[40:]
        assert sorted(ours[:40]) == sorted(theirs[:40])


@pytest.mark.parametrize(("kind", "replicas"), [("sequential", 1), ("shuffled", 1), ("shuffled", 4096)])
def test_no_memory_grows_with_the_data_set_nor_with_the_ranks(kind, replicas):
    """Up to the first batch and beyond it; a list of 10^8 indices would take 800 MB."""
    length, size = 10**8 * replicas, 32
    sizes = {"batch_size": size, "last_batch_size": size, "batches_per_pass": 10**8 // size, "buffer_size": 8 * size}
    shape = PlanShape(**sizes, workers=4, seed=0)
    tracemalloc.start()
    try:
        dealt_out = (length, 10**8, replicas, replicas - 1)
        order = SequentialOrder(*dealt_out) if kind == "sequential" else shuffled(*dealt_out, distance=shape.distance)
        requests = ExampleRequests(EachPlan(shape, 4), order, whole_calls=False)
        first = next(requests)
        _, peak = tracemalloc.get_traced_memory()
        for _ in range(100):
            request = next(requests)
        order.begin_spreading()
        order.seek(10**8 - 100)  # into the next pass
        order.take(1000)
        _, later_peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(set(first.indices)) == len(request.indices) == size
    assert peak < 5e6
    assert later_peak < 5e6
