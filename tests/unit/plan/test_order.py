"""Which index stands where: passes are complete, shuffled well, dealt out as torch deals them, kept apart, and found again.

The model is always a list: what the sampler yields pass by pass, padded and sliced as ``DistributedSampler`` documents it.
"""

import copy
import io
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
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
)

from lightning_echo.pipeline.requests import ExampleRequests, SamplerOrder
from lightning_echo.plan import order as order_module
from lightning_echo.plan.each import EachPlan
from lightning_echo.plan.order import SequentialOrder, ShuffledOrder, entry_key, permute, spread
from lightning_echo.plan.plan import PlanShape


def shuffled(length, pass_length=None, replicas=1, rank=0, distance=0, seed=1):
    return ShuffledOrder(length, length if pass_length is None else pass_length, replicas, rank, distance, seed=seed)


class TestPermutations:
    @pytest.mark.parametrize("length", [*range(1, 70), 97, 128, 1000, 4097])
    def test_hold_each_number_once(self, length):
        for key in range(5):
            assert sorted(permute(np.arange(length, dtype=np.uint64), length, key)) == list(range(length))

    def test_can_be_looked_up_anywhere(self):
        whole = permute(np.arange(1000, dtype=np.uint64), 1000, 3)
        slots = np.array([999, 0, 500, 500, 31], dtype=np.uint64)
        assert permute(slots, 1000, 3).tolist() == whole[slots].tolist()
        assert slots.tolist() == [999, 0, 500, 500, 31], "what is asked for is left as it was"

    def test_differ_by_key(self):
        found = {tuple(permute(np.arange(50, dtype=np.uint64), 50, key)) for key in range(500)}
        assert len(found) == 500

    @pytest.mark.parametrize("length", [2, 3, 5, 8, 13, 29])
    def test_put_every_number_in_every_slot_equally_often(self, length):
        keys = 100 * length
        counts = np.zeros((length, length))
        for key in range(keys):
            counts[np.arange(length), permute(np.arange(length, dtype=np.uint64), length, key)] += 1
        statistic = ((counts - keys / length) ** 2 / (keys / length)).sum()
        freedom = (length - 1) ** 2
        assert statistic < freedom + 6 * math.sqrt(2 * freedom)

    @pytest.mark.parametrize("length", [3, 4])
    def test_are_all_equally_likely(self, length):
        keys = 200 * math.factorial(length)
        counts = Counter(tuple(permute(np.arange(length, dtype=np.uint64), length, key).tolist()) for key in range(keys))
        expected, freedom = keys / math.factorial(length), math.factorial(length) - 1
        statistic = sum((counts[order] - expected) ** 2 / expected for order in permutations(range(length)))
        assert statistic < freedom + 6 * math.sqrt(2 * freedom)

    def test_do_not_keep_neighbours_together(self):
        """In how many of 2,000 permutations of 100 does 42 follow 41 at once? In one of 100."""
        together = 0
        for key in range(2000):
            values = permute(np.arange(100, dtype=np.uint64), 100, key).tolist()
            together += values.index(42) == values.index(41) + 1
        assert 5 <= together <= 45


class TestShuffledPasses:
    @pytest.mark.parametrize("length", [1, 2, 7, 100, 1025, 3000])
    def test_hold_each_index_once_and_differ(self, length):
        order = shuffled(length)
        passes = [order.take(length) for _ in range(4)]
        assert all(sorted(indices) == list(range(length)) for indices in passes)
        assert length < 7 or len(set(map(tuple, passes))) == 4

    def test_depend_on_the_seed_and_the_number_of_the_pass_alone(self):
        assert shuffled(100, seed=3).take(300) == shuffled(100, seed=3).take(300)
        assert shuffled(100, seed=3).take(300) != shuffled(100, seed=4).take(300)
        state = torch.get_rng_state()
        second = shuffled(100, seed=3)
        second.seek(100)
        assert second.take(200) == shuffled(100, seed=3).take(300)[100:]
        assert torch.equal(torch.get_rng_state(), state)

    def test_are_the_same_however_many_items_are_taken_at_a_time(self):
        order, together = shuffled(50), shuffled(50).take(200)
        assert [index for count in [1, 0, 3, 46, 50, 7, 93] for index in order.take(count)] == together

    def test_lose_their_tail_where_the_plain_loader_drops_it(self):
        whole = shuffled(50)
        cut = shuffled(50, pass_length=48)
        for _ in range(3):
            assert cut.take(48) == whole.take(50)[:48]


class TestSharding:
    @pytest.mark.parametrize("replicas", [1, 2, 3, 4])
    @pytest.mark.parametrize("length", [1, 2, 3, 5, 12, 13, 31])
    def test_deals_the_same_indices_as_a_distributed_sampler(self, length, replicas):
        sampler = RandomSampler(range(length), generator=generator(2))
        pass_length = kept_of(length, replicas, 1, drop_last=False)
        for rank in range(replicas):
            sequential = SequentialOrder(length, pass_length, replicas, rank)
            torchs = list(DistributedSampler(range(length), replicas, rank, shuffle=False))
            assert [sequential.take(pass_length) for _ in range(3)] == 3 * [torchs]
            sharded, whole = shuffled(length, pass_length, replicas, rank), shuffled(length)
            assert [sharded.take(pass_length) for _ in range(3)] == [dealt(whole.take(length), replicas, rank) for _ in range(3)]
            sampled = SamplerOrder(copy.deepcopy(sampler), length, pass_length, replicas, rank, seed=0)
            expected = [dealt(indices, replicas, rank) for indices in passes_of(copy.deepcopy(sampler), 3)]
            assert [sampled.take(pass_length) for _ in range(3)] == expected

    @pytest.mark.parametrize("replicas", [2, 3, 4])
    @pytest.mark.parametrize("batch_size", [2, 5])
    def test_ranks_are_disjoint_and_together_complete_but_for_what_torch_pads_or_the_loader_drops(self, replicas, batch_size):
        for length, drop_last in [(40, False), (41, False), (41, True), (43, True)]:
            pass_length = kept_of(length, replicas, batch_size, drop_last)
            for make in (shuffled, SequentialOrder):
                orders = [make(length, pass_length, replicas, rank) for rank in range(replicas)]
                for _ in range(3):
                    counts = Counter(index for order in orders for index in order.take(pass_length))
                    padded = max(pass_length * replicas - length, 0)
                    assert sum(counts.values()) == pass_length * replicas
                    assert sorted(counts.values(), reverse=True)[:padded] == [2] * padded
                    assert len(counts) == min(length, pass_length * replicas)


def resumed_stream(make_order, position, state, count):
    order = make_order()
    order.load(state)
    order.seek(position)
    assert order.position == position
    return order.take(count)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("distance", [0, 3, 8])
class TestGoingOn:
    """Anew at every position, by an order that knows the state alone, while the first one is ahead or is not."""

    def check(self, make_order, pass_length, distance, passes=4):
        total = passes * pass_length
        for lead in (0, 5):
            order, states, stream = make_order(0), [], []
            if distance:
                order.begin_spreading()
            for position in range(total):
                stream += order.take(position + lead - len(stream))
                order.prune(position)
                states.append(copy.deepcopy(order.state(position)))
            stream += order.take(1)
            for position, state in enumerate(states):
                begun = position or lead  # before the first item no pass was asked for: it is the sampler as it was made
                rest = resumed_stream(lambda begun=begun: make_order(1 if begun else 0), position, state, total - position)
                assert rest[: len(stream) - position] == stream[position:total], f"from position {position}"

    @pytest.mark.grid
    @pytest.mark.parametrize("length", [20, 21])
    def test_a_shuffled_order(self, length, replicas, distance):
        pass_length = math.ceil(length / replicas)
        self.check(lambda start: shuffled(length, pass_length, replicas, replicas - 1, distance), pass_length, distance)

    def test_a_sequential_order(self, replicas, distance):
        self.check(lambda start: SequentialOrder(21, 20 // replicas, replicas, 0, distance), 20 // replicas, distance)

    @pytest.mark.grid
    @pytest.mark.parametrize("name", SAMPLERS)
    def test_the_order_of_a_users_sampler(self, name, replicas, distance):
        length = len(SAMPLERS[name](0))
        for pass_length in {math.ceil(length / replicas), length // replicas - 1}:
            dealt_out = (length, pass_length, replicas, replicas - 1, distance)
            self.check(lambda start, args=dealt_out: SamplerOrder(SAMPLERS[name](start), *args, seed=0), pass_length, distance)

    def test_the_order_of_a_sampler_that_was_lent_a_generator(self, replicas, distance):
        dealt_out = (21, math.ceil(21 / replicas), replicas, 0, distance)
        self.check(lambda start: SamplerOrder(RandomSampler(range(21)), *dealt_out, seed=4), dealt_out[1], distance)

    @pytest.mark.parametrize("name", BATCH_SAMPLERS)
    def test_the_order_of_a_users_batch_sampler(self, name, replicas, distance):
        length = len(BATCH_SAMPLERS[name](0))
        pass_length = math.ceil(length / replicas)
        self.check(
            lambda start: SamplerOrder(BATCH_SAMPLERS[name](start), length, pass_length, replicas, 0, seed=0),
            pass_length,
            distance=0,
        )


def test_an_order_goes_back_on_the_spot():
    """A state is also loaded into a run that is under way."""
    for order in (
        shuffled(20, distance=6),
        SequentialOrder(20, 20),
        SamplerOrder(SAMPLERS["RandomSampler"](0), 23, 23, distance=6, seed=0),
    ):
        order.begin_spreading()
        order.take(7)
        state = copy.deepcopy(order.state(7))
        expected = order.take(60)
        order.load(state)
        order.seek(7)
        assert order.take(60) == expected


def order_of_ranks(kind, length, replicas, distance, drops):
    """The orders of all ranks, and the positions of a pass."""
    pass_length = length // replicas if drops else -(-length // replicas)
    if kind == "shuffled":
        return [shuffled(length, pass_length, replicas, rank, distance) for rank in range(replicas)], pass_length
    samplers = [SAMPLERS["RandomSampler"](0) for _ in range(replicas)]
    return [
        SamplerOrder(sampler, length, pass_length, replicas, rank, distance, seed=0) for rank, sampler in enumerate(samplers)
    ], pass_length


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(("before", "now"), [(4, 2), (4, 1), (2, 4), (1, 3), (3, 8)])
@pytest.mark.parametrize("kind", ["shuffled", "a sampler"])
def test_a_pass_that_goes_on_with_another_number_of_ranks_has_the_slots_that_nobody_has_taken(kind, before, now, drops):
    """At each place of two passes; and again, from a state of the run with the other number of ranks."""
    length = 23
    for offset in range(2 * -(-length // before)):
        orders, pass_length = order_of_ranks(kind, length, before, 2, drops)
        for order in orders:
            order.begin_spreading()
        number, taken = divmod(pass_length + offset, pass_length)
        earlier = [order.take(pass_length + offset) for order in orders]
        mine = {index for of_rank in earlier for index in of_rank[number * pass_length :]}
        state = {**orders[0].state(pass_length + offset), "ends": [[number, pass_length * before]]}
        others, other_length = order_of_ranks(kind, length, now, 4, drops)
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
        again = order_of_ranks(kind, length, now, 4, drops)[0]
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


@pytest.mark.parametrize("name", [*SAMPLERS, *BATCH_SAMPLERS])
def test_states_survive_a_checkpoint_that_is_loaded_with_weights_only(name):
    sampler = {**SAMPLERS, **BATCH_SAMPLERS}[name](0)
    order = SamplerOrder(sampler, len(sampler), len(sampler), distance=0 if name in BATCH_SAMPLERS else 4, seed=0)
    order.take(3)
    order.begin_spreading()
    order.take(40)
    file = io.BytesIO()
    torch.save(order.state(35), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    expected = order.take(20)
    order.load(state)
    order.seek(35)
    assert order.take(28)[8:] == expected


def test_states_are_the_same_on_all_ranks():
    states = []
    for rank in range(3):
        order = SamplerOrder(SAMPLERS["RandomSampler"](0), 23, 8, 3, rank, 2, seed=0)
        order.begin_spreading()
        order.take(21)
        states.append(order.state(19))
    assert states[0]["distances"] == states[1]["distances"] == states[2]["distances"]
    for other in states[1:]:
        for (number, state), (other_number, other_state) in zip(states[0]["sampler"], other["sampler"], strict=True):
            assert number == other_number
            assert torch.equal(state, other_state)


def test_the_state_of_a_long_run_holds_no_more_passes_than_are_needed():
    order = SamplerOrder(RandomSampler(range(100), generator=generator(1)), 100, 100, distance=20, seed=0)
    order.begin_spreading()
    sizes = []
    for number in range(30):
        order.take(100)
        sizes.append(len(order.state(100 * number + 50)["sampler"]))
    assert max(sizes) <= 3


class TestRearrangingTheStartOfAPass:
    def test_takes_what_has_not_been_seen_for_long_enough_and_comes_first(self):
        # The pass before ended with a, b, c, d; each must stay away for three slots.
        last_seen = {"b": 3, "c": 2, "d": 1}
        places, looked_at = spread("dxcaybz", last_seen, 3)
        assert [looked_at[place] for place in places] + list("dxcaybz")[len(looked_at) :] == list("xcdaybz")

    def test_moves_nothing_where_nothing_returns_too_soon(self):
        places, looked_at = spread(iter("abcdefgh"), {"g": 1, "h": 3}, 3)
        assert places == list(range(len(places)))
        assert looked_at == list("abcdefgh")[: len(places)]

    def test_goes_on_where_a_sampler_itself_asks_again_too_soon(self):
        places, looked_at = spread("aaa", {"a": 1}, 3)
        assert sorted(places) == [0, 1, 2]
        assert looked_at == ["a"] * 3

    @given(st.permutations(range(12)), st.permutations(range(12)), st.integers(1, 12), st.integers(0, 12))
    def test_keeps_indices_apart_and_leaves_none_out(self, before, after, distance, dropped):
        before, after = before[: 12 - dropped], after
        distance = min(distance, len(before))
        last_seen = {index: distance - i for i, index in enumerate(before[len(before) - distance :])} if distance else {}
        places, looked_at = spread(iter(after), last_seen, distance)
        rearranged = [looked_at[place] for place in places] + after[len(looked_at) :]
        assert sorted(rearranged) == sorted(after)
        stream = before + rearranged
        last = {}
        for slot, index in enumerate(stream):
            assert slot - last.get(index, -99) >= distance
            last[index] = slot


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


class TestSpreading:
    @st.composite
    def passes(draw):
        length, replicas = draw(st.integers(1, 60)), draw(st.integers(1, 4))
        pass_length = draw(st.integers(max(math.ceil(length / replicas) - 6, 1), math.ceil(length / replicas)))
        distance = draw(st.integers(1, pass_length))
        return length, replicas, pass_length, distance, draw(st.integers(0, 3 * pass_length)), draw(st.integers(0, 1000))

    @settings(max_examples=200)
    @given(passes(), st.sampled_from(["sequential", "shuffled", "sampler"]))
    def test_no_index_returns_to_a_rank_before_the_distance_and_passes_stay_complete(self, passes, kind):
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

    @pytest.mark.parametrize("seed", range(20))
    def test_a_rank_that_has_one_index_more_than_others_keeps_all_of_them_apart(self, seed):
        order = shuffled(7, 4, 2, 0, 4, seed)
        order.begin_spreading()
        stream = order.take(24)
        assert all(len(set(stream[at : at + 4])) == 4 for at in range(21))

    @given(passes())
    def test_an_index_stays_with_its_rank(self, passes):
        length, replicas, _, distance, _, seed = passes
        pass_length = math.ceil(length / replicas)
        for rank in range(replicas):
            plain, spread_out = (shuffled(length, pass_length, replicas, rank, distance, seed) for _ in range(2))
            spread_out.begin_spreading()
            for _ in range(4):
                assert sorted(spread_out.take(pass_length)) == sorted(plain.take(pass_length))

    @pytest.mark.parametrize("replicas", [1, 8, 4096])
    def test_a_rank_looks_at_its_own_entries_alone_however_many_ranks_there_are(self, monkeypatch, replicas):
        looked_at = []

        def counted(*args):
            places, entries = spread(*args)
            looked_at.append(len(entries))
            return places, entries

        monkeypatch.setattr(order_module, "spread", counted)
        order = shuffled(10**9, -(-(10**9) // replicas), replicas, replicas - 1, 100)
        order.begin_spreading()
        order.seek(order.pass_length - 50)
        order.take(300)
        assert len(looked_at) == 1
        assert looked_at[0] <= 200

    @pytest.mark.parametrize("kind", ["shuffled", "sampler"])
    def test_moves_only_the_start_of_a_pass(self, kind):
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

    def test_rearranges_each_pass_once_however_short_the_passes_are(self, monkeypatch):
        calls = []

        def counted(*args):
            calls.append(args)
            return spread(*args)

        monkeypatch.setattr(order_module, "spread", counted)
        order = shuffled(30, distance=20)
        order.begin_spreading()
        order.take(30 * 40)
        assert len(calls) <= 40


@pytest.mark.parametrize("kind", ["sequential", "shuffled"])
def test_no_memory_grows_with_the_data_set(kind):
    """Up to the first batch and beyond it; a list of 10^8 indices would take 800 MB."""
    length, batch_size = 10**8, 32
    shape = PlanShape(
        batch_size=batch_size,
        last_batch_size=batch_size,
        batches_per_pass=length // batch_size,
        workers=4,
        buffer_size=8 * batch_size,
        seed=0,
    )
    tracemalloc.start()
    try:
        order = SequentialOrder(length, length) if kind == "sequential" else shuffled(length, distance=shape.distance)
        requests = ExampleRequests(EachPlan(shape, 4), order, whole_calls=False)
        first = next(requests)
        _, peak = tracemalloc.get_traced_memory()
        for _ in range(300):
            request = next(requests)
        order.begin_spreading()
        order.seek(length - 100)  # into the next pass
        order.take(1000)
        _, later_peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(set(first.indices)) == len(request.indices) == batch_size
    assert peak < 5e6
    assert later_peak < 5e6


def test_no_memory_grows_with_the_ranks():
    tracemalloc.start()
    try:
        order = shuffled(10**9, -(-(10**9) // 4096), 4096, 77, 1000)
        order.begin_spreading()
        order.seek(order.pass_length - 100)
        order.take(1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2e6
