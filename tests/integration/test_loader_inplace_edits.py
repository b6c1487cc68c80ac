"""In-place edits never reach an echo: whoever edits, every use starts from the example as it was read.

The expectation is written from the index alone: what one edit makes of a newly read example.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from loader_cases import POINTS, case_id, pairwise
from PIL import Image, ImageDraw
from torch.utils.data import DataLoader, Dataset

from lightning_echo import EchoLoader

LENGTH, WIDTH = 24, 100


# --- values: how each kind is made from an index, edited in place, and read off as plain numbers ---


def boxes(index):
    return torch.tensor([[float(index), 1.0, index + 10.0, 5.0]])


def flip_boxes(value):
    value[:, [0, 2]] = WIDTH - value[:, [2, 0]]


def draw(image):
    ImageDraw.Draw(image).rectangle((0, 0, 1, 3), fill=200)


def negate(array):
    np.subtract(255, array, out=array)


def lengthen(words):
    words.append("edited")
    words[0] += 1000


KINDS = {
    "tensor": (boxes, flip_boxes, lambda value: value.tolist()),
    "image": (lambda index: Image.new("L", (4, 4), index), draw, lambda image: np.asarray(image).tolist()),
    "array": (lambda index: np.full((2, 2), index, dtype=np.uint8), negate, lambda array: array.tolist()),
    "list": (lambda index: [index, "word"], lengthen, list),
}


@dataclass
class Example:
    index: int
    value: object


def as_dict(index, value):
    return {"index": index, "value": value, "extra": {"id": index}}


# --- containers: how a value is packed, reached, and how the container itself is edited ---

CONTAINERS = {
    "dict": (as_dict, lambda e: (e["index"], e["value"]), lambda e: e.pop("extra")),
    "nested": (
        lambda index, value: {"index": index, "inner": [{"value": value}]},
        lambda e: (e["index"], e["inner"][0]["value"]),
        lambda e: e["inner"].append("more"),
    ),
    "tuple": (lambda index, value: (index, value, {"id": index}), lambda e: (e[0], e[1]), lambda e: e[2].clear()),
    "dataclass": (Example, lambda e: (e.index, e.value), lambda e: e.__dict__.update(index=e.index)),
}


def fingerprint(example, container, kind):
    """An example as plain values."""
    index, value = CONTAINERS[container][1](example)
    rest = example.get("extra", "gone") if container == "dict" else ()
    rest = len(example["inner"]) if container == "nested" else rest
    rest = dict(example[2]) if container == "tuple" else rest
    return index, KINDS[kind][2](value), rest


def edit(example, container, kind):
    """Edits the value in place, and the container too."""
    KINDS[kind][1](CONTAINERS[container][1](example)[1])
    CONTAINERS[container][2](example)


class Examples(Dataset):
    """Two stages; the augmentation edits what it gets, where it is the editor."""

    def __init__(self, container, kind, editor):
        self.container, self.kind, self.editor = container, kind, editor

    def read(self, index):  # an example that can be edited: bytes alone could not show it
        return CONTAINERS[self.container][0](index, KINDS[self.kind][0](index))

    def decode(self, raw):
        if self.editor == "decoding":
            edit(raw, self.container, self.kind)
        return raw

    def augment(self, example):
        if self.editor == "augmentation":
            edit(example, self.container, self.kind)
        return example

    def __getitem__(self, index):
        return self.augment(self.decode(self.read(index)))

    def __len__(self):
        return LENGTH


class Collate:
    """Does not copy: what it returns holds the examples themselves. Edits them, where it is the editor."""

    def __init__(self, container, kind, editor):
        self.container, self.kind, self.editor = container, kind, editor

    def __call__(self, examples):
        if self.editor == "collate":
            for example in examples:
                edit(example, self.container, self.kind)
        return tuple(zip(*((example,) for example in examples), strict=True))


@pytest.mark.parametrize(
    "case",
    pairwise(
        editor=("decoding", "augmentation", "collate", "step"),
        point=POINTS,
        kind=tuple(KINDS),
        container=tuple(CONTAINERS),
        workers=(0, 2),
    ),
    ids=case_id,
)
def test_every_use_of_an_example_is_as_if_it_were_the_only_one(case):
    container, kind, editor = case["container"], case["kind"], case["editor"]
    dataset = Examples(container, kind, editor)
    collate = Collate(container, kind, editor)
    plain = DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=collate, num_workers=case["workers"])
    loader = EchoLoader(plain, 4, insertion_point=case["point"], seed=0)
    uses = dict.fromkeys(range(LENGTH), 0)
    for _ in range(4):
        for (examples,) in loader:
            for example in examples:
                index = CONTAINERS[container][1](example)[0]
                expected = dataset.read(index)
                if editor != "step":
                    edit(expected, container, kind)
                assert fingerprint(example, container, kind) == fingerprint(expected, container, kind)
                uses[index] += 1
                if editor == "step":
                    edit(example, container, kind)
    assert max(uses.values()) >= 4
    assert loader.counts.echoed >= 2 * loader.counts.fresh


@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_a_training_step_that_edits_the_delivered_tensors_reaches_no_echo(point, workers):
    """``tuple(zip(*batch))`` does not copy: from a worker comes its own tensor, in memory that both share."""
    plain = DataLoader(Pairs(), batch_size=4, collate_fn=unzipped, num_workers=workers)
    loader = EchoLoader(plain, 4, insertion_point=point, seed=0)
    for _ in range(4):
        for images, indices in loader:
            for image, index in zip(images, indices, strict=True):
                assert image.tolist() == [float(index)] * 3
                image.data.mul_(-1)
                image.numpy()[:] -= 1


class Pairs(Dataset):
    def read(self, index):
        return torch.full((3,), float(index)), index

    def decode(self, raw):
        return raw

    def augment(self, example):
        return example

    def __getitem__(self, index):
        return self.augment(self.decode(self.read(index)))

    def __len__(self):
        return LENGTH


def unzipped(examples):
    return tuple(zip(*examples, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_default_collate_function_needs_no_copies_and_gets_none(workers):
    """It stacks into new tensors, so that editing the batch cannot reach an example."""
    loader = EchoLoader(DataLoader(Pairs(), batch_size=4, num_workers=workers), 4, insertion_point="after_augmentation", seed=0)
    for _ in range(4):
        for images, indices in loader:
            assert torch.equal(images, indices[:, None].float().expand(-1, 3))
            images.zero_()
            indices.zero_()


@pytest.mark.parametrize("workers", [0, 2])
def test_two_echoes_of_a_batch_share_nothing_with_each_other(workers):
    loader = EchoLoader(DataLoader(Pairs(), batch_size=4, num_workers=workers), 4, insertion_point="after_batching", seed=0)
    batches = [batch for _ in range(4) for batch in loader]
    pointers = [images.data_ptr() for images, _ in batches]
    assert len(set(pointers)) == len(pointers) == 24
