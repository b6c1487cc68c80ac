"""What is logged of a cache, against what the data set itself was asked for."""

import lightning.pytorch as pl
import torch
from callback_cases import Remembering
from idle_runs import Sleeper, fit
from torch.utils.data import DataLoader

from lightning_echo import EchoCallback, EchoLoader, StagedDataset
from lightning_echo.cache.kept import CacheConfig

LENGTH, BATCH, EXAMPLE_BYTES, BUDGET = 128, 8, 2**14, 2**20
FITS = range(BUDGET // (EXAMPLE_BYTES + 2**10), BUDGET // EXAMPLE_BYTES)  # examples: each takes a little more than its tensor


class Counted(StagedDataset):
    """Examples of 16 KiB; remembers what was read."""

    def __init__(self, length=LENGTH):
        self.length, self.reads = length, [0]

    def __len__(self):
        return self.length

    def load(self, index):
        self.reads[0] += 1
        return torch.full((EXAMPLE_BYTES // 4,), float(index))

    def augment(self, example):
        return example[:1]


class ReadsOfEpochs(pl.Callback):
    """How many examples were read in each epoch."""

    def __init__(self, dataset):
        self.dataset, self.reads = dataset, []

    def on_train_epoch_start(self, *args):
        self.before = self.dataset.reads[0]

    def on_train_epoch_end(self, *args):
        self.reads.append(self.dataset.reads[0] - self.before)


def loader_of(dataset):
    plain = DataLoader(dataset, BATCH, shuffle=True)
    return EchoLoader(plain, 1, insertion_point="before_augmentation", seed=3, cache=CacheConfig(BUDGET))


def test_hits_of_an_epoch_are_the_fresh_examples_that_were_not_read():
    dataset, logger, echo = Counted(), Remembering(), EchoCallback(summary=False)
    reads, model = ReadsOfEpochs(dataset), Sleeper(0.0, loader_of(dataset))
    fit(model, reads, echo=echo, max_epochs=4, logger=logger, log_every_n_steps=0)
    epochs = [values for _, values in logger.metrics]
    held = epochs[0]["echo/cached_examples"]
    assert held in FITS
    assert [values["echo/cache_hit_fraction"] * LENGTH for values in epochs] == [0, held, held, held]
    for values, read in zip(epochs, reads.reads, strict=True):
        hits = values["echo/cache_hit_fraction"] * LENGTH
        assert LENGTH - hits <= read <= LENGTH - hits + 2, "a few hits are read again, to see whether the data set is as it was"
        assert values["echo/cached_examples"] == held
        assert held * EXAMPLE_BYTES < values["echo/cache_bytes"] <= BUDGET
