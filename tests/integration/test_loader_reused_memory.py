"""Data sets, streams and loaders that use their memory again: each delivered image still belongs to its label.

The plain loader delivers every pair right, since each producer keeps what it hands out for as long as a batch is made, or trained
on. An echo is used long after that.
"""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_echo import EchoLoader

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
