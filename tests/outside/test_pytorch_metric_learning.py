"""PyTorch Metric Learning: a sampler that arranges batches, so many examples of each class."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from project_runs import WAYS, assert_epochs, assert_unchanged, train
from torch.utils.data import DataLoader, TensorDataset

pytorch_metric_learning = pytest.importorskip(
    "pytorch_metric_learning", reason="pytorch_metric_learning is not installed: pip install 'lightning-echo[test-outside]'"
)

from pytorch_metric_learning.samplers import MPerClassSampler  # noqa: E402

LENGTH, BATCH, EACH = 24, 8, 2
CLASSES = torch.arange(LENGTH) % 6


def make(workers: int = 2) -> Any:
    data = TensorDataset(torch.arange(LENGTH), CLASSES)
    sampler = MPerClassSampler(CLASSES, EACH, batch_size=BATCH, length_before_new_iter=LENGTH)
    return DataLoader(data, BATCH, sampler=sampler, num_workers=workers)


def see(batch: Any) -> Any:
    return [(number, label) for number, label in zip(*(column.tolist() for column in batch), strict=True)]


def is_arranged(values: list[int]) -> bool:
    return set(Counter(values).values()) == {EACH}


@pytest.mark.parametrize(("workers", "way"), WAYS)
@pytest.mark.parametrize("point", ["after_batching", "auto"])
def test_whole_batches_stay_as_they_were_arranged(point: str, workers: int, way: str) -> None:
    """Single examples are mixed again, since only a part of a batch is fresh: ask for whole batches where classes matter."""
    run = train(lambda: make(workers), see, way=way, epochs=4, insertion_point=point)
    assert_epochs(run, LENGTH // BATCH)
    assert_unchanged(run, dict(enumerate(CLASSES.tolist())))
    values = [use.value for use in run.uses if use.fresh]
    for start in (0, LENGTH):  # what the sampler drew for a pass
        assert all(count % EACH == 0 for count in Counter(values[start : start + LENGTH]).values())
    assert all(is_arranged([use.value for use in batch]) for batch in run.model.batches) is (point == "after_batching")
