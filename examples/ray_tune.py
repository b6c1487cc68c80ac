"""A Ray Tune sweep over four learning rates, whose trials share one process that reads.

pip install 'lightning-echo[ray]'
"""

import logging
import tempfile

import torch
from lightning import LightningModule, Trainer
from ray import tune
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_echo import EchoCallback


class Regression(LightningModule):
    def __init__(self, rate):
        super().__init__()
        self.rate, self.layer, self.loss = rate, nn.Linear(8, 1), 0.0

    def training_step(self, batch):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layer(inputs), targets)
        self.loss = loss.item()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def trial(config):
    for name in ("lightning.pytorch", "lightning_echo"):
        logging.getLogger(name).setLevel(logging.ERROR)
    inputs = torch.linspace(-1, 1, 8 * 256).reshape(256, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=32, shuffle=True, num_workers=1)
    model = Regression(config["rate"])
    # The reader stays for a minute after a trial: Ray starts a process for each, which imports torch first.
    echo = EchoCallback(share={"name": "tune", "join": "pass", "linger_seconds": 60}, summary=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=3, accelerator="cpu", callbacks=[echo], **quiet)
    trainer.fit(model, loader)
    tune.report({"loss": model.loss})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        space = {"rate": tune.grid_search([0.1, 0.03, 0.01, 0.003])}
        results = tune.Tuner(trial, param_space=space, run_config=tune.RunConfig(storage_path=folder, verbose=0)).fit()
        losses = results.get_dataframe()["loss"]
    print(f"{len(losses)} trials, best loss {losses.min():.3g}")
