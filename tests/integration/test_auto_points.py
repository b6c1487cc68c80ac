"""The table of docs/concepts/insertion_points.md, pipeline, point that `auto` takes, way to an earlier one, row by row."""

import pytest
import torch
from PIL import Image
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, IterableDataset, RandomSampler, Subset
from torchvision import datasets
from torchvision.transforms import v2

from lightning_echo import EchoLoader, StagedDataset


def noisy(example):
    return example + torch.rand(1)


CROP = v2.Compose([v2.RandomCrop(8), v2.PILToTensor()])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images" / "class").mkdir(parents=True)
    for index in range(8):
        Image.new("RGB", (12, 12), (index, 0, 0)).save(tmp_path / "images" / "class" / f"{index}.png")
    return datasets.ImageFolder(tmp_path / "images", CROP)


class Plain(Dataset):
    def __getitem__(self, index):
        return torch.tensor([float(index)])

    def __len__(self):
        return 16


class Whole(Plain):
    """Does everything in ``__getitem__``."""

    def __getitem__(self, index):
        return torch.tensor([index]) + torch.rand(1)


class Deceptive(Plain):
    """Stores a transform, but uses it so that the inferred split would be wrong."""

    def __init__(self):
        self.transform = noisy

    def __getitem__(self, index):
        return self.transform(super().__getitem__(index)).round()


class Staged(StagedDataset):
    load, __len__ = Plain.__getitem__, Plain.__len__

    def augment(self, example):
        return example + torch.rand(1)


class Raw(Staged):
    load = StagedDataset.load

    def read(self, index):
        return bytes([index])

    def decode(self, raw):
        return torch.tensor([float(raw[0])])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(16.0))


class OwnIter(DataLoader):
    def __iter__(self):
        return iter([torch.zeros(4)] * 4)


def take(loader, point="auto"):
    echoed = EchoLoader(loader, 2, insertion_point=point, seed=0)
    assert len(list(echoed)) > 0
    return str(echoed.insertion_point)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: ConcatDataset([d, Subset(d, [0, 2, 3, 5])])])
def test_torchvisions_convention(folder, wrap):
    assert take(DataLoader(wrap(folder), 4)) == "before_augmentation"
    assert take(DataLoader(wrap(folder), 4), "after_read") == "after_read"


STAGED = ("StagedDataset", "load(index) and augment(example)", "StagedDataset.of", "insertion_point='after_augmentation'")
BATCHES = ("is impossible here: ", "Use 'after_batching' or 'auto'")
NO_READ = ("read(index) and decode(raw)",)
STREAM = ("the data set is a stream, which has no index. Use 'after_augmentation', 'after_batch",)
LOADERS = {
    "staged": (DataLoader(Staged(), 4), "before_augmentation", "", "after_read", NO_READ),
    "raw": (DataLoader(Raw(), 4), "before_augmentation", "", None, ()),
    "whole": (DataLoader(Whole(), 4), "after_augmentation", "Whole has neither load(index) and", "before_augmentation", STAGED),
    "deceptive": (
        DataLoader(Deceptive(), 4),
        *("after_augmentation", "it looks at what its transform returns", "before_augmentation", STAGED),
    ),
    "named cut": (DataLoader(StagedDataset.of(Plain(), augment=noisy), 4), "before_augmentation", "", "after_read", NO_READ),
    "stream": (DataLoader(Stream(), 4), "after_augmentation", "the data set is a stream", "before_augmentation", STREAM),
    "batch sampler": (
        DataLoader(Plain(), batch_sampler=BatchSampler(RandomSampler(Plain()), 4, False)),
        *("after_batching", "", None, ()),
    ),
    "sampler": (DataLoader(Plain(), 4, sampler=RandomSampler(Plain())), "after_augmentation", "", "after_read", NO_READ),
    "no batch size": (DataLoader(Stream(), batch_size=None), "after_batching", "", "after_augmentation", BATCHES),
    "own iter": (OwnIter(Plain(), 4), "after_batching", "", "after_augmentation", BATCHES),
    "list": ([torch.zeros(4)] * 3, "after_batching", "list is an iterable of batches", "after_augmentation", BATCHES),
}


@pytest.mark.parametrize("name", LOADERS)
def test_auto_takes_a_point_says_once_which_and_why_and_an_earlier_one_is_refused(name, caplog):
    loader, point, why, earlier, ways_out = LOADERS[name]
    with caplog.at_level("INFO", "lightning_echo"):
        assert take(loader) == point
    said = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_echo")]
    assert len([line for line in said if line.startswith(f"{point}, factor 2: ")]) == 1
    assert (
        not why or len([line for line in said if line.startswith(f"insertion_point='auto' chose {point}: ") and why in line]) == 1
    )
    if earlier:
        with pytest.raises(ValueError, match=f"insertion_point='{earlier}' is impossible") as refused:
            EchoLoader(loader, 2, insertion_point=earlier)
        assert all(way in str(refused.value) for way in ways_out)


def test_what_a_streams_collate_function_draws_is_drawn_for_each_use():
    def collate(examples):
        return torch.stack([torch.stack([example, torch.rand(())]) for example in examples])

    loader = EchoLoader(DataLoader(Stream(), 4, collate_fn=collate), 3, buffer_size=8, seed=0)
    rows = [tuple(row) for _ in range(2) for batch in loader for row in batch.tolist()]
    assert loader.counts.echoed > 0
    assert len({noise for _, noise in rows}) == len(rows)
