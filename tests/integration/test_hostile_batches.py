"""`EchoCallback()` only measures: no batch ends a training, whatever it does when it is asked for its size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader
from trainer_runs import trainer

from lightning_echo import EchoCallback, EchoLoader

SIZES = [4, 4, 2]  # of the batches of a pass


@dataclass(slots=True)
class Slots:
    """A batch without a ``__dict__``, as chemprop's."""

    name: str
    x: torch.Tensor


class Raises:
    """Raises an error for every attribute that it does not have."""

    def __init__(self, examples: list[int]) -> None:
        self.examples = examples

    def __getattr__(self, name: str) -> Any:
        raise LookupError(f"{name} must not be asked for")


class Lazy:
    """Reads its data when it is asked for its size, and cannot do so here."""

    @property
    def batch_size(self) -> int:
        raise OSError("no such file")


KINDS = {
    "slots": lambda examples: Slots("scans", torch.tensor(examples)),
    "raises": Raises,
    "lazy": lambda examples: Lazy(),
}


class Steps(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kinds = torch.nn.Linear(1, 1), []  # type: ignore[var-annotated]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kinds.append(type(batch).__name__)
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(loader: Any, callback: EchoCallback) -> tuple[Steps, dict[str, Any]]:
    model, run = Steps(), trainer(max_epochs=2, callbacks=[callback], limit_val_batches=0, log_every_n_steps=1)
    run.fit(model, loader)
    return model, {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_is_measured_and_takes_all_its_steps(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    callback = EchoCallback(summary=False)
    with caplog.at_level("INFO"):
        model, metrics = fit(DataLoader(range(sum(SIZES)), 4, collate_fn=KINDS[kind]), callback)  # type: ignore[arg-type]
    assert len(model.kinds) == 2 * len(SIZES)
    assert 0 <= metrics["echo/idle_fraction"] <= 1
    said = [record for record in caplog.records if "examples are not counted" in record.getMessage()]
    if kind == "slots":
        assert metrics["echo/fresh_examples"] == 2 * sum(SIZES)
        assert said == []
    else:
        assert "echo/fresh_examples" not in metrics
        assert "echo/examples_per_second" not in metrics
        assert len(said) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_batches_that_cannot_be_asked_can_be_echoed(kind: str) -> None:
    loader = EchoLoader(DataLoader(range(sum(SIZES)), 4, collate_fn=KINDS[kind]), 1, insertion_point="after_batching")  # type: ignore[arg-type]
    model, _ = fit(loader, EchoCallback(summary=False))
    assert len(model.kinds) == 2 * len(SIZES)
