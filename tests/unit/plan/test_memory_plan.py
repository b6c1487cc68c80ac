"""The plan that draws echoes from all that memory holds: an exact share, a bound, the oldest leave first, a small exact state.

Everything is checked by a `Ledger`, which knows nothing of how a plan is made.
"""

import base64
import json
import pickle
import struct
import zlib
from collections import Counter
from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger import Ledger, plain_batch_sizes, shape_of

from lightning_echo.plan.memory import MemoryPlan, unpack_calls
from lightning_echo.plan.plan import smallest_buffer

FACTORS = st.sampled_from([1, 1.25, 1.5, 2, 2.37, 4, 8, 16.5, 100])


def plan_shape(length=1000, batch_size=8, workers=1, buffer_size=64, *, drop_last=True, seed=0):
    return shape_of(plain_batch_sizes(length, batch_size, drop_last), batch_size, workers, buffer_size, seed)


def ledger_of(shape):
    sizes = [shape.size_of(number) for number in range(shape.batches_per_pass)]
    return Ledger(sizes, shape.workers, shape.buffer_size, same_item_after=shape.pass_length)


def batches(plan, number):
    return [plan.next_batch() for _ in range(number)]


@st.composite
def runs(draw):
    """A shape whose pass is longer than memory and a batch, and factors, each for some batches."""
    batch_size, workers = draw(st.integers(1, 12)), draw(st.integers(0, 3))
    factors = draw(st.lists(st.tuples(FACTORS, st.integers(1, 60)), min_size=1, max_size=4))
    smallest = max(smallest_buffer(batch_size, max(factor for factor, _ in factors), workers), 1)
    buffer_size = draw(st.integers(smallest, smallest + 12 * batch_size))
    length = buffer_size + 2 * batch_size + draw(st.integers(0, 200))
    return plan_shape(
        length, batch_size, workers, buffer_size, drop_last=draw(st.booleans()), seed=draw(st.integers(0, 9))
    ), factors


@given(runs())
@settings(max_examples=300, deadline=None)
def test_every_batch_is_one_that_its_worker_can_make_within_the_bound_and_without_a_repetition(run):
    shape, factors = run
    plan, ledger = MemoryPlan(shape, factors[0][0]), ledger_of(shape)
    for number, (factor, count) in enumerate(factors):
        if number:
            plan.change_factor(plan.number, factor)
        for batch in batches(plan, count):
            ledger.enter(batch)
        assert {position for position, _ in plan.live()} <= ledger.held
        assert plan.live_count <= shape.buffer_size


@given(runs(), st.integers(0, 80))
@settings(max_examples=100, deadline=None)
def test_a_plan_goes_on_from_its_state_as_if_it_had_not_stopped(run, stop):
    shape, factors = run
    plan = MemoryPlan(shape, factors[0][0])
    for number, (factor, count) in enumerate(factors[1:], 1):
        plan.change_factor(number * 20 + count, factor)
    batches(plan, stop)
    state = json.loads(json.dumps(plan.state()))
    again = MemoryPlan.from_state(shape, state)
    assert again.live() == plan.live()
    expected = batches(plan, 100)
    found = batches(again, 100)
    assert [batch._replace(forget=()) for batch in found] == [batch._replace(forget=()) for batch in expected]


@pytest.mark.parametrize("factor", [1.25, 1.5, 2, 2.37, 4, 8, 100])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 7, 32])
def test_of_what_each_worker_delivers_one_in_e_is_fresh_by_error_diffusion(factor, workers, batch_size):
    shape = plan_shape(100_000, batch_size, workers, 40 * batch_size * workers)
    plan, exact = MemoryPlan(shape, factor), Fraction(str(factor))
    counted = {worker: [0, 0] for worker in range(workers)}
    for batch in batches(plan, 60 * workers):
        size, of_worker = len(batch.positions), counted[batch.number % workers]
        if batch.number < workers:
            assert batch.fresh == size, "nothing is held yet"
            continue
        of_worker[0] += size
        of_worker[1] += batch.fresh
        assert batch.fresh in {floor(size / exact), ceil(size / exact)}
        assert of_worker[1] == floor(of_worker[0] / exact)


def test_only_the_first_batch_of_each_worker_is_wholly_fresh():
    fresh = [batch.fresh for batch in batches(MemoryPlan(plan_shape(workers=2, buffer_size=640), 4), 12)]
    assert fresh == [8, 8] + [2] * 10


def test_items_leave_only_when_memory_is_full_and_then_the_oldest():
    plan = MemoryPlan(plan_shape(buffer_size=20), 4)
    held = []
    for _ in range(60):
        batch = plan.next_batch()
        held += range(batch.first_fresh, batch.first_fresh + batch.fresh)
        left, held = held[:-20], held[-20:]
        assert [position for position, _ in plan.live()] == held
        last_uses = {p for p, stays in zip(batch.positions, batch.stays_live, strict=True) if not stays}
        # What leaves undrawn is told with the next batch of its worker.
        assert last_uses <= set(left)
    assert len(held) == 20


def test_calls_are_those_in_which_the_items_were_read():
    plan = MemoryPlan(plan_shape(buffer_size=20, workers=2), 3)
    called = {}
    for batch in batches(plan, 40):
        called.update(dict.fromkeys(batch.positions[: batch.fresh], (batch.first_fresh, batch.fresh)))
    assert plan.live()
    assert all(tuple(call) == called[position] for position, call in plan.live())


def test_every_held_item_is_drawn_equally_often():
    shape = plan_shape(10**6, 8, 1, 50)
    plan = MemoryPlan(shape, 8)
    batches(plan, 200)
    drawn = Counter()
    for batch in batches(plan, 8000):
        oldest = batch.first_fresh - 50  # what was held before this batch
        drawn.update(position - oldest for position in batch.positions[batch.fresh :])
    expected = 8000 * 7 / 50
    chi_squared = sum((drawn[age] - expected) ** 2 / expected for age in range(50))
    assert sum(drawn.values()) == 8000 * 7
    assert chi_squared < 85.4  # exceeded once in a thousand times, with 49 degrees of freedom


def test_other_seeds_draw_otherwise_and_the_same_seed_alike():
    def drawn(seed):
        return [batch.positions for batch in batches(MemoryPlan(plan_shape(seed=seed), 4), 30)]

    assert [list(one) for one in drawn(1)] == [list(one) for one in drawn(1)]
    assert [list(one) for one in drawn(1)] != [list(one) for one in drawn(2)]


def test_factor_1_reads_everything_once_holds_nothing_and_lets_go_what_was_held():
    plan, ledger = MemoryPlan(plan_shape(), 4), ledger_of(plan_shape())
    for batch in batches(plan, 30):
        ledger.enter(batch)
    plan.change_factor(30, 1)
    (batch,) = batches(plan, 1)
    ledger.enter(batch)
    assert (batch.fresh, plan.live_count, ledger.held) == (8, 0, set())


def test_a_change_that_is_planned_already_is_refused():
    plan = MemoryPlan(plan_shape(), 4)
    batches(plan, 3)
    with pytest.raises(ValueError, match="batch 2 is planned already, the next one is 3"):
        plan.change_factor(2, 2)


@pytest.mark.parametrize("missing", [1, 2])
def test_where_the_source_has_fewer_the_batch_is_shorter_and_the_share_stays(missing):
    plan = MemoryPlan(plan_shape(), 4)
    batches(plan, 10)
    assert plan.wanted_fresh() == 2
    batch = plan.next_batch(missing)
    assert batch.fresh == 2 - missing
    # Nine batches of 8 with 2 fresh ones each came before it, and one that is not counted.
    assert len(batch.positions) <= 4 * (9 * 2 + batch.fresh + 1) - 1 - 9 * 8


def test_batches_without_a_fresh_item_add_nothing_to_the_state():
    plan = MemoryPlan(plan_shape(10**6, 8, 1, 64), 1000)
    fresh = [batch.fresh for batch in batches(plan, 400)]
    assert fresh[0] == 8
    assert sum(fresh) == 8 + 399 * 8 // 1000
    (memory,) = plan.state()["memories"]
    assert len(unpack_calls(memory["calls"])) == 1 + sum(fresh) - 8


@pytest.mark.parametrize("numbers", [struct.pack("<q", 3), struct.pack("<3q", 3, 8, 20), b"12345"])
def test_a_text_that_holds_no_calls_is_refused(numbers):
    with pytest.raises(ValueError, match=r"not pairs|multiple of item size"):
        unpack_calls(base64.b85encode(zlib.compress(numbers)).decode())


@pytest.mark.parametrize("text", ["", "no base 85 ~~~", "abcde"])
def test_a_text_that_is_none_of_a_memory_is_refused(text):
    with pytest.raises(ValueError, match=r"damaged|base85|bad"):
        unpack_calls(text)


@pytest.mark.parametrize("held", [1_000, 100_000])
def test_the_state_stays_small_however_much_is_held(held):
    plan = MemoryPlan(plan_shape(10**7, 32, 4, held), 2.37)
    while plan.live_count < held:
        plan.next_batch()
    assert len(pickle.dumps(plan.state())) < 2_000
