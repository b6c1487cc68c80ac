"""Echoes drawn from all that memory holds: an exact share, a bound, the oldest leave first, a small exact state."""

import base64
import json
import pickle
import struct
import zlib
from collections import Counter
from fractions import Fraction
from itertools import product
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
    drop_last, seed = draw(st.booleans()), draw(st.integers(0, 9))
    return plan_shape(length, batch_size, workers, buffer_size, drop_last=drop_last, seed=seed), factors


@given(runs(), FACTORS)
@settings(max_examples=60)
def test_batches_are_those_that_a_worker_can_make_within_the_bound_and_go_on_from_the_state(run, to_come):
    shape, factors = run
    sizes = [shape.size_of(number) for number in range(shape.batches_per_pass)]
    plan, ledger = MemoryPlan(shape, factors[0][0]), Ledger(sizes, shape.workers, shape.buffer_size, shape.pass_length)
    for number, (factor, count) in enumerate(factors):
        if number:
            plan.change_factor(plan.number, factor)
        for batch in batches(plan, count):
            ledger.enter(batch)
        assert {position for position, _ in plan.live()} <= ledger.held
        assert plan.live_count <= shape.buffer_size
    plan.change_factor(plan.number + 10, min(to_come, max(factor for factor, _ in factors)))
    again = MemoryPlan.from_state(shape, json.loads(json.dumps(plan.state())))
    assert again.live() == plan.live()
    expected, found = batches(plan, 50), batches(again, 50)
    assert [batch._replace(forget=()) for batch in found] == [batch._replace(forget=()) for batch in expected]


def test_of_what_each_worker_delivers_one_in_e_is_fresh_by_error_diffusion():
    for factor, workers, batch_size in product([1.25, 2, 2.37, 8, 100], [1, 3], [1, 7, 32]):
        plan = MemoryPlan(plan_shape(100_000, batch_size, workers, 40 * batch_size * workers), factor)
        exact, counted = Fraction(str(factor)), {worker: [0, 0] for worker in range(workers)}
        for batch in batches(plan, 60 * workers):
            size, of_worker = len(batch.positions), counted[batch.number % workers]
            if batch.number < workers:
                assert batch.fresh == size, "nothing is held yet"
                continue
            of_worker[0] += size
            of_worker[1] += batch.fresh
            assert batch.fresh in {floor(size / exact), ceil(size / exact)}
            assert of_worker[1] == floor(of_worker[0] / exact)


def test_items_leave_only_when_memory_is_full_and_then_the_oldest():
    plan = MemoryPlan(plan_shape(buffer_size=20), 3)
    held, called = [], {}
    for batch in (plan.next_batch() for _ in range(60)):
        fresh = range(batch.first_fresh, batch.first_fresh + batch.fresh)
        called.update(dict.fromkeys(fresh, (batch.first_fresh, batch.fresh)))
        held += fresh
        left, held = held[:-20], held[-20:]
        assert [(position, tuple(call)) for position, call in plan.live()] == [(each, called[each]) for each in held]
        last_uses = {p for p, stays in zip(batch.positions, batch.stays_live, strict=True) if not stays}
        assert last_uses <= set(left), "what leaves undrawn is told with the next batch of its worker"
    assert len(held) == 20


def test_every_held_item_is_drawn_equally_often():
    plan = MemoryPlan(plan_shape(10**6, 8, 1, 50), 8)
    batches(plan, 200)
    drawn = Counter()
    for batch in batches(plan, 4000):
        oldest = batch.first_fresh - 50  # what was held before this batch
        drawn.update(position - oldest for position in batch.positions[batch.fresh :])
    expected = 4000 * 7 / 50
    chi_squared = sum((drawn[age] - expected) ** 2 / expected for age in range(50))
    assert sum(drawn.values()) == 4000 * 7
    assert chi_squared < 85.4  # exceeded once in a thousand times, with 49 degrees of freedom


def test_factor_1_lets_go_what_was_held():
    plan, ledger = MemoryPlan(plan_shape(), 4), Ledger([8] * 125, 1, 64, 1000)
    for batch in batches(plan, 30):
        ledger.enter(batch)
    plan.change_factor(30, 1)
    batch = plan.next_batch()
    ledger.enter(batch)
    assert (batch.fresh, plan.live_count, ledger.held) == (8, 0, set())


@pytest.mark.parametrize("missing", [1, 2])
def test_where_the_source_has_fewer_the_batch_is_shorter_and_the_share_stays(missing):
    plan = MemoryPlan(plan_shape(), 4)
    batches(plan, 10)
    assert plan.wanted_fresh() == 2
    batch = plan.next_batch(missing)
    assert batch.fresh == 2 - missing
    # Nine batches of 8 with 2 fresh ones each came before it, and one that is not counted.
    assert len(batch.positions) <= 4 * (9 * 2 + batch.fresh + 1) - 1 - 9 * 8


@pytest.mark.parametrize("content", [struct.pack("<q", 3), struct.pack("<3q", 3, 8, 20), b"12345", "", "no base 85 ~~~", "abcde"])
def test_a_text_that_holds_no_calls_is_refused(content):
    text = content if isinstance(content, str) else base64.b85encode(zlib.compress(content)).decode()
    with pytest.raises(ValueError, match=r"not pairs|multiple of item size|damaged|base85|bad"):
        unpack_calls(text)


def test_the_state_stays_small_however_much_is_held():
    plan = MemoryPlan(plan_shape(10**7, 32, 4, 50_000), 2.37)
    while plan.live_count < 50_000:
        plan.next_batch()
    assert len(pickle.dumps(plan.state())) < 2_000
