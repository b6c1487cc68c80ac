"""What an analysis leaves as it was: all of the user's that it has called, iterated, read or trained on. And what it does not.

A trace is whatever is other afterwards in a picture of the objects that the user holds (`picture`).
"""

import multiprocessing
import random
import types
from array import array
from collections import Counter, deque, namedtuple
from dataclasses import dataclass
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from lightning_echo import EchoDataModule, EchoLoader
from lightning_echo.analysis.analyzer import StallAnalyzer

LENGTH = 24
Pair = namedtuple("Pair", "values seen")


def picture(value, known=None):
    """All that can be changed of an object, in plain values; where it comes again, a number stands for it."""
    known = {} if known is None else known
    if isinstance(value, (int, float, str, bytes, type(None))):
        return value
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = len(known)
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, np.ndarray):
        return [picture(item, known) for item in value.flat]
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        return repr(getattr(value, "bit_generator", value)), repr(vars_of_generator(value))
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, types.MethodType):
        return picture(value.__self__, known)
    if isinstance(value, partial):
        return [picture(part, known) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, (list, tuple, deque, array, bytearray)):
        return [picture(item, known) for item in value] + attributes(value, known)
    if isinstance(value, dict):
        return [(key, picture(item, known)) for key, item in value.items()] + attributes(value, known)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)):
        return str(value)
    return attributes(value, known) or repr(value)


def vars_of_generator(value):
    return value.get_state() if isinstance(value, np.random.RandomState) else value.bit_generator.state


def attributes(value, known):
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    return [(name, picture(getattr(value, name), known)) for name in [*getattr(value, "__dict__", {}), *slots]]


@dataclass(slots=True)
class InSlots:
    number: int = 0


class Noted(list):
    """A list with a name."""


class Helper:
    def __init__(self):
        self.calls, self.random = [], random.Random(5)

    def call(self):
        self.calls.append(self.random.random())


class Held(Dataset):
    """Has all that a data set may hold, and changes all of it whenever it is read."""

    def __init__(self):
        self.reads, self.cache = 0, {}
        self.lists = [[0.0] for _ in range(LENGTH)]
        self.arrays, self.array = [np.zeros(2) for _ in range(LENGTH)], np.zeros((LENGTH, 2))
        self.tensors, self.tensor = [torch.zeros(32) for _ in range(LENGTH)], torch.zeros(LENGTH, 2)
        self.shared = torch.zeros(LENGTH).share_memory_()
        self.records = [{"box": [0, 1], "pair": Pair([0], Counter())} for _ in range(LENGTH)]
        self.objects = np.array([{"seen": 0} for _ in range(LENGTH)], dtype=object)
        self.generators = np.random.default_rng(1), np.random.RandomState(2), random.Random(3), torch.Generator().manual_seed(4)
        self.counter, self.last, self.bytes, self.numbers = Counter(), deque(maxlen=3), bytearray(LENGTH), array("d", [0.0])
        self.slots, self.space, self.helper = InSlots(), types.SimpleNamespace(number=0), Helper()
        self.noted = Noted([[0]])
        self.noted.names = []
        self.method, self.append = self.helper.call, partial(list.append, [])
        self.norm = torch.nn.BatchNorm1d(32)

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        self.reads += 1
        self.lists[index][0] += 1
        self.cache[index] = self.arrays[index]
        for numbers in (self.arrays[index], self.array[index], self.tensors[index], self.tensor[index], self.shared[index]):
            numbers += 1
        self.records[index]["box"].append(0)
        self.records[index]["pair"].values[0] += 1
        self.records[index]["pair"].seen["reads"] += 1
        self.objects[index]["seen"] += 1
        self.generators[0].random(), self.generators[1].rand(), self.generators[2].random()
        torch.rand(1, generator=self.generators[3])
        self.counter[index] += 1
        self.last.append(index)
        self.bytes[index], self.numbers[0] = self.bytes[index] + 1, self.numbers[0] + 1
        self.slots.number += 1
        self.space.number += 1
        self.method(), self.append(1)
        self.noted[0].append(1), self.noted.names.append(1)
        self.norm(torch.rand(4, 32))
        return self.tensors[index]


class Edited(Dataset):
    """Hands out what it holds, and has a transform with a generator of its own."""

    def __init__(self):
        self.tensors = [torch.zeros(32) for _ in range(LENGTH)]
        self.transform = Noise()

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return self.transform(self.tensors[index])


class Noise:
    def __init__(self):
        self.random, self.calls = random.Random(1), 0

    def __call__(self, example):
        self.calls += 1
        example += self.random.random()
        return example


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


class Batches:
    def __init__(self):
        self.rng, self.passes = np.random.default_rng(1), 0

    def __len__(self):
        return LENGTH // 2

    def __iter__(self):
        self.passes += 1
        return iter([self.rng.integers(0, LENGTH, 2).tolist() for _ in range(len(self))])


class Collate:
    def __init__(self):
        self.calls = []

    def stack(self, examples):
        self.calls.append(len(examples))
        return torch.stack(examples)

    def as_it_is(self, examples):
        self.calls.append(1)
        return examples[0][None]  # a view: the step edits what the data set holds


class Numbers(IterableDataset):
    def __init__(self):
        self.random, self.drawn = random.Random(1), []

    def __iter__(self):
        for _ in range(LENGTH):
            self.drawn.append(self.random.random())
            yield torch.zeros(32)

    def __len__(self):
        return LENGTH


class Module(pl.LightningDataModule):
    """Its hooks change what it holds."""

    def __init__(self, dataset, **options):
        super().__init__()
        self.save_hyperparameters({"sizes": [1]})
        self.dataset, self.options = dataset, options
        self.events, self.counts, self.helper, self.rng = [], {"setup": [0]}, Helper(), np.random.default_rng(3)

    def prepare_data(self):
        self.events.append("prepare_data")

    def setup(self, stage):
        self.counts["setup"][0] += 1
        self.hparams["stage"] = stage
        self.hparams["sizes"].append(2)

    def train_dataloader(self):
        self.helper.call()
        self.made = DataLoader(self.dataset, 2, **self.options)
        return self.made

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.rng.random()
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.events.append("on_after_batch_transfer")
        return batch

    def teardown(self, stage):
        self.events.append("teardown")


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


def with_own_sampler(**options):
    dataset = Held()
    return loader(dataset, sampler=Shuffled(dataset), collate_fn=Collate().stack, **options)


def with_generators(**options):
    dataset, generator = Held(), torch.Generator().manual_seed(1)
    return loader(dataset, sampler=RandomSampler(dataset, generator=generator), generator=generator, **options)


def with_own_batches(**options):
    return DataLoader(Held(), batch_sampler=Batches(), **options)


def without_a_copy(**options):
    return loader(Edited(), batch_size=1, collate_fn=Collate().as_it_is, **options)


def of_a_stream(**options):
    return loader(Numbers(), **options)


LOADERS = [loader, with_own_sampler, with_generators, with_own_batches, without_a_copy, of_a_stream]


def analyze(model, data, setting=True, **options):
    analyzer = StallAnalyzer(model, data, trainer_kwargs={"accelerator": "cpu"}, say=lambda message: None)
    found = analyzer.run(4, **options)
    return analyzer.check(found, factor=2, insertion_point="after_batching") if setting else found


def assert_no_trace(held, model, data):
    before = picture([held, model])
    assert picture([held, model]) == before, "looking leaves none"
    analyze(model, data)
    assert picture([held, model]) == before


@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", LOADERS)
def test_loaders_and_all_that_they_hold_are_as_they_were(make, workers):
    data = make(num_workers=workers)
    assert_no_trace(data, Edits(), data)


def test_the_picture_shows_what_reading_and_iterating_change():
    """Else the tests above would see no trace whatever was left."""
    for make in LOADERS:
        data = make()
        before = picture(data)
        for batch in data:
            batch += 1
        after = picture(data)
        assert after != before
    held, other = Held(), Held()
    held[3]
    assert [name for name in vars(held) if picture(getattr(held, name)) == picture(getattr(other, name))] == []


@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("around", [lambda module: module, lambda module: EchoDataModule(module, 2)], ids=["plain", "echoed"])
def test_a_data_module_and_all_that_it_holds_are_as_they_were(around, workers):
    module = Module(Held(), num_workers=workers)
    assert_no_trace(module, Edits(), around(module))


@pytest.mark.parametrize(
    "around", [lambda plain: EchoLoader(plain, 2), lambda plain: EchoDataModule.from_dataloaders(plain, factor=2)]
)
def test_echoing_around_loaders_makes_no_difference(around):
    plain = with_own_sampler()
    assert_no_trace(plain, Edits(), around(plain))


def test_what_only_a_hook_refers_to_is_as_it_was():
    dataset = Held()
    sampler = Shuffled(dataset)

    class Outside(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(dataset, 2, sampler=sampler)

    class Own(Edits):
        def train_dataloader(self):
            return DataLoader(dataset, 2, sampler=sampler)

    on_an_instance = pl.LightningDataModule()
    on_an_instance.train_dataloader = Outside().train_dataloader
    for model, data in ((Edits(), Outside()), (Edits(), on_an_instance), (Own(), None)):
        assert_no_trace(sampler, model, data)


def test_workers_that_a_loader_keeps_are_left_alone():
    data = loader(num_workers=1, persistent_workers=True)
    iterator = iter(data)
    next(iterator)
    analyze(Edits(), data, setting=False)
    assert data._iterator is iterator
    assert len(list(iterator)) == LENGTH // 2 - 1


def test_after_an_error_too_everything_is_as_it_was():
    class Fails(Edits):
        def on_train_batch_end(self, *args):
            raise ZeroDivisionError

    module, model = Module(Held()), Fails()
    before = picture([module, model])
    with pytest.raises(ZeroDivisionError):
        analyze(model, module)
    assert picture([module, model]) == before


# ------------------------------------------------------------------ what docs/stall_analysis.md says is left


def test_what_is_too_large_to_be_copied_keeps_its_edits_and_the_report_says_so(monkeypatch):
    monkeypatch.setattr("lightning_echo.analysis.sources._MOST_BYTES", 4 * 32 * 4)  # four examples
    data = loader(Edited())
    found = analyze(Edits(), data, setting=False)
    assert found.notes[-1] == ("Edited.tensors: too large to be copied, so that edits in place remain after the analysis")
    assert [tensor.any().item() for tensor in data.dataset.tensors[:8]] == [False] * 4 + [True] * 4
    assert data.dataset.transform.calls == 0


def test_with_workers_it_does_not_and_nothing_is_said(monkeypatch):
    monkeypatch.setattr("lightning_echo.analysis.sources._MOST_BYTES", 0)
    data = loader(Edited(), num_workers=1)
    found = analyze(Edits(), data, setting=False)
    assert not any("too large" in note for note in found.notes)
    assert not any(tensor.any() for tensor in data.dataset.tensors)


class Ruled(list):
    """Says itself how it is copied."""

    def __deepcopy__(self, memo):
        return self


def test_files_shared_memory_what_code_refers_to_and_what_copies_itself_are_not_copied(tmp_path):
    (tmp_path / "file").write_bytes(bytes(100_000))
    seen = []

    class Outside(Dataset):
        reads = 0

        def __init__(self):
            self.file = open(tmp_path / "file", "rb")  # noqa: SIM115
            self.mapped = np.memmap(tmp_path / "map", "f4", "w+", shape=(LENGTH, 32))
            self.number, self.ruled = multiprocessing.Value("i", 0), Ruled()
            self.note = lambda index: seen.append(index)

        def __len__(self):
            return LENGTH

        def __getitem__(self, index):
            Outside.reads += 1
            self.file.read(1)
            self.mapped[index] += 1
            self.number.value += 1
            self.ruled.append(index)
            self.note(index)
            return torch.zeros(32)

    data = loader(Outside())
    analyze(BoringModel(), data, setting=False)
    held = data.dataset
    assert held.number.value > Outside.reads == len(seen) == len(held.ruled) > 0, "a worker has read, too"
    assert held.file.tell() > 0
    assert held.mapped.any()
    held.file.close()
