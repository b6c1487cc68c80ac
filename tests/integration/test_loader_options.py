"""The options of the user's ``DataLoader`` are kept."""

import random
import threading
from contextlib import closing

import numpy as np
import psutil
import pytest
import torch
from loader_cases import POINTS, PREFETCH_DEPTH, LoggedDataset, Noisy, ReadLog, Values, epochs, same, take, until, workers
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, get_worker_info

from lightning_echo import EchoLoader, insertion

EXAMPLE_POINTS = tuple(point.value for point in insertion.POINTS if not point.by_batches)


# --- worker_init_fn ---


class Shifted(Dataset):
    """Its examples say what a ``worker_init_fn`` has set."""

    def __init__(self, transform=None):
        self.root, self.transform, self.shift = "images", transform, 0

    def read(self, index):
        return torch.tensor([index, self.shift])

    def decode(self, raw):
        return raw if self.transform is None else self.transform(raw)

    def __getitem__(self, index):
        return self.decode(self.read(index))

    def __len__(self):
        return 24


def shift_by_worker(worker):
    info = get_worker_info()
    assert info.dataset.root == "images"
    assert len(info.dataset) == 24
    info.dataset.shift = 100 * (worker + 1)


def negated(value):
    return -value


@pytest.mark.parametrize("point", POINTS)
def test_attributes_that_worker_init_fn_reads_and_sets_are_those_of_the_users_data_set(point):
    plain = DataLoader(Shifted(negated), batch_size=4, num_workers=2, worker_init_fn=shift_by_worker)
    loader = EchoLoader(plain, 2, insertion_point=point, seed=0)
    shifts = [set((-batch[:, 1]).tolist()) for epoch in epochs(loader, 2) for batch in epoch]
    if point == "after_batching":
        assert shifts[0] == {100}
        assert set.union(*shifts) == {100, 200}
    else:
        assert shifts == [{100}, {200}] * 6, "batch k is worker k mod 2's"
    assert plain.dataset.shift == 0


def test_worker_init_fn_reaches_what_is_inside_a_subset():
    def shift_inside(worker):
        get_worker_info().dataset.dataset.shift = 7

    subset = torch.utils.data.Subset(Shifted(), range(12))
    loader = EchoLoader(DataLoader(subset, batch_size=4, num_workers=1, worker_init_fn=shift_inside), 2)
    assert {shift for batch in loader for shift in batch[:, 1].tolist()} == {7}


class Asking(Shifted):
    def read(self, index):
        assert type(get_worker_info().dataset) is ConcatDataset, "also without a worker_init_fn"
        return super().read(index)


def look_inside(worker):
    assert isinstance(get_worker_info().dataset, ConcatDataset)
    for part in get_worker_info().dataset.datasets:
        part.shift = 7


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(("init", "shift"), [(look_inside, 7), (None, 0)])
def test_in_a_worker_the_data_set_is_the_users_own_with_its_class(point, init, shift):
    plain = DataLoader(ConcatDataset([Asking(negated), Asking(negated)]), batch_size=4, num_workers=1, worker_init_fn=init)
    with closing(EchoLoader(plain, 2, insertion_point=point)) as loader:
        assert {-value for batch in loader for value in batch[:, 1].tolist()} == {shift}


def test_a_worker_init_fn_set_on_the_loader_later_is_used():
    """As ``seed_everything(workers=True)`` makes Lightning do."""
    loader = EchoLoader(DataLoader(Shifted(), batch_size=4, num_workers=1), 2)
    assert loader.worker_init_fn is None
    loader.worker_init_fn = shift_by_worker
    assert {shift for batch in loader for shift in batch[:, 1].tolist()} == {100}


def test_without_workers_worker_init_fn_is_not_called():
    loader = EchoLoader(DataLoader(Shifted(), batch_size=4, worker_init_fn=shift_by_worker), 2)
    assert {shift for batch in loader for shift in batch[:, 1].tolist()} == {0}


# --- collate_fn, examples of any kind ---


class Images(Dataset):
    def read(self, index):
        return {"image": Image.new("L", (2, 2), index), "array": np.full(2, index), "name": f"image {index}", "index": index}

    def decode(self, raw):
        return raw

    def augment(self, example):
        return example

    def __getitem__(self, index):
        return self.augment(self.decode(self.read(index)))

    def __len__(self):
        return 24


def as_given(examples):
    return examples


@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_images_arrays_and_words_arrive_as_the_users_collate_function_leaves_them(point, workers):
    plain = DataLoader(Images(), batch_size=4, shuffle=True, num_workers=workers, collate_fn=as_given)
    for batch in take(EchoLoader(plain, 4, insertion_point=point, seed=0), 12):
        assert type(batch) is list
        for example in batch:
            index = example["index"]
            assert list(example) == ["image", "array", "name", "index"]
            assert (example["image"].mode, example["image"].getpixel((0, 0))) == ("L", index)
            assert example["array"].tolist() == [index, index]
            assert example["name"] == f"image {index}"


# --- pin_memory ---


class Pinnable:
    """A batch of a class of its own, which ``DataLoader`` pins by its method."""

    def __init__(self, examples):
        self.examples, self.pinned = examples, False

    def pin_memory(self):
        self.pinned = True
        return self


@pytest.mark.skipif(not hasattr(torch, "accelerator"), reason="an older torch cannot be told that there is a device")
@pytest.mark.parametrize("point", POINTS)
def test_pin_memory_reaches_the_users_batch(point, monkeypatch):
    """Without a GPU: torch is told that there is one, and asks the batch to pin itself."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    loader = EchoLoader(DataLoader(Values(24), batch_size=4, pin_memory=True, collate_fn=Pinnable), 4, insertion_point=point)
    assert [batch.pinned for batch in take(loader, 12)] == [True] * 12


# --- generator ---


@pytest.mark.parametrize("workers", [0, 2])
def test_the_users_generator_decides_the_workers_base_seed(workers):
    """A data set that draws from a generator which ``worker_init_fn`` seeds, as PyTorch's notes on randomness show."""
    plain = DataLoader(
        Shifted(),
        batch_size=4,
        num_workers=workers,
        generator=torch.Generator().manual_seed(3),
        worker_init_fn=seed_shift,
    )
    shifts = {shift for batch in EchoLoader(plain, 2, insertion_point="after_augmentation") for shift in batch[:, 1].tolist()}
    base_seed = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(3)).item()
    assert shifts == ({base_seed % 2**32, (base_seed + 1) % 2**32} if workers else {0})


def seed_shift(worker):
    get_worker_info().dataset.shift = torch.initial_seed() % 2**32


# --- timeout, prefetch_factor, persistent_workers ---


class Stuck(Dataset):
    def __init__(self):
        self.go_on = torch.multiprocessing.get_context("fork").Event()

    def __getitem__(self, index):
        if index >= 8 and get_worker_info() is not None:
            self.go_on.wait(30)
        return index

    def __len__(self):
        return 24


def test_timeout_ends_the_wait_for_a_worker_that_is_stuck():
    dataset = Stuck()
    loader = EchoLoader(DataLoader(dataset, batch_size=4, num_workers=1, timeout=1), 1, insertion_point="after_augmentation")
    release = threading.Timer(2.0, dataset.go_on.set)  # so that the worker can be joined
    release.start()
    with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds"):
        list(loader)
    release.join()


@pytest.mark.parametrize("prefetch_factor", [None, 1, 4])
def test_workers_read_prefetch_factor_batches_ahead_and_no_more(tmp_path, monkeypatch, prefetch_factor):
    monkeypatch.setattr("lightning_echo.pipeline.prefetch._SHORT_SECONDS", float("-inf"))  # any step is a long one
    dataset = LoggedDataset(400, ReadLog(tmp_path / "reads"))
    plain = DataLoader(dataset, batch_size=4, num_workers=2, prefetch_factor=prefetch_factor)
    loader = EchoLoader(plain, 1, insertion_point="after_augmentation")
    at_construction = len(dataset.log.entries())
    iterator = iter(loader)
    next(iterator)
    ahead = PREFETCH_DEPTH + 2 * (prefetch_factor or 2)
    assert until(lambda: len(dataset.log.entries()) - at_construction == 4 * (1 + ahead))
    next(iterator)
    assert until(lambda: len(dataset.log.entries()) - at_construction == 4 * (2 + ahead))


@pytest.mark.grid
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_workers_and_their_queues_live_on_over_epochs(point, persistent):
    plain = DataLoader(Values(24), batch_size=4, num_workers=2, persistent_workers=persistent)
    loader = EchoLoader(plain, 2, insertion_point=point, seed=0)
    before, seen = workers(), []
    for _ in range(3):
        for _ in loader:
            seen.append(workers() - before)
    assert len(seen[0]) == 2
    assert seen == [seen[0]] * 18


def test_the_users_loader_itself_is_left_alone_and_can_be_iterated_beside():
    plain = DataLoader(Values(24), batch_size=4, num_workers=1)
    loader = EchoLoader(plain, 2, insertion_point="after_augmentation", seed=0)
    expected = take(EchoLoader(plain, 2, insertion_point="after_augmentation", seed=0), 6)
    delivered = []
    for batch in loader:
        delivered.append(batch)
        if len(delivered) == 2:
            assert [b["index"].tolist() for b in loader.loader] == [list(range(i, i + 4)) for i in range(0, 24, 4)]
    assert same(delivered, expected)


# --- loaders of other classes ---


class OwnIteration(DataLoader):
    """Does something to its batches that a rebuilt loader would not do."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch["index"] + 1000


@pytest.mark.parametrize("point", EXAMPLE_POINTS)
def test_a_dataloader_with_its_own_iteration_is_refused_at_example_level_points(point):
    plain = OwnIteration(Values(24), batch_size=4)
    with pytest.raises(
        ValueError, match=rf"insertion_point='{point}'.*OwnIteration has an __iter__ of its own.*'after_batching'"
    ):
        EchoLoader(plain, 2, insertion_point=point)


@pytest.mark.parametrize("point", ["auto", "after_batching"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_with_its_own_iteration_is_echoed_by_batches(point, workers):
    loader = EchoLoader(OwnIteration(Values(24), batch_size=4, num_workers=workers), 2, insertion_point=point, seed=0)
    assert loader.insertion_point == "after_batching"
    passes = [tuple(range(1000 + i, 1004 + i)) for i in range(0, 24, 4)]
    batches = [tuple(batch.tolist()) for epoch in epochs(loader, 4) for batch in epoch]
    assert set(batches) == set(passes)
    assert loader.counts.fresh + loader.counts.echoed == 96
    assert 48 <= loader.counts.fresh <= 48 + 4 * loader.buffer_size


class Renamed(DataLoader):
    """A subclass that changes nothing of the iteration."""

    def __init__(self, *args, **options):
        super().__init__(*args, batch_size=4, **options)


@pytest.mark.parametrize("point", EXAMPLE_POINTS)
def test_a_dataloader_subclass_that_iterates_as_its_base_is_echoed_by_examples(point):
    loader = EchoLoader(Renamed(Values(24)), 2, insertion_point=point)
    assert [len(batch["index"]) for batch in loader] == [4] * 6


class RandomBatches:
    """A plain iterable, shuffled and noisy by the global random states."""

    def __len__(self):
        return 5

    def __iter__(self):
        for index in torch.randperm(5).tolist():
            yield torch.tensor([index, random.random(), np.random.rand()], dtype=torch.float64)


@pytest.mark.parametrize(
    "plain", [RandomBatches, lambda: OwnNoise(Noisy(5), batch_size=1, shuffle=True)], ids=["iterable", "loader"]
)
def test_an_iterable_that_draws_from_the_global_random_states_draws_anew_in_every_pass(plain):
    def run():
        loader = EchoLoader(plain(), 1, seed=0)
        return [[tuple(batch.flatten().tolist()) for batch in epoch] for epoch in epochs(loader, 4)]

    first = run()
    assert len({batch for epoch in first for batch in epoch}) == 20, "no noise comes twice"
    assert len({tuple(batch[0] for batch in epoch) for epoch in first}) > 1, "the order changes"
    torch.rand(3), random.random()
    assert run() == first


class OwnNoise(DataLoader):
    def __iter__(self):
        return super().__iter__()


def test_the_process_is_not_busy_while_it_waits():
    """The prefetching thread blocks when it is ahead: it does not spin."""
    loader = EchoLoader(DataLoader(Values(400), batch_size=4, num_workers=1), 2, insertion_point="after_augmentation")
    iterator = iter(loader)
    next(iterator)
    threading.Event().wait(0.1)
    before = psutil.Process().cpu_times()
    threading.Event().wait(0.5)
    after = psutil.Process().cpu_times()
    assert after.user + after.system - before.user - before.system < 0.25
    del iterator
