"""Batches are the same with and without a cache, bit by bit: while it fills, afterwards, and in a resumed run.

The expectation is always the same loader without a cache.
"""

import itertools
import math
import warnings

import pytest
import torch
from cached_data_cases import ALL, DATASETS, EXAMPLES, WHOLE, Kind, Loaded, Told, plain_values
from torch.utils.data import DataLoader, default_collate

from lightning_echo import EchoLoader, StagedDataset

MISFITS = ("misfits", "lenient", "decodes with its own generator")


def loader_of(dataset, point, hold, *, factor=1.0, workers=0, size="2MiB", collate=list, batch_size=4, **options):
    plain = DataLoader(
        dataset, batch_size=batch_size, shuffle="sampler" not in options, num_workers=workers, collate_fn=Told(collate), **options
    )
    cache = None if hold is None else {"size": size, "hold": hold}
    return EchoLoader(plain, factor, insertion_point=point, seed=3, cache=cache)


def delivered(loader, passes):
    """The batches of so many passes, as plain values, each with its number of fresh examples."""
    batches, epochs = [], math.ceil(passes * loader.factor)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*example .* does not fit the split of the data set", UserWarning)
        for _ in range(epochs):
            batches += [(plain_values(batch[0]), loader.last_batch_counts.fresh) for batch in loader]
    if counts := loader.cache_counts:
        assert counts.hits + counts.misses == loader.counts.fresh
        assert counts.hits > 0
        assert counts.examples > 0
    loader.close()
    return batches


@pytest.mark.grid
@pytest.mark.parametrize("factor", [1, 2.37])
@pytest.mark.parametrize(("point", "hold"), ALL + WHOLE)
@pytest.mark.parametrize("kind", sorted(EXAMPLES.keys() - {"unpicklable"}))
def test_examples_of_any_kind_are_the_same_from_the_cache(kind, point, hold, factor):
    make = Loaded if hold == "whole" else Kind
    expected = delivered(loader_of(make(kind), point, None, factor=factor), 3)
    assert delivered(loader_of(make(kind), point, hold, factor=factor), 3) == expected


@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("factor", [1, 2.37])
@pytest.mark.parametrize(("name", "point", "hold"), [(name, *each) for name in DATASETS for each in DATASETS[name][1]])
def test_data_sets_of_any_kind_give_the_same_through_the_cache(tmp_path, name, point, hold, factor, workers):
    make, collate = DATASETS[name][0], default_collate if name == "preallocated" else list

    def run(hold):
        loader = loader_of(make(tmp_path), point, hold, factor=factor, workers=workers, collate=collate)
        return loader.insertion_point, delivered(loader, 3)

    assert run(hold) == run(None)


@pytest.mark.grid
@pytest.mark.parametrize("shared", [0.3, 0.7])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("point", "hold"), ALL)
def test_a_cache_for_a_part_of_the_data_gives_the_same(point, hold, workers, shared):
    data = Wide(int(2**20 / shared / 24))
    expected = delivered(loader_of(data, point, None, factor=1.5, workers=workers), 3)
    loader = loader_of(data, point, hold, factor=1.5, workers=workers, size="1MiB")
    assert delivered(loader, 3) == expected
    assert 0 < loader.cache_counts.examples < 24


class Wide(StagedDataset):
    """Large examples."""

    def __init__(self, width):
        self.width = width

    def read(self, index):
        return bytes([index]) * self.width

    def decode(self, raw):
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    def augment(self, example):
        return example[: int(torch.randint(1, 50, ()))] + torch.randint(9, (1,))

    def __len__(self):
        return 24


# --- resumed -------------------------------------------------------------------------------------------------------------


@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("point", "hold"), ALL + WHOLE)
@pytest.mark.parametrize(("saved_with", "resumed_with"), [(True, True), (True, False), (False, True)])
def test_a_run_resumed_in_the_middle_of_a_pass_goes_on_as_without_a_cache(point, hold, workers, saved_with, resumed_with):
    make = (lambda: Loaded("dataclass")) if hold == "whole" else (lambda: Kind("tensor"))
    assert_resumes(make, point, hold, workers, saved_with=saved_with, resumed_with=resumed_with)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["batched", "batched, whole", "preallocated", "nested", "misfits"])
def test_a_resumed_run_of_data_sets_that_read_whole_batches_or_lead_to_others_goes_on_as_without_a_cache(name, workers):
    make, uses = DATASETS[name]
    point, hold = uses[-1] if name == "misfits" else uses[0]
    collate = default_collate if name == "preallocated" else list
    assert_resumes(lambda: make(None), point, hold, workers, collate=collate)


@pytest.mark.parametrize("workers", [0, 2])
def test_examples_that_are_read_again_keep_their_values_where_the_next_call_reads_into_the_same_memory(workers):
    make = DATASETS["preallocated"][0]
    options = {"collate": default_collate, "saved_with": False, "resumed_with": False}
    assert_resumes(lambda: make(None), "after_augmentation", None, workers, **options)


def assert_resumes(make, point, hold, workers, *, saved_with=True, resumed_with=True, collate=list):
    options = {"factor": 2.37, "workers": workers, "collate": collate}
    plain = loader_of(make(), point, None, **options)
    whole = delivered(plain, 4)
    for stop in (1, len(whole) // 2 + 1):
        first = loader_of(make(), point, hold if saved_with else None, **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*example .* does not fit the split of the data set", UserWarning)
            left = stop
            while left:
                left -= len(list(itertools.islice(iter(first), left)))
        state = first.state_dict()
        first.close()
        resumed = loader_of(make(), point, hold if resumed_with else None, **options)
        resumed.load_state_dict(state)
        rest = []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*example .* does not fit the split of the data set", UserWarning)
            while len(rest) < len(whole) - stop:
                rest += [(plain_values(batch[0]), resumed.last_batch_counts.fresh) for batch in resumed]
        resumed.close()
        assert rest[: len(whole) - stop] == whole[stop:]
