"""Copies of data sets leave no trace in the original, and copy nothing large."""

import copy
import mmap
import random
import threading
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from data_cases import Holding
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_echo.data import copies
from lightning_echo.data.copies import ThrowAwayCopies, shallow_copy, throw_away_copy
from lightning_echo.data.randomness import generator_state


class Reader:
    def __init__(self, path):
        self.path = path
        self.archive = None

    def read(self, name):
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.path)
        return self.archive.read(name)


class Closing(Dataset):
    """Closes what it holds when it is collected."""

    def __init__(self, path):
        self.file = open(path, "rb")  # noqa: SIM115 - held on purpose

    def __del__(self):
        self.file.close()

    def __getitem__(self, index):
        self.file.seek(index)
        return self.file.read(1)


class Noise:
    def __init__(self):
        self.rng = random.Random(1)


class Guarded(Noise):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


@pytest.fixture
def reader(tmp_path):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as made:
        made.writestr("0", b"zero")
    return Reader(tmp_path / "data.zip")


def made(most_members=1000, most_bytes=1000):
    return ThrowAwayCopies(most_members, most_bytes)


@pytest.mark.parametrize("copied", [shallow_copy, throw_away_copy])
def test_a_collected_copy_does_not_close_what_the_original_holds(copied, tmp_path):
    (tmp_path / "data").write_bytes(b"abc")
    original = Closing(tmp_path / "data")
    assert isinstance(copied(original), Closing)
    assert copied(original)[1] == b"b"
    assert original[2] == b"c"


def test_a_file_opened_by_an_object_inside_is_not_the_originals_and_one_held_twice_stays_one(reader):
    original = Holding(held=OrderedDict(train=(reader,)), inner=Holding(reader=reader))
    original.me = original
    copied = throw_away_copy(original)
    assert copied.inner.reader.read("0") == b"zero"
    assert reader.archive is None
    assert copied.inner.reader is copied.held["train"][0]
    assert copied.me is copied
    copied.inner.reader.archive.close()


def test_nothing_large_is_copied_and_what_is_copied_in_all_is_bounded(monkeypatch):
    monkeypatch.setattr(copies, "_MOST_MEMBERS", 500)
    monkeypatch.setattr(copies, "_MOST_BYTES", 100)
    large = {"tensor": torch.zeros(26), "array": np.zeros(13), "samples": [("path", 0)] * 501, "index": dict.fromkeys(range(501))}
    copied = throw_away_copy(Subset(Holding(**large), [0])).dataset
    assert all(getattr(copied, name) is value for name, value in large.items())
    original = Holding(**{f"list_{i}": [0] * 200 for i in range(4)}, **{f"tensor_{i}": torch.zeros(10) for i in range(4)})
    copied = throw_away_copy(original)
    shared = [name for name, value in vars(original).items() if getattr(copied, name) is value]
    assert shared == ["list_2", "list_3", "tensor_2", "tensor_3"]


def test_what_is_open_or_of_the_standard_library_is_shared(reader):
    event = threading.Event()
    reader.read("0")
    copied = throw_away_copy(Holding(reader=reader, event=event))
    assert (copied.reader, copied.event) == (reader, event)
    del copied
    assert reader.read("0") == b"zero"
    reader.archive.close()


def test_transforms_are_copied_deeply_or_as_far_as_it_goes():
    transform = Guarded()
    with pytest.raises(TypeError):
        copy.deepcopy(transform)
    assert throw_away_copy(Holding(transform=transform)).transform.lock is transform.lock
    for each in (transform, Noise()):
        copied = throw_away_copy(Subset(Holding(transform=each), [0])).dataset.transform
        assert copied.rng.random() == random.Random(1).random() == each.rng.random()


def test_a_method_is_bound_to_the_copy_of_what_it_is_bound_to_and_of_a_class_to_that(reader):
    class Bound(Holding):
        def shift(self, example):
            return example + self.by

    original = Bound(by=1, reader=reader, read=reader.read, of_class=Path.cwd)
    original.transform = original.shift
    copied = throw_away_copy(original)
    copied.by = 10
    assert (copied.transform(0), original.transform(0)) == (10, 1)
    assert copied.read.__self__ is copied.reader is not reader
    assert copied.of_class == Path.cwd


def test_images_are_copied_unless_they_are_files_that_are_still_open(tmp_path):
    image = Image.new("L", (2, 2))
    image.save(tmp_path / "image.png")
    with Image.open(tmp_path / "image.png") as opened:
        copied = throw_away_copy(Holding(image=image, opened=opened))
        assert copied.opened is opened
    copied.image.putpixel((0, 0), 7)
    assert image.getpixel((0, 0)) == 0


class Ruled:
    def __deepcopy__(self, memo):
        raise AssertionError("it would read all that it stands for")


def test_what_is_mapped_or_on_a_device_or_has_a_copying_rule_is_shared(tmp_path):
    mapped = np.memmap(tmp_path / "map", "f4", "w+", shape=4)
    buffer = np.frombuffer(mmap.mmap(-1, 16), "f4")
    held = {"mapped": mapped, "view": np.asarray(mapped)[1:], "buffer": buffer, "meta": torch.empty(2, device="meta")}
    held |= {"weight": torch.nn.Parameter(torch.zeros(2)), "sparse": torch.eye(2).to_sparse(), "system": random.SystemRandom()}
    held |= {base.__name__: type("Ruled", (Ruled, base), {})() for base in (object, list, dict)}
    copied = throw_away_copy(Holding(**held))
    assert all(getattr(copied, name) is value for name, value in held.items())


def test_a_loader_its_samplers_and_its_data_set_stay_one(reader):
    dataset = Holding(reader=reader)
    reader.read("0")
    loader = DataLoader(dataset, 2, shuffle=True, generator=torch.Generator().manual_seed(1))
    loader._iterator = "workers that it keeps"
    copied = made().of(loader)
    assert (type(copied), copied._iterator) == (DataLoader, None)
    assert copied.dataset is copied.sampler.data_source is copied.batch_sampler.sampler.data_source is not dataset
    assert copied.dataset.reader is reader
    assert copied.generator is copied.sampler.generator is not loader.generator
    before = loader.generator.get_state()
    assert sorted(torch.cat(list(copied)).tolist()) == [0, 1, 2]
    assert torch.equal(loader.generator.get_state(), before)
    reader.archive.close()


def test_what_was_copied_before_is_that_copy_and_a_copy_is_its_own():
    several, inner = made(), Holding(items=[])
    first = several.of(Subset(inner, [0]))
    assert first.dataset is several.of(Subset(inner, [1])).dataset is several.of(inner)
    assert several.of(Subset(first.dataset, [0])).dataset is first.dataset
    assert several.of(first) is first
    assert made().of(Subset(inner, [0]), sharing=[inner, None]).dataset is inner


def test_an_object_that_is_gone_leaves_no_place_that_another_could_take():
    several, copied = made(), []
    for number in range(100):
        copied.append(several.of(Holding(items=[number])))
    assert [each.items for each in copied] == [[number] for number in range(100)]


def test_what_is_shared_for_its_size_is_told_once_by_where_it_was_met():
    several = made(most_members=5, most_bytes=100)
    several.of(Holding(few=[1], many=list(range(9)), tensors=[torch.zeros(20), torch.zeros(20), torch.zeros(20)]))
    several.of([0] * 9)
    assert several.too_large == ["Holding.many", "Holding.tensors", "list"]


def test_what_cannot_be_copied_is_returned_as_it_is_and_a_list_is_a_data_set():
    for value in (iter([]), (number for number in range(3)), None, 7, print):
        assert made().of(value) is value
    examples = [[0], [1]]
    made().of(DataLoader(examples)).dataset[0].append(7)
    assert examples == [[0], [1]]


def test_generators_inside_are_copied():
    generators = {
        "a": np.random.default_rng(3),
        "b": np.random.RandomState(3),
        "c": random.Random(3),
        "d": torch.Generator().manual_seed(3),
    }

    def drawn(held):
        return held["a"].random(), held["b"].random(), held["c"].random(), torch.rand((), generator=held["d"]).item()

    copied = throw_away_copy(Holding(**generators))
    before = [repr(generator_state(each)) for each in generators.values()]
    found = drawn(vars(copied))
    assert [repr(generator_state(each)) for each in generators.values()] == before
    assert found == drawn(generators)
