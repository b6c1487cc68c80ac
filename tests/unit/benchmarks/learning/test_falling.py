"""The falling fresh share: what is promised of it, batch by batch."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
import torch
from learning.reuse.falling import FALLING_BATCHES, FallingSampler, falling_batches, fresh_share
from torch.utils.data import DataLoader


@pytest.mark.parametrize("factor", [4, 8, 16, 32])
def test_the_share_falls_from_all_to_one_of_e_and_stays(factor: int) -> None:
    shares = [fresh_share(batch, factor) for batch in range(2 * FALLING_BATCHES)]
    assert shares[0] == 1
    assert all(one >= other for one, other in pairwise(shares))
    assert shares[FALLING_BATCHES - 1] > shares[FALLING_BATCHES] == pytest.approx(1 / factor)
    assert set(shares[FALLING_BATCHES:]) == {shares[-1]}
    assert 1 / shares[10] == pytest.approx(1 + (factor - 1) / 10)  # a tenth of the way


@pytest.mark.parametrize(("batch_size", "factor", "most_held"), [(8, 4, 64), (8, 32, 64), (32, 8, 2048), (32, 16, 10**6)])
def test_batches_are_full_distinct_fresh_in_order_and_drawn_from_memory(batch_size: int, factor: int, most_held: int) -> None:
    read, due = 0, 0.0
    for number, (positions, fresh) in enumerate(islice(falling_batches(batch_size, factor, most_held, seed=3), 600)):
        assert len(positions) == len(set(positions)) == batch_size
        assert positions[:fresh] == list(range(read, read + fresh))
        assert all(max(read - most_held, 0) <= echo < read for echo in positions[fresh:])
        read += fresh
        due += batch_size * fresh_share(number, factor)
        assert abs(read - due) <= 1 or fresh == batch_size


def test_echoes_come_from_all_that_is_held() -> None:
    ages = []
    for number, (positions, fresh) in enumerate(islice(falling_batches(8, 8, 160, seed=0), 4000)):
        if number > 1000:
            ages += [positions[0] - echo for echo in positions[fresh:]]
    # uniform over the last 160
    assert min(ages) == 1
    assert max(ages) == 160
    assert sum(ages) / len(ages) == pytest.approx(80.5, rel=0.03)


def test_indices_are_those_of_a_random_order_in_each_pass() -> None:
    sampler = FallingSampler(length=100, batch_size=8, factor=4, most_held=32, seed=5)
    batches = list(islice(sampler, 200))
    fresh = [index for batch, count in zip(batches, sampler.fresh, strict=True) for index in batch[:count]]
    assert sorted(fresh[:100]) == sorted(fresh[100:200]) == list(range(100))
    assert fresh[:100] != list(range(100))
    assert fresh[:100] != fresh[100:200]


def test_an_echo_is_an_example_that_was_read_before() -> None:
    sampler, seen = FallingSampler(length=10**5, batch_size=8, factor=8, most_held=64, seed=5), set()
    for batch in islice(sampler, 300):
        count = sampler.fresh[-1]
        seen.update(batch[:count])
        assert seen.issuperset(batch[count:])
    assert len(seen) == sum(sampler.fresh)


def test_a_seed_decides_order_and_draws() -> None:
    first, again, other = (list(islice(FallingSampler(500, 8, 4, 64, seed), 50)) for seed in (1, 1, 2))
    assert first == again != other


def test_a_loader_without_end_delivers_these_batches() -> None:
    sampler = FallingSampler(500, 8, 4, 64, seed=1)
    loader = DataLoader(torch.arange(500), batch_sampler=sampler)
    assert [batch.tolist() for batch in islice(loader, 5)] == list(islice(FallingSampler(500, 8, 4, 64, seed=1), 5))
