"""Counts are exact, with real workers, seen from the data set.

Every read has a number of its own there: a fresh example is one whose number has not been seen before.
"""

import math
from collections import Counter

import pytest
from loader_cases import POINTS, PREFETCH_DEPTH, LoggedDataset, ReadLog, case_id, pairwise, plain_sizes
from torch.utils.data import DataLoader

from lightning_echo import EchoCounts, EchoLoader

BATCH_SIZE, EPOCHS = 8, 3


CASES = pairwise(
    factor=(1, 2.37),
    point=POINTS,
    workers=(0, 2),
    length=(64, 61),  # 8 divides one of them
    drop_last=(False, True),
    reuse=("each", "memory"),
)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_counts_batch_sizes_source_calls_and_passes_are_exact(case, tmp_path):
    dataset = LoggedDataset(case["length"], ReadLog(tmp_path / "reads"))
    options = {"shuffle": True, "num_workers": case["workers"], "drop_last": case["drop_last"]}
    plain = DataLoader(dataset, BATCH_SIZE, **options)
    loader = EchoLoader(plain, case["factor"], insertion_point=case["point"], reuse=case["reuse"], seed=3)
    at_construction = len(dataset.log.entries())
    sizes = plain_sizes(case["length"], BATCH_SIZE, case["drop_last"])
    by_batches = case["point"] == "after_batching"
    seen, uses, fresh, fresh_sizes, delivered = set(), Counter(), [], [], 0
    for _ in range(EPOCHS):
        found = []
        for batch in loader:
            examples = [(index, read) for index, read, _ in batch.tolist()]
            new = [(index, read) for index, read in examples if read not in seen]
            assert loader.last_batch_counts == EchoCounts(len(new), len(examples) - len(new), 0)
            found.append(len(examples))
            delivered += len(examples)
            seen.update(read for _, read in new)
            uses.update(read for _, read in examples)
            fresh += new
            fresh_sizes += [len(new)] if new else []
            assert loader.counts == EchoCounts(len(fresh), delivered - len(fresh), 0)
        assert len(found) == len(sizes)
        if not by_batches:  # there a batch is delivered as it was read, the short one too
            assert found == sizes
    loader.close()
    if case["reuse"] == "each" or case["factor"] == 1:  # from memory an example may be drawn more often
        assert max(uses.values()) <= math.ceil(case["factor"])
    if by_batches:
        assert fresh_sizes == [sizes[i % len(sizes)] for i in range(len(fresh_sizes))]
        assert abs(len(fresh_sizes) - EPOCHS * len(sizes) / case["factor"]) <= loader.buffer_size
    else:
        assert abs(len(fresh) - delivered / case["factor"]) <= loader.buffer_size
    for start in range(0, len(fresh), sum(sizes)):
        of_pass = [index for index, _ in fresh[start : start + sum(sizes)]]
        assert len(set(of_pass)) == len(of_pass)

    entries = dataset.log.entries()
    looked_at = {index for _, index in entries[:at_construction]}
    assert len(looked_at) <= 8  # spread over the data, since examples differ in their sizes
    read = entries[at_construction:]
    assert len(set(read)) == len(read)
    assert {(read, index) for index, read in fresh} <= set(read)
    in_flight = (2 * case["workers"] + PREFETCH_DEPTH) * BATCH_SIZE if case["workers"] else 0
    assert 0 <= len(read) - loader.counts.fresh - loader.counts.refetched <= in_flight
