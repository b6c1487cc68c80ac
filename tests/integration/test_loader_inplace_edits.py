"""In-place edits never reach an echo: whoever edits, every use starts from the example as it was read."""

import itertools

import numpy as np
import pytest
import torch
from loader_cases import POINTS, case_id
from PIL import Image, ImageDraw
from torch.utils.data import DataLoader, Dataset

from lightning_echo import EchoLoader

LENGTH, WIDTH = 24, 100


class Examples(Dataset):
    """Two stages; each edits what it gets, where it is the editor."""

    def __init__(self, editor):
        self.editor = editor

    def read(self, index):  # an example that can be edited: bytes alone could not show it
        boxes, image = torch.tensor([[float(index), 1.0, index + 10.0, 5.0]]), Image.new("L", (4, 4), index)
        return {"index": index, "boxes": boxes, "inner": [image, np.full((2, 2), index, dtype=np.uint8)], "extra": index}

    def decode(self, raw):
        return self.edited(raw, "decoding")

    def augment(self, example):
        return self.edited(example, "augmentation")

    def collate(self, examples):
        """Does not copy: what it returns holds the examples themselves."""
        return tuple(zip(*((self.edited(example, "collate"),) for example in examples), strict=True))

    def edited(self, example, editor):
        """Edits values in place, and their containers too."""
        if self.editor == editor:
            image, array = example["inner"]
            example["boxes"][:, [0, 2]] = WIDTH - example["boxes"][:, [2, 0]]
            ImageDraw.Draw(image).rectangle((0, 0, 1, 3), fill=200)
            np.subtract(255, array, out=array)
            example["inner"].append("more")
            example.pop("extra")
        return example

    def __getitem__(self, index):
        return self.augment(self.decode(self.read(index)))

    def __len__(self):
        return LENGTH


def plain(example):
    image, array, *more = example["inner"]
    return {**example, "boxes": example["boxes"].tolist(), "inner": [image.tobytes(), array.tolist(), *more]}


@pytest.mark.parametrize(
    "case",
    [
        {"point": point, "editor": editor, "workers": index % 2}
        for index, (point, editor) in enumerate(itertools.product(POINTS[::3], ("decoding", "augmentation", "collate", "step")))
    ],
    ids=case_id,
)
def test_every_use_of_an_example_is_as_if_it_were_the_only_one(case):
    editor = case["editor"]
    dataset = Examples(editor)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=dataset.collate, num_workers=case["workers"])
    loader = EchoLoader(loader, 4, insertion_point=case["point"], seed=0)
    uses = dict.fromkeys(range(LENGTH), 0)
    for _ in range(4):
        for (examples,) in loader:
            for example in examples:
                expected = dataset.edited(dataset.read(example["index"]), editor if editor != "step" else "nobody")
                assert plain(example) == plain(expected)
                uses[example["index"]] += 1
                dataset.edited(example, "step")
    assert max(uses.values()) >= 4
    assert loader.counts.echoed >= 2 * loader.counts.fresh
