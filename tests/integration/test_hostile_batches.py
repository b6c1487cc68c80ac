"""`EchoCallback()` only measures: no batch ends a training, whatever it does when it is asked for its size."""

from dataclasses import dataclass

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

    def __init__(self, examples):
        self.examples = examples

    def __getattr__(self, name):
        raise LookupError(f"{name} must not be asked for")


class Steps(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.steps = torch.nn.Linear(1, 1), 0

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


KINDS = {"slots": lambda examples: Slots("scans", torch.tensor(examples)), "raises": Raises}


@pytest.mark.parametrize(("kind", "echoed"), [("slots", False), ("raises", False), ("raises", True)])
def test_a_training_is_measured_and_takes_all_its_steps(kind, echoed, caplog):
    loader = DataLoader(range(sum(SIZES)), 4, collate_fn=KINDS[kind])
    if echoed:
        loader = EchoLoader(loader, 1, insertion_point="after_batching")
    model = Steps()
    callback = EchoCallback(summary=False)
    run = trainer(max_epochs=2, callbacks=[callback], limit_val_batches=0, log_every_n_steps=1)
    with caplog.at_level("INFO"):
        run.fit(model, loader)
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    assert model.steps == 2 * len(SIZES)
    assert 0 <= metrics["echo/idle_fraction"] <= 1
    said = [record for record in caplog.records if "examples are not counted" in record.getMessage()]
    if kind == "slots":
        assert metrics["echo/fresh_examples"] == 2 * sum(SIZES)
        assert said == []
    elif not echoed:
        assert "echo/fresh_examples" not in metrics
        assert "echo/examples_per_second" not in metrics
        assert len(said) == 1
