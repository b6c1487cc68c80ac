"""The rule of echo on demand: what arrived comes first, nothing is twice in a batch, echoes are earned, all are drawn."""

import random
from collections import Counter, deque

import pytest

from lightning_echo.plan.demand import Arrived, DemandRule, lead

SCHEDULES = 10_000


class Source:
    """Examples in passes over ``length`` indices, in another order in each pass."""

    def __init__(self, length, seed):
        self.length, self.random, self.position = length, random.Random(seed), 0
        self.order = []

    def next(self):
        if not self.order:
            self.order = self.random.sample(range(self.length), self.length)
        number = self.position // self.length
        self.position += 1
        return Arrived(self.position - 1, self.order.pop(), number)


def run(seed, batches=25):
    """One random schedule: arrivals and due times are random, as are the sizes. Yields each batch with what had arrived."""
    rand = random.Random(seed)
    size, length = rand.randint(1, 9), rand.randint(1, 60)
    size = min(size, length)
    factor = rand.choice([1, 1.1, 1.5, 2, 3, 8, 100])
    most_held = rand.choice([0, 1, size, 2 * size, length, 10 * length])
    rule, source, arrived = DemandRule(seed, factor, most_held), Source(length, seed + 1), deque()
    for number in range(batches):
        speed = rand.choice([0, 0.3, 1, 3])
        arrived.extend(source.next() for _ in range(min(round(rand.random() * speed * size), 4 * size)))
        while len(rule.fresh_in(size, arrived)) < size and not rule.may_hand_out(size, arrived):
            arrived.append(source.next())
        before = list(arrived)
        batch = rule.hand_out(number, size, before)
        arrived = deque(one for one in before if one not in batch.fresh)
        yield rule, size, factor, most_held, before, batch


@pytest.mark.slow
def test_ten_thousand_random_schedules_keep_the_rule():
    for seed in range(SCHEDULES):
        memory, fresh_so_far, echoes_so_far, seen = {}, 0, 0, set()
        for rule, size, factor, most_held, arrived, batch in run(seed):
            assert len(batch.fresh) + len(batch.echoes) == size
            keys = [one.key for one in batch.fresh]
            assert len({*keys, *batch.echoes}) == size, seed  # no index twice
            assert batch.fresh == sorted(batch.fresh)
            assert {*batch.fresh} <= {*arrived}
            assert not seen & {one.position for one in batch.fresh}  # each position is fresh once
            seen |= {one.position for one in batch.fresh}
            # Those that arrived first come first: one that was left out has an index that the batch has from another pass.
            latest = max((arrived.index(one) for one in batch.fresh), default=-1)
            passes = {one.key: one.pass_number for one in batch.fresh}
            for one in arrived[: latest + 1] if len(batch.fresh) == size else arrived:
                assert one in batch.fresh or passes[one.key] != one.pass_number
            # Echoes come from memory, and not from what this batch brings.
            assert {*batch.echoes} <= memory.keys() - set(keys), seed
            for key in keys:
                memory.pop(key, None)
            memory.update(dict.fromkeys(keys if factor > 1 and most_held else ()))
            assert len(batch.forget) == len(set(batch.forget))
            assert batch.forget == list(memory)[: len(batch.forget)], seed  # the oldest
            for key in batch.forget:
                del memory[key]
            assert len(memory) <= most_held
            fresh_so_far, echoes_so_far = fresh_so_far + len(keys), echoes_so_far + len(batch.echoes)
            assert echoes_so_far <= (factor - 1) * fresh_so_far + 1e-6, seed
            assert rule.account <= (factor - 1) * most_held + 1e-6


@pytest.mark.parametrize("factor", [1.5, 2, 8])
def test_a_dead_source_is_bridged_for_at_most_so_many_uses_of_memory(factor):
    rule, held, size = DemandRule(0, factor, most_held=64), 64, 8
    for number in range(40):  # the source keeps up: much is earned, and what memory does not hold lapses
        rule.hand_out(number, size, [Arrived(number * size + i, number * size + i, 0) for i in range(size)])
    bridged = 0
    while rule.may_hand_out(size, []):
        rule.hand_out(40 + bridged, size, [])
        bridged += 1
    assert bridged == int((factor - 1) * held) // size


def test_what_was_earned_under_a_larger_bound_lapses():
    rule = DemandRule(0, 8, most_held=16)
    rule.hand_out(0, 8, [Arrived(i, i, 0) for i in range(8)])
    rule.set_factor(1.5)
    assert rule.account == 4
    assert rule.may_hand_out(4, [])
    assert not rule.may_hand_out(5, [])
    rule.set_factor(1)
    assert not rule.may_hand_out(1, [])
    rule.hand_out(1, 2, [Arrived(8, 8, 0), Arrived(9, 9, 0)])
    rule.set_factor(8)
    assert not rule.may_hand_out(1, [])  # with factor 1 memory was emptied


def test_echoes_are_drawn_uniformly_old_ones_as_well():
    rule = DemandRule(3, 1000, most_held=50)
    for number in range(10):
        rule.hand_out(number, 5, [Arrived(number * 5 + i, number * 5 + i, 0) for i in range(5)])
    drawn = Counter()
    rounds = 4000
    for number in range(10, 10 + rounds):
        rule.account = 1000.0
        drawn.update(rule.hand_out(number, 5, []).echoes)
    assert len(drawn) == 50
    expected = rounds * 5 / 50
    chi_square = sum((count - expected) ** 2 / expected for count in drawn.values())
    assert chi_square < 85  # 49 degrees of freedom: one in a thousand is above


def test_the_draw_follows_from_seed_and_number_alone():
    def batches(seed):
        rule = DemandRule(seed, 8, most_held=20)
        rule.hand_out(0, 4, [Arrived(i, f"{i}.png", 0) for i in range(4)])
        rule.hand_out(1, 4, [Arrived(i, f"{i}.png", 0) for i in range(4, 8)])
        return [rule.hand_out(number, 4, []).echoes for number in range(2, 8)]

    assert batches(1) == batches(1) != batches(2)


def test_a_sampler_that_repeats_an_index_in_a_pass_has_it_twice_as_in_the_plain_loader():
    rule = DemandRule(0, 4, most_held=8)
    batch = rule.hand_out(0, 3, [Arrived(0, "a", 0), Arrived(1, "a", 0), Arrived(2, "b", 0)])
    assert [one.key for one in batch.fresh] == ["a", "a", "b"]
    assert not rule.may_hand_out(3, [])  # memory holds each index once
    assert rule.may_hand_out(2, [])


def test_an_index_of_the_next_pass_waits_unless_no_other_example_can_come():
    arrived = [Arrived(0, "a", 0), Arrived(1, "a", 1), Arrived(2, "b", 1)]
    rule = DemandRule(0, 1, most_held=0)
    assert [one.position for one in rule.fresh_in(2, arrived)] == [0, 2]
    assert [one.position for one in rule.fresh_in(2, arrived, may_repeat=True)] == [0, 1]


def test_a_batch_is_due_as_early_as_making_one_takes():
    assert [lead(seconds, 0.02, most=8) for seconds in (0.0, 0.019, 0.021, 0.139, 0.15, 9)] == [1, 2, 3, 8, 8, 8]
