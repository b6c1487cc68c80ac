"""Whole batches on demand: which loaders are refused and why, what a copy is made for, and what a state may hold."""

import copy
import threading
from contextlib import closing

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from lightning_echo.loader.loader import EchoLoader
from lightning_echo.loader.state import EchoState, EchoStateError
from lightning_echo.pipeline import demand_batches
from lightning_echo.pipeline.demand_batches import Copier, Held

PATIENCE = 30  # seconds after which a test that hangs fails; no test waits for it to pass
DATA = TensorDataset(torch.arange(12))


class Own(Sampler):
    """A sampler of the user's, which may draw from anywhere."""

    def __iter__(self):
        return iter(range(12))

    def __len__(self):
        return 12


class OwnBatches(Own):
    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        return 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


@pytest.mark.parametrize(
    ("loader", "point", "why"),
    [
        (DataLoader(DATA, 2, num_workers=2), "after_transfer", "a batch is transferred where it is used.*Give after_batching"),
        (DataLoader(DATA, 2), "after_batching", "without workers, no batch arrives while a step runs.*num_workers=2 or more"),
        (DataLoader(DATA, 2, sampler=Own(), num_workers=2), "after_batching", "Own may draw from the global random states"),
        (DataLoader(DATA, batch_sampler=OwnBatches(), num_workers=2), "auto", "OwnBatches may draw.*a sampler of torch's"),
        (DataLoader(Stream(), 2, num_workers=2), "after_batching", "the data set is a stream"),
        ([torch.zeros(2)], "auto", "list is an iterable of batches.*made while the training waits.*give a number"),
    ],
)
def test_a_loader_whose_batches_no_thread_may_fetch_ahead_is_refused_with_the_reason(loader, point, why):
    with pytest.raises(ValueError, match=f"factor='demand' is impossible.*{why}"):
        EchoLoader(loader, "demand", insertion_point=point)


def test_a_state_of_whole_batches_has_no_batch_that_came_early():
    with closing(EchoLoader(DataLoader(DATA, 2, num_workers=1), "demand", insertion_point="after_batching")) as loader:
        next(iter(loader))
        state = loader.state_dict()
    assert (state["demand"]["frontier"], state["demand"]["ahead"]) == (1, [])
    damaged = copy.deepcopy(state)
    damaged["delivered"] = damaged["demand"]["number"] = 8
    damaged["demand"]["ahead"] = [[3, 1]]
    with pytest.raises(EchoStateError, match=r"demand\.ahead must be an empty list: batches come in their order"):
        EchoState.from_dict(damaged, by_index=True)
    damaged["demand"].update(ahead=[], frontier=9)
    with pytest.raises(EchoStateError, match=r"demand\.frontier must be at most 8, by its number of batches"):
        EchoState.from_dict(damaged, by_index=True)


def test_a_copy_is_begun_once_for_a_batch_and_has_memory_of_its_own(monkeypatch):
    copied, copy_example = [], demand_batches.copy_example

    def noted(batch):
        copied.append(threading.current_thread().name)
        return copy_example(batch)

    monkeypatch.setattr(demand_batches, "copy_example", noted)
    held, copier = Held(torch.ones(3), 3), Copier()
    first = copier.copy_for(7, held)
    assert copier.copy_for(7, held) is first
    first.result(PATIENCE).fill_(5)
    assert held.batch.tolist() == [1, 1, 1]
    assert copier.copy_for(8, held).result(PATIENCE).tolist() == [1, 1, 1]
    assert copied == ["lightning_echo-copy_0"] * 2
    copier.close()
