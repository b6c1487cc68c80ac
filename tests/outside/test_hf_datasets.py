"""Hugging Face ``datasets``: map-style with ``set_transform``, echoed like any map-style data set, and iterable, a stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from project_runs import BATCH, LENGTH, STEPS, WAYS, assert_resumes_exactly, assert_right, see_numbers, train
from torch.utils.data import DataLoader

datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install 'lightning-echo[test-loaders]'")


def transform(examples: dict[str, list[int]]) -> dict[str, Any]:
    """What ``set_transform`` calls, for several examples at once."""
    return {"index": torch.tensor(examples["index"]), "noise": torch.rand(len(examples["index"]))}


def map_style(workers: int) -> Any:
    data = datasets.Dataset.from_dict({"index": list(range(LENGTH))})
    data.set_transform(transform)
    return DataLoader(data, BATCH, shuffle=True, num_workers=workers)


def see_noise(batch: Any) -> Any:
    return zip(batch["index"].tolist(), batch["noise"].tolist(), strict=True)


def stream(workers: int) -> Any:
    data = datasets.Dataset.from_dict({"index": list(range(LENGTH))}).to_iterable_dataset(num_shards=4)
    return DataLoader(data.shuffle(seed=5, buffer_size=6), BATCH, num_workers=workers)


@pytest.mark.parametrize(("workers", "way"), [*WAYS, (2, "loader")])
def test_a_map_style_data_set_with_a_transform_is_echoed_in_the_workers(workers: int, way: str) -> None:
    run = train(lambda: map_style(workers), see_noise, way=way)
    assert_right(run, range(LENGTH), point="after_augmentation", steps=STEPS, noise="reused")


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_a_stream_ends_its_epoch_and_has_another_order_in_each_pass(workers: int, way: str) -> None:
    """Its shuffle follows ``set_epoch`` alone."""
    run = train(lambda: stream(workers), see_numbers, way=way, epoch_length="full_pass")
    assert_right(run, range(LENGTH), point="after_augmentation", passes=3)
    assert len({tuple(run.fresh[start : start + LENGTH]) for start in range(0, 3 * LENGTH, LENGTH)}) == 3


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_a_stream_has_a_state_so_that_epochs_keep_their_steps_and_passes_go_on_in_the_next_one(workers: int, way: str) -> None:
    run = train(lambda: stream(workers), see_numbers, way=way, epochs=7)
    plain = sum(1 for _ in stream(workers))
    assert run.steps[1:] == [plain] * 6
    passes = [run.fresh[start : start + LENGTH] for start in range(0, len(run.fresh), LENGTH)]
    assert [sorted(each) for each in passes[:3]] == [list(range(LENGTH))] * 3
    assert len(set(passes[-1])) == len(passes[-1]), "nothing twice in the pass that was cut short"
    assert len(set(map(tuple, passes[:3]))) == 3, "another order in each pass"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_goes_on_exactly(workers: int, tmp_path: Path) -> None:
    """Of a stream in the second and third pass, too: a loaded state counts for one pass, and only under its ``set_epoch``."""
    assert_resumes_exactly(lambda: map_style(workers), see_noise, tmp_path, (1, 6, 13))
    first = len(train(lambda: stream(workers), see_numbers, epochs=1).model.batches)
    steps = (1, first, first + 3, first + 14)  # 2 fresh examples a step, and 22 in a pass
    assert_resumes_exactly(lambda: stream(workers), see_numbers, tmp_path, steps, epochs=5)
