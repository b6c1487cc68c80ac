"""The counts of a cache are exact: what is held is never read again, and what is not held is read each time.

The reads are counted in the user's own data set, in the process that reads. The expectation is a model: the order of the fresh
examples, and which of them are held.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from cached_data_cases import READS, Told, note_read
from loader_cases import case_id, pairwise
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_echo import EchoLoader

EXAMPLE_BYTES = 2**16
COUNT = 48


class Sized(Dataset):
    """Examples of sizes of its own, which say their index."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __getitem__(self, index):
        note_read(int(index) % COUNT)
        return torch.full((self.sizes[index],), int(index) % COUNT, dtype=torch.uint8)

    def __len__(self):
        return len(self.sizes)


def indices_of(batch):
    return [int(example[0]) for example in batch[0]]


class Ledger:
    """What a loader has delivered, and what the user's data set has read for it, process by process.

    Args:
        loader: An echo loader whose collate function is `Told`.
        pass_length: Fresh examples in a pass.
    """

    def __init__(self, loader, pass_length):
        self.loader, self.pass_length = loader, pass_length
        self.fresh = []  # of each batch: the process, its fresh indices, and what was read for it
        self.batches = 0

    def deliver(self, passes):
        """Takes batches until so many passes of fresh examples were delivered in all."""
        while sum(len(fresh) for _, fresh, _ in self.fresh) < passes * self.pass_length:
            for batch in self.loader:
                count = self.loader.last_batch_counts.fresh
                if self.loader.insertion_point == "after_batching":
                    count = count and len(batch[0])
                self.fresh.append((batch[1], indices_of(batch)[:count], batch[2] if count else []))
        return self

    def held(self):
        """The indices that the cache holds, by its own index."""
        arena = self.loader._setting.cache._opened.store().arena
        return {key for key in range(arena.keys - 1) if key in arena}

    def check(self):
        """Compares counts and reads with the model, from the first batch to the last one; returns the hits."""
        held, counts = self.held(), self.loader.cache_counts
        assert counts.examples == len(held)
        seen, hits, misses = set(), Counter(), 0
        for process, fresh, read in self.fresh:
            hit = Counter(index for index in fresh if index in held & seen)
            missed = Counter(fresh) - hit
            audits = powers_of_ten(hits[process] + hit.total()) - powers_of_ten(hits[process])
            hits[process] += hit.total()
            misses += missed.total()
            assert not missed - Counter(read), "each miss is read"
            audited = Counter(read) - missed
            assert audited <= hit, "what is read beside the misses are hits"
            assert audited.total() == audits, "the 1st, 10th, 100th hit of the process"
            seen |= set(fresh)
        assert (counts.hits, counts.misses) == (hits.total(), misses)
        return hits.total()


def powers_of_ten(count):
    """How many of 1, 10, 100 ... are at most ``count``: the audits of a process with so many hits."""
    return len(str(count)) if count else 0


def ledger(dataset, factor, size, *, workers=0, point="after_augmentation", hold="whole", passes=4, pass_length=None, **options):
    """Delivers some passes, and checks them.

    The order is that of the data set if several workers read: then an example is never asked for again before it is held.
    """
    if not options.keys() & {"sampler", "batch_sampler"}:
        options["shuffle"] = workers < 2
    if "batch_sampler" not in options:
        options["batch_size"] = 5
    plain = DataLoader(dataset, num_workers=workers, collate_fn=Told(), **options)
    echoed = EchoLoader(plain, factor, insertion_point=point, seed=2, cache={"size": size, "hold": hold})
    READS.clear()
    book = Ledger(echoed, pass_length or (COUNT // 5 * 5 if options.get("drop_last") else COUNT))
    try:
        book.deliver(passes)
        book.hits = book.check()
    finally:
        echoed.close()
    return book


SIZES = {
    "half": ([EXAMPLE_BYTES] * COUNT, "1.5MiB"),
    "all": ([EXAMPLE_BYTES] * COUNT, "8MiB"),
    "of very different sizes": ([10 if i % 3 else 400_000 // (1 + i % 7) for i in range(COUNT)], "1.5MiB"),
}


@pytest.mark.parametrize(
    "case",
    pairwise(
        workers=(0, 1, 2, 3),
        factor=(1, 2.37, 4),
        size=tuple(SIZES),
        point=("after_augmentation", "after_batching"),
        drop_last=(False, True),
        persistent=(False, True),
    ),
    ids=case_id,
)
def test_hits_are_the_fresh_reads_of_what_is_held_and_all_else_is_read(case):
    case = dict(case)
    sizes, size = SIZES[case.pop("size")]
    case["persistent_workers"] = case.pop("persistent") and case["workers"] > 0
    book = ledger(Sized(sizes), case.pop("factor"), size, **case)
    assert book.hits


SAMPLERS = {
    "with replacement": lambda data: {"sampler": RandomSampler(data, True, 40, generator=torch.Generator().manual_seed(3))},
    "weighted": lambda data: {
        "sampler": WeightedRandomSampler(torch.arange(1.0, COUNT + 1), 40, generator=torch.Generator().manual_seed(3))
    },
    "subset": lambda data: {"sampler": SubsetRandomSampler(range(3, 43), generator=torch.Generator().manual_seed(3))},
    "distributed": lambda data: {"sampler": DistributedSampler(data, 2, 1, drop_last=True)},
    "own batches": lambda data: {"batch_sampler": BatchSampler(SequentialSampler(data), 7, False)},
    "tensors": lambda data: {"sampler": torch.arange(COUNT - 1, 7, -1)},
    "numpy": lambda data: {"sampler": np.arange(8, COUNT)},
}


@pytest.mark.grid
@pytest.mark.parametrize("factor", [1, 2.37])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", SAMPLERS)
def test_whatever_the_sampler_yields_each_visit_of_what_is_held_is_a_hit(name, workers, factor):
    data = Sized([EXAMPLE_BYTES] * COUNT)
    options = SAMPLERS[name](data)
    length = len(options["sampler"]) if "sampler" in options else COUNT
    point = "after_batching" if name == "own batches" else "after_augmentation"
    book = ledger(data, factor, "1.5MiB", workers=workers, point=point, pass_length=length, **options)
    assert book.hits


@pytest.mark.parametrize("hold", ["raw", "loaded"])
@pytest.mark.parametrize("point", ["after_read", "before_augmentation", "after_augmentation"])
def test_reads_are_counted_alike_whatever_is_held_and_wherever_echoes_are_made(point, hold):
    if (point, hold) != ("after_read", "loaded"):
        assert ledger(Staged([EXAMPLE_BYTES] * COUNT), 2.37, "1.5MiB", point=point, hold=hold).hits
        assert ledger(Staged([EXAMPLE_BYTES] * COUNT), 1, "8MiB", workers=2, point=point, hold=hold).hits


class Staged(Sized):
    """The same in stages; what is decoded is as large as what is read."""

    def read(self, index):
        return bytes(super().__getitem__(index).numpy())

    def decode(self, raw):
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    def augment(self, example):
        return torch.cat([example[:1], torch.randint(100, (1,))])

    def __getitem__(self, index):
        return self.augment(self.decode(self.read(index)))


class Calls(Sized):
    """Reads whole batches."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("point", ["after_augmentation", "after_batching"])
def test_a_data_set_that_reads_whole_batches_is_asked_for_what_is_missing_alone(point):
    for workers in (0, 2):
        assert ledger(Calls([EXAMPLE_BYTES] * COUNT), 2.37, "1.5MiB", workers=workers, point=point).hits


@pytest.mark.rest_of_grid
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_inherit_nothing_share_the_cache(method):
    book = ledger(Sized([EXAMPLE_BYTES] * COUNT), 2, "1.5MiB", workers=2, persistent_workers=True, multiprocessing_context=method)
    assert book.hits
    assert len({process for process, _, _ in book.fresh}) == 2


@pytest.mark.parametrize("workers", [2, 3])
def test_several_workers_and_a_shuffled_order_have_as_many_hits_as_are_held_in_each_pass_once_it_is_full(workers):
    data = Sized([EXAMPLE_BYTES] * COUNT)
    plain = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers, collate_fn=Told())
    loader = EchoLoader(plain, 1, insertion_point="after_augmentation", seed=2, cache={"size": "1.5MiB", "hold": "whole"})
    hits = []
    for _ in range(5):
        read = [index for batch in loader for index in batch[2]]
        hits.append(loader.cache_counts.hits)
        counts = loader.cache_counts
        assert counts.hits + counts.misses == loader.counts.fresh
    assert counts.is_full
    assert 0 < counts.examples < COUNT
    assert [late - early for early, late in itertools.pairwise(hits)][1:] == [counts.examples] * 3
    assert COUNT - counts.examples <= len(read) <= COUNT - counts.examples + workers, "the rest, and an audit per worker at most"
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_budget_below_one_example_holds_nothing_and_says_so_once(workers):
    plain = DataLoader(Sized([1_200_000] * 8), batch_size=2, shuffle=True, num_workers=workers, collate_fn=Told())
    loader = EchoLoader(plain, 1, cache={"size": "1MiB", "hold": "whole"})
    READS.clear()

    def deliver():
        for _ in range(3):
            assert sorted(index for batch in loader for index in batch[2]) == list(range(8))
        loader.close()
        list(loader)

    with pytest.warns(UserWarning, match=r"holds nothing: an example takes 1\.14 MiB\. Give it a larger size") as said:
        deliver()
    assert len([each for each in said if "holds nothing" in str(each.message)]) == 1  # Python 3.12 and newer also warn of fork
    counts = loader.cache_counts
    assert (counts.examples, counts.bytes, counts.hits, counts.misses) == (0, 0, 0, 32)
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_from_the_second_pass_on_nothing_is_read_where_all_fits_but_for_the_audits(workers):
    sizes, _ = SIZES["all"]
    book = ledger(Sized(sizes), 1, "8MiB", workers=workers, passes=6)
    later = [read for _, _, read in book.fresh[-(-COUNT // 5) :]]
    audits = sum(map(len, later))
    assert audits <= 3 * max(workers, 1)
    assert book.loader.cache_counts.examples == COUNT
    assert not book.loader.cache_counts.is_full


@pytest.mark.parametrize("point", ["after_augmentation", "after_batching"])
@pytest.mark.parametrize("kind", [Sized, Calls], ids=["one by one", "whole batches"])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_read_again_after_a_resume_counts_as_neither_hit_nor_miss(kind, workers, point):
    def make():
        plain = DataLoader(
            kind([EXAMPLE_BYTES] * COUNT), batch_size=5, shuffle=True, num_workers=workers, collate_fn=Told(), drop_last=True
        )
        return EchoLoader(plain, 2.37, insertion_point=point, seed=2, cache={"size": "1.5MiB", "hold": "whole"})

    first = make()
    batches = list(itertools.islice(iter(first), 7))
    assert batches
    state = first.state_dict()
    before = first.cache_counts
    assert before.hits + before.misses == first.counts.fresh
    first.close()
    resumed = make()
    resumed.load_state_dict(state)
    for _ in range(6):
        list(resumed)
        counts = resumed.cache_counts
        assert counts.hits + counts.misses == resumed.counts.fresh - first.counts.fresh
    assert resumed.counts.refetched > 0
    assert counts.hits > 0
    resumed.close()


def test_a_loader_that_is_closed_and_goes_on_counts_what_is_delivered_once():
    plain = DataLoader(Sized([EXAMPLE_BYTES] * COUNT), batch_size=4, shuffle=True, num_workers=2, collate_fn=Told())
    loader = EchoLoader(plain, 1, insertion_point="after_augmentation", seed=2, cache={"size": "8MiB", "hold": "whole"})
    for stop in (3, 5, 40, 2, 30):
        list(itertools.islice(iter(loader), stop))
        loader.close()
        counts = loader.cache_counts
        assert counts.hits + counts.misses == loader.counts.fresh
    assert counts.examples <= COUNT
    assert counts.hits > 0


def test_indices_that_are_no_numbers_are_read_each_time_and_that_is_said():
    data = Named()
    plain = DataLoader(data, batch_size=4, sampler=sorted(data.examples), collate_fn=Told())
    loader = EchoLoader(plain, 1, insertion_point="after_augmentation", cache={"size": "1MiB", "hold": "whole"})
    READS.clear()
    with pytest.warns(UserWarning, match="cannot hold example 'key 00', nor others whose index is not a number") as said:
        read = [index for _ in range(3) for batch in loader for index in batch[2]]
    assert read == 3 * sorted(data.examples)
    assert len(said) == 1
    counts = loader.cache_counts
    assert (counts.examples, counts.hits, counts.misses) == (0, 0, 36)


class Named(Dataset):
    """Its indices are names; numbers work, too."""

    def __init__(self):
        self.examples = {f"key {number:02}": number for number in range(12)}

    def __getitem__(self, name):
        note_read(name)
        return self.examples[name if isinstance(name, str) else f"key {name:02}"]

    def __len__(self):
        return len(self.examples)
