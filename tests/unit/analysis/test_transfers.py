"""Transfers of batches that the hooks of a model and a data module make: noted or skipped, and the hooks given back."""

import pytest
import torch

from lightning_echo.analysis.sources import Transfers, transfers_noted, transfers_skipped

CPU = torch.device("cpu")


class Hooks:
    """In the place of a model or a data module."""

    def __init__(self, name):
        self.name, self.before = name, []

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.before.append(batch)
        return batch

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return f"{batch} on {device} by {self.name}"


@pytest.fixture
def seconds(monkeypatch):
    """A clock that goes on by a second each time that it is read."""
    now = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))


@pytest.mark.usefixtures("seconds")
def test_transfers_of_either_are_noted_and_the_last_batch_is_there():
    model, module, transfers = Hooks("model"), Hooks("module"), Transfers()
    with transfers_noted([model, module], transfers):
        assert model.transfer_batch_to_device("a", CPU, 0) == "a on cpu by model"
        assert module.transfer_batch_to_device("b", CPU, 0) == "b on cpu by module"
    assert transfers.seconds == [1.0, 1.0]
    assert transfers.batch == "b on cpu by module"


def test_before_the_first_transfer_there_is_no_batch():
    transfers = Transfers()
    assert (transfers.seconds, transfers.batch) == ([], None)


def test_lightning_finds_the_users_hook_below_the_one_that_notes():
    """It compares ``__wrapped__`` with the hook of its own class, to see whether the hook was overridden."""
    model = Hooks("model")
    with transfers_noted([model], Transfers()):
        assert model.transfer_batch_to_device.__wrapped__.__func__ is Hooks.transfer_batch_to_device


def test_a_batch_that_is_on_the_device_is_left_as_it_is():
    model = Hooks("model")
    batch = object()
    with transfers_skipped([model]):
        assert model.on_before_batch_transfer(batch, 0) is batch
        assert model.transfer_batch_to_device(batch, CPU, 0) is batch
    assert model.before == []


@pytest.mark.parametrize("replaced", [transfers_skipped, lambda instances: transfers_noted(instances, Transfers())])
def test_the_hooks_are_given_back_also_after_an_error(replaced):
    model = Hooks("model")
    with pytest.raises(ZeroDivisionError), replaced([model]):
        raise ZeroDivisionError
    assert set(vars(model)) == {"name", "before"}
    assert model.transfer_batch_to_device("a", CPU, 0) == "a on cpu by model"
