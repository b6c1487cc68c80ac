"""What is asked of the workers and how far ahead: the positions of the plan, the indices of the order; a state at any batch."""

import copy
import json
import threading
from itertools import pairwise

import pytest
import torch
from cache_cases import batches_shape
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger import plain_batch_sizes, shape_of
from torch.utils.data import DataLoader, RandomSampler

from lightning_echo.pipeline.batches import PassReader
from lightning_echo.pipeline.kinds import IndexedBatches
from lightning_echo.pipeline.prefetch import DEPTH
from lightning_echo.pipeline.requests import BatchedOrder, BatchRequests, ExampleRequests, SamplerOrder
from lightning_echo.plan.each import EachPlan
from lightning_echo.plan.order import SequentialOrder, ShuffledOrder

LENGTH, BATCH_SIZE = 61, 5
SIZES = plain_batch_sizes(LENGTH, BATCH_SIZE, drop_last=False)
KINDS = ("sequential", "shuffled", "sampler")


def shape_for(workers=2):
    return shape_of(SIZES, BATCH_SIZE, workers, 2 * BATCH_SIZE * max(workers, 1), seed=3)


def make_order(kind, length=LENGTH, pass_length=LENGTH, replicas=1, rank=0, distance=0, start=5):
    dealt_out = (length, pass_length, replicas, rank, distance)
    if kind == "sequential":
        return SequentialOrder(*dealt_out)
    if kind == "shuffled":
        return ShuffledOrder(*dealt_out, seed=2)
    sampler = RandomSampler(range(length), generator=torch.Generator().manual_seed(start))
    return SamplerOrder(sampler, *dealt_out, seed=0)


def make_requests(kind="shuffled", factor=3, workers=2, whole_calls=False):
    shape = shape_for(workers)
    return ExampleRequests(EachPlan(shape, factor), make_order(kind, distance=shape.distance), whole_calls=whole_calls)


def stream_of(kind, factor, count=1000):
    """The model: a second order, taken from position 0 on, says which index stands at which position."""
    order = make_order(kind, distance=shape_for().distance)
    if factor > 1:
        order.begin_spreading()
    return order.take(count)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [1, 2.37])
def test_what_the_plan_says_is_asked_for_by_the_indices_that_stand_there(kind, factor):
    requests, stream, plan = make_requests(kind, factor), stream_of(kind, factor), EachPlan(shape_for(), factor)
    for number in range(80):
        request, batch = next(requests), plan.next_batch()
        assert request.indices == [stream[position] for position in request.positions]
        assert (request.number, request.positions, request.fresh) == (batch.number, batch.positions, batch.fresh)
        assert (request.stays_live, request.forget, request.rebuild) == (batch.stays_live, batch.forget, ())
        assert factor > 1 or request.fresh == len(request.indices) == SIZES[number % len(SIZES)]


class TestGoingOn:
    BATCHES, AHEAD = 140, 9

    def played(self, kind, factor, workers=2, whole_calls=False, changes=()):
        """The requests of an uninterrupted run, and its state at each delivered batch while it is some batches ahead."""
        requests = make_requests(kind, factor, workers, whole_calls)
        asked, states = [next(requests) for _ in range(self.AHEAD)], []
        for delivered in range(self.BATCHES):
            requests.delivered = delivered
            for number, new in changes:
                if delivered == number:
                    requests.change_factor(delivered + self.AHEAD, new)
            states.append(copy.deepcopy(requests.state(requests.delivered)))
            asked.append(next(requests))
        return asked, states

    def resumed(self, state, kind, workers=2, whole_calls=False):
        shape = shape_for(workers)
        order = make_order(kind, distance=shape.distance, start=99)
        order.load(state["order"])
        plan = EachPlan.from_state(shape, json.loads(json.dumps(state["plan"])))
        return ExampleRequests(plan, order, whole_calls=whole_calls)

    @pytest.mark.parametrize(("kind", "workers"), [("sequential", 2), ("shuffled", 0), ("sampler", 2)])
    def test_from_every_delivered_batch(self, kind, workers):
        asked, states = self.played(kind, 2.37, workers)
        for delivered, state in enumerate(states):
            if delivered % 9 and delivered not in range(60, 68):  # around a snapshot each, else a sample
                continue
            requests = self.resumed(state, kind, workers)
            for expected in asked[delivered:]:
                assert next(requests)[:5] == expected[:5], f"from batch {delivered}"

    @pytest.mark.parametrize("kind", ["shuffled", "sampler"])
    def test_between_a_change_of_factor_and_the_batch_from_which_it_counts(self, kind):
        changes = [(20, 4), (70, 1), (95, 1.5), (98, 8)]
        asked, states = self.played(kind, 2, changes=changes)
        counts = [(len(request.positions), request.fresh) for request in asked]
        assert all(fresh == size for size, fresh in counts[79 : 95 + self.AHEAD]), "the change counts from its batch on"
        assert any(fresh < size for size, fresh in counts[70:79])
        decided = [*(number for number, _ in changes), self.BATCHES]
        for now, following in pairwise(decided):
            for delivered in range(now, min(now + 12, following), 2):
                requests = self.resumed(states[delivered], kind)
                for expected in asked[delivered : following + self.AHEAD][:50]:
                    assert next(requests)[:5] == expected[:5], f"from batch {delivered}"

    def test_of_a_data_set_that_reads_whole_batches_each_call_with_a_live_example_is_repeated_once(self):
        asked, states = self.played("shuffled", 4, whole_calls=True)
        stream, call_of = stream_of("shuffled", 4), {}  # position -> the call in which it was read
        for request in asked:
            fresh = request.positions[: request.fresh]
            call_of.update((position, fresh) for position in fresh)
        for delivered in range(0, self.BATCHES, 11):
            requests, state = self.resumed(states[delivered], "shuffled", whole_calls=True), states[delivered]
            live = {item[0] for buffer in state["plan"]["buffers"] for item in buffer["live"]}
            rebuilt, wanted, calls = set(), set(), []
            for _ in range(60):
                request = next(requests)
                echoed = [position for position in request.positions[request.fresh :] if position in live]
                for first, indices, positions in request.rebuild:
                    assert call_of[first][0] == first
                    assert indices == [stream[position] for position in call_of[first]]
                    assert set(positions) == {position for position in call_of[first] if position in live}
                    rebuilt.update(positions)
                    calls.append(first)
                assert set(echoed) <= rebuilt, "what is echoed was rebuilt by then"
                wanted.update(echoed)
            assert wanted == rebuilt == live
            assert len(calls) == len(set(calls))


def test_two_threads_may_plan_and_ask_for_the_state():
    racing = make_requests("shuffled", 4)
    for _ in range(40):
        next(racing)
    racing.delivered = 40
    expected = json.dumps(racing.state(racing.delivered))
    thread = threading.Thread(target=lambda: [next(racing) for _ in range(1500)])
    thread.start()
    states = {json.dumps(racing.state(racing.delivered))}
    while thread.is_alive():
        states.add(json.dumps(racing.state(racing.delivered)))
    thread.join()
    assert states == {expected}


class TestBatches:
    """The point after_batching: whole batches are the items."""

    def order(self, kind="shuffled", start=5):
        return BatchedOrder(make_order(kind, start=start), BATCH_SIZE, SIZES[-1], len(SIZES))

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_order_of_batches_cuts_as_the_plain_loader_does_and_is_found_again_at_every_batch(self, kind):
        order, indices, batches, states = self.order(kind), make_order(kind), [], []
        for number in range(3 * len(SIZES)):
            states.append(copy.deepcopy(order.state(number)))
            batches += order.take(1)
            assert batches[-1] == indices.take(SIZES[number % len(SIZES)])
            assert order.position == number + 1
        for number, state in enumerate(states):
            resumed = self.order(kind, start=99 if number else 5)  # before the first batch there is no state yet
            resumed.load(state)
            resumed.seek(number)
            assert resumed.take(len(states) - number) == batches[number:]

    @pytest.mark.parametrize("kind", ["shuffled", "sampler", "opaque"])
    def test_from_every_delivered_batch_a_run_goes_on_and_reads_live_batches_once_more(self, kind):
        def order(start):
            return PassReader([], len(SIZES)) if kind == "opaque" else self.order(kind, start)

        shape = batches_shape(len(SIZES))
        requests = BatchRequests(EachPlan(shape, 2.37), order(5))
        steps, states = [requests.step() for _ in range(6)], []
        for delivered in range(80):
            requests.delivered = delivered
            if delivered == 40:
                requests.change_factor(50, 4)
            states.append(copy.deepcopy(requests.state(requests.delivered)))
            steps.append(requests.step())
        assert {step.size == -1 for step in steps} == {kind == "opaque"}, "of batches that nothing is known of"
        batches = order(5).take(200)
        for delivered, state in list(enumerate(states))[::2]:
            fresh_order, held = order(99), set()
            fresh_order.load(state["order"])
            resumed = BatchRequests(EachPlan.from_state(shape, state["plan"]), fresh_order)
            for expected in steps[delivered : 50 if delivered < 40 else None]:  # the change is decided at 40, for 50
                step = resumed.step()
                ours, theirs = ((each.position, each.is_fresh, each.stays_live) for each in (step, expected))
                assert ours == theirs
                assert step.is_read == (step.position not in held)
                if step.is_read and kind != "opaque":
                    assert next(resumed).indices == batches[step.position]
                (held.add if step.stays_live else held.discard)(step.position)
                assert len(held) <= 4


FACTORS = st.one_of(st.just(1.0), st.floats(1, 9), st.sampled_from([1.5, 2.0, 4.0, 8.0]))


@settings(max_examples=25)
@given(
    factor=FACTORS,
    changes=st.lists(st.tuples(st.integers(0, 120), FACTORS), max_size=4),
    buffer_size=st.integers(1, 20),
    prefetched=st.integers(1, 12),
)
def test_no_more_whole_batches_are_in_flight_than_it_looks_ahead_however_fast_the_workers_are(
    factor, changes, buffer_size, prefetched
):
    """A change that came too late would be refused by the plan: batches are planned as they are asked of torch's loader.

    That asks for ``prefetched`` batches at the start, and for one more whenever it hands one out; the thread fetches `DEPTH`
    ahead of the training, and has begun with the one after.
    """
    shape = batches_shape(50, buffer_size)
    order = BatchedOrder(SequentialOrder(200, 200, 1, 0, 0), 4, 4, 50)
    plan = EachPlan(shape, factor)
    kind = IndexedBatches(DataLoader(range(200), 4, num_workers=1, prefetch_factor=prefetched))
    requests = BatchRequests(plan, order)
    for _ in range(prefetched):
        next(requests)
    fetched, largest = 0, factor
    for delivered in range(1, 200):
        while fetched < delivered + DEPTH + 1:
            if requests.step().is_read:
                next(requests)
            fetched += 1
        assert plan.number <= delivered + kind.lookahead(largest)
        for at, value in changes:
            if at == delivered:
                requests.change_factor(delivered + kind.lookahead(largest), value)
                largest = max(largest, value)
