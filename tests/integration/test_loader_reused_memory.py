"""Data sets, streams and loaders that use their memory again: each delivered image still belongs to its label.

The plain loader delivers every pair right, since each producer keeps what it hands out for as long as a batch is made, or trained
on. An echo is used long after that.
"""

import warnings

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from lightning_echo import EchoLoader, StagedDataset

BATCH_SIZE, LENGTH = 8, 80


class Chunks(IterableDataset):
    """Yields views of one buffer of two batches, and fills it again when all of them were yielded."""

    def __init__(self):
        self.buffer = torch.zeros(2 * BATCH_SIZE, 3)

    def __iter__(self):
        for start in range(0, LENGTH, len(self.buffer)):
            self.buffer[:] = torch.arange(start, start + len(self.buffer))[:, None]
            yield from zip(self.buffer, range(start, start + len(self.buffer)), strict=True)


class Preallocated(Dataset):
    """Reads a whole batch into the same memory each time."""

    def __init__(self):
        self.images = torch.zeros(BATCH_SIZE, 3)

    def __getitems__(self, indices):
        self.images[: len(indices)] = torch.tensor(indices)[:, None]
        return list(zip(self.images[: len(indices)], indices, strict=True))

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __len__(self):
        return LENGTH


class Ring:
    """A loader with a few slots that batches are made in, by turns."""

    def __init__(self, slots):
        self.slots = [torch.zeros(BATCH_SIZE, 3) for _ in range(slots)]

    def __iter__(self):
        for number, start in enumerate(range(0, LENGTH, BATCH_SIZE)):
            slot = self.slots[number % len(self.slots)]
            labels = torch.arange(start, start + BATCH_SIZE)
            slot[:] = labels[:, None]
            yield slot, labels

    def __len__(self):
        return LENGTH // BATCH_SIZE


def unzipped(examples):
    return list(zip(*examples, strict=True))


def wrong(loader, epochs=3):
    """Of all images and labels, as they are when their step comes, those that do not belong together."""
    with_transfer = loader.insertion_point == "after_transfer"
    loader.is_transferred = with_transfer
    found, count = [], 0
    for _ in range(epochs):
        for batch in loader:
            if with_transfer:
                batch.live.prepare(batch.host, lambda host: host)
                batch = batch.live.transfer(lambda host: host, is_last=batch.is_last)  # a device that is the host
            for image, label in zip(*batch, strict=True):
                count += 1
                if image.tolist() != [float(label)] * 3:
                    found.append((int(image[0]), int(label)))
    loader.close()
    assert count == epochs * LENGTH if loader.has_length else count >= epochs * LENGTH  # echoes make passes of a stream longer
    return found


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: DataLoader(Chunks(), batch_size=BATCH_SIZE, num_workers=1), {}),
        (lambda: DataLoader(Chunks(), batch_size=BATCH_SIZE, collate_fn=unzipped), {}),
        (lambda: DataLoader(Preallocated(), batch_size=BATCH_SIZE, shuffle=True, num_workers=2), {}),
        (lambda: Ring(1), {}),
        (lambda: Ring(3), {}),
        (lambda: Ring(1), {"insertion_point": "after_transfer"}),
        (lambda: DataLoader(Preallocated(), batch_size=BATCH_SIZE, num_workers=1), {"insertion_point": "after_transfer"}),
    ],
    ids=["chunks", "own collate", "calls, workers", "a slot", "a ring", "to a device", "to one, a worker"],
)
def test_images_belong_to_their_labels(make, options):
    for factor in (1, 3.5):
        assert wrong(EchoLoader(make(), factor, seed=0, **options)) == []


def as_array(buffer):
    return np.frombuffer(buffer, np.float32)


BUFFERS = {
    "tensor": (lambda: torch.zeros(64), lambda buffer: buffer),
    "in a dict": (lambda: bytearray(256), lambda buffer: {"pixels": buffer}),
    "image": (lambda: PIL.Image.new("F", (8, 8)), lambda buffer: buffer),
}


class Decoder(StagedDataset):
    """Decodes into ``slots`` buffers by turns."""

    def __init__(self, slots, kind="tensor"):
        self.kind, self.turn = kind, 0
        self.buffers = [BUFFERS[kind][0]() for _ in range(slots)]

    def load(self, index):
        self.turn += 1
        buffer = self.buffers[self.turn % len(self.buffers)]
        if self.kind == "image":
            buffer.paste(float(index), (0, 0, 8, 8))
        else:
            (buffer if isinstance(buffer, torch.Tensor) else np.frombuffer(buffer, np.float32))[:] = index
        return BUFFERS[self.kind][1](buffer), index

    def augment(self, example):
        image, label = example
        pixels = as_array(image["pixels"]) if isinstance(image, dict) else image
        pixels = pixels if isinstance(pixels, torch.Tensor) else torch.from_numpy(np.array(pixels))
        return pixels.flatten()[:3] + 0.0, label

    def __len__(self):
        return LENGTH


class Picture(Dataset):
    """As torchvision's data sets are."""

    def __init__(self, slots):
        self.decoder, self.transform = Decoder(slots), lambda image: image[:3] + torch.zeros(())

    def __getitem__(self, index):
        image, label = self.decoder.load(index)
        return self.transform(image), label

    def __len__(self):
        return LENGTH


class PictureInOneCall(Picture):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore:.*uses its memory again")
@pytest.mark.parametrize(("workers", "cache", "factor"), [(0, None, 2.37), (1, {"size": "4MiB", "hold": "loaded"}, 1)])
@pytest.mark.parametrize(
    ("slots", "make"),
    [
        (2, lambda slots: Decoder(slots, "tensor")),
        (4, lambda slots: Decoder(slots, "in a dict")),
        (2, lambda slots: Decoder(slots, "image")),
        (4, PictureInOneCall),
    ],
    ids=["tensor", "in a dict", "image", "transform in one call"],
)
def test_images_decoded_into_a_ring_of_buffers_belong_to_their_labels(slots, make, factor, cache, workers):
    loader = DataLoader(make(slots), batch_size=BATCH_SIZE, shuffle=True, num_workers=workers)
    assert wrong(EchoLoader(loader, factor, insertion_point="before_augmentation", cache=cache, seed=0), 2) == []


def said_by(loader):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert wrong(loader, 2) == []
    return [str(each.message) for each in said if "memory" in str(each.message)]


@pytest.mark.parametrize(("make", "factor", "cache"), [(Decoder, 1, "4MiB"), (PictureInOneCall, 2, None)])
def test_it_is_said_once(make, factor, cache):
    loader = DataLoader(make(3), batch_size=BATCH_SIZE, shuffle=True)
    (said,) = said_by(EchoLoader(loader, factor, insertion_point="before_augmentation", cache=cache, seed=0))
    assert f"is overwritten when a later one of its batch is loaded, since {make.__name__} uses its memory again" in said


class Stored(Decoder):
    """Returns views of what it holds: rows of their own, or windows that overlap, with one mean for all of them."""

    def __init__(self, width, mean=None):
        self.values, self.width, self.mean = torch.arange(100.0), width, mean

    def load(self, index):
        return self.values[index : index + self.width], index, self.mean

    def augment(self, example):
        return example[0][:1].repeat(3), example[1]


@pytest.mark.parametrize(("width", "mean", "cache"), [(5, None, "4MiB"), (5, torch.zeros(3), None)])
def test_views_of_what_a_data_set_holds_are_right_without_a_word(width, mean, cache):
    sampler = RandomSampler(range(LENGTH), replacement=True, num_samples=LENGTH)
    loader = DataLoader(Stored(width, mean), batch_size=BATCH_SIZE, sampler=sampler)
    assert said_by(EchoLoader(loader, 2, insertion_point="before_augmentation", cache=cache, seed=0)) == []
