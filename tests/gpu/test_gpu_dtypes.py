"""Examples in half precision keep their type, are counted, and no edit in place reaches an echo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_runs import POINTS, Moving, echoing, loader_of, trainer, warns_of_edits

from lightning_echo import StagedDataset

STEPS, BATCH_SIZE, WIDTH, FACTOR = 24, 4, 33, 3
LENGTH = STEPS * BATCH_SIZE


def halves(index: int, dtype: torch.dtype) -> torch.Tensor:
    """Multiples of an eighth under 16, which seven bits hold: exact in both types."""
    return ((torch.arange(WIDTH) * 5 + index) % 127 / 8).to(dtype)


class Halves(StagedDataset):
    """Example ``index``: the index, its numbers, and the sign that the augmentation has drawn for them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __len__(self) -> int:
        return LENGTH

    def read(self, index: Any) -> Any:
        return str(index).encode()

    def decode(self, raw: Any) -> Any:
        return {"index": int(raw), "values": halves(int(raw), self.dtype)}

    def augment(self, example: Any) -> Any:
        sign = 2 * torch.randint(2, ()) - 1
        return {**example, "sign": sign, "values": example["values"].mul_(sign)}


class Edits(Moving):
    """Remembers each batch, and then edits it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.batches: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append({name: part.clone() for name, part in batch.items()})
        loss = self.weight.sum() * batch["values"].float().mean()
        batch["values"].add_(1)
        return loss


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("point", POINTS)
def test_half_precision_is_kept_counted_and_protected(point: str, dtype: torch.dtype) -> None:
    data, model = echoing(loader_of(Halves(dtype), BATCH_SIZE), FACTOR, point), Edits()
    with warns_of_edits(point == "after_transfer"):
        trainer().fit(model, datamodule=data)
    assert len(model.batches) == STEPS
    indices = []
    for batch in model.batches:
        assert batch["values"].dtype == dtype
        index, sign, values = (batch[name].cpu() for name in ("index", "sign", "values"))
        assert torch.equal(values, torch.stack([halves(each, dtype) for each in index.tolist()]) * sign[:, None])
        indices += index.tolist()
    counts = data.loader.counts
    assert (counts.fresh + counts.echoed, len(set(indices))) == (LENGTH, counts.fresh)
    assert abs(counts.fresh - LENGTH // FACTOR) <= 4 * BATCH_SIZE
