"""The remedies that the summary of a real training advises: in their order, only those that its data allows, ready to paste."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset, IterableDataset
from trainer_runs import trainer

from lightning_echo import EchoCallback, StagedDataset

pytestmark = pytest.mark.usefixtures("read_here", "one_thread")
LENGTH, READ = 240, 0.003


def example(index: Any) -> torch.Tensor:
    time.sleep(READ)
    return torch.full((32,), float(index))


class Whole(Dataset[torch.Tensor]):
    """Nothing shows where it could be cut."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return example(index)


class Staged(StagedDataset):
    def __len__(self) -> int:
        return LENGTH

    def load(self, index: int) -> torch.Tensor:
        return example(index)

    def augment(self, example: torch.Tensor) -> torch.Tensor:
        return example + 1


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(example, range(LENGTH))


def lines_of(dataset: Any, callback: EchoCallback, workers: int = 1) -> list[str]:
    loader = DataLoader(dataset, 2, num_workers=workers)
    trainer(callbacks=[callback], max_epochs=1, limit_val_batches=0).fit(BoringModel(), loader)
    verdict = callback.verdict
    assert verdict is not None
    assert "come before echoing" not in verdict.message
    return [verdict.next_line, *verdict.others]


@pytest.mark.parametrize(
    ("dataset", "cores", "begin"),
    [
        (Whole(), 1, ["EchoCallback(factor="]),
        (Endless(), 1, ["EchoCallback(factor="]),
        (Whole(), 3, ["num_workers=3", "EchoCallback(factor="]),
        (Staged(), 1, ["EchoCallback(cache=0.5)", "EchoCallback(factor="]),
        (Staged(), 3, ["num_workers=3", "EchoCallback(cache=0.5)", "EchoCallback(factor="]),
    ],
)
def test_what_the_data_and_the_machine_allow_is_advised_in_order(
    dataset: Any, cores: int, begin: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_echo.training.meters.usable_cores", lambda: cores)
    lines = [line for line in lines_of(dataset, EchoCallback()) if "reads_in_flight" not in line]
    assert len(lines) == len(begin)
    for line, expected in zip(lines, begin, strict=True):
        assert line.startswith(expected)


def test_a_cache_that_is_advised_can_be_pasted_and_is_not_advised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_echo.training.meters.usable_cores", lambda: 1)
    (line,) = (line for line in lines_of(Staged(), EchoCallback()) if "cache" in line)
    pasted = eval(line.partition(", up to")[0])
    assert not any("num_workers" in again or "cache=0.5), up to" in again for again in lines_of(Staged(), pasted))
    assert pasted.reports[-1].cached_examples == LENGTH
    monkeypatch.setattr("lightning_echo.training.waits.free_memory_bytes", lambda: 0)
    assert not any("cache" in line for line in lines_of(Staged(), EchoCallback(factor=2)))  # nothing would fit
