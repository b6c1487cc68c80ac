"""What an analysis leaves as it was: all of the user's that it has called, iterated, read or trained on. And what it does not.

A trace is whatever is other afterwards in a picture of the objects that the user holds (`picture`). Which kinds of objects can be
copied at all: tests/unit/data/test_copies.py.
"""

import multiprocessing
import random
import types

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from lightning_echo import EchoDataModule
from lightning_echo.analysis.analyzer import StallAnalyzer

LENGTH = 24


def picture(value, known=None):
    """All that can be changed of an object, in plain values; where it comes again, a number stands for it."""
    known = {} if known is None else known
    if isinstance(value, (int, float, str, bytes, type(None))):
        return value
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = len(known)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, types.MethodType):
        return picture(value.__self__, known)
    if isinstance(value, (list, tuple)):
        return [picture(item, known) for item in value]
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)):
        return str(value)
    inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return [(key, picture(item, known)) for key, item in inside.items()] or repr(value)


class Helper:
    def __init__(self):
        self.calls, self.random = [], random.Random(5)

    def call(self):
        self.calls.append(self.random.random())

    def as_it_is(self, examples):
        """Collates one example: the step edits what the data set holds."""
        self.call()
        return examples[0][None]


class Held(Dataset):
    """Has what a data set may hold, and changes all of it whenever it is read."""

    def __init__(self):
        self.reads, self.cache, self.helper = 0, {}, Helper()
        self.lists, self.array = [[0.0] for _ in range(LENGTH)], np.zeros((LENGTH, 2))
        self.tensors, self.shared = [torch.zeros(32) for _ in range(LENGTH)], torch.zeros(LENGTH).share_memory_()
        self.generators = np.random.default_rng(1), random.Random(3), torch.Generator().manual_seed(4)
        self.method, self.norm = self.helper.call, torch.nn.BatchNorm1d(32)

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        self.reads += 1
        self.lists[index][0] += 1
        self.cache[index] = self.array[index]
        for numbers in (self.array[index], self.tensors[index], self.shared[index]):
            numbers += 1
        self.generators[0].random(), self.generators[1].random()
        torch.rand(1, generator=self.generators[2])
        self.method()
        self.norm(torch.rand(4, 32))
        return self.tensors[index]


class Edited(Dataset):
    """Hands out what it holds, and has a transform with a generator of its own."""

    def __init__(self):
        self.tensors, self.noise = [torch.zeros(32) for _ in range(LENGTH)], Helper()

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        self.noise.call()
        self.tensors[index] += self.noise.calls[-1]
        return self.tensors[index]


class Shuffled(Sampler):
    def __init__(self, dataset):
        self.dataset, self.random, self.first = dataset, random.Random(7), []

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        order = list(range(len(self.dataset)))
        self.random.shuffle(order)
        self.first.append(order[0])
        return iter(order)

    def set_epoch(self, epoch):
        self.epoch = epoch


class Edits(BoringModel):
    """A step that edits its batch, and counts itself."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def training_step(self, batch, batch_idx):
        self.steps.append(batch_idx)
        loss = super().training_step(batch.clone(), batch_idx)
        batch += 1
        return loss


def loader(dataset=None, **options):
    return DataLoader(Held() if dataset is None else dataset, **{"batch_size": 2, **options})


class Module(pl.LightningDataModule):
    """Its hooks change what it holds, and what else they refer to."""

    def __init__(self, workers):
        super().__init__()
        self.save_hyperparameters({"sizes": [1]})
        self.workers, self.events, self.helper, self.rng = workers, [], Helper(), np.random.default_rng(3)

    def prepare_data(self):
        self.events.append("prepare_data")

    def setup(self, stage):
        self.hparams["stage"] = stage
        self.hparams["sizes"].append(2)

    def train_dataloader(self):
        self.helper.call()
        dataset, generator = Held(), torch.Generator().manual_seed(1)
        order = RandomSampler(dataset, generator=generator)
        self.made = loader(dataset, sampler=order, generator=generator, num_workers=self.workers)
        return self.made

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.rng.random()
        return batch

    def teardown(self, stage):
        self.events.append("teardown")


def analyze(model, data, setting=True):
    analyzer = StallAnalyzer(model, data, trainer_kwargs={"accelerator": "cpu"}, say=str)
    found = analyzer.run(4)
    return analyzer.check(found, factor=2, insertion_point="after_batching") if setting else found


def assert_no_trace(held, model, data):
    before = picture([held, model])
    assert picture([held, model]) == before, "looking leaves none"
    analyze(model, data)
    assert picture([held, model]) == before


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_its_sampler_and_all_that_they_hold_are_as_they_were(workers):
    dataset, model = Held(), Edits()
    sampler = Shuffled(dataset)
    data = loader(dataset, sampler=sampler, generator=torch.Generator().manual_seed(1), num_workers=workers)
    assert_no_trace(data, model, data)
    model.train_dataloader = lambda: loader(dataset, sampler=sampler)  # only a hook refers to them
    assert_no_trace(sampler, model, None)
    before = picture(data)
    for batch in data:
        batch += 1
    assert picture(data) != before, "else no trace would be seen here whatever was left"


def test_what_a_collate_function_hands_out_without_a_copy_is_as_it_was():
    data = loader(Edited(), batch_size=1, collate_fn=Helper().as_it_is)
    assert_no_trace(data, Edits(), data)


@pytest.mark.parametrize("is_echoed", [False, True])
def test_a_data_module_and_all_that_it_holds_are_as_they_were(is_echoed):
    module = Module(workers=0)
    module.made = module.train_dataloader()
    assert_no_trace(module, Edits(), EchoDataModule(module, 2) if is_echoed else module)


def test_workers_that_a_loader_keeps_are_left_alone():
    data = loader(num_workers=1, persistent_workers=True)
    iterator = iter(data)
    next(iterator)
    analyze(Edits(), data, setting=False)
    assert data._iterator is iterator
    assert len(list(iterator)) == LENGTH // 2 - 1


# What docs/stall_analysis.md says is left


def test_what_is_too_large_to_be_copied_keeps_its_edits_without_workers_and_the_report_says_so(monkeypatch):
    monkeypatch.setattr("lightning_echo.analysis.sources._MOST_BYTES", 4 * 32 * 4)  # four examples
    data = loader(Edited())
    notes = analyze(Edits(), data, setting=False).notes
    said = ["Edited.tensors: too large to be copied, so that edits in place remain after the analysis"]
    assert [note for note in notes if "too large" in note] == said
    assert [tensor.any().item() for tensor in data.dataset.tensors[:8]] == [False] * 4 + [True] * 4
    assert data.dataset.noise.calls == []


def test_files_shared_memory_and_what_code_refers_to_are_not_copied(tmp_path):
    (tmp_path / "file").write_bytes(bytes(100_000))
    seen = []

    class Outside(Dataset):
        reads = 0

        def __init__(self):
            self.file = open(tmp_path / "file", "rb")  # noqa: SIM115
            self.mapped = np.memmap(tmp_path / "map", "f4", "w+", shape=(LENGTH, 32))
            self.number = multiprocessing.Value("i", 0)
            self.note = lambda index: seen.append(index)

        def __len__(self):
            return LENGTH

        def __getitem__(self, index):
            Outside.reads += 1
            self.file.read(1)
            self.mapped[index] += 1
            self.number.value += 1
            self.note(index)
            return torch.zeros(32)

    data = loader(Outside())
    analyze(BoringModel(), data, setting=False)
    held = data.dataset
    assert held.number.value > Outside.reads == len(seen) > 0, "a worker has read, too"
    assert held.file.tell() > 0
    assert held.mapped.any()
    held.file.close()
