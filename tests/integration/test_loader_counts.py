"""Counts are exact, with real workers, seen from the data set.

Every read has a number of its own there: a fresh example is one whose number has not been seen before.
"""

import math
from collections import Counter

import pytest
import torch
from loader_cases import (
    POINTS,
    PREFETCH_DEPTH,
    LoggedDataset,
    ReadLog,
    Values,
    case_id,
    pairwise,
    plain_sizes,
)
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_echo import EchoCounts, EchoLoader

BATCH_SIZE, EPOCHS = 8, 4
CASES = pairwise(
    factor=(1, 1.5, 2, 2.37, 4, 8),
    workers=(0, 1, 2, 3),
    length=(64, 61),  # 8 divides one of them
    order=("sequential", "shuffle", "weighted", "subset"),
    drop_last=(False, True),
    point=POINTS,
    reuse=("each", "memory"),
)


def sampler_of(order, length):
    """The user's sampler, or None, and how many indices it yields."""
    if order == "weighted":
        weights = torch.arange(1.0, length + 1)
        return WeightedRandomSampler(weights, length, generator=torch.Generator().manual_seed(5)), length
    if order == "subset":
        indices = range(0, length, 1 if length < 64 else 2)  # 61 or 32 of them
        return SubsetRandomSampler(indices, generator=torch.Generator().manual_seed(5)), len(indices)
    return None, length


def loader_of(case, dataset):
    sampler, _ = sampler_of(case["order"], case["length"])
    return DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        sampler=sampler,
        shuffle=case["order"] == "shuffle" if sampler is None else None,
        num_workers=case["workers"],
        drop_last=case["drop_last"],
    )


def run(case, dataset):
    """The delivered examples of each batch, by epoch, the counts of each batch, and the log's length at construction."""
    loader = EchoLoader(loader_of(case, dataset), case["factor"], insertion_point=case["point"], reuse=case["reuse"], seed=3)
    at_construction = len(dataset.log.entries())
    batches, counts = [[] for _ in range(EPOCHS)], []
    for epoch in batches:
        for batch in loader:
            epoch.append(batch[:, :2].tolist())
            counts.append(loader.last_batch_counts)
    loader.close()
    return loader, batches, counts, at_construction


def test_covering_sample_holds_every_pair_of_values():
    values = {name: {case[name] for case in CASES} for name in CASES[0]}
    for a in values:
        for b in values:
            if a != b:
                assert {(case[a], case[b]) for case in CASES} == {(x, y) for x in values[a] for y in values[b]}
    assert len(values["factor"]) == 6
    assert len(values["workers"]) == 4


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_counts_batch_sizes_and_source_calls_are_exact(case, tmp_path):
    dataset = LoggedDataset(case["length"], ReadLog(tmp_path / "reads"))
    loader, batches, counts, at_construction = run(case, dataset)
    _, length = sampler_of(case["order"], case["length"])
    sizes = plain_sizes(length, BATCH_SIZE, case["drop_last"])
    by_batches = case["point"] == "after_batching"
    assert [len(epoch) for epoch in batches] == [len(sizes)] * EPOCHS
    if not by_batches:  # there a batch is delivered as it was read, the short one too
        assert [[len(batch) for batch in epoch] for epoch in batches] == [sizes] * EPOCHS

    seen, uses, fresh, fresh_sizes = set(), Counter(), [], []
    for batch, count in zip((batch for epoch in batches for batch in epoch), counts, strict=True):
        new = [(index, read) for index, read in batch if read not in seen]
        assert count == EchoCounts(len(new), len(batch) - len(new), 0)
        seen.update(read for _, read in new)
        uses.update(read for _, read in batch)
        fresh += new
        fresh_sizes += [len(new)] if new else []
    delivered = sum(len(batch) for epoch in batches for batch in epoch)
    assert loader.counts == EchoCounts(len(fresh), delivered - len(fresh), 0)
    if case["reuse"] == "each" or case["factor"] == 1:  # from memory an example may be drawn more often
        assert max(uses.values()) <= math.ceil(case["factor"])
    if by_batches:
        assert fresh_sizes == [sizes[i % len(sizes)] for i in range(len(fresh_sizes))]
        assert abs(len(fresh_sizes) - EPOCHS * len(sizes) / case["factor"]) <= loader.buffer_size
    else:
        assert abs(len(fresh) - delivered / case["factor"]) <= loader.buffer_size

    entries = dataset.log.entries()
    looked_at = {index for _, index in entries[:at_construction]}
    assert len(looked_at) <= 8  # spread over the data, since examples differ in their sizes
    read = entries[at_construction:]
    assert len(set(read)) == len(read)
    assert {(read, index) for index, read in fresh} <= set(read)
    in_flight = (2 * case["workers"] + PREFETCH_DEPTH) * BATCH_SIZE if case["workers"] else 0
    assert 0 <= len(read) - loader.counts.fresh - loader.counts.refetched <= in_flight


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_fresh_examples_are_whole_passes_of_the_users_order(case, tmp_path):
    dataset = LoggedDataset(case["length"], ReadLog(tmp_path / "reads"))
    _, batches, _, _ = run(case, dataset)
    examples = [example for epoch in batches for batch in epoch for example in batch]
    fresh = [index for index, _ in dict.fromkeys(map(tuple, examples))]
    _, length = sampler_of(case["order"], case["length"])
    kept = sum(plain_sizes(length, BATCH_SIZE, case["drop_last"]))
    twin, _ = sampler_of(case["order"], case["length"])
    for start in range(0, len(fresh), kept):
        delivered = fresh[start : start + kept]
        if case["order"] == "sequential":
            assert delivered == list(range(len(delivered)))
        elif case["order"] == "weighted":
            asked_for = list(twin)
            if case["factor"] == 1:
                assert delivered == asked_for[: len(delivered)]
            elif len(delivered) == length:
                assert Counter(delivered) == Counter(asked_for)
        else:
            assert len(set(delivered)) == len(delivered)
            assert set(delivered) <= set(range(case["length"]) if twin is None else twin.indices)


@pytest.mark.parametrize("workers", [0, 2])
def test_counts_say_the_same_at_every_batch_whatever_the_workers_have_planned_ahead(workers):
    loader = EchoLoader(
        DataLoader(Values(64), batch_size=8, num_workers=workers), 4, insertion_point="after_augmentation", seed=0
    )
    delivered = EchoCounts()
    assert loader.counts == loader.last_batch_counts == delivered
    for number, _ in enumerate(loader, 1):
        delivered += loader.last_batch_counts
        assert loader.counts == delivered
        assert loader.counts.delivered == 8 * number


def test_full_pass_epochs_have_factor_times_as_many_steps_and_deliver_a_whole_pass_of_fresh_examples():
    loader = EchoLoader(
        DataLoader(Values(64), batch_size=8, num_workers=2),
        2.5,
        insertion_point="after_augmentation",
        epoch_length="full_pass",
        seed=0,
    )
    assert len(loader) == 20
    for epoch in range(1, 4):
        assert len(list(loader)) == 20
        assert abs(loader.counts.fresh - 64 * epoch) <= loader.buffer_size


class OwnBatches(BatchSampler):
    """Composes its batches itself: far apart indices together, of changing sizes."""

    def __init__(self, length):
        super().__init__(SequentialSampler(range(length)), 4, False)
        self.batches = [list(range(start, length, 5)) for start in range(5)]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return 5


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_users_own_batch_sampler_are_echoed_whole(workers, tmp_path):
    dataset = LoggedDataset(23, ReadLog(tmp_path / "reads"))
    plain = DataLoader(dataset, batch_sampler=OwnBatches(23), num_workers=workers)
    loader = EchoLoader(plain, 2, seed=0)
    assert loader.insertion_point == "after_batching"
    seen, fresh = set(), []
    for _ in range(4):
        for batch in loader:
            reads = frozenset(batch[:, 1].tolist())
            assert loader.last_batch_counts == (EchoCounts(0, len(batch)) if reads in seen else EchoCounts(len(batch), 0))
            if reads not in seen:
                fresh.append(batch[:, 0].tolist())
            seen.add(reads)
    passes = [OwnBatches(23).batches[i % 5] for i in range(len(fresh))]
    assert fresh == passes
    assert 9 <= len(fresh) <= 10 + loader.buffer_size


@pytest.mark.parametrize("point", ["after_read", "before_augmentation", "after_augmentation"])
def test_an_example_level_point_is_refused_with_a_users_own_batch_sampler(point):
    plain = DataLoader(Values(23), batch_sampler=OwnBatches(23))
    with pytest.raises(ValueError, match=rf"insertion_point='{point}'.*batch_sampler of its own.*Use 'after_batching' or 'auto'"):
        EchoLoader(plain, 2, insertion_point=point)
