"""Batches are the same with and without a cache, bit by bit: while it fills, afterwards, and in a resumed run."""

import itertools
import math

import pytest
from cached_data_cases import ALL, DATASETS, EXAMPLES, WHOLE, Kind, Loaded, plain_values, told
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader

pytestmark = pytest.mark.filterwarnings("ignore:.*example .* does not fit the split of the data set:UserWarning")
FACTOR = 2.37


def loader_of(dataset, point, hold, *, factor=FACTOR, workers=0):
    options = {"batch_size": 4, "shuffle": True, "num_workers": workers, "persistent_workers": workers > 0}
    plain = DataLoader(dataset, collate_fn=told, **options)
    cache = None if hold is None else {"size": "2MiB", "hold": hold}
    return EchoLoader(plain, factor, insertion_point=point, seed=3, cache=cache)


def batches_of(loader, number=None):
    """So many batches, or an epoch, as plain values, each with its number of fresh examples."""
    return [(plain_values(batch[0]), loader.last_batch_counts.fresh) for batch in itertools.islice(loader, number)]


def delivered(loader, passes=2):
    batches = [batch for _ in range(math.ceil(passes * loader.factor)) for batch in batches_of(loader)]
    if counts := loader.cache_counts:
        assert counts.hits + counts.misses == loader.counts.fresh
        assert counts.hits > 0
        assert counts.examples > 0
    loader.close()
    return batches


@pytest.mark.grid
@pytest.mark.parametrize("factor", [1, FACTOR])
@pytest.mark.parametrize(("point", "hold"), ALL + WHOLE)
@pytest.mark.parametrize("kind", EXAMPLES)
def test_examples_of_any_kind_are_the_same_from_the_cache(kind, point, hold, factor):
    make = Loaded if hold == "whole" else Kind
    expected = delivered(loader_of(make(kind), point, None, factor=factor))
    assert delivered(loader_of(make(kind), point, hold, factor=factor)) == expected


@pytest.mark.parametrize(("name", "point", "hold"), [(name, *use) for name in DATASETS for use in DATASETS[name][1]])
def test_data_sets_of_any_kind_give_the_same_through_the_cache(name, point, hold):
    workers = 2 if (name, hold) in (("nested", "loaded"), ("misfits", "raw")) else 0
    plain, cached = (loader_of(DATASETS[name][0](), point, each, workers=workers) for each in (None, hold))
    assert delivered(cached) == delivered(plain)
    assert cached.insertion_point == plain.insertion_point


RESUMED = [  # by data set: insertion point, hold, workers, and whether there is a cache before and after
    ("tensor", "before_augmentation", "loaded", 1, True, False),
    ("dataclass", "after_augmentation", "whole", 0, False, True),
    ("batched, whole", "after_augmentation", "whole", 1, True, True),
    ("misfits", "after_augmentation", "auto", 0, True, True),
]


@pytest.mark.parametrize(("name", "point", "hold", "workers", "before", "after"), RESUMED)
def test_a_run_resumed_in_the_middle_of_a_pass_goes_on_as_without_a_cache(name, point, hold, workers, before, after):
    def make(has_cache):
        dataset = DATASETS[name][0]() if name in DATASETS else (Loaded if hold == "whole" else Kind)(name)
        return loader_of(dataset, point, hold if has_cache else None, workers=workers)

    whole = delivered(make(False))
    stop, first, resumed, seen, rest = len(whole) // 2 + 1, make(before), make(after), [], []
    while len(seen) < stop:
        seen += batches_of(first, stop - len(seen))
    resumed.load_state_dict(first.state_dict())
    first.close()
    while len(rest) < len(whole) - stop:
        rest += batches_of(resumed)
    resumed.close()
    assert rest[: len(whole) - stop] == whole[stop:]
