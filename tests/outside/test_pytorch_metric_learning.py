"""PyTorch Metric Learning: a sampler that arranges batches, so many examples of each class."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from project_runs import WAYS, assert_epochs, assert_repeatable, assert_unchanged, train
from torch.utils.data import DataLoader, TensorDataset

pytorch_metric_learning = pytest.importorskip(
    "pytorch_metric_learning", reason="pytorch_metric_learning is not installed: pip install 'lightning-echo[test-outside]'"
)

from pytorch_metric_learning.samplers import MPerClassSampler  # noqa: E402

LENGTH, BATCH, EACH = 24, 8, 2
CLASSES = torch.arange(LENGTH) % 6


def make(workers: int) -> Any:
    data = TensorDataset(torch.arange(LENGTH), CLASSES)
    sampler = MPerClassSampler(CLASSES, EACH, batch_size=BATCH, length_before_new_iter=LENGTH)
    return DataLoader(data, BATCH, sampler=sampler, num_workers=workers)


def see(batch: Any) -> Any:
    return [(number, label) for number, label in zip(*(column.tolist() for column in batch), strict=True)]


PLAIN = dict(enumerate(CLASSES.tolist()))


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_whole_batches_stay_as_they_were_arranged(workers: int, way: str) -> None:
    run = train(lambda: make(workers), see, way=way, insertion_point="after_batching")
    assert run.loader.counts.delivered == len(run.uses) == 3 * LENGTH
    assert_epochs(run, LENGTH // BATCH)
    assert_unchanged(run, PLAIN)
    for batch in run.model.batches:
        assert set(Counter(use.value for use in batch).values()) == {EACH}


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_examples_are_mixed_anew_where_they_are_reused_one_by_one(workers: int, way: str) -> None:
    """Only a part of a batch is fresh: ask for whole batches where their classes matter."""
    run = train(lambda: make(workers), see, way=way, epochs=4)
    assert run.loader.insertion_point == "after_augmentation"
    assert run.loader.counts.delivered == len(run.uses) == 4 * LENGTH
    assert_unchanged(run, PLAIN)
    values = [use.value for use in run.uses if use.fresh]
    assert all(one == other for one, other in zip(values[:LENGTH:EACH], values[1:LENGTH:EACH], strict=True))
    for start in (0, LENGTH):  # what the sampler drew for a pass
        assert all(count % EACH == 0 for count in Counter(values[start : start + LENGTH]).values())
    arranged = [set(Counter(use.value for use in batch).values()) == {EACH} for batch in run.model.batches]
    assert not all(arranged)


@pytest.mark.parametrize("workers", [0, 2])
def test_two_runs_with_the_same_seed_draw_the_same_classes(workers: int) -> None:
    assert_repeatable(lambda seed: train(lambda: make(workers), see, epochs=2, seed=seed))
