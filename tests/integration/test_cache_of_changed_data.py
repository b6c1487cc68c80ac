"""No record of a cache is taken for an example of other data: after a reload, in a second `fit`, and in the next job."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from trainer_runs import trainer

from lightning_echo import CacheConfig, EchoCallback, EchoLoader, StagedDataset

LENGTH, BATCH_SIZE, CHANGED = 200, 8, (13, 77, 140)  # none of these is among eight that are spread over the data


class Labelled(Dataset):
    """An example is [index, label]."""

    def __init__(self, labels=range(LENGTH)):
        self.labels = list(labels)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return torch.tensor([index, self.labels[index]])


def labels_of(epoch):
    """The labels, of which a few are others in each epoch."""
    return [1000 * epoch + index if index in CHANGED else index for index in range(LENGTH)]


def loader_of(data, workers=0):
    return DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=workers)


class Reloaded(pl.LightningDataModule):
    """Makes a data set with other pseudo labels each time that it is asked."""

    def __init__(self, workers):
        super().__init__()
        self.workers, self.asked = workers, 0

    def train_dataloader(self):
        data = Labelled(labels_of(self.asked))
        self.asked += 1
        return loader_of(data, self.workers)


class Listens(pl.LightningModule):
    """Remembers what it was trained on in each epoch."""

    def __init__(self):
        super().__init__()
        self.layer, self.epochs = torch.nn.Linear(1, 1), {}

    def training_step(self, batch, batch_idx):
        self.epochs.setdefault(self.current_epoch, []).extend(map(tuple, batch.tolist()))
        return self.layer(batch[:, :1].float()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def stale(seen, epoch):
    labels = labels_of(epoch)
    return [example for example in seen if example[1] != labels[example[0]]]


def test_a_new_data_set_in_each_epoch_is_the_one_that_is_delivered():
    model, options = Listens(), {"insertion_point": "after_augmentation", "cache": CacheConfig("4MiB", "whole")}
    run = trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1, callbacks=[EchoCallback(factor=1, seed=0, **options)])
    with pytest.warns(UserWarning, match=r"dataset\.labels: .*the cache is emptied"):
        run.fit(model, Reloaded(1))
    assert {epoch: stale(seen, epoch) for epoch, seen in model.epochs.items()} == {0: [], 1: [], 2: []}
    assert len(model.epochs[2]) == LENGTH


def flipped(example):
    return (example[0], example[1] + int(torch.randint(2, ())))


class Image(Dataset):
    """As torchvision's data sets are: with transforms of which the first are not random."""

    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return self.transform(torch.full((1, 8, 8), float(index))), index


def hits_after(loaders, cache="4MiB"):
    """The hits that each of several loaders has, one after the other; each takes the place of the one before."""
    found, before = [], None
    for loader in loaders:
        echoed = EchoLoader(loader, 1, insertion_point="before_augmentation", cache=cache, seed=0)
        if before is not None:
            echoed.follow(before)
        counts = (0, 0) if before is None else (before.cache_counts.hits, before.cache_counts.misses)
        list(echoed)
        found.append(echoed.cache_counts.hits - counts[0] if echoed.cache_counts.misses == counts[1] else 0)
        before = echoed
    before.close()
    return found


def test_another_augmentation_empties_no_cache():
    images = [Image(v2.Compose([v2.Resize(4), v2.RandomCrop(size)])) for size in (2, 3)]
    assert hits_after(map(loader_of, images)) == [0, LENGTH]
    staged = [StagedDataset.of(Labelled(), augment=augment) for augment in (flipped, tuple)]
    assert hits_after(map(loader_of, staged)) == [0, LENGTH]


def test_another_transform_before_the_cut_does():
    images = [Image(v2.Compose([v2.Resize(size), v2.RandomCrop(2)])) for size in (4, 6)]
    with pytest.warns(UserWarning, match=r"dataset\.transform\[0\]\.size.*the cache is emptied"):
        assert hits_after(map(loader_of, images)) == [0, 0]


class Counts(Dataset):
    """Counts its reads, and remembers what it has read."""

    def __init__(self):
        self.reads, self.memo, self.transform = 0, {}, tuple

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        self.reads += 1
        if index not in self.memo:
            self.memo[index] = (torch.tensor(float(index)), index)
        return self.transform(self.memo[index])


class Validates(Listens):
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0][:, None]).sum()

    def validation_step(self, batch, batch_idx):
        assert len(batch[0])


class OverOneBase(pl.LightningDataModule):
    """Trains and validates on new data sets around one."""

    def __init__(self):
        super().__init__()
        self.base = Counts()

    def train_dataloader(self):
        return loader_of(Wraps(self.base, range(150)))

    def val_dataloader(self):
        return DataLoader(Wraps(self.base, range(150, LENGTH)), BATCH_SIZE)


class Wraps(Dataset):
    def __init__(self, base, indices):
        self.base, self.indices, self.transform = base, indices, flipped

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        return self.transform(self.base[self.indices[index]])


def test_a_validation_that_reads_the_same_data_set_empties_no_cache():
    callback = EchoCallback(factor=1, seed=0, insertion_point="before_augmentation", cache="4MiB")
    run = trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1, callbacks=[callback])
    run.fit(Validates(), OverOneBase())
    counts = run.train_dataloader.cache_counts
    assert (counts.hits, counts.misses) == (300, 150)
