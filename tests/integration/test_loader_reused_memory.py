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

BATCH_SIZE = 8


class Chunks(IterableDataset):
    """Yields views of one buffer of two batches, and fills it again when all of them were yielded."""

    def __init__(self):
        self.buffer = torch.zeros(2 * BATCH_SIZE, 3)

    def __iter__(self):
        for start in range(0, 320, len(self.buffer)):
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
        return 320


class Ring:
    """A loader with a few slots that batches are made in, by turns."""

    def __init__(self, slots):
        self.slots = [torch.zeros(BATCH_SIZE, 3) for _ in range(slots)]

    def __iter__(self):
        for number, start in enumerate(range(0, 320, BATCH_SIZE)):
            slot = self.slots[number % len(self.slots)]
            labels = torch.arange(start, start + BATCH_SIZE)
            slot[:] = labels[:, None]
            yield slot, labels

    def __len__(self):
        return 320 // BATCH_SIZE


def pairs(loader, epochs=3):
    """All images and labels as they are when their step comes."""
    with_transfer = loader.insertion_point == "after_transfer"
    loader.is_transferred = with_transfer
    for _ in range(epochs):
        for batch in loader:
            if with_transfer:
                batch.live.prepare(batch.host, lambda host: host)
                batch = batch.live.transfer(lambda host: host, is_last=batch.is_last)  # a device that is the host
            yield from zip(*batch, strict=True)
    loader.close()


@pytest.mark.grid
@pytest.mark.parametrize("factor", [1, 2, 3.5])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: DataLoader(Chunks(), batch_size=BATCH_SIZE), {}),
        (lambda: DataLoader(Chunks(), batch_size=BATCH_SIZE, num_workers=1), {}),
        (lambda: DataLoader(Chunks(), batch_size=BATCH_SIZE, collate_fn=lambda examples: list(zip(*examples, strict=True))), {}),
        (lambda: DataLoader(Preallocated(), batch_size=BATCH_SIZE, shuffle=True), {}),
        (lambda: DataLoader(Preallocated(), batch_size=BATCH_SIZE, shuffle=True, num_workers=2), {}),
        (lambda: Ring(1), {}),
        (lambda: Ring(3), {}),
        (lambda: Ring(1), {"insertion_point": "after_transfer"}),
        (lambda: DataLoader(Preallocated(), batch_size=BATCH_SIZE, num_workers=1), {"insertion_point": "after_transfer"}),
    ],
    ids=[
        "chunks",
        "chunks, a worker",
        "chunks, own collate",
        "calls",
        "calls, workers",
        "a slot",
        "a ring",
        "to a device",
        "to one, a worker",
    ],
)
def test_images_belong_to_their_labels(make, options, factor):
    count = 0
    for image, label in pairs(EchoLoader(make(), factor, seed=0, **options)):
        assert image.tolist() == [float(label)] * 3
        count += 1
    assert count >= 320


# --- a data set that decodes into a few buffers by turns -------------------------------------------------------------------


def as_array(buffer):
    return np.frombuffer(buffer, np.float32)


BUFFERS = {
    "tensor": (lambda: torch.zeros(64), lambda buffer: buffer),
    "array": (lambda: np.zeros(64, np.float32), lambda buffer: buffer),
    "array as tensor": (lambda: np.zeros(64, np.float32), torch.from_numpy),
    "bytearray": (lambda: bytearray(256), as_array),
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
        return 80


class InOneCall(Decoder):
    """Reads a batch in one call, example by example."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Picture(Dataset):
    """As torchvision's data sets are."""

    def __init__(self, slots):
        self.decoder, self.transform = Decoder(slots), lambda image: image[:3] + torch.zeros(())

    def __getitem__(self, index):
        image, label = self.decoder.load(index)
        return self.transform(image), label

    def __len__(self):
        return 80


class PictureInOneCall(Picture):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def wrong(loader, epochs=2):
    seen = list(pairs(loader, epochs))
    assert len(seen) == epochs * 80
    return [(int(image[0]), int(label)) for image, label in seen if image.tolist() != [float(label)] * 3]


@pytest.mark.filterwarnings("ignore:.*uses its memory again")
@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("cache", [None, {"size": "4MiB", "hold": "loaded"}])
@pytest.mark.parametrize("factor", [1, 2.37])
@pytest.mark.parametrize(
    "make",
    [*(lambda slots, kind=kind: Decoder(slots, kind) for kind in BUFFERS), InOneCall, Picture, PictureInOneCall],
    ids=[*BUFFERS, "in one call", "transform", "transform in one call"],
)
@pytest.mark.parametrize("slots", [2, 4])
def test_images_decoded_into_a_ring_of_buffers_belong_to_their_labels(slots, make, factor, cache, workers):
    loader = DataLoader(make(slots), batch_size=BATCH_SIZE, shuffle=True, num_workers=workers)
    echoed = EchoLoader(loader, factor, insertion_point="before_augmentation", cache=cache, seed=0)
    assert wrong(echoed) == []


class Gray(Dataset):
    """Makes images of Pillow of its buffers, which copies none of them: ``Image.fromarray`` of one channel."""

    def __init__(self):
        self.buffers, self.turn = [np.zeros((4, 4), np.uint8) for _ in range(3)], 0
        self.transform = lambda image: torch.from_numpy(np.array(image)).flatten()[:3] + torch.zeros(())

    def __getitem__(self, index):
        self.turn += 1
        buffer = self.buffers[self.turn % 3]
        buffer[:] = index
        return self.transform(PIL.Image.fromarray(buffer)), index

    def __len__(self):
        return 80


@pytest.mark.filterwarnings("ignore:.*uses its memory again")
@pytest.mark.parametrize("cache", [None, "4MiB"])
def test_images_over_the_memory_of_arrays_belong_to_their_labels(cache):
    loader = DataLoader(Gray(), batch_size=BATCH_SIZE, shuffle=True)
    assert wrong(EchoLoader(loader, 2, insertion_point="before_augmentation", cache=cache, seed=0)) == []


def said_by(loader):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert wrong(loader) == []
    return [str(each.message) for each in said if "memory" in str(each.message)]


@pytest.mark.parametrize(("factor", "cache"), [(1, "4MiB"), (2, None)])
@pytest.mark.parametrize("make", [Decoder, PictureInOneCall])
def test_it_is_said_once(make, factor, cache):
    loader = DataLoader(make(3), batch_size=BATCH_SIZE, shuffle=True)
    (said,) = said_by(EchoLoader(loader, factor, insertion_point="before_augmentation", cache=cache, seed=0))
    assert f"is overwritten when a later one of its batch is loaded, since {make.__name__} uses its memory again" in said


class Stored(StagedDataset):
    """Returns views of what it holds: rows of their own, or windows that overlap, with one mean for all of them."""

    def __init__(self, width, mean=None):
        self.values, self.width, self.mean = torch.arange(100.0), width, mean

    def load(self, index):
        return self.values[index : index + self.width], index, self.mean

    def augment(self, example):
        return example[0][:1].repeat(3), example[1]

    def __len__(self):
        return 80


@pytest.mark.parametrize("cache", [None, "4MiB"])
@pytest.mark.parametrize("make", [lambda: Stored(1), lambda: Stored(5), lambda: Stored(1, torch.zeros(3))])
def test_views_of_what_a_data_set_holds_are_right_without_a_word(make, cache):
    sampler = RandomSampler(range(80), replacement=True, num_samples=80)
    loader = DataLoader(make(), batch_size=BATCH_SIZE, sampler=sampler)
    assert said_by(EchoLoader(loader, 2, insertion_point="before_augmentation", cache=cache, seed=0)) == []
