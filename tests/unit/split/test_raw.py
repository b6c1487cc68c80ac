"""Splits after reading: what is read is reused, the rest redone; the way from a raw item to a loaded example, proved."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from raw_cases import RANDOM, Letters, NotAugmented, Raws, ShapeOfWords, Words
from split_cases import Staged, behaves_like, noisy, proved
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from torchvision import datasets
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.datasets import folder as torchvision_folder

from lightning_echo.data.difference import difference
from lightning_echo.pipeline.worker import LiveExamples, Request
from lightning_echo.split.describe import Convention, ReadRefused, SplitRefused
from lightning_echo.split.prove import Split, find_split, make_decoding, make_stages, prove_decoding
from lightning_echo.split.staged import StagedDataset


@pytest.mark.parametrize(
    ("dataset", "redone"),
    [
        (Words(), ("decode", "augment")),
        (ShapeOfWords(), ("decode", "augment")),
        (NotAugmented(), ("decode",)),
        (StagedDataset.of(Raws(), decode=int, augment=noisy), ("decode", "augment")),
        (Subset(Words(), [5, 2]), ("decode", "augment")),
        (ConcatDataset([NotAugmented(), Subset(Words(), [1])]), ("decode", "augment")),
        (StagedDataset.of(ConcatDataset([NotAugmented(), NotAugmented()]), augment=str.upper), ("decode", "augment")),
        (StagedDataset.of(Subset(Words(), [3, 1]), augment=repr), ("decode", "augment", "augment")),
    ],
    ids=[
        *("inherited", "protocol", "no augment", "named cut", "subset", "concat"),
        *("named augmentation of a concat", "named augmentation of a subset"),
    ],
)
def test_each_use_is_decoded_and_augmented_anew(dataset, redone):
    split, stages = proved(dataset, raw=True, is_sent=True)
    assert (split.reused, split.redone) == (("read",), redone)
    assert isinstance(stages.load(0), bytes), "what is reused is raw"


def test_a_named_augmentation_leads_each_raw_item_to_the_decoder_that_it_is_for():
    class Backwards(NotAugmented):
        def decode(self, raw):
            return raw.decode()[::-1]

    dataset = StagedDataset.of(ConcatDataset([Subset(NotAugmented(), range(7)), Backwards()]), augment=str.upper)
    assert find_split(dataset, [8, 2, 0], raw=True).redone == ("decode", "augment")
    stages = proved(Subset(dataset, [8, 0, 13, 6]), raw=True)[1]
    assert stages.augment(0, stages.load(0)) == "1 REBMUN DROW"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ()),
        ({"transform": RANDOM}, ("Resize", "RandomHorizontalFlip", "PILToTensor")),
        ({"target_transform": noisy}, ("target noisy",)),
        ({"transform": v1.ToTensor(), "target_transform": noisy}, ("ToTensor", "target noisy")),
    ],
)
def test_an_image_folder_is_split_as_it_is(images, options, names):
    dataset = datasets.ImageFolder(images, **options)
    split, stages = proved(dataset, raw=True)
    assert (split.reused, split.redone, split.conventions) == (("read",), ("decode", *names), (Convention.folder,))
    for index, (path, target) in enumerate(dataset.samples):
        with open(path, "rb") as file:
            assert stages.load(index) == (file.read(), target)
    dataset.samples = dataset.samples[::-1]  # as a worker_init_fn may do
    dataset.transform = RANDOM
    assert behaves_like(dataset, stages)


def test_files_of_every_kind_are_decoded_as_torchvision_does(tmp_path):
    (tmp_path / "kinds").mkdir()
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 4), dtype=np.uint8))
    for mode, kind in [("RGB", "png"), ("RGBA", "png"), ("P", "png"), ("1", "bmp"), ("L", "jpg"), ("CMYK", "jpg")]:
        (pixels if mode == "RGBA" else pixels.convert("RGB").convert(mode)).save(tmp_path / "kinds" / f"{mode}.{kind}")
    dataset = datasets.ImageFolder(tmp_path)
    assert len(dataset) == 6
    assert behaves_like(dataset, make_stages(dataset, raw=True))


def own(method):
    return type("WithPaths", (datasets.ImageFolder,), {method: lambda self, index: index})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: datasets.ImageFolder(folder, loader=Image.open), r"its loader is open, not torchvision's default_loader"),
        (
            lambda folder: datasets.ImageFolder(folder, loader=torchvision_folder.pil_loader),
            r"its loader is pil_loader, not torchvision's default_loader, so it is not known .* decoded\. Give it read\(index\)",
        ),
        (own("__getitem__"), "WithPaths reads examples by a method of its own, not by DatasetFolder's"),
        (own("__getitems__"), "WithPaths reads examples by a method of its own, not by DatasetFolder's"),
    ],
)
def test_a_folder_that_is_decoded_in_another_way_is_refused(images, make, reason):
    with pytest.raises(ReadRefused, match=reason):
        find_split(make(images), raw=True)


def test_a_default_loader_that_decodes_otherwise_is_found_by_the_proof_and_both_reasons_are_given(images, monkeypatch):
    class Both(datasets.ImageFolder):
        def read(self, index):
            return b"nothing"

        def decode(self, raw):
            return raw

    monkeypatch.setattr(torchvision_folder, "default_loader", lambda path: Image.open(path).convert("L"))
    with pytest.raises(ReadRefused, match=r"dataset\[0\] is not what its stages return .*images of mode L and RGB") as refused:
        find_split(Both(images, loader=torchvision_folder.default_loader), raw=True)
    for convention in ("by read(index) and decode(raw): ", "by files that torchvision's default loader decodes: "):
        assert convention in refused.value.reason


def remembering(self, index):
    self.last = index
    return b"word"


def failing(self, raw):
    raise OSError("truncated")


class Stream(IterableDataset):
    read, decode = Words.read, Words.decode

    def __iter__(self):
        return iter([])


NOT_ITS_STAGES = r"dataset\[0\] is not what its stages return under the same seeds"


@pytest.mark.parametrize(
    ("base", "methods", "reason"),
    [
        (
            Words,
            {"read": lambda self, index: b"%f" % random.random()},
            r"reused \(read\) draws random numbers from random\. Give",
        ),
        (ShapeOfWords, {"__getitem__": lambda self, index: self.augment(self.decode(self.read(index)).upper())}, NOT_ITS_STAGES),
        (NotAugmented, {"__getitem__": lambda self, index: noisy(len(self.read(index)))}, NOT_ITS_STAGES),
        (NotAugmented, {"read": remembering, "decode": lambda self, raw: (raw, self.last)}, NOT_ITS_STAGES),
        (
            NotAugmented,
            {"__getitem__": lambda self, index: "word", "decode": failing},
            r"decoding and augmenting dataset\[0\] in stages raised OSError: truncated",
        ),
        (Stream, {}, "Own is a stream"),
        (Staged, {}, r"Own has no read\(index\) and decode\(raw\)"),
    ],
    ids=["read draws", "more than its stages", "augmented without augment", "remembers", "decoding raises", "stream", "loads"],
)
def test_what_is_not_its_raw_item_decoded_and_augmented_is_refused(base, methods, reason):
    with pytest.raises(ReadRefused, match=reason):
        find_split(type("Own", (base,), methods)(), raw=True)


@pytest.mark.slow
@pytest.mark.own_interpreter  # blocks imports
def test_torchvision_is_neither_needed_nor_imported():
    program = (
        "import sys\n"
        "sys.modules['torchvision'] = sys.modules['PIL'] = None\n"  # importing them raises
        "from torch.utils.data import DataLoader, Dataset\n"
        "from lightning_echo import EchoLoader\n"
        "class Own(Dataset):\n"
        "    def read(self, index): return b'%d' % index\n"
        "    def decode(self, raw): return int(raw)\n"
        "    def __getitem__(self, index): return self.decode(self.read(index))\n"
        "    def __len__(self): return 4\n"
        "print(repr(EchoLoader(DataLoader(Own(), batch_size=2), 2, insertion_point='after_read', seed=0)).split(';')[0])\n"
        "try: EchoLoader(DataLoader([1, 2], batch_size=2), 2, insertion_point='after_read')\n"
        "except ValueError as error: print('read(index)' in str(error))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["after_read, factor 2: reuse [read], redo [decode]", "True"]


def held_bytes(cache):
    """The bytes of all raw items in a cache, which have to be nothing but bytes and targets."""
    assert {(type(data), type(target)) for data, target in cache._held.values()} == {(bytes, int)}
    return sum(len(data) for data, _ in cache._held.values())


def test_what_is_held_are_the_bytes_of_the_files(images):
    dataset = datasets.ImageFolder(images, RANDOM)
    sizes = [os.path.getsize(path) for path, _ in dataset.samples]
    cache = LiveExamples(dataset, lambda dataset: make_stages(dataset, raw=True), 0, list)
    cache.fetch(Request(0, [0, 1, 2], 3, [4, 5, 6], b"\1\1\1"))
    assert held_bytes(cache) == sizes[4] + sizes[5] + sizes[6]
    cache.fetch(Request(1, [3, 0], 1, [7, 4], b"\1\0", forget=(1,)))
    assert held_bytes(cache) == sizes[6] + sizes[7]
    decoded = 160 * 120 * 4  # Pillow's RGB
    assert max(sizes) < decoded / 10, "or the test shows nothing"


def assert_decodes(dataset, indices):
    raw, loaded = find_split(dataset, raw=True), find_split(dataset)
    prove_decoding(dataset, raw, loaded)
    two, one = make_decoding(dataset, raw, loaded), make_stages(dataset, loaded.conventions)
    for index in indices:
        assert difference(two.augment(index, two.load(index)), one.load(index)) is None
    return two


def test_an_image_folder_decodes_and_applies_what_is_not_random_also_inside_others(images):
    folder = ImageFolder(str(images), RANDOM, target_transform=lambda target: target + 100)
    two = assert_decodes(folder, range(6))
    content, target = two.load(0)
    assert content == Path(folder.samples[0][0]).read_bytes()
    image, after = two.augment(0, (content, target))
    assert (image.size, after) == ((16, 12), 0), "a function that nobody knows may draw: it comes after the cut"
    assert_decodes(ConcatDataset([Subset(folder, [3]), folder, Letters()]), [0, 1, 6, 9, 13])


class More(Letters):
    def load(self, index):
        return [*super().load(index), "more"]

    def augment(self, example):
        return example[:3]


class Draws(Letters):
    def load(self, index):
        return ["x"]

    def decode(self, raw):
        torch.rand(1)
        return ["x"]

    def augment(self, example):
        return example


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (More(), r"dataset\[0\] is loaded otherwise than it is read and decoded"),
        (Draws(), "decoding draws random numbers from torch"),
    ],
)
def test_another_load_than_read_and_decode_or_a_decode_that_draws_is_refused(dataset, reason):
    raw = Split(("read",), ("decode", "augment"), 3, find_split(Letters(), raw=True).conventions, raw=True)
    with pytest.raises(SplitRefused, match=reason):
        prove_decoding(dataset, raw, find_split(dataset))


def test_a_named_cut_that_is_read_inside_decodes_all_that_stands_before_it():
    class Plain(Letters):
        def augment(self, example):
            return [*example, "!"]

    two = assert_decodes(StagedDataset.of(Plain(), augment=lambda example: [*example, noisy(0)]), range(5))
    assert two.augment(2, two.load(2)) == ["c", "c", "c", "!"]
