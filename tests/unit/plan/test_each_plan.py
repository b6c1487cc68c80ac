"""The plan's counts are exact, its batches steady, its live items bounded; `Ledger` checks all, and knows nothing of plans."""

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
CUTS = [(320, 8, False), (325, 8, True), (300, 7, False), (1003, 32, True), (1003, 32, False), (50, 1, False)]
BUFFERS = ("default", "larger", "smallest")
BATCHES = 150  # the larger buffer of three workers is full after 30


def exactly(factor):
    """The factor as written, without the rounding of a float."""
    return Fraction(str(factor))


def buffer_of(kind, batch_size, factor, workers):
    workers = max(workers, 1)
    echoes = batch_size - floor(batch_size / exactly(factor))
    return {"default": 2 * batch_size, "larger": 10 * batch_size, "smallest": max(echoes, 1)}[kind] * workers


def steady(batch_size, factor):
    return {floor(batch_size / factor), ceil(batch_size / factor)}


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
        self.number, self.size, self.fresh, self.positions = batch.number, len(batch.positions), batch.fresh, batch.positions
        self.full = self.size == run.batch_size
        self.delivered, self.all_fresh = run.ledger.delivered, run.ledger.fresh
        self.delivered_before = self.delivered - self.size
        self.most_uses = max((run.ledger.uses[position] for position in batch.positions[batch.fresh :]), default=0)
        self.live, self.held = {item.position for item in run.plan.live()}, run.ledger.held
        assert len(self.live) == run.plan.live_count


def assert_uses_follow_error_diffusion(run, factor):
    """The uses of any n items of a worker in a row, once warm, add up to n times the factor, rounded up or down."""
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


@pytest.mark.grid
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("workers", WORKERS)
def test_counts_uses_ages_and_what_is_live_are_as_promised(factor, workers):
    exact = exactly(factor)
    for cut, kind in product(CUTS, BUFFERS):
        run = Run(*cut, workers, buffer_of(kind, cut[1], factor, workers), [(factor, BATCHES)])
        assert run.shape.max_age <= sum(run.sizes), run.case
        for seen in run.stretches[0][1]:
            assert abs(seen.all_fresh - seen.delivered / exact) <= run.buffer_size, run.case
            assert seen.fresh >= floor(seen.size / exact), run.case
            if seen.full and seen.delivered_before >= max(run.buffer_size, workers * run.batch_size):
                assert seen.fresh in steady(run.batch_size, exact), run.case
            assert max(seen.positions) - min(seen.positions) < run.shape.max_age, run.case
            assert seen.live == seen.held, run.case
        if kind == "default":
            assert_uses_follow_error_diffusion(run, exact)


CHANGES = [
    [(1, 20), (4, 60)],
    [(4, 40), (8, 80), (1.5, 40)],
    [(8, 50), (2.37, 50), (1, 15), (2, 40)],
    [(4, 33), (1, 7), (1.5, 60), (1, 1), (8, 70)],
    [(1.5, 1), (8, 2), (2, 1), (4, 3), (2.37, 80)],
    [(2.37, 31), (2, 32), (1.5, 33), (4, 60), (1, 8)],
]


@pytest.mark.grid
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("factors", CHANGES, ids=lambda factors: " to ".join(f"{factor}" for factor, _ in factors))
def test_a_change_of_factor_is_soon_steady_drops_what_is_beyond_it_and_leaves_nothing_behind(factors, workers):
    for cut, kind in product([(325, 8, False), (300, 7, True)], BUFFERS):
        buffer_size = max(buffer_of(kind, cut[1], factor, workers) for factor, _ in factors)
        run, asked = Run(*cut, workers, buffer_size, factors), 0
        for changes, (factor, stretch) in enumerate(run.stretches):
            for number, seen in enumerate(stretch):
                asked += seen.size / factor
                assert abs(seen.all_fresh - asked) <= (changes + 1) * run.buffer_size, run.case
                if seen.full and seen.delivered_before - stretch[0].delivered_before >= run.buffer_size:
                    assert seen.fresh in steady(run.batch_size, factor), f"at factor {float(factor)} of {run.case}"
                assert kind != "default" or seen.most_uses <= ceil(factor), run.case
                assert seen.live <= seen.held, run.case
                assert seen.held == seen.live or number < run.ledger.workers - 1, run.case
                assert factor > 1 or (seen.fresh == seen.size and not seen.live), run.case
        run.plan.change_factor(run.ledger.number, 1)
        last = [run.step() for _ in range(run.ledger.workers)]
        assert not any(seen.live for seen in last), run.case
        assert not last[-1].held, run.case


@pytest.mark.grid
@pytest.mark.parametrize("factor", [1.5, 2, 2.37, 4, 5.3, 8])
@pytest.mark.parametrize("batch_size", [5, 8, 33])
@pytest.mark.parametrize("workers", [0, 2, 3])
def test_a_buffer_that_just_holds_a_batch_meets_the_factor_as_exactly_as_a_large_one(batch_size, factor, workers):
    """Each batch draws nearly all live items. So no use may be wasted, whatever size the last batch of a pass has."""
    for extra, tail in product((0, 1, 3), (1, batch_size // 2, batch_size)):
        buffer_size = smallest_buffer(batch_size, factor, workers) + extra * max(workers, 1)
        sizes = [*[batch_size] * (10 * (buffer_size // batch_size + 1) + 5), tail]
        run = Run(sum(sizes), batch_size, False, workers, buffer_size, [(factor, 300)])
        for seen in run.stretches[0][1]:
            assert abs(seen.all_fresh - seen.delivered / exactly(factor)) <= buffer_size, run.case
            if seen.full and seen.number >= max(workers, 1) * (1 + buffer_size // (max(workers, 1) * batch_size)):
                assert seen.fresh in steady(batch_size, exactly(factor)), run.case
        start = buffer_size + batch_size * max(workers, 1)  # what came before filled the buffer
        uses = [n for position, n in run.ledger.uses.items() if position >= start and position not in run.ledger.held]
        astray = [n for n in uses if n not in (floor(factor), ceil(factor))]
        assert len(astray) <= 0.3 * len(uses), run.case  # what one does without for the sake of the others, a later one gets
        assert all(abs(n - factor) < 3 for n in astray), run.case


@pytest.mark.parametrize("factor", [1.5, 4])
@pytest.mark.parametrize(("length", "batch_size", "workers"), [(1000, 256, 4), (64, 64, 2), (10, 8, 3), (3, 8, 0)])
def test_a_pass_smaller_than_the_buffer_meets_the_factor(length, batch_size, workers, factor):
    """Nothing else could: examples would grow older than a pass before they are used up."""
    buffer_size = 2 * batch_size * max(workers, 1)
    ledger = Run(length, batch_size, False, workers, buffer_size, [(factor, 150)]).ledger
    assert 0 <= ledger.fresh - ledger.delivered / factor <= buffer_size


def test_a_later_decision_replaces_the_changes_to_come_and_one_for_a_planned_batch_is_refused():
    plan = EachPlan(shape_of([8] * 100, 8, 0, 16), factor=1)
    for number, factor in ((10, 2), (20, 8), (15, 4)):
        plan.change_factor(number, factor)
    factors = []
    for _ in range(30):
        plan.next_batch()
        factors.append(plan.factor)
    assert factors == [1] * 10 + [2] * 5 + [4] * 15
    with pytest.raises(ValueError, match="batch 29 is planned already, the next one is 30"):
        plan.change_factor(29, 4)
    plan.change_factor(30, 2)
    plan.next_batch()
    assert plan.factor == 2


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


@pytest.mark.grid
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("buffer_size", [1, 4, 20])
@pytest.mark.parametrize("batches_per_pass", [1, 3, 50])
def test_whole_batches_are_interleaved_evenly_also_when_a_pass_is_shorter_than_the_buffer(factor, buffer_size, batches_per_pass):
    sizes = {"batch_size": 1, "last_batch_size": 1, "batches_per_pass": batches_per_pass, "buffer_size": buffer_size}
    shape = PlanShape(**sizes, workers=1, seed=0, distinct=False)
    plan, ledger, exact = EachPlan(shape, factor), Ledger([1], 1, buffer_size), exactly(factor)
    for _ in range(150):
        ledger.enter(plan.next_batch())
    before = [0, *accumulate(fresh for _, fresh, _ in ledger.history[buffer_size:])]
    for start, end in product(range(0, 40), range(60, 130, 7)):
        share = (end - start) / exact
        assert floor(share) <= before[end] - before[start] <= ceil(share)
    done = [ledger.uses[position] for position in sorted(ledger.uses)[buffer_size:] if position not in ledger.held]
    assert set(done) <= {floor(exact), ceil(exact)}


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
def test_any_plan_keeps_to_the_ledger_and_goes_on_from_its_state(arguments):
    run = Run(*arguments)
    resumed = EachPlan.from_state(run.shape, json.loads(json.dumps(run.plan.state())))
    for _ in range(30):
        seen, batch = run.step(), resumed.next_batch()
        assert (batch.fresh, list(batch.positions)) == (seen.fresh, list(seen.positions))
        assert max(seen.positions) - min(seen.positions) < run.shape.max_age
    assert seen.live == seen.held
    assert resumed.state() == run.plan.state()


def test_warming_fills_the_buffer_to_the_middle_and_uses_the_rest_once():
    """By hand: of the 8 items that may be live the next batch needs 4, so that 6 stay live."""
    shape = PlanShape(batch_size=8, last_batch_size=8, batches_per_pass=100, workers=1, buffer_size=8, seed=0)
    first = EachPlan(shape, 2.0).next_batch()
    assert (first.fresh, sum(first.stays_live)) == (8, 6)
