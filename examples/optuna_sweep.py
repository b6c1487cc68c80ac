"""An Optuna study whose trials share one process that reads: in two processes on one storage, then in two threads of one process.

pip install optuna
"""

import logging
import multiprocessing
import tempfile
from pathlib import Path

import optuna
import torch
from lightning import LightningModule, Trainer
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
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


def objective(trial):
    inputs = torch.linspace(-1, 1, 8 * 256).reshape(256, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=32, shuffle=True, num_workers=1)
    model = Regression(trial.suggest_float("rate", 1e-3, 1e-1, log=True))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=3, accelerator="cpu", callbacks=[EchoCallback(share="study", summary=False)], **quiet)
    trainer.fit(model, loader)
    return model.loss


def search(storage, trials, jobs=1):
    for name in ("lightning.pytorch", "lightning_echo"):
        logging.getLogger(name).setLevel(logging.ERROR)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(study_name="rates", storage=JournalStorage(JournalFileBackend(storage)), load_if_exists=True)
    study.optimize(objective, n_trials=trials, n_jobs=jobs)
    return study


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        storage = str(Path(folder) / "study.log")
        context = multiprocessing.get_context("spawn")  # as from two terminals
        searches = [context.Process(target=search, args=(storage, 2)) for _ in range(2)]
        for each in searches:
            each.start()
        for each in searches:
            each.join()
        study = search(storage, 4, jobs=2)
        done = study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
    print(f"{len(done)} trials, best loss {min(trial.value for trial in done):.3g}")
