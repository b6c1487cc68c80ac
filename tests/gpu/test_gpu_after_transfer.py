"""A fresh batch is copied to the device once, an echo not at all; live batches take the memory that was promised, then none."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from gpu_runs import ON_GPU, Moving, copies_to_the_device, echoing, loader_of, synchronize, traced, trainer, warns_of_edits

from lightning_echo import EchoDataModule

STEPS, BATCH_SIZE = 48, 4
WIDTH = 12_288  # in bytes a multiple of what CUDA memory is handed out in; nothing else that is copied is of a batch's size
BATCH_BYTES = BATCH_SIZE * WIDTH * 4


class Remembers(Moving):
    """Remembers, on the device, what it was given. Augments there, and edits its batch in place if told to."""

    def __init__(self, edits: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.edits = edits
        self.firsts: list[torch.Tensor] = []  # of each batch the first column: its examples
        self.drawn: list[torch.Tensor] = []
        self.moved: list[weakref.ref[torch.Tensor]] = []
        self.most_live = 0

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        self.moved.append(weakref.ref(moved))
        self.most_live = max(self.most_live, self.live_batches)
        return moved

    def on_after_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> Any:
        return batch, torch.rand((), device=batch.device)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        examples, drawn = batch
        assert examples.is_cuda == ON_GPU
        self.firsts.append(examples[:, 0].clone())
        self.drawn.append(drawn)
        loss = self.weight.sum() * examples.mean()
        if self.edits:
            examples.add_(1)
        return loss

    @property
    def live_batches(self) -> int:
        """How many of the batches that were moved to the device are still there."""
        return sum(each() is not None for each in self.moved)

    def different_batches(self) -> set[tuple[float, ...]]:
        return set(map(tuple, torch.stack(self.firsts).tolist()))


def fit(
    point: str, *, factor: float = 4, edits: bool = False, workers: int = 0, **options: Any
) -> tuple[EchoDataModule, Remembers]:
    examples = torch.arange(float(STEPS * BATCH_SIZE))[:, None].expand(-1, WIDTH)
    data = echoing(loader_of(examples, BATCH_SIZE, workers), factor, point, **options)
    model = Remembers(edits)
    trainer().fit(model, datamodule=data)
    assert len(model.firsts) == STEPS
    return data, model


def copied_and_fresh(point: str, **options: Any) -> tuple[int, int, Remembers]:
    """How often a batch went from the host to the device, how often a batch was fresh, and the model."""
    (data, model), events = traced(lambda: fit(point, **options))
    if ON_GPU:
        assert copies_to_the_device(events, BATCH_BYTES) == model.transfers
    return model.transfers, data.loader.counts.fresh // BATCH_SIZE, model


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fresh_batch_is_copied_once_and_an_echo_never(workers: int) -> None:
    copied, fresh, model = copied_and_fresh("after_transfer", workers=workers)
    assert copied == fresh
    assert abs(fresh - STEPS / 4) <= 4
    assert len(model.different_batches()) == fresh
    assert len(set(torch.stack(model.drawn).tolist())) == STEPS, "augmented anew on the device for each use"


def test_the_count_above_sees_the_copies_of_the_point_before() -> None:
    copied, fresh, _ = copied_and_fresh("after_batching")
    assert copied == STEPS > fresh


def test_at_factor_1_each_batch_is_copied_once() -> None:
    assert copied_and_fresh("after_transfer", factor=1)[:2] == (STEPS, STEPS)


def test_an_edited_batch_is_copied_again_and_its_data_is_right() -> None:
    with warns_of_edits(True):
        copied, fresh, model = copied_and_fresh("after_transfer", edits=True)
    assert copied == STEPS
    assert len(model.different_batches()) == fresh
    for batch in model.different_batches():
        assert set(batch) <= set(range(STEPS * BATCH_SIZE))


def test_no_batch_is_left_on_the_device_after_fit() -> None:
    data, model = fit("after_transfer")
    gc.collect()
    assert model.live_batches == 0
    assert data.loader.counts.echoed > 0
    if ON_GPU:
        found = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == (BATCH_SIZE, WIDTH)]
        assert [each for each in found if each.is_cuda] == []


# ---------------------------------------------------------------------- memory


def peak(factor: float, buffer_size: int | None) -> tuple[float, int]:
    """The most memory of the device that a fit took, in batches, and the most batches that were there at once."""
    gc.collect()
    synchronize()
    before = 0
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    _, model = fit("after_transfer", factor=factor, buffer_size=buffer_size, reuse="memory")
    if ON_GPU:
        return (torch.cuda.max_memory_allocated() - before) / BATCH_BYTES, model.most_live
    return model.most_live, model.most_live


@pytest.mark.parametrize("buffer_size", [4, 10])
def test_live_batches_take_no_more_memory_than_the_buffer_may(buffer_size: int) -> None:
    """One more may be in flight: the buffer's last batch goes to the device before the step drops the one before."""
    plain, plain_batches = peak(1, None)
    echoed, echoed_batches = peak(4, buffer_size)
    assert plain_batches <= 2
    assert buffer_size - 2 <= echoed_batches <= buffer_size + 1
    assert buffer_size - 3.5 <= echoed - plain <= buffer_size + 0.5, "but for what is smaller than a batch"


def test_the_log_says_what_a_live_batch_takes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning_echo"):
        fit("after_transfer", buffer_size=4)
    each = BATCH_BYTES / 2**20
    said = [record.getMessage() for record in caplog.records if "device memory, buffer_size=" in record.getMessage()]
    assert said == [
        f"lightning_echo: a live batch takes {each:.3g} MiB of device memory, buffer_size=4 of them {4 * each:.3g} MiB, and "
        "about as much on the host"
    ]
    if ON_GPU:
        before = torch.cuda.memory_allocated()
        batch = torch.zeros(BATCH_SIZE, WIDTH).cuda()
        assert torch.cuda.memory_allocated() - before == batch.numel() * 4 == BATCH_BYTES
