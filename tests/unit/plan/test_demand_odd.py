"""`DemandRule` on odd inputs, against a plain model of a memory: indices that come twice, tiny passes and tiny memories."""

import random
from collections import Counter

import pytest

from lightning_echo.plan.demand import Arrived, DemandRule


class Model:
    """The keys that memory holds, the oldest first, and how often each fresh example has paid for an echo."""

    def __init__(self, most_held):
        self.most_held, self.held = most_held, []

    def add(self, keys):
        for key in keys:
            if key in self.held:
                self.held.remove(key)
            self.held.append(key)
        dropped = self.held[: max(len(self.held) - self.most_held, 0)]
        self.held = self.held[len(dropped) :]
        return dropped


def assert_follows(rule, model, number, size, arrived, *, may_repeat=False):
    """Hands out a batch, and compares it with the model. Returns what is left of ``arrived``."""
    expected = rule.fresh_in(size, arrived, may_repeat=may_repeat)
    handed = rule.hand_out(number, size, arrived, may_repeat=may_repeat)
    keys = [one.key for one in handed.fresh]
    assert handed.fresh == sorted(expected)
    assert len(handed.fresh) + len(handed.echoes) == size
    assert len(set(handed.echoes)) == len(handed.echoes)
    assert set(handed.echoes) <= set(model.held) - set(keys)
    if not may_repeat:  # only within one pass may the sampler itself give an index twice
        passes = {}
        for one in handed.fresh:
            assert passes.setdefault(one.key, one.pass_number) == one.pass_number
    assert handed.forget == model.add(keys)
    return [one for one in arrived if one not in handed.fresh]


@pytest.mark.parametrize("seed", range(300))
def test_a_rule_follows_the_model(seed):
    chance = random.Random(seed)
    pass_length, size = chance.choice((1, 2, 5, 30)), chance.randint(1, 8)
    index_of = [chance.randrange(pass_length) if chance.random() < 0.3 else place for place in range(pass_length)]
    most_held, max_factor = chance.choice((1, 2, 6, 40)), chance.choice((1.1, 2.0, 5.5, 100.0))
    rule, model = DemandRule(seed, max_factor, most_held), Model(most_held)
    arrived, position, fresh, echoes, delivered = [], 0, 0, 0, Counter()
    for number in range(60):
        batch = chance.randint(1, size)
        for _ in range(chance.choice((0, 1, batch, 3 * size))):
            arrived.append(Arrived(position, index_of[position % pass_length], position // pass_length))
            position += 1
        may_repeat = False
        while len(rule.fresh_in(batch, arrived)) < batch and not rule.may_hand_out(batch, arrived):
            if len(arrived) >= 2 * batch + 2 * pass_length:  # nothing else can arrive, as with a tiny pass
                may_repeat = True
                break
            arrived.append(Arrived(position, index_of[position % pass_length], position // pass_length))
            position += 1
        before = [one.position for one in arrived]
        arrived = assert_follows(rule, model, number, batch, arrived, may_repeat=may_repeat)
        gone = set(before) - {one.position for one in arrived}
        assert not before or before[0] in gone  # nothing waits for longer than one batch after it is the oldest
        delivered.update(gone)
        fresh, echoes = fresh + len(gone), echoes + batch - len(gone)
        assert echoes <= fresh * (max_factor - 1) + 1e-6
        assert rule.account >= -1e-6
    assert set(delivered.values()) == {1}


def test_an_index_that_a_sampler_gives_twice_is_twice_in_the_batch_and_once_in_memory():
    rule = DemandRule(0, 3.0, 8)
    rule.hand_out(0, 2, [Arrived(0, "a", 0), Arrived(1, "b", 0)])
    batch = rule.hand_out(1, 3, [Arrived(2, "a", 1), Arrived(3, "a", 1)])
    assert [one.position for one in batch.fresh] == [2, 3]
    assert batch.echoes == ["b"]  # and not "a", which memory held
    assert not rule.may_hand_out(3, [])  # memory has two
    assert rule.may_hand_out(2, [])
    assert sorted(rule.hand_out(2, 2, []).echoes) == ["a", "b"]


def test_an_index_of_the_next_pass_waits_if_the_batch_has_it_already():
    rule = DemandRule(0, 3.0, 8)
    arrived = [Arrived(0, "a", 0), Arrived(1, "a", 1), Arrived(2, "b", 1)]
    assert [one.position for one in rule.fresh_in(2, arrived)] == [0, 2]
    assert [one.position for one in rule.hand_out(0, 2, arrived).fresh] == [0, 2]
    assert [one.position for one in rule.fresh_in(2, [arrived[1]])] == [1]


def test_a_memory_of_one_example_echoes_one():
    rule = DemandRule(0, 4.0, 1)
    assert rule.hand_out(0, 2, [Arrived(0, "a", 0), Arrived(1, "b", 0)]).forget == ["a"]
    assert not rule.may_hand_out(2, [])
    assert [rule.may_hand_out(1, []) and rule.hand_out(number, 1, []).echoes for number in range(1, 5)] == [["b"]] * 3 + [False]


@pytest.mark.parametrize(("max_factor", "most_held"), [(1.0, 8), (4.0, 0)])
def test_without_echoes_nothing_is_held(max_factor, most_held):
    rule = DemandRule(0, max_factor, most_held)
    assert not rule.keeps
    assert rule.hand_out(0, 1, [Arrived(0, "a", 0)]).forget == []
    assert not rule.may_hand_out(1, [])
    assert rule.may_hand_out(1, [Arrived(1, "a", 1)])


def test_a_bound_of_one_empties_the_memory_and_a_larger_one_fills_it_again():
    rule = DemandRule(0, 4.0, 8)
    rule.hand_out(0, 2, [Arrived(0, "a", 0), Arrived(1, "b", 0)])
    rule.set_factor(1.0)
    assert sorted(rule.hand_out(1, 1, [Arrived(2, "c", 0)]).forget) == ["a", "b"]
    rule.set_factor(2.0)
    assert not rule.may_hand_out(1, [])
    rule.hand_out(2, 1, [Arrived(3, "d", 0)])
    assert rule.hand_out(3, 1, []).echoes == ["d"]
