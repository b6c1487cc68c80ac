"""The counts of a cache are exact: what is held is never read again, what is not is read each time (by a model of both)."""

import itertools
from collections import Counter

import pytest
import torch
from cached_data_cases import READS, note_read, told
from loader_cases import case_id, pairwise
from torch.utils.data import (
    DataLoader,
    Dataset,
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
    """What an echo loader with `told` has delivered and read, by process; ``pass_length``: the fresh examples of a pass."""

    def __init__(self, loader, pass_length):
        self.loader, self.pass_length = loader, pass_length
        self.fresh = []  # of each batch: the process, its fresh indices, and what was read for it

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


def ledger(dataset, factor, size, *, workers=0, point="after_augmentation", hold="whole", passes=3, pass_length=None, **options):
    """Delivers some passes, and checks them.

    The order is that of the data set if several workers read: then an example is never asked for again before it is held.
    """
    if not options.keys() & {"sampler", "batch_sampler"}:
        options["shuffle"] = workers < 2
    if "batch_sampler" not in options:
        options["batch_size"] = 5
    plain = DataLoader(dataset, num_workers=workers, collate_fn=told, **options)
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
        workers=(0, 2),
        factor=(1, 2.37),
        size=tuple(SIZES),
        point=("after_augmentation", "after_batching"),
        drop_last=(False, True),
    ),
    ids=case_id,
)
def test_hits_are_the_fresh_reads_of_what_is_held_and_all_else_is_read(case):
    case = dict(case)
    sizes, size = SIZES[case.pop("size")]
    case["persistent_workers"] = case["workers"] > 1
    book = ledger(Sized(sizes), case.pop("factor"), size, **case)
    assert book.hits


class Calls(Sized):
    """Reads whole batches."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize(("point", "workers"), [("after_batching", 0), ("after_augmentation", 2)])
def test_a_data_set_that_reads_whole_batches_is_asked_for_what_is_missing_alone(point, workers):
    assert ledger(Calls([EXAMPLE_BYTES] * COUNT), 2.37, "1.5MiB", workers=workers, point=point).hits


@pytest.mark.rest_of_grid
def test_workers_that_inherit_nothing_share_the_cache():
    options = {"workers": 2, "persistent_workers": True, "multiprocessing_context": "spawn"}
    book = ledger(Sized([EXAMPLE_BYTES] * COUNT), 2, "1.5MiB", **options)
    assert book.hits
    assert len({process for process, _, _ in book.fresh}) == 2


def test_several_workers_and_a_shuffled_order_have_as_many_hits_as_are_held_in_each_pass_once_it_is_full():
    data, workers = Sized([EXAMPLE_BYTES] * COUNT), 2
    plain = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers, collate_fn=told)
    loader = EchoLoader(plain, 1, insertion_point="after_augmentation", seed=2, cache={"size": "1.5MiB", "hold": "whole"})
    hits = []
    for _ in range(4):
        read = [index for batch in loader for index in batch[2]]
        hits.append(loader.cache_counts.hits)
        counts = loader.cache_counts
        assert counts.hits + counts.misses == loader.counts.fresh
    assert counts.is_full
    assert 0 < counts.examples < COUNT
    assert [late - early for early, late in itertools.pairwise(hits)][1:] == [counts.examples] * 2
    assert COUNT - counts.examples <= len(read) <= COUNT - counts.examples + workers, "the rest, and an audit per worker at most"
    loader.close()


@pytest.mark.parametrize(("kind", "workers", "point"), [(Sized, 1, "after_batching"), (Calls, 0, "after_augmentation")])
def test_what_is_read_again_after_a_resume_counts_as_neither_hit_nor_miss(kind, workers, point):
    def make():
        options = {"batch_size": 5, "shuffle": True, "num_workers": workers, "drop_last": True}
        plain = DataLoader(kind([EXAMPLE_BYTES] * COUNT), collate_fn=told, **options)
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
    for _ in range(4):
        list(resumed)
        counts = resumed.cache_counts
        assert counts.hits + counts.misses == resumed.counts.fresh - first.counts.fresh
    assert resumed.counts.refetched > 0
    assert counts.hits > 0
    resumed.close()
