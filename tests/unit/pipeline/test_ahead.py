"""What is told ahead: the requests stay as they are, and each read was told to its worker before, or is asked for at once."""

import random
from collections import Counter

import pytest

from lightning_echo.pipeline.ahead import AheadOrder, Foreseen
from lightning_echo.pipeline.requests import BatchedOrder, BatchRequests, ExampleRequests
from lightning_echo.plan.memory import make_plan, plan_from_state
from lightning_echo.plan.order import SequentialOrder, ShuffledOrder
from lightning_echo.plan.plan import PlanShape, Reuse

FACTORS = (1, 1.5, 2, 3.7, 8)


class Case:
    """Requests of a random shape, with and without hints."""

    def __init__(self, rand, *, by_batches):
        self.by_batches, self.workers = by_batches, rand.choice([1, 2, 3])
        size, batches = rand.choice([1, 2, 4, 7]), rand.randint(2, 40)
        self.sizes = size, rand.randint(1, size), batches
        of_plan = (1, 1) if by_batches else self.sizes[:2]
        self.shape = PlanShape(
            batch_size=of_plan[0],
            last_batch_size=of_plan[1],
            batches_per_pass=batches,
            workers=1 if by_batches else self.workers,
            buffer_size=of_plan[0] * self.workers * rand.randint(1, 6),
            seed=rand.randint(0, 99),
            reuse=rand.choice(list(Reuse)),
            distinct=not by_batches,
        )
        self.factor, self.is_shuffled = rand.choice(FACTORS), rand.random() < 0.7
        self.window = rand.randint(1, 30)
        self.may_repeat = rand.random() < 0.5  # whether an index comes again; if not, it is its position

    def requests(self, state=None, *, foreseen):
        size, last, batches = self.sizes
        length = (batches - 1) * size + last
        order = SequentialOrder(length, length, 1, 0)
        if not self.may_repeat:
            order = SequentialOrder(10**9, 10**9, 1, 0)
        elif self.is_shuffled:
            order = ShuffledOrder(length, length, 1, 0, self.shape.distance, 1, seed=5)
        if state is not None:
            order.load(state["order"])
        if self.by_batches:
            order = BatchedOrder(order, size, last, batches) if self.may_repeat else BatchedOrder(order, size, size, batches)
        order = AheadOrder(order, batches if self.by_batches else length, crosses=True) if foreseen else order
        plan = make_plan(self.shape, self.factor) if state is None else plan_from_state(self.shape, state["plan"])
        kind = BatchRequests(plan, order) if self.by_batches else ExampleRequests(plan, order, whole_calls=False)
        return kind, (Foreseen(kind, order, self.workers, self.window) if foreseen else kind)


def read_by(request, held, *, by_batches):
    """The indices that a worker reads for a request: those of fresh examples, and of live ones that it does not hold."""
    if by_batches:
        return list(request.indices)
    not_held = [position not in held for position in request.positions]
    read = [index for i, index in enumerate(request.indices) if i < request.fresh or not_held[i]]
    held.difference_update(request.forget)
    for position, stays in zip(request.positions, request.stays_live, strict=True):
        (held.add if stays else held.discard)(position)
    return read


@pytest.mark.grid
@pytest.mark.parametrize("by_batches", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_requests_and_states_are_the_same_and_what_is_told_is_read_or_dropped(seed, by_batches):
    rand = random.Random(seed)
    unforeseen = total = 0
    for _ in range(12):
        case = Case(rand, by_batches=by_batches)
        (plain, plain_requests), (inner, foreseen) = case.requests(foreseen=False), case.requests(foreseen=True)
        told, count = [Counter() for _ in range(case.workers)], 0
        held = [set() for _ in range(case.workers)]
        is_calm = 0  # requests since the factor changed, or the run was resumed
        for _ in range(rand.randint(5, 120)):
            is_calm += 1
            if rand.random() < 0.04:
                number, factor, is_calm = plain.plan.number + rand.randint(0, 5), rand.choice(FACTORS), 0
                plain.change_factor(number, factor)
                inner.change_factor(number, factor)
            if rand.random() < 0.02 and not by_batches:  # the run is resumed: workers hold and know nothing
                state = plain.state(plain.plan.number)
                (plain, plain_requests), (inner, foreseen) = (case.requests(state, foreseen=each) for each in (False, True))
                told, held = [Counter() for _ in range(case.workers)], [set() for _ in range(case.workers)]
                count = is_calm = 0
            if by_batches:  # as they are delivered
                plain.step(), inner.step()
            expected, request = next(plain_requests), next(foreseen)
            assert request._replace(ahead=(), drop=()) == expected
            assert inner.state(inner.plan.number) == plain.state(plain.plan.number)
            mine = told[count % case.workers]
            mine.subtract(request.drop)
            assert case.may_repeat or min(mine.values(), default=0) >= 0
            for index in read_by(request, held[count % case.workers], by_batches=by_batches):
                total += 1
                unforeseen += mine[index] <= 0 and is_calm > 2 * case.workers
                mine[index] -= mine[index] > 0
            mine.update(request.ahead)
            assert case.may_repeat or max(mine.values(), default=0) <= 1
            assert case.may_repeat or mine.total() <= case.window * (case.sizes[0] if by_batches else 1)
            count += 1
    assert total > 500
    assert unforeseen < total / 2  # windows smaller than a batch tell less than a batch reads


def test_with_a_large_window_all_reads_but_the_first_are_told_ahead():
    shape = PlanShape(batch_size=4, last_batch_size=4, batches_per_pass=50, workers=2, buffer_size=16, seed=0)
    order = AheadOrder(ShuffledOrder(200, 200, 1, 0, shape.distance, 1, seed=5), 200, crosses=True)
    requests = Foreseen(ExampleRequests(make_plan(shape, 2), order, whole_calls=False), order, 2, 64)
    told = [Counter(), Counter()]
    for number in range(200):
        request, mine = next(requests), told[number % 2]
        if number >= 2:
            assert all(mine[index] > 0 for index in request.indices[: request.fresh])
            mine.subtract(request.indices[: request.fresh])
        mine.update(request.ahead)
        assert mine.total() == 64
        assert not request.drop


def test_after_passes_begin_to_be_spread_workers_are_told_the_indices_that_come_now():
    shape = PlanShape(batch_size=4, last_batch_size=4, batches_per_pass=20, workers=1, buffer_size=16, seed=0)
    order = AheadOrder(ShuffledOrder(80, 80, 1, 0, shape.distance, 1, seed=5), 80, crosses=True)
    inner = ExampleRequests(make_plan(shape, 1), order, whole_calls=False)
    requests, told = Foreseen(inner, order, 1, 64), Counter()
    inner.change_factor(14, 2)
    for number in range(60):
        request = next(requests)
        told.subtract(request.drop)
        if number:
            assert all(told[index] > 0 for index in request.indices[: request.fresh])
            told.subtract(request.indices[: request.fresh])
        told.update(request.ahead)
        assert told.total() == 64


def test_an_order_of_the_users_sampler_is_not_looked_at_past_its_pass():
    order = AheadOrder(SequentialOrder(10, 10, 1, 0), 10, crosses=False)
    assert not order.reaches(0)  # no pass has begun
    assert order.take(1) == [0]
    assert [order.reaches(position) for position in range(12)] == [True] * 9 + [False] * 3
    assert order.at(8) == 8
    assert order.take(9) == list(range(1, 10))
    assert not order.reaches(10)  # the next pass has not begun
    assert order.take(1) == [0]
    assert order.reaches(18)
    assert not order.reaches(19)
