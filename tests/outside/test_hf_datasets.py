"""Hugging Face ``datasets``: map-style with ``set_transform``, echoed like any map-style data set, and iterable, a stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from outside_runs import (
    BATCH,
    RULES,
    WORKERS_AND_WAYS,
    assert_an_epoch_is_a_pass,
    assert_counts,
    assert_length,
    assert_resumes_exactly,
    fit,
    passes,
    stamp,
    stamped,
)
from torch.utils.data import DataLoader

datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install 'lightning-echo[test-loaders]'")

LENGTH = 24
SHARDS = 4


def transform(examples: dict[str, list[int]]) -> dict[str, Any]:
    """What ``set_transform`` calls, for several examples at once."""
    return {"index": torch.tensor(examples["index"]), "stamp": torch.tensor([stamp() for _ in examples["index"]])}


def map_style(workers: int, **options: Any) -> Any:
    data = datasets.Dataset.from_dict({"index": list(range(LENGTH - 2))})
    data.set_transform(transform)
    return DataLoader(data, BATCH, shuffle=True, num_workers=workers, **options)


def stream(workers: int, shuffle: bool = False) -> Any:
    data = datasets.Dataset.from_dict({"index": list(range(LENGTH))}).to_iterable_dataset(num_shards=SHARDS)
    if shuffle:
        data = data.shuffle(seed=5, buffer_size=6)
    return DataLoader(data.map(stamped), BATCH, num_workers=workers)


@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize(("workers", "way"), WORKERS_AND_WAYS)
def test_a_map_style_data_set_with_a_transform_is_echoed_in_the_workers(workers: int, way: str, reuse: str) -> None:
    run = fit(lambda: map_style(workers), way=way, epochs=4, reuse=reuse)
    assert run.loader.insertion_point == "after_augmentation"
    assert_counts(run, range(LENGTH - 2), complete=2)
    assert_length(run, 6)


def test_two_epochs_of_a_map_style_data_set_that_drops_its_tail() -> None:
    run = fit(lambda: map_style(2, drop_last=True), epochs=2)
    assert_length(run, 5)
    assert {len(batch) for batch in run.indices} == {BATCH}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_map_style_data_set_resumes_exactly(workers: int, tmp_path: Path) -> None:
    assert_resumes_exactly(lambda: map_style(workers), tmp_path, (1, 6, 13), epochs=3)


@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize(("workers", "way"), WORKERS_AND_WAYS)
def test_a_stream_ends_its_epoch(workers: int, way: str, reuse: str) -> None:
    run = fit(lambda: stream(workers), way=way, epochs=2, reuse=reuse)
    assert run.loader.insertion_point == "after_augmentation"
    assert_an_epoch_is_a_pass(run, range(LENGTH), 2)
    assert_counts(run, range(LENGTH), complete=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_stream_has_another_order_in_each_pass(workers: int) -> None:
    """Its shuffle follows ``set_epoch`` alone."""
    run = fit(lambda: stream(workers, shuffle=True), epochs=3)
    assert_an_epoch_is_a_pass(run, range(LENGTH), 3)
    assert len(set(map(tuple, passes(run, LENGTH)))) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_resumes_exactly(workers: int, tmp_path: Path) -> None:
    """In the second and third pass, too: a loaded state counts for one pass, and only under its own ``set_epoch``."""
    first = len(fit(lambda: stream(workers), epochs=1).indices)
    steps = (1, first - 1, first, first + 3, 2 * first + 2)
    assert_resumes_exactly(lambda: stream(workers), tmp_path, steps, epochs=3)
