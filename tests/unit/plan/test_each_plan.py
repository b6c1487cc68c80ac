"""The plan keeps its promises: exact counts, a steady number of fresh items, a bound on what is live, and an exact state.

Everything is checked by a `Ledger`, which knows nothing of how a plan is made. The full grid of factors, workers, batch sizes
and buffers runs here, because a plan needs no data.
"""

import json
import random
from fractions import Fraction
from itertools import accumulate, product
from math import ceil, floor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger import Ledger, plain_batch_sizes, shape_of

from lightning_echo.plan.each import EachPlan
from lightning_echo.plan.plan import PlanShape, smallest_buffer

FACTORS = (1, 1.5, 2, 2.37, 4, 8)
WORKERS = (0, 1, 2, 3)
# Data set length, batch size, drop_last. Every pass is longer than the largest buffer and a batch.
CUTS = [(320, 8, False), (325, 8, False), (325, 8, True), (300, 7, False), (1003, 32, True), (1003, 32, False), (50, 1, False)]
BUFFERS = ("default", "larger", "smallest")
BATCHES = 150  # the larger buffer of three workers is full after 30


def exactly(factor):
    """The factor as written, without the rounding of a float."""
    return Fraction(str(factor))


def echoes_at_most(batch_size, factor):
    """The most echoes that a steady batch can have."""
    return max(batch_size - floor(batch_size / exactly(factor)), 0)


def buffer_of(kind, batch_size, factor, workers):
    workers = max(workers, 1)
    smallest = max(echoes_at_most(batch_size, factor) * workers, 1)
    return {"default": 2 * batch_size * workers, "larger": 10 * batch_size * workers, "smallest": smallest}[kind]


class Run:
    """A plan, run with every batch entered into a ledger; each of ``factors`` for so many batches."""

    def __init__(self, length, batch_size, drop_last, workers, buffer_size, factors, seed=0):
        self.case = f"{length=} {batch_size=} {drop_last=} {workers=} {buffer_size=} {factors=} {seed=}"
        self.sizes = plain_batch_sizes(length, batch_size, drop_last)
        self.batch_size, self.buffer_size = batch_size, buffer_size
        self.shape = shape_of(self.sizes, batch_size, workers, buffer_size, seed)
        length = sum(self.sizes)
        self.ledger = Ledger(self.sizes, workers, buffer_size, same_item_after=length if length > buffer_size else None)
        self.plan = EachPlan(self.shape, factors[0][0])
        self.stretches = []  # per factor: it, and what was seen after each of its batches
        for i, (factor, batches) in enumerate(factors):
            if i:
                self.plan.change_factor(self.ledger.number, factor)
            self.stretches.append((exactly(factor), [self.step() for _ in range(batches)]))

    def step(self):
        batch = self.plan.next_batch()
        try:
            self.ledger.enter(batch)
        except AssertionError as error:
            raise AssertionError(f"{error}\nin {batch} of {self.case}") from error
        return Seen(self, batch)


class Seen:
    """What is seen after a batch."""

    def __init__(self, run, batch):
        self.batch, self.size, self.fresh = batch, len(batch.positions), batch.fresh
        self.full = self.size == run.batch_size
        self.delivered, self.all_fresh = run.ledger.delivered, run.ledger.fresh
        self.delivered_before = self.delivered - self.size
        self.most_uses = max((run.ledger.uses[position] for position in batch.positions[batch.fresh :]), default=0)
        self.live_count = run.plan.live_count
        self.live_but_not_held = self.held_but_not_live = frozenset()
        if len(run.stretches) or batch.number % 9 == 0:  # where factors change, after every batch
            live, held = {item.position for item in run.plan.live()}, run.ledger.held
            self.live_but_not_held, self.held_but_not_live = live - held, held - live


def steady(batch_size, factor):
    return {floor(batch_size / factor), ceil(batch_size / factor)}


@pytest.fixture(scope="class")
def grid(request):
    """For one factor and number of workers: (kind of buffer, run). The ledgers have checked each batch on the way."""
    factor, workers = request.param
    return exactly(factor), [
        (kind, Run(*cut, workers, buffer_of(kind, cut[1], factor, workers), [(factor, BATCHES)]))
        for cut, kind in product(CUTS, BUFFERS)
    ]


@pytest.mark.parametrize(
    "grid", list(product(FACTORS, WORKERS)), ids=lambda grid: f"factor {grid[0]}, {grid[1]} workers", indirect=True, scope="class"
)
class TestOverTheFullGrid:
    def test_fresh_and_echoed_items_add_up_to_what_is_delivered(self, grid):
        _, runs = grid
        for _, run in runs:
            delivered = sum(run.sizes[number % len(run.sizes)] for number in range(BATCHES))
            assert sum(run.ledger.uses.values()) == delivered, run.case
            assert len(run.ledger.uses) == run.ledger.fresh == run.plan.position, run.case

    def test_fresh_is_always_within_one_buffer_of_delivered_over_factor(self, grid):
        factor, runs = grid
        for _, run in runs:
            for seen in run.stretches[0][1]:
                assert abs(seen.all_fresh - seen.delivered / factor) <= run.buffer_size, run.case

    def test_every_full_batch_after_warming_up_has_a_steady_number_of_fresh_items(self, grid):
        factor, runs = grid
        for _, run in runs:
            for seen in run.stretches[0][1]:
                assert seen.fresh >= floor(seen.size / factor), run.case
                if seen.full and seen.delivered_before >= max(run.buffer_size, run.shape.workers * run.batch_size):
                    assert seen.fresh in steady(run.batch_size, factor), run.case

    def test_uses_per_item_follow_error_diffusion_after_warming_up(self, grid):
        """The uses of any n items of a worker in a row add up to n times the factor, rounded up or down."""
        factor, runs = grid
        for kind, run in runs:
            if kind != "default":
                continue
            ledger, held = run.ledger, run.ledger.held
            for worker in range(ledger.workers):
                sums = [Fraction(0)]
                for position, number in ledger.read_in.items():
                    if number % ledger.workers != worker or ledger.history[number][2] < run.buffer_size:
                        continue
                    if position in held:
                        break
                    assert ledger.uses[position] in (floor(factor), ceil(factor)), run.case
                    sums.append(sums[-1] + ledger.uses[position] - factor)
                assert len(sums) > 4, run.case
                assert max(sums) - min(sums) < 1, run.case

    def test_items_are_live_for_fewer_positions_than_the_order_keeps_an_index_apart(self, grid):
        _, runs = grid
        for _, run in runs:
            assert run.shape.max_age <= sum(run.sizes), run.case
            for seen in run.stretches[0][1]:
                assert max(seen.batch.positions) - min(seen.batch.positions) < run.shape.max_age, run.case

    def test_the_items_that_the_plan_knows_to_be_live_are_those_that_the_workers_hold(self, grid):
        _, runs = grid
        for _, run in runs:
            for seen in run.stretches[0][1]:
                assert not seen.live_but_not_held, run.case
                assert not seen.held_but_not_live, run.case


CHANGES = [
    [(1, 20), (4, 60)],
    [(2, 30), (4, 60)],
    [(4, 40), (8, 80), (1.5, 40)],
    [(8, 50), (2.37, 50), (1, 15), (2, 40)],
    [(4, 33), (1, 7), (1.5, 60), (1, 1), (8, 70)],
    [(1.5, 1), (8, 2), (2, 1), (4, 3), (2.37, 80)],
    [(2.37, 31), (2, 32), (1.5, 33), (4, 60), (1, 8)],
]


@pytest.fixture(scope="class")
def runs(factors, workers):
    """(kind of buffer, run) for one sequence of factors. The ledgers have checked each batch on the way."""
    return [
        (kind, Run(*cut, workers, max(buffer_of(kind, cut[1], factor, workers) for factor, _ in factors), factors))
        for cut, kind in product([(325, 8, False), (300, 7, True)], BUFFERS)
    ]


@pytest.mark.parametrize("workers", WORKERS, scope="class")
@pytest.mark.parametrize("factors", CHANGES, ids=lambda factors: " to ".join(f"{factor}" for factor, _ in factors), scope="class")
class TestWhenTheFactorChanges:
    def test_the_number_of_fresh_items_is_steady_again_after_one_buffers_worth_of_batches(self, runs):
        for _, run in runs:
            for factor, stretch in run.stretches:
                for seen in stretch:
                    if seen.full and seen.delivered_before - stretch[0].delivered_before >= run.buffer_size:
                        assert seen.fresh in steady(run.batch_size, factor), f"at factor {float(factor)} of {run.case}"

    def test_fresh_stays_within_a_buffer_per_change_of_what_the_factors_ask_for(self, runs):
        for _, run in runs:
            asked = 0
            for changes, (factor, stretch) in enumerate(run.stretches):
                for seen in stretch:
                    asked += seen.size / factor
                    assert abs(seen.all_fresh - asked) <= (changes + 1) * run.buffer_size, run.case

    def test_uses_beyond_the_new_factor_are_dropped_at_once(self, runs):
        for kind, run in runs:
            for factor, stretch in run.stretches if kind == "default" else ():
                assert all(seen.most_uses <= ceil(factor) for seen in stretch), run.case

    def test_workers_are_left_with_nothing_that_the_plan_does_not_know(self, runs):
        for _, run in runs:
            for _, stretch in run.stretches:
                assert not any(seen.live_but_not_held for seen in stretch), run.case
                assert not any(seen.held_but_not_live for seen in stretch[run.ledger.workers - 1 :]), run.case

    def test_at_factor_1_every_item_is_fresh_and_nothing_is_live(self, runs):
        for _, run in runs:
            run.plan.change_factor(run.ledger.number, 1)
            stretches = [*run.stretches, (1, [run.step() for _ in range(run.ledger.workers)])]
            for factor, stretch in stretches:
                if factor == 1:
                    assert all(seen.fresh == seen.size and not seen.live_count for seen in stretch), run.case
            assert not run.ledger.held, run.case


@pytest.mark.grid
@pytest.mark.parametrize("factor", [1.5, 2, 2.37, 4, 5.3, 8])
@pytest.mark.parametrize("batch_size", [5, 8, 33])
def test_a_buffer_that_just_holds_a_batch_meets_the_factor_as_exactly_as_a_large_one(batch_size, factor):
    """Each batch draws nearly all live items. So no use may be wasted, whatever size the last batch of a pass has."""
    for workers, extra, tail in product((0, 2, 3), (0, 1, 3), (1, batch_size // 2, batch_size)):
        buffer_size = smallest_buffer(batch_size, factor, workers) + extra * max(workers, 1)
        sizes = [*[batch_size] * (10 * (buffer_size // batch_size + 1) + 5), tail]
        run = Run(sum(sizes), batch_size, False, workers, buffer_size, [(factor, 400)])
        for seen in run.stretches[0][1]:
            assert abs(seen.all_fresh - seen.delivered / exactly(factor)) <= buffer_size, run.case
            if seen.full and seen.batch.number >= max(workers, 1) * (1 + buffer_size // (max(workers, 1) * batch_size)):
                assert seen.fresh in steady(batch_size, exactly(factor)), run.case
        start = buffer_size + batch_size * max(workers, 1)  # what came before filled the buffer
        uses = [n for position, n in run.ledger.uses.items() if position >= start and position not in run.ledger.held]
        astray = [n for n in uses if n not in (floor(factor), ceil(factor))]
        assert len(astray) <= 0.3 * len(uses), run.case  # what one does without for the sake of the others, a later one gets
        assert all(abs(n - factor) < 3 for n in astray), run.case


@pytest.mark.grid
@pytest.mark.parametrize(("before", "after"), [(8, 4), (8, 2.37), (4, 8), (2, 4), (1.5, 4)])
@pytest.mark.parametrize("batch_size", [4, 32])
def test_the_number_of_fresh_items_is_steady_again_whatever_was_drawn_before_the_change(before, after, batch_size):
    """Many draws with usual buffers: what is live when the factor changes differs from one to the other."""
    for seed in range(60):
        plan = EachPlan(shape_of([batch_size] * 1000, batch_size, 0, 2 * batch_size, seed), before)
        for _ in range(20 + seed % 13):
            plan.next_batch()
        plan.change_factor(plan.number, after)
        fresh = [plan.next_batch().fresh for _ in range(25)]
        assert set(fresh[2:]) <= steady(batch_size, exactly(after)), f"{seed=}: {fresh}"


@pytest.mark.grid
@pytest.mark.parametrize("factor", [1.5, 2, 4, 8])
@pytest.mark.parametrize(
    ("length", "batch_size", "workers"), [(5000, 512, 8), (1000, 256, 4), (64, 64, 2), (10, 8, 3), (3, 8, 0)]
)
def test_a_pass_smaller_than_the_buffer_meets_the_factor(length, batch_size, workers, factor):
    """Nothing else could: examples would grow older than a pass before they are used up."""
    buffer_size = 2 * batch_size * max(workers, 1)
    run = Run(length, batch_size, False, workers, buffer_size, [(factor, 300)])
    assert 0 <= run.ledger.fresh - run.ledger.delivered / factor <= buffer_size


def test_a_later_decision_replaces_the_changes_that_were_to_come_after_it():
    plan = EachPlan(shape_of([8] * 100, 8, 0, 16), factor=1)
    plan.change_factor(10, 2)
    plan.change_factor(20, 8)
    plan.change_factor(15, 4)
    factors = []
    for _ in range(30):
        plan.next_batch()
        factors.append(plan.factor)
    assert factors == [1] * 10 + [2] * 5 + [4] * 15


def test_a_change_of_factor_at_a_planned_batch_is_refused():
    plan = EachPlan(shape_of([8] * 10, 8, 0, 16), factor=2)
    for _ in range(3):
        plan.next_batch()
    with pytest.raises(ValueError, match="batch 2 is planned already, the next one is 3"):
        plan.change_factor(2, 4)
    plan.change_factor(3, 4)
    plan.next_batch()
    assert plan.factor == 4


@pytest.mark.parametrize("workers", WORKERS)
def test_a_plan_made_of_the_state_at_any_step_goes_on_with_the_same_batches(workers):
    sizes = plain_batch_sizes(93, 8, False)
    shape = shape_of(sizes, 8, workers, 16 * max(workers, 1), seed=5)
    plan, states, batches = EachPlan(shape, 2.37), [], []
    plan.change_factor(20, 4.0)
    plan.change_factor(35, 1.0)
    plan.change_factor(42, 1.5)
    for _ in range(60):
        states.append(json.dumps(plan.state()))
        assert json.dumps(plan.state()) == states[-1], "asking twice changes nothing"
        batches.append(plan.next_batch())
    for number, state in enumerate(states):
        resumed = EachPlan.from_state(shape, json.loads(state))
        assert json.dumps(resumed.state()) == state
        held = {item.position for item in resumed.live()} | set(range(resumed.position, 60 * 8))
        for batch in batches[number:]:
            # What was dropped before, a resumed run's workers have never held.
            assert resumed.next_batch() == batch._replace(forget=tuple(p for p in batch.forget if p in held))


def test_a_state_holds_positions_and_plain_types_only():
    plan = EachPlan(shape_of([8] * 50, 8, 2, 32), factor=4)
    for _ in range(30):
        plan.next_batch()

    def kinds(value):
        if isinstance(value, dict):
            return set().union({type(key) for key in value}, *map(kinds, value.values()))
        if isinstance(value, list):
            return set().union(*map(kinds, value))
        return {type(value)}

    assert kinds(plan.state()) <= {str, int, float, bool}


def test_the_plan_depends_on_its_seed_alone_and_leaves_the_global_random_state_as_it_was():
    def planned(seed, noise):
        random.seed(noise)
        before = random.getstate()
        plan = EachPlan(shape_of([8] * 50, 8, 2, 32, seed=seed), factor=4)
        batches = [plan.next_batch() for _ in range(40)]
        assert random.getstate() == before
        return batches

    assert planned(seed=1, noise=2) == planned(seed=1, noise=3)
    assert planned(seed=1, noise=2) != planned(seed=2, noise=2)


def test_the_length_of_a_pass_decides_nothing_but_the_batch_sizes_and_no_index_is_ever_seen():
    """Two data sets whose passes are longer than the run are planned alike."""
    short, long = (EachPlan(shape_of([8] * batches, 8, 2, 32), factor=2.37) for batches in (1_000, 10**7))
    assert [short.next_batch() for _ in range(500)] == [long.next_batch() for _ in range(500)]


def test_echoes_are_drawn_from_the_whole_buffer():
    """Over many batches each age of a live item is drawn: uses of an item do not stand in adjacent batches."""
    run = Run(8_000, 8, False, 0, 80, [(4, 0)])
    last_use, gaps = {}, []
    for number in range(600):
        for position in run.step().batch.positions:
            if number > 100 and position in last_use:
                gaps.append(number - last_use[position])
            last_use[position] = number
    # About 43 items are live and 6 of them are drawn from each batch: a mean gap of about 7, geometrically distributed.
    assert 4 < sum(gaps) / len(gaps) < 12
    assert gaps.count(1) < len(gaps) / 4
    assert max(gaps) > 20


@pytest.mark.grid
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("buffer_size", [1, 4, 20])
@pytest.mark.parametrize("batches_per_pass", [1, 3, 50])
def test_whole_batches_are_interleaved_evenly_also_when_a_pass_is_shorter_than_the_buffer(factor, buffer_size, batches_per_pass):
    shape = PlanShape(
        batch_size=1,
        last_batch_size=1,
        batches_per_pass=batches_per_pass,
        workers=1,
        buffer_size=buffer_size,
        seed=0,
        distinct=False,
    )
    plan, ledger = EachPlan(shape, factor), Ledger([1], 1, buffer_size)
    for _ in range(150):
        ledger.enter(plan.next_batch())
    fresh = [fresh for _, fresh, _ in ledger.history][buffer_size:]
    before = [0, *accumulate(fresh)]
    for start, end in product(range(0, 40), range(60, 130, 7)):
        share = (end - start) / exactly(factor)
        assert floor(share) <= before[end] - before[start] <= ceil(share)
    done = [ledger.uses[position] for position in sorted(ledger.uses)[buffer_size:] if position not in ledger.held]
    assert set(done) <= {floor(exactly(factor)), ceil(exactly(factor))}


@st.composite
def plans(draw):
    batch_size = draw(st.integers(1, 12))
    length = draw(st.integers(1, 300))
    drop_last = length >= batch_size and draw(st.booleans())
    factors = draw(st.lists(st.tuples(st.floats(1, 12), st.integers(1, 40)), min_size=1, max_size=4))
    workers = draw(st.integers(0, 3))
    least = max(smallest_buffer(batch_size, factor, workers) for factor, _ in factors)
    buffer_size = max(least, 1) + draw(st.integers(0, 60))
    return length, batch_size, drop_last, workers, buffer_size, factors, draw(st.integers(0, 2**63))


@given(plans())
def test_any_plan_keeps_to_the_ledger(arguments):
    """Whatever the sizes, also where a pass is shorter than the buffer or than a batch."""
    run = Run(*arguments)
    for _ in range(20):
        positions = run.step().batch.positions
        assert max(positions) - min(positions) < run.shape.max_age
    assert {item.position for item in run.plan.live()} == run.ledger.held


@given(plans(), st.integers(0, 50))
def test_any_plan_goes_on_from_its_state(arguments, steps):
    run = Run(*arguments)
    state = json.loads(json.dumps(run.plan.state()))
    resumed = EachPlan.from_state(run.shape, state)
    for _ in range(steps):
        expected, batch = run.step().batch, resumed.next_batch()
        assert batch[:-1] == expected[:-1]
        assert set(batch.forget) <= set(expected.forget)
