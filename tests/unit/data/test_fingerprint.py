"""Fingerprints: what decides what an example is makes them differ, and nothing else does."""

import functools
import logging
import operator
import os
import random
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections import deque
from dataclasses import dataclass

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

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


def noisy(seed):
    labels = np.arange(2000) % 10
    labels[np.random.default_rng(seed).permutation(2000)[:20]] = 3
    return labels


def with_label(place, dtype=torch.int64):
    labels = torch.zeros(1000, dtype=dtype)
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
PAIRS = {
    "the folds of a cross-validation": (
        *(Subset(Images(), [place for place in range(30) if place % 3 != fold]) for fold in (1, 2)),
        "x.indices",
    ),
    "the share of images that are erased": (
        Images(nn.Sequential(nn.ReLU(), nn.Dropout(0.1))),
        Images(nn.Sequential(nn.ReLU(), nn.Dropout(0.25))),
        "x.transform._modules['1'].p: 0.1 and 0.25",
    ),
    "a transform's probability": (Images([Erase(0.1)]), Images([Erase(0.5)]), "x.transform[0].p: 0.1 and 0.5"),
    "weights of a sampler": (WeightedRandomSampler([0.1] * 9 + [1.0], 10), WeightedRandomSampler([0.1] * 10, 10), "x.weights"),
    "indices of a random sampler": (
        SubsetRandomSampler([1, 2, 3]),
        SubsetRandomSampler([1, 2, 4]),
        "x.indices: list [1, 2, 3] and list [1, 2, 4]",
    ),
    "label noise": (Images(labels=noisy(1)), Images(labels=noisy(2)), "x.labels"),
    "an option": (Images(scale=1), Images(scale=10), "x.scale: 1 and 10"),
    "the order of an own sampler": (Order(1), Order(2), "x.step: 1 and 2"),
    "an own batch sampler": (BatchSampler(Order(1), 4, False), BatchSampler(Order(1), 5, False), "x.batch_size: 4 and 5"),
    "the sampler in a batch sampler": (
        BatchSampler(Order(1), 4, False),
        BatchSampler(Order(3), 4, False),
        "x.sampler.step: 1 and 3",
    ),
    "the files of a stream": (Lines(["a.txt"]), Lines(["b.txt"]), "x.files: list ['a.txt'] and list ['b.txt']"),
    "the function that makes batches": (
        Images.__len__,
        Images.__getitem__,
        "x: function Images.__len__ and function Images.__getitem__",
    ),
    "code that was edited": (
        made(METHOD.format("prepared", 1, 0, 0))(),
        made(METHOD.format("prepared", 2, 0, 0))(),
        "the code of script.Data.prepared is other code",
    ),
    "which method is called": (
        made(METHOD.format("prepared", 1, 0, 0))(),
        made(METHOD.format("other", 1, 0, 0))(),
        "the code of script.Data.__getitem__ is other code",
    ),
    "a constant of the module": (made("made = lambda i: i * S", S=1), made("made = lambda i: i * S", S=10), "script.S: 1 and 10"),
    "an attribute of a global": (
        *(made("made = lambda i: i * C.size", C=types.SimpleNamespace(size=size)) for size in (1, 10)),
        "script.C.size: 1 and 10",
    ),
    "a variable of the function around": (Images(scaled(2)), Images(scaled(3)), "x.transform.factor: 2 and 3"),
    "an argument": (functools.partial(max, 2), functools.partial(max, 3), "x.args: tuple [2] and tuple [3]"),
    "a default": (
        made("def made(i, by=1): return i * by"),
        made("def made(i, by=2): return i * by"),
        "x.__defaults__: tuple [1] and tuple [2]",
    ),
    "one label in a tensor": (TensorDataset(with_label(3)), TensorDataset(with_label(4)), "x.tensors[0]"),
    "a type": (TensorDataset(with_label(3)), TensorDataset(with_label(3, torch.int32)), "x.tensors[0]"),
    "one of many paths": (
        *(Images(samples=[(f"{place}.png", place == odd) for place in range(2000)]) for odd in (7, 8)),
        "x.samples: list of 2,000",
    ),
    "one of many objects": (
        *(Images(samples=[Erase(place == odd) for place in range(2000)]) for odd in (7, 8)),
        "x.samples: list of 2,000",
    ),
    "a data set inside": (
        ConcatDataset([Images(), Images(p=1)]),
        ConcatDataset([Images(), Images(p=2)]),
        "x.datasets[1].p: 1 and 2",
    ),
    "a class": (Images(), Lines([]), "x: test_fingerprint.Images and test_fingerprint.Lines"),
    "a seed that was chosen": (
        Images(rng=np.random.default_rng(1)),
        Images(rng=np.random.default_rng(2)),
        "x.rng: Generator of seed 1 and Generator of seed 2",
    ),
    "the field of an item": (operator.itemgetter(1), operator.itemgetter(2), "x.arguments: tuple [(1,)] and tuple [(2,)]"),
    "an array of another layout": (
        Images(labels=np.arange(6).reshape(2, 3)),
        Images(labels=np.arange(6).reshape(3, 2)),
        "x.labels",
    ),
    "a set": (Images(names={"a", "b"}), Images(names={"a", "c"}), "x.names: set of 2"),
    "a member of a dict": (
        Images(table={"a": [1], "b": [2]}),
        Images(table={"a": [1], "b": [3]}),
        "x.table['b']: list [2] and list [3]",
    ),
}


@pytest.mark.parametrize("case", PAIRS)
def test_different_data_differs_and_the_first_difference_is_named(case):
    one, other, said = PAIRS[case]
    assert fingerprint({"x": one}).difference(fingerprint({"x": other})).startswith(said)
    assert fingerprint({"x": one}).difference(fingerprint({"x": one})) == ""


@pytest.mark.parametrize("case", [case for case in PAIRS if "code" not in PAIRS[case][2]])
def test_a_glance_sees_all_but_code(case):
    one, other, said = PAIRS[case]
    if "tensor" not in case and "type" not in case:  # two tensors in memory are never the same at a glance
        assert first_difference(glance({"x": one}), glance({"x": one})) == ""
    assert said.partition(":")[0] in first_difference(glance({"x": one}), glance({"x": other}))


def test_what_a_training_chooses_for_itself_is_no_difference():
    def loader(workers, seed):
        loader = torch.utils.data.DataLoader(Images(), num_workers=workers, generator=torch.Generator().manual_seed(seed))
        return {"loader": loader, "sampler": torch.utils.data.RandomSampler(Images(), generator=loader.generator)}

    assert fingerprint(loader(0, 1)).difference(fingerprint(loader(3, 2))) == ""


def test_code_that_reading_does_not_reach_is_no_difference():
    one, other = (made(METHOD.format("prepared", 1, *more))() for more in ((0, 0), (5, 6)))
    assert fingerprint({"x": one}).difference(fingerprint({"x": other})) == ""
    dynamic = METHOD.replace("self.{0}(index)", "getattr(self, '{0}')(index)")
    one, other = (made(dynamic.format("prepared", 1, *more))() for more in ((0, 0), (5, 0)))
    assert fingerprint({"x": one}).difference(fingerprint({"x": other})) == "the code of script.Data.other is other code"


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


def test_what_is_opened_or_drawn_in_the_meantime_is_no_difference(tmp_path):
    with open(tmp_path / "data", "w") as file:
        before = Images(handle=None, rng=np.random.default_rng(), legacy=random.Random())
        after = Images(handle=file, rng=np.random.default_rng(), legacy=random.Random(), lock=threading.Lock())
        assert fingerprint({"x": before}).difference(fingerprint({"x": after})) == ""
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


class Slots:
    __slots__ = ("empty", "full")

    def __init__(self, full):
        self.full = full


@dataclass(frozen=True)
class Sample:
    path: str


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
            *(
                deque([Hostile()]),
                {Hostile(): Hostile()},
                np.frompyfunc(lambda _: Hostile(), 1, 1)(np.arange(2)),
                np.zeros(3, dtype=[("a", "i4")]),
            ),
            *(torch.zeros(2, 0), torch.eye(3).to_sparse(), torch.empty(3, device="meta"), nn.Linear(2, 2), lambda: 1),
            *(torch.zeros(3, dtype=torch.complex64).conj(), np.zeros((4, 4))[::-1, ::2], torch.zeros(4, 4).T, np.float32(1)),
            *(Slots(Hostile()), Sample("a"), functools.lru_cache(len), np.memmap(tmp_path / "m", shape=9, mode="w+"), "\ud800"),
        ]
        texts = take({"x": things, **{str(number): thing for number, thing in enumerate(things)}})
        assert not [path for path, text in texts.items() if "AssertionError" in text]
        assert all(type(part) is str for item in texts.items() for part in item)


class Lazy(Images):
    @functools.cached_property
    def index(self):
        return [1]


def test_a_property_that_was_evaluated_before_is_no_difference():
    read = Lazy()
    assert read.index == [1]
    assert fingerprint({"x": Lazy()}).difference(fingerprint({"x": read})) == ""


PROGRAM = """
import functools, hashlib, sys
import numpy as np
import torch
from torch.utils.data import Dataset, Subset, WeightedRandomSampler
from lightning_echo.data.fingerprint import fingerprint

SIZES = {"small", "large", "huge"}
CONFIG = {"scale": 1}

@functools.lru_cache
def scale(value):
    return value * CONFIG["scale"]

class Data(Dataset):
    kinds = {"a", "b", "c"}
    def __init__(self):
        self.names = {str(n) for n in range(100)}
        self.objects = {frozenset({"x", "y"}), ("a", 1)}
        self.pairs = [("".join(["n", str(n)]), n) for n in range(100)]
        self.same = ["n1"] * 40
        self.crop = lambda value: scale(value) + 1
        self.rng = np.random.default_rng()
    def __getitem__(self, index):
        return self.kinds if index in {"left", "right", "up"} else scale(index)

parts = {"x": Subset(Data(), [1, 2]), "sampler": WeightedRandomSampler(torch.ones(3), 3), "collate": lambda batch: batch}
print(fingerprint(parts).digest())
"""


def test_two_starts_of_a_program_have_one_fingerprint(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": seed}
        run = subprocess.run(
            [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert run.stdout, run.stderr
        found.add(run.stdout)
    assert len(found) == 1


def test_a_copy_in_another_process_has_the_same_code():
    sent = {"x": Images(scaled(2), labels=np.arange(3)), "f": lambda value: value * SCALE + len(CONFIG.folder)}
    back = cloudpickle.loads(cloudpickle.dumps(sent))
    assert fingerprint(sent).difference(fingerprint(back)) == ""
    assert fingerprint(sent).code == fingerprint(back).code


def test_a_large_array_costs_less_than_a_second():
    labels = np.zeros(2**28, dtype=np.uint8)
    began = time.process_time()
    before = fingerprint({"x": labels})
    assert time.process_time() - began < 2.0
    labels[12345] = 1
    assert before.difference(fingerprint({"x": labels}))


@pytest.mark.parametrize(("shared", "shape", "is_seen"), [(True, (), False), (False, (), True), (True, (2,), True)])
def test_one_number_in_shared_memory_is_not_looked_at_between_epochs(shared, shape, is_seen):
    """It tells running workers something, as the epoch of a Hugging Face stream does: new workers would be started each time."""
    word = torch.zeros(shape)
    holder = types.SimpleNamespace(word=word.share_memory_() if shared else word)
    before = glance({"dataset": holder})
    word += 1
    assert (glance({"dataset": holder}) != before) == is_seen
