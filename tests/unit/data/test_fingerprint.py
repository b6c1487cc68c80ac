"""Fingerprints: what decides what an example is makes them differ, and nothing else does."""

import functools
import logging
import operator
import random
import socket
import sys
import textwrap
import threading
import types
from collections import deque

import numpy as np
import pytest
import torch
from data_cases import Frozen, Slotted
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_echo.data import contents
from lightning_echo.data.fingerprint import fingerprint, first_difference, glance

SCALE = 1
CONFIG = types.SimpleNamespace(size=32, folder="logs/1")
TABLE = torch.zeros(10)


class Erase:
    def __init__(self, p):
        self.p = p

    def __call__(self, image):
        return image * (torch.rand(()) > self.p)


class Images(Dataset):
    factor = 2

    def __init__(self, transform=None, labels=None, **options):
        self.transform, self.labels = transform, labels
        self.__dict__.update(options)

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return index * SCALE * CONFIG.size * self.factor + TABLE[0]

    @functools.cached_property
    def index(self):
        return [1]


class Order(Sampler):
    def __init__(self, step):
        self.step = step

    def __iter__(self):
        return iter(range(0, 30, self.step))


class Lines(IterableDataset):
    def __init__(self, files, log_dir="logs/1"):
        self.files, self.log_dir = files, log_dir

    def __iter__(self):
        return iter(self.files)


def scaled(factor):
    return lambda value: value * factor


def made(source, **names):
    """The function ``made`` of a source text, as if a module were imported again."""
    namespace = {"__name__": "script", "Dataset": Dataset, "functools": functools, "types": types, **names}
    exec(textwrap.dedent(source), namespace)
    return namespace["made"]


def with_label(place):
    labels = torch.zeros(1000, dtype=torch.int64)
    labels[place] = 1
    return labels


METHOD = """
class Data:
    def __getitem__(self, index):
        return self.{0}(index)

    def prepared(self, index):
        return index + {1}

    def other(self, index):
        return {2}

    def plot(self):
        return {3}

made = Data
"""


def of_methods(*values, source=METHOD):
    return made(source.format(*values))()


def both(make, *values):
    return tuple(make(value) for value in values)


PAIRS = {
    "the share of images that are erased": (
        *both(lambda p: Images(nn.Sequential(nn.ReLU(), nn.Dropout(p))), 0.1, 0.25),
        "x.transform._modules['1'].p: 0.1 and 0.25",
    ),
    "indices of a random sampler": (*both(SubsetRandomSampler, [1, 2], [1, 4]), "x.indices: list [1, 2] and list [1, 4]"),
    "the sampler in a batch sampler": (*both(lambda step: BatchSampler(Order(step), 4, False), 1, 3), "x.sampler.step: 1 and 3"),
    "the files of a stream": (Lines(["a.txt"]), Lines(["b.txt"]), "x.files: list ['a.txt'] and list ['b.txt']"),
    "the function that makes batches": (scaled, both, "x: function scaled and function both"),
    "code that was edited": (
        *both(lambda by: of_methods("prepared", by, 0, 0), 1, 2),
        "the code of script.Data.prepared is other code",
    ),
    "a variable of the function around": (Images(scaled(2)), Images(scaled(3)), "x.transform.factor: 2 and 3"),
    "an argument": (functools.partial(max, 2), functools.partial(max, 3), "x.args: tuple [2] and tuple [3]"),
    "a default": (
        *both(lambda by: made(f"def made(i, by={by}): return i * by"), 1, 2),
        "x.__defaults__: tuple [1] and tuple [2]",
    ),
    "one label in a tensor": (TensorDataset(with_label(3)), TensorDataset(with_label(4)), "x.tensors[0]"),
    "one of many paths": (*both(lambda odd: [(f"{n}.png", n == odd) for n in range(2000)], 7, 8), "x: list of 2,000"),
    "one of many objects": (*both(lambda odd: [Erase(n == odd) for n in range(2000)], 7, 8), "x: list of 2,000"),
    "a data set inside": (*both(lambda p: ConcatDataset([Images(), Images(p=p)]), 1, 2), "x.datasets[1].p: 1 and 2"),
    "a class": (Images(), Lines([]), "x: test_fingerprint.Images and test_fingerprint.Lines"),
    "a seed that was chosen": (*both(np.random.default_rng, 1, 2), "x: Generator of seed 1 and Generator of seed 2"),
    "the field of an item": (operator.itemgetter(1), operator.itemgetter(2), "x.arguments: tuple [(1,)] and tuple [(2,)]"),
    "an array of another layout": (*both(lambda shape: Images(labels=np.arange(6).reshape(shape)), (2, 3), (3, 2)), "x.labels"),
    "a set": (Images(names={"a", "b"}), Images(names={"a", "c"}), "x.names: set of 2"),
    "a member of a dict": (*both(lambda b: {"a": [1], "b": [b]}, 2, 3), "x['b']: list [2] and list [3]"),
}


@pytest.mark.parametrize("case", PAIRS)
def test_different_data_differs_and_the_first_difference_is_named(case):
    one, other, said = PAIRS[case]
    assert fingerprint({"x": one}).difference(fingerprint({"x": other})).startswith(said)
    assert fingerprint({"x": one}).difference(fingerprint({"x": one})) == ""
    assert fingerprint({"x": one}).digest() != fingerprint({"x": other}).digest()
    if "code" not in said:  # at which a glance does not look
        assert said.partition(":")[0] in first_difference(glance({"x": one}), glance({"x": other}))
        assert "tensors" in said or first_difference(glance({"x": one}), glance({"x": one})) == ""


def loader(workers, seed):
    generator = torch.Generator().manual_seed(seed)
    return [DataLoader(Images(), num_workers=workers, generator=generator), RandomSampler(Images(), generator=generator)]


def evaluated():
    data = Images()
    assert data.index == [1]
    return data


SAME = {
    "what a training chooses for itself": lambda: (loader(0, 1), loader(3, 2)),
    "code that reading does not reach": lambda: (of_methods("prepared", 1, 0, 0), of_methods("prepared", 1, 5, 6)),
    "a generator that nobody has seeded": lambda: both(lambda _: Images(rng=np.random.default_rng(), old=random.Random()), 1, 2),
    "a property that was evaluated": lambda: (Images(), evaluated()),
    "the order in which a set was filled": lambda: ({0, 8}, {8, 0}),
    "the order of sets in a set": lambda: ({frozenset({0, 8}), ("a", 1)}, {("a", 1), frozenset({8, 0})}),
    "the order of a set in code": lambda: (made("made = lambda i: i in {0, 8}"), made("made = lambda i: i in {8, 0}")),
    "strings that are one object": lambda: (["n1"] * 40, ["".join(["n", "1"]) for _ in range(40)]),
}


@pytest.mark.parametrize("case", SAME)
def test_what_decides_nothing_is_no_difference(case):
    one, other = SAME[case]()
    assert fingerprint({"x": one}).difference(fingerprint({"x": other})) == ""


def test_globals_and_class_attributes_are_seen_when_they_change(monkeypatch):
    before = fingerprint({"x": Images()})
    for owner, name, value, said in (
        (sys.modules[__name__], "SCALE", 64, "test_fingerprint.SCALE: 1 and 64"),
        (CONFIG, "size", 64, "test_fingerprint.CONFIG.size: 32 and 64"),
        (Images, "factor", 3, "test_fingerprint.Images.factor: 2 and 3"),
        (CONFIG, "folder", "logs/2", ""),  # the code does not name it
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert before.difference(fingerprint({"x": Images()})) == said


@pytest.mark.parametrize("ignored", ["log_dir", "x.log_dir", "x.dataset.log_dir"])
def test_what_the_user_leaves_out_is_no_difference(ignored):
    one, other = (Subset(Lines(["a"], log_dir), [0]) for log_dir in ("logs/1", "logs/2"))
    prints = [fingerprint({"x": data.dataset if ignored == "x.log_dir" else data}, ignore=[ignored]) for data in (one, other)]
    assert prints[0].difference(prints[1]) == ""
    whole = [fingerprint({"x": data.dataset if ignored == "x.log_dir" else data}) for data in (one, other)]
    assert whole[0].difference(whole[1]) != ""
    assert whole[0].difference(whole[1], [ignored]) == ""
    assert whole[0].without([ignored]) == whole[1].without([ignored])


def test_what_is_opened_in_the_meantime_is_no_difference(tmp_path):
    with open(tmp_path / "data", "w") as file:
        before, after = Images(handle=None), Images(handle=file, lock=threading.Lock())
        assert fingerprint({"x": before}).difference(fingerprint({"x": after})) == ""
        assert fingerprint({"x": before}).digest() == fingerprint({"x": after}).digest()
        assert first_difference(glance({"x": before}), glance({"x": after})) == ""


class Hostile:
    """Raises whatever is done with it."""

    def __getattribute__(self, name):
        raise AssertionError(f"{name} was asked for")

    __getattr__ = __getitem__ = __call__ = __len__ = __iter__ = __eq__ = __bool__ = __getattribute__

    def __hash__(self):
        return 1

    def __repr__(self):
        raise AssertionError("its repr was asked for")

    @property
    def size(self):
        raise AssertionError("a property was evaluated")


class HostileDict(dict):
    __iter__ = items = keys = values = __getitem__ = __len__ = __repr__ = Hostile.__repr__


class HostileList(list):
    __iter__ = __getitem__ = __len__ = __repr__ = Hostile.__repr__


def a_cycle():
    inner = []
    inner.append({"again": inner, "set": Images(again=inner)})
    return inner


def deep():
    found = []
    for _ in range(5000):
        found = [found]
    return found


@pytest.mark.parametrize("take", [lambda parts: fingerprint(parts).held, glance])
def test_nothing_raises_and_no_code_of_the_users_runs(take, tmp_path):
    with socket.socket() as connection, open(tmp_path / "data", "w+") as file:
        things = [
            *(Hostile(), HostileDict(a=1), HostileList([1]), Hostile, a_cycle(), deep(), connection, file, threading.Thread()),
            bytearray(b"a"),
            *(
                logging.getLogger("x"),
                (n for n in range(3)),
                iter([1]),
                object(),
                types,
                sys,
                memoryview(b"abc"),
                bytearray(b"a"),
            ),
            *(deque([Hostile()]), {Hostile(): Hostile()}, np.frompyfunc(lambda _: Hostile(), 1, 1)(np.arange(2))),
            *(torch.zeros(2, 0), torch.eye(3).to_sparse(), torch.empty(3, device="meta"), nn.Linear(2, 2), lambda: 1),
            *(torch.zeros(3, dtype=torch.complex64).conj(), np.zeros((4, 4))[::-1, ::2], torch.zeros(4, 4).T, np.float32(1)),
            *(np.zeros(3, dtype=[("a", "i4")]), np.memmap(tmp_path / "m", shape=9, mode="w+"), "\ud800"),
            *(Slotted(Hostile()), Frozen("a"), functools.lru_cache(len)),
        ]
        texts = take({"x": things, **{str(number): thing for number, thing in enumerate(things)}})
        assert not [path for path, text in texts.items() if "AssertionError" in text]
        assert all(type(part) is str for item in texts.items() for part in item)


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["array", "tensor"])
def test_of_a_large_array_blocks_from_its_start_to_its_end_are_compared(make, monkeypatch):
    monkeypatch.setattr(contents, "_WHOLE_BYTES", 2**16)
    monkeypatch.setattr(contents, "_BLOCK_BYTES", 2**10)
    before = fingerprint({"x": make(2**18)})
    assert "of 256 blocks" in before.held["x"]
    for place in (0, 2**17, -1):
        values = make(2**18)
        values[place] = 1
        assert (before.difference(fingerprint({"x": values})) != "") == (place != 2**17), "the middle lies between two blocks"


@pytest.mark.parametrize(("shared", "shape", "is_seen"), [(True, (), False), (False, (), True), (True, (2,), True)])
def test_one_number_in_shared_memory_is_not_looked_at_between_epochs(shared, shape, is_seen):
    """It tells running workers something, as the epoch of a Hugging Face stream does: new workers would be started each time."""
    word = torch.zeros(shape)
    holder = types.SimpleNamespace(word=word.share_memory_() if shared else word)
    before = glance({"dataset": holder})
    word += 1
    assert (glance({"dataset": holder}) != before) == is_seen
