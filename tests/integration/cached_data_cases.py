"""Data sets that a cache is tried on, by name: kinds of examples, cuts and wrappings, which note their reads (see `told`)."""

import dataclasses
import io
import os
import random

import numpy as np
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_echo import StagedDataset

LENGTH = 24

READS = []  # the indices that this process has read since its last batch
_owner = os.getpid()


def note_read(index):
    """Notes that the user's data set has read an example. What a process has inherited is not its own."""
    global _owner
    if _owner != os.getpid():
        _owner = os.getpid()
        READS.clear()
    READS.append(index)


def told(examples):
    """A collate function: the examples as they are, the process that made the batch, and what it has read for it."""
    if _owner != os.getpid():
        READS.clear()
    read = list(READS)
    READS.clear()
    return examples, os.getpid(), read


def plain_values(value):
    """A value as nested tuples of plain values, with all types: what must be the same with and without a cache."""
    if isinstance(value, torch.Tensor):
        data = value.detach().to_dense().as_subclass(torch.Tensor).contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
        return type(value).__name__, str(data.dtype), value.layout, tuple(data.shape), raw, plain_values(dict(vars(value)))
    if isinstance(value, np.ndarray):
        return type(value).__name__, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Image.Image):
        return "image", value.mode, value.size, value.format, plain_values(value.getpalette()), value.tobytes()
    if isinstance(value, dict):
        return type(value).__name__, tuple((plain_values(key), plain_values(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(plain_values(item) for item in value)
    if isinstance(value, set):
        return "set", tuple(sorted(map(repr, value)))
    if dataclasses.is_dataclass(value):
        return type(value).__name__, plain_values(vars(value))
    return type(value).__name__, repr(value)


def noise():
    """A number of all three global generators."""
    return float(torch.rand(())) + random.random() + float(np.random.rand())


@dataclasses.dataclass
class Scan:
    image: torch.Tensor
    name: str
    rest: dict


def picture(index):
    return Image.fromarray(np.random.default_rng(index).integers(0, 256, (7, 9, 3), dtype=np.uint8))


def as_file(index, kind="PNG"):
    file = io.BytesIO()
    picture(index).save(file, kind)
    return file.getvalue()


def shaken(tensor):
    return tensor + noise()


def edited_in_place(example):
    """As a transform that flips boxes in place, pops a key, and appends."""
    example["x"].add_(noise())
    example.pop("extra")
    example["words"].append(len(example["words"]))
    np.negative(example["array"], out=example["array"])
    return example


def flipped(image):
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if noise() > 1.5 else image


def twice(index):
    tensor, words = torch.full((3,), float(index)), [index]
    return {"a": tensor, "b": tensor, "c": words, "d": words}


def both_edited(example):
    example["a"] += noise()
    example["c"].append(7)
    return example


EXAMPLES = {
    "tensor": (lambda i: torch.full((40,), float(i)), shaken),
    "dataclass": (
        lambda i: Scan(torch.full((3,), float(i)), f"scan {i}", {"ids": {1, 2, i}}),
        lambda e: dataclasses.replace(e, image=e.image + noise()),
    ),
    "image": (picture, flipped),
    "opened image": (lambda i: {"image": Image.open(io.BytesIO(as_file(i))), "id": i}, lambda e: (flipped(e["image"]), e["id"])),
    "edited in place": (
        lambda i: {"x": torch.full((6,), float(i)), "extra": 1, "words": [i], "array": np.arange(4) + i},
        edited_in_place,
    ),
    "twice the same": (twice, both_edited),
}


class Kind(Dataset):
    """A data set of one kind of examples: pickled bytes stand for a file, of which the index is read."""

    def __init__(self, kind, length=LENGTH):
        self.kind, self.length = kind, length

    def read(self, index):
        note_read(int(index))
        return str(int(index) % self.length).encode()

    def decode(self, raw):
        return EXAMPLES[self.kind][0](int(raw))

    def augment(self, example):
        return EXAMPLES[self.kind][1](example)

    def __getitem__(self, index):
        return self.augment(self.decode(self.read(index)))

    def __len__(self):
        return self.length


class Loaded(Dataset):
    """The same without any augmentation: it may be held whole."""

    def __init__(self, kind, length=LENGTH):
        self.kind, self.length = kind, length

    def __getitem__(self, index):
        note_read(int(index))
        return EXAMPLES[self.kind][0](int(index) % self.length)

    def __len__(self):
        return self.length


class Batched(Loaded):
    """Reads whole batches in one call."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Misfits(Kind):
    """Draws random numbers while it decodes, for a few of its examples."""

    def decode(self, raw):
        example = super().decode(raw)
        return example + torch.rand(()) if int(raw) % 8 == 5 else example


class DecodesInPlace(Kind):
    """Edits what was read while it decodes, and draws random numbers there for a few examples."""

    def read(self, index):
        return [super().read(index), 0]

    def decode(self, raw):
        raw[1] += 1
        example = super().decode(raw[0]) + raw[1]
        return example + torch.rand(()) if int(raw[0]) % 8 == 5 else example


def nested():
    """A base that is inside twice, a named cut of it, and others, over several levels."""
    base = Kind("tensor")
    cut = StagedDataset.of(Loaded("tensor"), augment=shaken)
    inner = ConcatDataset([Subset(base, [5, 4, 3]), base])
    return Subset(
        ConcatDataset([inner, cut, Subset(cut, [0, 0, 7])]), [53, 0, 1, 2, 3, 30, 12, 7, 8, 9, 27, 40, 41, 52, 26, 6, 7]
    )


LOADED = [(point, "loaded") for point in ("before_augmentation", "after_augmentation", "after_batching")]
ALL = [("after_read", "raw"), *((point, "raw") for point, _ in LOADED), *LOADED]
WHOLE = [("after_augmentation", "whole"), ("after_batching", "whole")]

# By name: how a data set is made, and insertion points and holds with which it is used.
DATASETS = {
    "nested": (nested, LOADED[:1]),
    "batched, whole": (lambda: Batched("dataclass"), WHOLE[1:]),
    "misfits": (lambda: Misfits("tensor"), [("auto", "auto"), ("auto", "raw")]),
    "decodes in place": (lambda: DecodesInPlace("tensor"), [("auto", "raw")]),
}
