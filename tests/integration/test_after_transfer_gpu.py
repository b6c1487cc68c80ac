"""On CUDA a fresh batch is copied to the device once, and an echo not at all: counted in the profiler's trace."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from trainer_runs import trainer

from lightning_echo import EchoDataModule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer` in `LightningModule`"),
]
STEPS, BATCH_SIZE, WIDTH = 48, 4, 12_345
BATCH_BYTES = BATCH_SIZE * WIDTH * 4  # nothing else that is copied is of this size


class Remembers(pl.LightningModule):
    """Remembers, on the device, what it was given. Augments there, and edits its batch in place if told to."""

    def __init__(self, edits: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.edits = edits
        self.firsts: list[torch.Tensor] = []  # of each batch the first column: its examples
        self.drawn: list[Any] = []

    def on_after_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> Any:
        return batch, torch.rand((), device=batch.device)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        examples, drawn = batch
        assert examples.is_cuda
        self.firsts.append(examples[:, 0].clone())
        self.drawn.append(drawn)
        loss = self.weight.sum() * examples.mean()
        if self.edits:
            examples.add_(1)
        return loss

    def different_batches(self) -> set[tuple[float, ...]]:
        return set(map(tuple, torch.stack(self.firsts).tolist()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(point: str, *, factor: float = 4, edits: bool = False, workers: int = 0) -> tuple[EchoDataModule, Remembers]:
    examples = torch.arange(float(STEPS * BATCH_SIZE))[:, None].expand(-1, WIDTH)
    loader = DataLoader(examples, BATCH_SIZE, shuffle=True, num_workers=workers, pin_memory=True)  # type: ignore[arg-type]
    data = EchoDataModule.from_dataloaders(loader, factor=factor, insertion_point=point, seed=1)
    model = Remembers(edits)
    trainer(accelerator="gpu", max_epochs=1).fit(model, datamodule=data)
    return data, model


def copies_to_the_device(folder: Path, point: str, **options: Any) -> tuple[int, int, Remembers]:
    """How often memory of a batch's size went from the host to the device, how often a batch was fresh, and the model."""
    fit(point, **options)  # warms the device up
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        data, model = fit(point, **options)
        torch.cuda.synchronize()
    file = folder / "trace.json"
    trace.export_chrome_trace(str(file))
    copied = [
        event["args"]["bytes"]
        for event in json.loads(file.read_text())["traceEvents"]
        if event.get("name", "").startswith("Memcpy HtoD")
    ]
    assert len(model.firsts) == STEPS
    return copied.count(BATCH_BYTES), data.loader.counts.fresh // BATCH_SIZE, model


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fresh_batch_is_copied_once_and_an_echo_never(workers: int, tmp_path: Path) -> None:
    copied, fresh, model = copies_to_the_device(tmp_path, "after_transfer", workers=workers)
    assert copied == fresh
    assert abs(fresh - STEPS / 4) <= 4
    assert len(model.different_batches()) == fresh
    assert len(set(torch.stack(model.drawn).tolist())) == STEPS, "augmented anew on the device for each use"


def test_the_count_above_sees_the_copies_of_the_point_before(tmp_path: Path) -> None:
    copied, fresh, _ = copies_to_the_device(tmp_path, "after_batching")
    assert copied == STEPS > fresh


def test_at_factor_1_each_batch_is_copied_once(tmp_path: Path) -> None:
    assert copies_to_the_device(tmp_path, "after_transfer", factor=1)[:2] == (STEPS, STEPS)


@pytest.mark.filterwarnings("ignore:lightning_echo. a batch was edited in place on the device")
def test_an_edited_batch_is_copied_again_and_its_data_is_right(tmp_path: Path) -> None:
    copied, fresh, model = copies_to_the_device(tmp_path, "after_transfer", edits=True)
    assert copied == STEPS
    assert len(model.different_batches()) == fresh


def test_no_batch_is_left_on_the_device_after_fit() -> None:
    data, model = fit("after_transfer")
    gc.collect()
    left = [
        each for each in gc.get_objects() if type(each) is torch.Tensor and each.is_cuda and each.shape == (BATCH_SIZE, WIDTH)
    ]
    assert left == []
    assert data.loader.counts.echoed > 0
    assert len(model.firsts) == STEPS
