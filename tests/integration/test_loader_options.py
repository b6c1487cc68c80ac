"""The options of the user's ``DataLoader`` are kept."""

import threading
from contextlib import closing

import pytest
import torch
from loader_cases import PREFETCH_DEPTH, LoggedDataset, ReadLog, Values, epochs, take, until
from torch.utils.data import ConcatDataset, DataLoader, Dataset, get_worker_info

from lightning_echo import EchoLoader


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


@pytest.mark.parametrize("point", ["after_read", "after_batching"])
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
    later = EchoLoader(DataLoader(Shifted(), batch_size=4, num_workers=1), 2)
    later.worker_init_fn = shift_by_worker  # as ``seed_everything(workers=True)`` makes Lightning do
    assert {shift for batch in later for shift in batch[:, 1].tolist()} == {100}


class Asking(Shifted):
    def read(self, index):
        assert type(get_worker_info().dataset) is ConcatDataset, "also without a worker_init_fn"
        return super().read(index)


def look_inside(worker):
    assert isinstance(get_worker_info().dataset, ConcatDataset)
    for part in get_worker_info().dataset.datasets:
        part.shift = 7


@pytest.mark.parametrize(("point", "init", "shift"), [("before_augmentation", look_inside, 7), ("after_batching", None, 0)])
def test_in_a_worker_the_data_set_is_the_users_own_with_its_class(point, init, shift):
    plain = DataLoader(ConcatDataset([Asking(negated), Asking(negated)]), batch_size=4, num_workers=1, worker_init_fn=init)
    with closing(EchoLoader(plain, 2, insertion_point=point)) as loader:
        assert {-value for batch in loader for value in batch[:, 1].tolist()} == {shift}


class Pinnable:
    """A batch of a class of its own, which ``DataLoader`` pins by its method."""

    def __init__(self, examples):
        self.examples, self.pinned = examples, False

    def pin_memory(self):
        self.pinned = True
        return self


@pytest.mark.skipif(not hasattr(torch, "accelerator"), reason="an older torch cannot be told that there is a device")
@pytest.mark.parametrize("point", ["before_augmentation", "after_batching"])
def test_pin_memory_reaches_the_users_batch(point, monkeypatch):
    """Without a GPU: torch is told that there is one, and asks the batch to pin itself."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    loader = EchoLoader(DataLoader(Values(24), batch_size=4, pin_memory=True, collate_fn=Pinnable), 4, insertion_point=point)
    assert [batch.pinned for batch in take(loader, 8)] == [True] * 8


def test_the_users_generator_decides_the_workers_base_seed():
    """A data set that draws from a generator which ``worker_init_fn`` seeds, as PyTorch's notes on randomness show."""
    plain = DataLoader(
        Shifted(),
        batch_size=4,
        num_workers=2,
        generator=torch.Generator().manual_seed(3),
        worker_init_fn=seed_shift,
    )
    shifts = {shift for batch in EchoLoader(plain, 2, insertion_point="after_augmentation") for shift in batch[:, 1].tolist()}
    base_seed = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(3)).item()
    assert shifts == {base_seed % 2**32, (base_seed + 1) % 2**32}


def seed_shift(worker):
    get_worker_info().dataset.shift = torch.initial_seed() % 2**32


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


def test_workers_read_prefetch_factor_batches_ahead_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_echo.pipeline.prefetch._SHORT_SECONDS", float("-inf"))  # any step is a long one
    dataset = LoggedDataset(400, ReadLog(tmp_path / "reads"))
    plain = DataLoader(dataset, batch_size=4, num_workers=2, prefetch_factor=4)
    loader = EchoLoader(plain, 1, insertion_point="after_augmentation")
    at_construction = len(dataset.log.entries())
    iterator = iter(loader)
    next(iterator)
    ahead = PREFETCH_DEPTH + 2 * 4
    assert until(lambda: len(dataset.log.entries()) - at_construction == 4 * (1 + ahead))
    next(iterator)
    assert until(lambda: len(dataset.log.entries()) - at_construction == 4 * (2 + ahead))
