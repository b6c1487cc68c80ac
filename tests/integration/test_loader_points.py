"""What an echo repeats at each insertion point, that no index is twice in a batch, and how uses are spread."""

import math
import weakref
from collections import defaultdict

import pytest
import torch
from loader_cases import POINTS, LoggedDataset, ReadLog, Values, case_id, epochs, pairwise
from torch.utils.data import DataLoader, Dataset

from lightning_echo import EchoLoader, InsertionPoint

RULES = ("each", "memory")


def delivered(tmp_path, point, workers, reuse, factor=4, count=3):
    dataset = LoggedDataset(40, ReadLog(tmp_path / "reads"))
    plain = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=workers)
    loader = EchoLoader(plain, factor, insertion_point=point, reuse=reuse, seed=2)
    return [batch.tolist() for epoch in epochs(loader, count) for batch in epoch]


def by_read(batches):
    """The uses of each read example: (index, noise) in order."""
    uses = defaultdict(list)
    for batch in batches:
        for index, read, noise in batch:
            uses[read].append((index, noise))
    return uses


def check_most_uses(uses, factor, reuse):
    """By the rule "each" the factor, rounded up; by "memory" chance decides, and among dozens some are drawn more often."""
    assert max(uses) == math.ceil(factor) if reuse == "each" else max(uses) > math.ceil(factor)


@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize("workers", [0, 2])
def test_before_augmentation_uses_share_the_source_and_differ_by_augmentation(tmp_path, workers, reuse):
    uses = by_read(delivered(tmp_path, "before_augmentation", workers, reuse))
    check_most_uses(map(len, uses.values()), 4, reuse)
    for several in uses.values():
        assert len({index for index, _ in several}) == 1
        assert len({noise for _, noise in several}) == len(several)
    noises = [noise for several in uses.values() for _, noise in several]
    assert len(set(noises)) == len(noises), "no two uses of anything share their noise"


@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize("workers", [0, 2])
def test_after_augmentation_uses_are_equal(tmp_path, workers, reuse):
    uses = by_read(delivered(tmp_path, "after_augmentation", workers, reuse))
    check_most_uses(map(len, uses.values()), 4, reuse)
    assert {len(set(several)) for several in uses.values()} == {1}
    assert len({several[0][1] for several in uses.values()}) == len(uses), "source and augmentation ran once for each"


@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("factor", [2, 4, 2.5])
def test_after_batching_batches_repeat_whole_and_evenly_interleaved(tmp_path, workers, factor, reuse):
    batches = delivered(tmp_path, "after_batching", workers, reuse, factor, count=10)
    first_use, uses = {}, defaultdict(int)
    for number, batch in enumerate(batches):
        key = tuple(map(tuple, batch))
        first_use.setdefault(key, number)
        uses[key] += 1
    check_most_uses(uses.values(), factor, reuse)
    assert len({example[1] for key in first_use for example in key}) == 8 * len(first_use), "batches share no read"
    gaps = [b - a for a, b in zip(list(first_use.values()), list(first_use.values())[1:], strict=False)]
    steady = gaps[4:]  # by the rule "each" the buffer of four batches is filled by then
    assert set(steady) <= {math.floor(factor), math.ceil(factor)}, "between fresh batches always as many echoes"


@pytest.mark.parametrize(
    "case",
    pairwise(
        factor=(1.5, 2, 2.37, 4, 8),
        workers=(0, 1, 2, 3),
        batch_size=(4, 5),
        shuffle=(True, False),
        drop_last=(True, False),
        surplus=(0, 3),
        point=("after_read", "before_augmentation", "after_augmentation"),
        reuse=RULES,
    ),
    ids=case_id,
)
def test_no_index_is_twice_in_a_batch_also_where_passes_meet(case):
    batch_size = case["batch_size"]
    buffer_size = 2 * batch_size * max(case["workers"], 1)
    length = buffer_size + batch_size + case["surplus"]  # the shortest pass for which this is promised, and an uneven one
    if case["drop_last"]:
        length = -(-length // batch_size) * batch_size + case["surplus"]  # what is dropped does not count
    plain = DataLoader(
        Values(length),
        batch_size=batch_size,
        shuffle=case["shuffle"],
        drop_last=case["drop_last"],
        num_workers=case["workers"],
    )
    asked = None if case["reuse"] == "each" else buffer_size  # by default "memory" holds half of what this pass allows
    loader = EchoLoader(plain, case["factor"], insertion_point=case["point"], buffer_size=asked, reuse=case["reuse"], seed=4)
    assert loader.buffer_size == buffer_size
    for epoch in epochs(loader, 15):
        for batch in epoch:
            assert len(set(batch["index"].tolist())) == len(batch["index"])
    assert loader.counts.fresh > length, "at least one pass has met the next"


@pytest.mark.grid
@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("factor", [1.5, 2, 2.37, 4, 8])
def test_the_share_of_fresh_examples_is_level_after_warm_up(workers, factor, reuse):
    loader = EchoLoader(
        DataLoader(Values(400), batch_size=8, shuffle=True, num_workers=workers),
        factor,
        insertion_point="after_augmentation",
        buffer_size=16 * max(workers, 1),
        reuse=reuse,
        seed=1,
    )
    fresh = []
    for _ in range(2):
        for _ in loader:
            fresh.append(loader.last_batch_counts.fresh)
    assert set(fresh[2 * max(workers, 1) * math.ceil(factor) :]) <= {math.floor(8 / factor), math.ceil(8 / factor)}


def test_the_point_is_a_string_and_a_member():
    loader = EchoLoader(DataLoader(Values(8), batch_size=4), 2)
    assert loader.insertion_point is InsertionPoint.before_augmentation
    assert loader.insertion_point == "before_augmentation"
    assert EchoLoader(DataLoader(Values(8), batch_size=4), 2, insertion_point=InsertionPoint.after_batching).insertion_point == (
        "after_batching"
    )


LIVE = weakref.WeakSet()  # in each process, the examples that were read or copied there and are still held


class Tracked:
    def __init__(self, index):
        self.index = index
        LIVE.add(self)

    def __deepcopy__(self, memo):
        return Tracked(self.index)


class TrackedDataset(Dataset):
    def __getitem__(self, index):
        return Tracked(index)

    def __len__(self):
        return 200


def count_held(examples):
    """How many examples the process holds beside those that are handed out for good."""
    return len(LIVE) - sum(example in LIVE for example in examples)


@pytest.mark.grid
@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize("factor", [1, 1.5, 4, 8])
@pytest.mark.parametrize("workers", [0, 2])
def test_never_more_examples_are_held_than_the_buffer_allows_and_none_that_are_used_up(workers, factor, reuse):
    plain = DataLoader(TrackedDataset(), batch_size=8, shuffle=True, num_workers=workers, collate_fn=count_held)
    loader = EchoLoader(plain, factor, insertion_point="after_augmentation", reuse=reuse, seed=1, buffer_size=24)
    held = [held for epoch in epochs(loader, 4) for held in epoch]
    share = 24 // max(workers, 1)
    assert max(held) <= share
    assert max(held) > share // 4 if factor > 1.5 else True
    loader.factor = 1
    held = [held for epoch in epochs(loader, 2) for held in epoch]
    assert held[12:] == [0] * 38, "at factor 1 nothing is held"


def test_a_batch_is_exactly_what_the_collate_function_made():
    def collate(examples):
        return {
            "indices": tuple(example["index"] for example in examples),
            "sum": torch.stack([e["value"] for e in examples]).sum(),
        }

    for point in POINTS:
        loader = EchoLoader(DataLoader(Values(12), batch_size=4, collate_fn=collate), 2, insertion_point=point)
        for batch in loader:
            assert list(batch) == ["indices", "sum"]
            assert batch["sum"].item() == 3 * sum(batch["indices"])
