"""Splits after reading: what is read is reused, decoding and augmenting are redone; proved like any other split."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torchvision
from PIL import Image
from raw_cases import RANDOM, Letters, NotAugmented, Raws, ShapeOfWords, Words
from split_cases import Staged, behaves_like, noisy, proved
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset
from torchvision import datasets
from torchvision import transforms as v1
from torchvision.datasets import folder as torchvision_folder

from lightning_echo.loader.loader import EchoLoader
from lightning_echo.split.describe import Convention, ReadRefused, SplitRefused
from lightning_echo.split.prove import find_split, make_stages
from lightning_echo.split.staged import StagedDataset, is_raw


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


def test_decoding_may_draw_from_a_generator_of_the_data_set_where_it_is_redone_but_not_where_it_is_reused():
    class OwnGenerator:
        def __init__(self):
            self.rng = np.random.default_rng(1)

        def __call__(self, raw):
            return int(raw) + self.rng.random()

    decode = OwnGenerator()
    dataset = StagedDataset.of(Raws(), decode=decode, augment=abs)
    assert find_split(dataset, raw=True).redone == ("decode", "augment")
    for each, of_which in ((dataset, "a generator that"), (Words(), "random"), (ShapeOfWords(), "random")):
        with pytest.raises(SplitRefused, match=rf"would be reused \(load\) draws random numbers from {of_which}"):
            find_split(each)
    assert decode.rng.random() == np.random.default_rng(1).random(), "the proof draws from a copy"


class LoadsToo(Letters):
    def load(self, index):
        return ["abcde"[index]] * 3


@pytest.mark.parametrize("dataset", [Letters(), LoadsToo(), StagedDataset.of(Raws(), decode=int, augment=noisy)])
def test_before_augmentation_decoding_is_loading(dataset):
    split = find_split(dataset)
    assert (split.reused, split.redone, split.raw) == (("load",), ("augment",), False)
    assert find_split(dataset, raw=True).redone[:2] == ("decode", "augment")


def test_a_staged_data_set_that_loads_may_call_a_helper_read():
    class Reads(Staged):
        def read(self, path):
            raise AssertionError("open(0) would close standard input")

        def decode(self, data):
            return data

    assert not is_raw(Reads())
    with pytest.raises(ReadRefused, match=r"Reads has no read\(index\) and decode\(raw\)"):
        find_split(Reads(), raw=True)
    assert find_split(Reads()).reused == ("load",)


@pytest.mark.parametrize("inside", [lambda cut: cut, lambda cut: StagedDataset.of(cut, augment=abs)])
def test_batched_reading_is_kept_by_a_named_cut(inside):
    class Batched(Raws):
        def __init__(self):
            self.calls = []

        def __getitems__(self, indices):
            self.calls.append(list(indices))
            return [self[index] for index in indices]

    inner = Batched()
    dataset = inside(StagedDataset.of(inner, decode=int, augment=lambda example: example * 2))
    stages = make_stages(dataset, raw=True)
    assert stages.load_many([5, 2]) == [b"5", b"2"]
    assert stages.augment(5, b"5") == 10
    assert [batch.tolist() for batch in DataLoader(dataset, batch_size=4)] == [[0, 2, 4, 6], [8, 10]]
    assert inner.calls == [[5, 2], [0, 1, 2, 3], [4, 5]]
    assert find_split(dataset, raw=True).redone[:2] == ("decode", "augment")


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


def of_general(images):
    return datasets.DatasetFolder(images, loader=torchvision_folder.default_loader, extensions=(".jpg",), transform=RANDOM)


@pytest.mark.parametrize(
    "make",
    [
        lambda images: ConcatDataset([of_general(images), Subset(datasets.ImageFolder(images), [0, 7])]),
        lambda images: StagedDataset.of(Subset(datasets.ImageFolder(images), [4, 5]), augment=lambda pair: (RANDOM(pair[0]), 1)),
    ],
    ids=["concat", "named augmentation"],
)
def test_folders_of_other_classes_and_inside_others(images, make):
    assert proved(make(images), raw=True)[0].reused == ("read",)


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


def test_another_image_backend_is_refused(images):
    dataset = datasets.ImageFolder(images)
    torchvision.set_image_backend("accimage")
    try:
        with pytest.raises(ReadRefused, match="torchvision's image backend is accimage"):
            find_split(dataset, raw=True)
    finally:
        torchvision.set_image_backend("PIL")


def test_in_a_worker_it_is_refused_if_it_is_no_longer_what_it_was(images):
    dataset = datasets.ImageFolder(images)
    conventions = find_split(dataset, raw=True).conventions
    dataset.loader = Image.open
    with pytest.raises(ReadRefused, match="its loader is open"):
        make_stages(dataset, conventions, raw=True)
    dataset.read, dataset.decode = dataset.samples.__getitem__, lambda raw: raw
    with pytest.raises(SplitRefused, match="ImageFolder no longer has files that torchvision's default loader decodes"):
        make_stages(dataset, conventions, raw=True)


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


@pytest.mark.parametrize("dataset", [Raws(), StagedDataset.of(Raws(), augment=len)])
def test_the_refusal_of_a_loader_says_what_to_implement_and_hides_no_way_out(dataset):
    with pytest.raises(ValueError, match=r"^insertion_point='after_read' is impossible here: ") as refused:
        EchoLoader(DataLoader(dataset, batch_size=2), 2, insertion_point="after_read")
    for way in ("read(index)", "decode(raw)", "StagedDataset", "StagedDataset.of(", "decode=...", "'before_augmentation'"):
        assert way in str(refused.value)
    assert "before its augmentation" not in str(refused.value)
    assert str(refused.value).count("Raws") == 1


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
