"""How the benchmark of the cache counts: hits in the data set, the model of the page cache, the bound, what ranks have found."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from keepers import KEEPERS, Books, Deliveries, Run, Slow

BY_NAME = {keeper.name: keeper for keeper in KEEPERS}


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path, 20)


@pytest.mark.parametrize("capacity", [1, 3, 10, 20])
def test_the_model_of_the_page_cache_throws_out_what_was_not_used_for_longest(books: Books, capacity: int) -> None:
    chance = np.random.default_rng(capacity)
    held: OrderedDict[int, None] = OrderedDict()
    for index in chance.integers(0, 20, 500).tolist():
        expected = index in held
        held[index] = None
        held.move_to_end(index)
        if len(held) > capacity:
            held.popitem(last=False)
        assert books.touch(index, capacity) == expected


def test_an_example_is_a_hit_if_nobody_has_read_it_since_it_was_delivered(books: Books, tmp_path: Path) -> None:
    data, here, there = Slow(books, 20, 0.0), Deliveries(books, tmp_path), Deliveries(books, tmp_path)  # two ranks
    data[3], data[4]
    assert [here.is_hit(3), here.is_hit(4)] == [False, False]
    data[4]
    assert [there.is_hit(3), there.is_hit(4), here.is_hit(4)] == [True, False, True]


@pytest.mark.parametrize(
    ("name", "hits"),
    [("bare DataLoader", 0), ("ours", 32), ("functools.lru_cache, half in each worker", None), ("LMDB on /dev/shm", None)],
)
def test_a_partner_delivers_every_example_once_a_pass(name: str, hits: int | None, tmp_path: Path) -> None:
    keeper = BY_NAME[name]
    if not keeper.version:
        pytest.skip(f"{keeper.package} is not installed")
    run = Run(Books(tmp_path, 64), tmp_path, 64, 0.0)
    loader = keeper.make(run)
    found, deliveries = [], Deliveries(run.books, tmp_path)
    for _ in range(3):
        indices = [index for _, batch in loader for index in batch.tolist()]
        assert sorted(indices) == list(range(64))
        found.append(sum(map(deliveries.is_hit, indices)))
    held = keeper.held(run, loader)
    if name == "ours":
        assert loader.cache_counts.examples == 32
        loader.close()
        # Each worker reads its first hit again, and its tenth.
        assert (found[0], 32 - found[1] <= 4, 32 - found[2] <= 4) == (0, True, True)
    elif hits is not None:
        assert found == [hits] * 3
    assert (held > 0) == (name != "bare DataLoader")
