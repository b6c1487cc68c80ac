"""Copies of data sets leave no trace in the original, and copy nothing large."""

import copy
import mmap
import random
import threading
import zipfile
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset
from torchvision.tv_tensors import Mask

from lightning_echo.data import copies
from lightning_echo.data.copies import ThrowAwayCopies, shallow_copy, throw_away_copy
from lightning_echo.data.randomness import generator_state


class Numbers(Dataset):
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __getitem__(self, index):
        return index

    def __len__(self):
        return 3


class Reader:
    """Opens its file at the first read."""

    def __init__(self, path):
        self.path = path
        self.archive = None

    def read(self, name):
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.path)
        return self.archive.read(name)

    def close(self):
        if self.archive is not None:
            self.archive.close()


class Closing(Dataset):
    """Closes what it holds when it is collected."""

    def __init__(self, path):
        self.file = open(path, "rb")  # noqa: SIM115 - held on purpose

    def __del__(self):
        self.file.close()

    def __getitem__(self, index):
        self.file.seek(index)
        return self.file.read(1)

    def __len__(self):
        return 3


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("0", b"zero")
    return path


class TestShallowCopy:
    def test_same_class_same_attributes(self):
        original = Numbers(data=[1, 2], transform=abs)
        copied = shallow_copy(original)
        assert type(copied) is Numbers
        assert copied.data is original.data
        copied.transform = None
        assert original.transform is abs

    def test_what_a_worker_init_fn_opened_is_kept_although_pickling_drops_it(self):
        class Dropping(Numbers):
            def __getstate__(self):
                return {**vars(self), "handle": None}

        assert shallow_copy(Dropping(handle="open")).handle == "open"

    def test_a_class_with_slots_or_built_in_content_is_copied_by_its_own_rules(self):
        class Slotted:
            __slots__ = ("transform",)

        class Listed(list):
            pass

        slotted, listed = Slotted(), Listed([1, 2])
        slotted.transform, listed.transform = abs, abs
        assert shallow_copy(slotted).transform is abs
        assert shallow_copy(listed) == [1, 2]
        assert shallow_copy(listed).transform is abs

    def test_a_collected_copy_does_not_close_what_the_original_holds(self, tmp_path):
        path = tmp_path / "data"
        path.write_bytes(b"abc")
        original = Closing(path)
        copied = shallow_copy(original)
        assert copied[1] == b"b"
        assert isinstance(copied, Closing)
        del copied
        assert original[2] == b"c"


class TestAThrowAwayCopy:
    @pytest.mark.parametrize(
        "hold",
        [
            lambda reader: reader,
            lambda reader: [reader],
            lambda reader: {"train": (reader,)},
            lambda reader: OrderedDict(train=reader),
            lambda reader: Numbers(inner=Numbers(reader=reader)),
        ],
        ids=["holder", "list", "dict", "OrderedDict", "data sets"],
    )
    def test_a_file_opened_by_an_object_inside_is_not_the_originals(self, archive, hold):
        reader = Reader(archive)
        copied = throw_away_copy(Numbers(held=hold(reader), other=reader))
        assert copied.other.read("0") == b"zero"
        assert copied.other.archive is not None
        assert reader.archive is None
        copied.other.close()

    def test_one_object_held_twice_stays_one(self, archive):
        reader = Reader(archive)
        original = Numbers(a=reader, b=[reader])
        original.me = original
        copied = throw_away_copy(original)
        assert copied.a is copied.b[0]
        assert copied.me is copied

    def test_caches_filled_by_the_copy_are_not_the_originals(self):
        original = Numbers(cache={}, seen=set(), files=[None] * 3)
        copied = throw_away_copy(original)
        copied.cache[0], copied.files[1] = "read", "open"
        copied.seen.add(0)
        assert (original.cache, original.seen, original.files) == ({}, set(), [None] * 3)

    def test_examples_kept_in_memory_are_copied(self):
        """A data set may edit them in place when it is read."""
        original = Numbers(tensor=torch.ones(3), array=np.ones(3), records=[{"box": [1, 2]} for _ in range(1000)])
        copied = throw_away_copy(Subset(original, [0])).dataset
        copied.tensor[0], copied.array[1] = 7, 7
        copied.records[999].pop("box")
        copied.records[5]["box"][0] = 7
        assert original.tensor.tolist() == original.array.tolist() == [1, 1, 1]
        assert original.records == [{"box": [1, 2]}] * 1000

    def test_nothing_large_is_copied(self, monkeypatch):
        monkeypatch.setattr(copies, "_MOST_MEMBERS", 500)
        monkeypatch.setattr(copies, "_MOST_BYTES", 100)
        large = {
            "tensor": torch.zeros(26),
            "array": np.zeros(13),
            "samples": [("path", 0)] * 501,
            "index": {n: n for n in range(501)},
        }
        copied = throw_away_copy(Subset(Numbers(**large), [0])).dataset
        assert all(getattr(copied, name) is value for name, value in large.items())

    def test_what_is_copied_in_all_is_bounded(self, monkeypatch):
        monkeypatch.setattr(copies, "_MOST_MEMBERS", 500)
        monkeypatch.setattr(copies, "_MOST_BYTES", 100)
        original = Numbers(**{f"list_{i}": [0] * 200 for i in range(4)}, **{f"tensor_{i}": torch.zeros(10) for i in range(4)})
        copied = throw_away_copy(original)
        shared = [name for name, value in vars(original).items() if getattr(copied, name) is value and name[-2] == "_"]
        assert shared == ["list_2", "list_3", "tensor_2", "tensor_3"]

    def test_all_data_sets_of_a_long_concat_are_copied(self):
        parts = [Numbers(reader=None) for _ in range(300)]
        copied = throw_away_copy(ConcatDataset(parts))
        copied.datasets[299].reader = "open"
        assert parts[299].reader is None

    def test_what_is_open_or_of_the_standard_library_is_shared(self, archive):
        reader, event = Reader(archive), threading.Event()
        reader.read("0")
        copied = throw_away_copy(Numbers(reader=reader, event=event))
        assert copied.reader is reader
        assert copied.event is event
        del copied
        assert reader.read("0") == b"zero"
        reader.close()

    def test_a_collected_copy_does_not_close_what_the_original_holds(self, tmp_path):
        path = tmp_path / "data"
        path.write_bytes(b"abc")
        original = Closing(path)
        assert throw_away_copy(Subset(original, [0]))[0] == b"a"
        assert original[2] == b"c"

    def test_generators_inside_are_copied(self):
        generators = {
            "a": np.random.default_rng(3),
            "b": np.random.RandomState(3),
            "c": random.Random(3),
            "d": torch.Generator().manual_seed(3),
            "e": Numbers(inner=np.random.default_rng(4)),
        }
        original = Numbers(**generators)
        copied = throw_away_copy(original)
        before = [repr(generator_state(generators[name])) for name in "abcd"]
        drawn = [
            copied.a.random(),
            copied.b.random(),
            copied.c.random(),
            torch.rand((), generator=copied.d).item(),
        ]
        assert [repr(generator_state(generators[name])) for name in "abcd"] == before
        assert drawn == [
            generators["a"].random(),
            generators["b"].random(),
            generators["c"].random(),
            torch.rand((), generator=generators["d"]).item(),
        ]

    def test_transforms_are_copied_deeply(self):
        class Noise:
            def __init__(self):
                self.rng = np.random.default_rng(0)
                self.bank = torch.zeros(3)

        original, copied = Noise(), throw_away_copy(Subset(Numbers(transform=Noise()), [0])).dataset.transform
        assert copied.rng.random() == original.rng.random()

    def test_a_transform_that_cannot_be_copied_deeply_is_copied_as_far_as_it_goes(self):
        class Guarded:
            def __init__(self):
                self.lock = threading.Lock()
                self.rng = random.Random(1)

        original = Numbers(transform=Guarded())
        with pytest.raises(TypeError):
            copy.deepcopy(original.transform)
        copied = throw_away_copy(original)
        assert copied.transform.lock is original.transform.lock
        copied.transform.rng.random()
        assert original.transform.rng.random() == random.Random(1).random()

    def test_a_method_of_the_data_set_is_bound_to_the_copy(self):
        class Bound(Numbers):
            def shift(self, example):
                return example + self.by

        original = Bound(by=1)
        original.transform = original.shift
        copied = throw_away_copy(original)
        copied.by = 10
        assert copied.transform(0) == 10
        assert original.transform(0) == 1


def test_the_operating_systems_generator_is_shared():
    system = random.SystemRandom()
    assert throw_away_copy(Numbers(random=system)).random is system


def made(most_members=1000, most_bytes=1000):
    return ThrowAwayCopies(most_members, most_bytes)


@dataclass(slots=True)
class Slotted:
    items: list


@dataclass(frozen=True, slots=True)
class Frozen:
    items: list


class SlotsAndMore(Slotted):
    """Has a ``__dict__``, too."""

    def __init__(self):
        super().__init__([0])
        self.extra = [0]


class Named(list):
    """Has attributes beside its members."""


class Tagged(dict):
    pass


Pair = namedtuple("Pair", "left right")


def named():
    value = Named([[0]])
    value.name = [0]
    return value


def tagged():
    value = Tagged(a=[0])
    value.tag = [0]
    return value


def objects():
    array = np.empty(1, object)
    array[0] = [0]
    return array


class TestWhatIsCopied:
    @pytest.mark.parametrize(
        ("value", "parts"),
        [
            (Slotted([0]), [lambda held: held.items]),
            (Frozen([0]), [lambda held: held.items]),
            (SlotsAndMore(), [lambda held: held.items, lambda held: held.extra]),
            (SimpleNamespace(items=[0]), [lambda held: held.items]),
            (named(), [lambda held: held[0], lambda held: held.name]),
            (tagged(), [lambda held: held["a"], lambda held: held.tag]),
            (Pair([0], [0]), [lambda held: held.left, lambda held: held.right]),
            (deque([[0]], maxlen=4), [lambda held: held[0]]),
            (defaultdict(list, a=[0]), [lambda held: held["a"]]),
            (objects(), [lambda held: held[0]]),
            (partial(print, [0], end=[0]), [lambda held: held.args[0], lambda held: held.keywords["end"]]),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_what_an_object_holds_by_any_means_is_the_copys_own(self, value, parts):
        copied = throw_away_copy(Numbers(held=value)).held
        assert type(copied) is type(value)
        for part in parts:
            part(copied).append(1)
            assert (part(copied), part(value)) == ([0, 1], [0])

    @pytest.mark.parametrize(
        "value",
        [
            Counter("a"),
            deque([1, 2], maxlen=2),
            bytearray(b"ab"),
            array("d", [1.0]),
            {1, 2},
            np.ma.masked_array([1, 2], mask=[True, False]),
            torch.ones(2).share_memory_(),
            Mask(torch.ones(2, 2)),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_what_is_edited_by_itself_is_copied_whole(self, value):
        copied = throw_away_copy(Numbers(held=value)).held
        assert copied is not value
        assert type(copied) is type(value)
        assert repr(copied) == repr(value)
        assert not (isinstance(value, torch.Tensor) and copied.data_ptr() == value.data_ptr())

    def test_images_are_copied_unless_they_are_files_that_are_still_open(self, tmp_path):
        image = Image.new("L", (2, 2))
        image.save(tmp_path / "image.png")
        with Image.open(tmp_path / "image.png") as opened:
            copied = throw_away_copy(Numbers(image=image, opened=opened))
            assert copied.opened is opened
        copied.image.putpixel((0, 0), 7)
        assert image.getpixel((0, 0)) == 0

    def test_a_method_is_bound_to_the_copy_of_what_it_is_bound_to_and_of_a_class_to_that(self, archive):
        reader = Reader(archive)
        copied = throw_away_copy(Numbers(reader=reader, read=reader.read, of_class=Path.cwd))
        assert copied.read.__self__ is copied.reader is not reader
        assert copied.of_class == Path.cwd

    def test_what_is_mapped_from_a_file_or_on_a_device_is_shared(self, tmp_path):
        mapped = np.memmap(tmp_path / "map", "f4", "w+", shape=4)
        buffer = np.frombuffer(mmap.mmap(-1, 16), "f4")
        held = {"mapped": mapped, "view": np.asarray(mapped)[1:], "buffer": buffer, "meta": torch.empty(2, device="meta")}
        held |= {"weight": torch.nn.Parameter(torch.zeros(2)), "sparse": torch.eye(2).to_sparse()}
        copied = throw_away_copy(Numbers(**held))
        assert all(getattr(copied, name) is value for name, value in held.items())

    @pytest.mark.parametrize("base", [object, list, dict])
    def test_an_object_with_a_copying_rule_of_its_own_is_shared(self, base):
        class Ruled(base):
            def __deepcopy__(self, memo):
                raise AssertionError("it would read all that it stands for")

        ruled = Ruled()
        assert throw_away_copy(Numbers(ruled=ruled)).ruled is ruled

    def test_what_refers_to_a_data_set_with_an_open_file_or_to_an_image_is_not_open_itself(self, archive):
        reader = Reader(archive)
        reader.read("0")
        batches = SimpleNamespace(dataset=Numbers(reader=reader), order=[0])
        drawn = SimpleNamespace(image=Image.new("L", (2, 2)), count=[0])
        copied = throw_away_copy(Numbers(batches=batches, drawn=drawn))
        assert copied.batches is not batches
        assert copied.batches.dataset is not batches.dataset
        assert copied.batches.dataset.reader is reader
        assert copied.drawn.image is not drawn.image
        reader.close()

    def test_a_loader_its_samplers_and_its_data_set_stay_one(self, archive):
        """Also where the data set has a file open: what its samplers hold is a data set, which is copied."""
        dataset = Numbers(reader=Reader(archive))
        dataset.reader.read("0")
        loader = DataLoader(dataset, 2, shuffle=True, generator=torch.Generator().manual_seed(1))
        copied = made().of(loader)
        assert type(copied) is DataLoader
        assert copied.dataset is copied.sampler.data_source is copied.batch_sampler.sampler.data_source is not dataset
        assert copied.dataset.reader is dataset.reader
        assert copied.generator is copied.sampler.generator is not loader.generator
        before = loader.generator.get_state()
        assert sorted(torch.cat(list(copied)).tolist()) == [0, 1, 2]
        assert torch.equal(loader.generator.get_state(), before)
        dataset.reader.close()

    def test_workers_that_a_loader_keeps_stay_with_it(self):
        loader = DataLoader(Numbers(), num_workers=1, persistent_workers=True)
        iter(loader)
        assert made().of(loader)._iterator is None


class TestThrowAwayCopies:
    def test_what_was_copied_before_is_that_copy_and_a_copy_is_its_own(self):
        several, inner = made(), Numbers(items=[])
        first = several.of(Subset(inner, [0]))
        second = several.of(Subset(inner, [1]))
        assert first.dataset is second.dataset is several.of(inner)
        third = several.of(Subset(first.dataset, [0]))
        assert third.dataset is first.dataset
        assert several.of(first) is first

    def test_an_object_that_is_gone_leaves_no_place_that_another_could_take(self):
        several, copied = made(), []
        for number in range(100):
            copied.append(several.of(Numbers(items=[number])))
        assert [each.items for each in copied] == [[number] for number in range(100)]

    def test_what_shall_be_shared_is(self):
        inner = Numbers(items=[])
        copied = made().of(Subset(inner, [0]), sharing=[inner, None])
        assert copied.dataset is inner

    def test_what_is_shared_for_its_size_is_told_once_by_where_it_was_met(self):
        several = made(most_members=5, most_bytes=100)
        several.of(Numbers(few=[1], many=list(range(9)), tensors=[torch.zeros(20), torch.zeros(20), torch.zeros(20)]))
        several.of([0] * 9)
        assert several.too_large == ["Numbers.many", "Numbers.tensors", "list"]

    @pytest.mark.parametrize(
        "around", [lambda inner: [inner], lambda inner: SimpleNamespace(inner=inner)], ids=["list", "object"]
    )
    def test_what_lies_deeper_than_twelve_levels_is_shared(self, around):
        levels = [around(0)]
        for _ in range(20):
            levels.insert(0, around(levels[0]))
        copied, depth = made().of(Numbers(nested=levels[0])).nested, 0
        while copied is not levels[depth]:
            copied, depth = copied[0] if isinstance(copied, list) else copied.inner, depth + 1
        assert depth == 12

    def test_what_cannot_be_copied_is_returned_as_it_is(self):
        for value in (iter([]), (number for number in range(3)), None, 7, print):
            assert made().of(value) is value

    def test_a_list_is_a_data_set_too(self):
        examples = [[0], [1]]
        made().of(DataLoader(examples)).dataset[0].append(7)
        assert examples == [[0], [1]]
