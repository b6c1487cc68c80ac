"""Data sets that a cache is tried on, by name: what there is of kinds of examples, cuts and wrappings.

Spawned workers import this module. Each data set counts what is read of it in the process that reads (`READS`), and `Told` sends
that with each batch, so that the tests count in the user's own code, in all processes.
"""

import dataclasses
import io
import os
import random
from collections import namedtuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split
from torchvision import datasets, tv_tensors
from torchvision.transforms import v2

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


class Told:
    """A collate function: the examples as they are, the process that made the batch, and what it has read for it."""

    def __init__(self, collate=list):
        self.collate = collate

    def __call__(self, examples):
        if _owner != os.getpid():
            READS.clear()
        read = list(READS)
        READS.clear()
        return self.collate(examples), os.getpid(), read


def plain_values(value):
    """A value as nested tuples of plain values, with all types: what must be the same with and without a cache."""
    if isinstance(value, torch.Tensor):
        data = value.detach().to_dense().as_subclass(torch.Tensor).contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
        return type(value).__name__, str(data.dtype), value.layout, tuple(data.shape), raw, plain_values(dict(vars(value)))
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return "objects", value.dtype.str, value.shape, plain_values(value.ravel().tolist())
    if isinstance(value, np.ndarray):
        return type(value).__name__, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Image.Image):
        return "image", value.mode, value.size, value.format, plain_values(value.getpalette()), value.tobytes()
    if isinstance(value, dict):
        return type(value).__name__, tuple((plain_values(key), plain_values(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(plain_values(item) for item in value)
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, tuple(sorted(map(repr, value)))
    if dataclasses.is_dataclass(value):
        return type(value).__name__, plain_values(vars(value))
    if isinstance(value, Slotted):
        return "Slotted", plain_values(value.value)
    if callable(value):
        return "function", value()
    return type(value).__name__, repr(value)


# --- examples of each kind: made of an index, and augmented with random numbers ------------------------------------------


def noise():
    """A number of all three global generators."""
    return float(torch.rand(())) + random.random() + float(np.random.rand())


@dataclasses.dataclass
class Scan:
    image: torch.Tensor
    name: str
    rest: dict


Pair = namedtuple("Pair", "left right")


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def picture(index, mode="RGB", size=(9, 7)):
    values = np.random.default_rng(index).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(values).convert(mode)


def as_file(index, kind="PNG", **options):
    file = io.BytesIO()
    picture(index).save(file, kind, **options)
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


SHARED = torch.arange(LENGTH * 50.0).reshape(LENGTH, 50)

EXAMPLES = {
    "tensor": (lambda i: torch.full((40,), float(i)), shaken),
    "tensors of every layout": (
        lambda i: (torch.arange(12.0).reshape(3, 4).t() + i, torch.full((2, 3, 4, 5), i).to(memory_format=torch.channels_last)),
        lambda e: (e[0] + noise(), e[1]),
    ),
    "views": (lambda i: {"row": SHARED[i], "part": SHARED[i, 3:9]}, lambda e: {**e, "row": e["row"] + noise()}),
    "odd tensors": (
        lambda i: [
            torch.empty(0, 3),
            torch.tensor(i),
            torch.tensor([True, False]),
            torch.tensor([1 + 2j]),
            torch.tensor([float("nan")]),
        ],
        lambda e: [*e, noise()],
    ),
    "half": (lambda i: torch.full((3,), i, dtype=torch.bfloat16), lambda e: (e, noise())),
    "sparse": (lambda i: {"s": torch.eye(4).mul(i).to_sparse()}, lambda e: {"s": e["s"].to_dense() + noise()}),
    "arrays": (
        lambda i: {
            "f": np.asfortranarray(np.full((3, 5), i)),
            "back": np.arange(9)[::-1] + i,
            "str": np.array(["a", "bcd"]),
            "when": np.array(["2020-01-01"], dtype="datetime64[D]"),
            "any": np.array([i, "x", None], dtype=object),
            "record": np.array([(i, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
            "one": np.float32(i),
            "scalar": np.array(i),
        },
        lambda e: {**e, "f": e["f"] + noise()},
    ),
    "plain": (
        lambda i: (i, i / 7, "wörd \udcff", b"\x00raw", None, True, 2**80, float("inf"), 1 + 2j, {1: "a", None: (), "k": [[]]}),
        lambda e: (*e, noise()),
    ),
    "none": (lambda i: None, lambda e: noise()),
    "string": (lambda i: f"file {i}", lambda e: f"{e} {noise()}"),
    "dataclass": (
        lambda i: Scan(torch.full((3,), float(i)), f"scan {i}", {"ids": {1, 2, i}}),
        lambda e: dataclasses.replace(e, image=e.image + noise()),
    ),
    "namedtuple": (lambda i: Pair(torch.tensor(i), [i]), lambda e: Pair(e.left, [*e.right, noise()])),
    "slots": (lambda i: Slotted(torch.full((2,), i)), lambda e: (e.value + noise(),)),
    "unpicklable": (lambda i: {"x": torch.tensor(float(i)), "call": lambda: i}, lambda e: (e["x"] + noise(), e["call"]())),
    "image": (lambda i: picture(i), flipped),
    "images of modes": (
        lambda i: [picture(i, mode) for mode in ("1", "L", "P", "RGBA", "CMYK", "F", "I", "YCbCr", "LA")],
        lambda e: [*e, noise()],
    ),
    "opened image": (lambda i: {"image": Image.open(io.BytesIO(as_file(i))), "id": i}, lambda e: (flipped(e["image"]), e["id"])),
    "opened jpeg": (lambda i: Image.open(io.BytesIO(as_file(i, "JPEG", dpi=(72, 72)))), lambda e: (e.format, e, noise())),
    "detection": (
        lambda i: (
            tv_tensors.Image(torch.full((3, 8, 10), i, dtype=torch.uint8)),
            {
                "boxes": tv_tensors.BoundingBoxes([[1.0, 2.0, 4.0, 6.0 + i % 2]], format="XYXY", canvas_size=(8, 10)),
                "masks": tv_tensors.Mask(torch.ones(1, 8, 10, dtype=torch.bool)),
                "labels": torch.tensor([i]),
            },
        ),
        lambda e: v2.Compose([v2.RandomHorizontalFlip(0.5), v2.RandomResizedCrop(4)])(*e),
    ),
    "edited in place": (
        lambda i: {"x": torch.full((6,), float(i)), "extra": 1, "words": [i], "array": np.arange(4) + i},
        edited_in_place,
    ),
    "twice the same": (
        lambda i: (lambda t, w: {"a": t, "b": t, "c": w, "d": w})(torch.full((3,), float(i)), [i]),
        lambda e: both_edited(e),
    ),
}


def both_edited(example):
    example["a"] += noise()
    example["c"].append(7)
    return example


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


# --- data sets: cut in every way, and wrapped in every way ----------------------------------------------------------------


class Batched(Loaded):
    """Reads whole batches in one call."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Preallocated(Dataset):
    """Reads a whole batch into the same memory each time, which has no room for more."""

    def __init__(self, batch_size):
        self.values = torch.zeros(batch_size, 3)

    def __getitems__(self, indices):
        for index in indices:
            note_read(index)
        self.values[: len(indices)] = torch.tensor(indices)[:, None]
        return list(zip(self.values[: len(indices)], indices, strict=True))

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __len__(self):
        return LENGTH


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


class Lenient(Kind):
    """Takes another example for one that cannot be decoded."""

    def decode(self, raw):
        if int(raw) % 8 == 5:
            raise ValueError("no image")
        return super().decode(raw)

    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except ValueError:
            return self.augment(torch.full((40,), -1.0))


class OwnGenerator(Kind):
    """Draws from a generator of its own."""

    def __init__(self, kind):
        super().__init__(kind)
        self.generator = np.random.default_rng(5)

    def augment(self, example):
        return example + float(self.generator.random()) + noise()


class DecodesWithOwnGenerator(OwnGenerator):
    """Draws from a generator of its own, which can be seeded, for a few examples while it decodes."""

    def set_random_seed(self, seed):
        self.generator = np.random.default_rng(seed)

    def decode(self, raw):
        example = super().decode(raw)
        return example + float(self.generator.random()) if int(raw) % 8 == 5 else example


class WithTransform(Dataset):
    """A transform of the image, as torchvision's data sets hold it."""

    def __init__(self, transform, calls):
        self.transform, self.calls = transform, calls

    def __getitem__(self, index):
        note_read(index)
        image, mask = np.asarray(picture(index)), np.full((7, 9), index % 5, dtype=np.uint8)
        if self.calls == "by name":
            made = self.transform(image=image, mask=mask)
            return made["image"], made["mask"]
        if self.calls == "detection":
            return self.transform(*EXAMPLES["detection"][0](index))
        return self.transform(picture(index)), index

    def __len__(self):
        return LENGTH


class ByName:
    """As a transform of Albumentations: values by name, and a generator of its own."""

    def __init__(self):
        self.generator = np.random.default_rng()

    def set_random_seed(self, seed):
        self.generator = np.random.default_rng(seed)

    def __call__(self, image, mask):
        if self.generator.random() < 0.5:
            image, mask = image[:, ::-1].copy(), mask[:, ::-1].copy()
        return {"image": image, "mask": mask}


def augmented_in_place(example):
    """Also what a data set itself keeps, unless it hands out copies."""
    return example.mul_(2).add_(noise())


def nested():
    """A base that is inside twice, a named cut of it, and others, over several levels."""
    base = Kind("tensor")
    cut = StagedDataset.of(Loaded("tensor"), augment=shaken)
    inner = ConcatDataset([Subset(base, [5, 4, 3]), base])
    return Subset(
        ConcatDataset([inner, cut, Subset(cut, [0, 0, 7])]), [53, 0, 1, 2, 3, 30, 12, 7, 8, 9, 27, 40, 41, 52, 26, 6, 7]
    )


def folder(tmp_path):
    for index in range(LENGTH):
        place = tmp_path / f"class {index % 3}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{index:03}.jpg").write_bytes(as_file(index, "JPEG"))
    transform = v2.Compose(
        [v2.Resize((6, 6)), v2.RandomHorizontalFlip(), v2.PILToTensor(), v2.ToDtype(torch.float32), v2.GaussianNoise()]
    )
    return datasets.ImageFolder(tmp_path, transform)


DETECTION = v2.Compose([v2.ToDtype(torch.float32), v2.RandomHorizontalFlip(0.5), v2.RandomZoomOut(p=0.5)])
CLASSIFIED = v2.Compose([v2.Resize((5, 5)), v2.RandomCrop(3), v2.PILToTensor()])

EARLY = ("after_read", "raw"), ("before_augmentation", "raw"), ("after_augmentation", "raw"), ("after_batching", "raw")
LATE = ("before_augmentation", "loaded"), ("after_augmentation", "loaded"), ("after_batching", "loaded")
WHOLE = ("after_augmentation", "whole"), ("after_batching", "whole")
ALL = EARLY + LATE
AUTO = ("auto", "auto"), ("auto", "raw"), ("after_augmentation", "auto")

# By name: how a data set is made (of a folder for files), and with which insertion points and holds it can be used.
DATASETS = {
    "subset": (lambda _: Subset(Kind("tensor"), [3, 3, 20, 1, 8, 9, 0, 11, 17]), ALL),
    "random_split": (lambda _: random_split(Kind("tensor"), [15, 9], torch.Generator().manual_seed(1))[0], ALL),
    "concat": (lambda _: ConcatDataset([Kind("tensor"), Kind("dataclass", 9)]), ALL),
    "nested": (lambda _: nested(), LATE),
    "named cut": (lambda _: StagedDataset.of(Loaded("image"), augment=flipped), LATE),
    "batched": (lambda _: StagedDataset.of(Batched("tensor"), augment=shaken), LATE),
    "batched, whole": (lambda _: Batched("dataclass"), WHOLE),
    "preallocated": (lambda _: Preallocated(4), WHOLE),
    "subset, whole": (lambda _: Subset(Loaded("detection"), [1, 9, 3, 4, 20, 7, 8]), WHOLE),
    "misfits": (lambda _: Misfits("tensor"), AUTO),
    "decodes in place": (lambda _: DecodesInPlace("tensor"), AUTO),
    "lenient": (lambda _: Lenient("tensor"), AUTO),
    "own generator": (lambda _: OwnGenerator("tensor"), ALL),
    "decodes with its own generator": (lambda _: DecodesWithOwnGenerator("tensor"), AUTO),
    "transform": (lambda _: WithTransform(CLASSIFIED, "image"), LATE),
    "transform by name": (lambda _: WithTransform(ByName(), "by name"), LATE),
    "transforms of detection": (lambda _: WithTransform(DETECTION, "detection"), LATE),
    "in place": (lambda _: StagedDataset.of(Loaded("tensor"), augment=augmented_in_place), LATE),
    "image folder": (folder, ALL),
}
