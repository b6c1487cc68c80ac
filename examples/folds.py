"""Cross-validation of five folds beside each other: each training reads for itself, or one process reads once for all of them.

The 1,797 scanned digits of scikit-learn are read through a delay, which stands for network storage. Each fold trains on four
fifths of them and is evaluated on the rest. Printed are the time that the steps of a training take, with their waiting for data,
how often all trainings together have read an example in each of their passes, and the mean accuracy. On two cores that takes less
than a minute.
"""

import logging
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from lightning import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.transforms import v2

from lightning_echo import EchoCallback

FOLDS, EPOCHS, DELAY_SECONDS = 5, 2, 0.001


class Digits(Dataset):
    transform = v2.Compose([v2.RandomAffine(degrees=15, translate=(0.1, 0.1)), v2.ToDtype(torch.float32, scale=True)])

    def __init__(self, reads):
        digits = load_digits()
        self.scans, self.labels, self.reads = (255 / 16 * digits.images).astype(np.uint8), digits.target, str(reads)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        time.sleep(DELAY_SECONDS)
        with open(self.reads, "ab") as reads:
            reads.write(b".")  # counted, whichever process reads
        return self.transform(torch.from_numpy(self.scans[index])[None]), int(self.labels[index])


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch):
        scans, labels = batch
        return nn.functional.cross_entropy(self.network(scans), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def train(fold, share, reads, results):
    for name in ("lightning.pytorch", "lightning_echo"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(fold)
    data = Digits(reads)  # all of it, the same in each training ...
    is_held_out = np.random.default_rng(0).integers(FOLDS, size=len(data)) == fold
    part = Subset(data, np.flatnonzero(~is_held_out))  # ... of which this training takes a part
    echo = EchoCallback(share=share, summary=False)  # <- the line that changes; share=None: this training reads for itself
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[echo], **quiet)
    model = Classifier()
    trainer.fit(model, DataLoader(part, batch_size=32, shuffle=True, num_workers=1))
    scans, labels = data.scans[is_held_out], data.labels[is_held_out]
    with torch.no_grad():
        found = model.network(torch.from_numpy(scans) / 255).argmax(1).numpy()
    seconds = sum(report.steps * (report.data_wait_seconds + report.step_seconds) for report in echo.reports)
    results.put((seconds, 100 * float(np.mean(found == labels))))


def cross_validation(what, share=None):
    context = multiprocessing.get_context("fork")  # nothing was computed here before
    results = context.Queue()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # the reader may still read
        reads = Path(folder, "reads")
        trainings = [context.Process(target=train, args=(fold, share, reads, results)) for fold in range(FOLDS)]
        for training in trainings:
            training.start()
        seconds, accuracies = zip(*[results.get(timeout=240) for _ in trainings], strict=True)
        for training in trainings:
            training.join()
        passes = reads.stat().st_size / len(load_digits().target) / EPOCHS
    print(f"{what:>24}{statistics.mean(seconds):>20.1f}{passes:>24.2f}{statistics.mean(accuracies):>16.1f}")


if __name__ == "__main__":
    print(f"{'':>24}{'time of each (s)':>20}{'reads of an example':>24}{'accuracy (%)':>16}")
    cross_validation("each reads for itself")
    cross_validation("one reads for all", {"name": "folds", "wait_for": FOLDS, "linger_seconds": 0, "window": "128KiB"})
