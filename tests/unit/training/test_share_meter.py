"""What sharing did in an epoch: joined over the ranks, and nothing where a loader does not share."""

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader
from lightning_echo.share.attachment import Waited
from lightning_echo.share.sharing import LoaderSharing
from lightning_echo.training.counts import ShareMeter, ShareUse


@pytest.fixture
def loader(monkeypatch):
    values = {"trainings": 3, "waited": Waited(for_peers=2.0), "missed_examples": 5, "read_again_examples": 2}
    values["saved_cpu_seconds"] = 0.5
    for name in values:
        monkeypatch.setattr(LoaderSharing, name, property(lambda self, name=name: values[name]))
    loader = EchoLoader(DataLoader(range(8), batch_size=2), 1, share="sweep")
    return loader, values


def test_waiting_is_that_of_the_epoch_and_of_the_slowest_rank(loader):
    loader, values = loader
    meter = ShareMeter()
    meter.begin_epoch(loader)
    values["waited"] = Waited(for_reading=9.0, for_peers=3.5, by_peer={"a": 0.5, "b": 3.0})
    others = [2, 4_000_000_000, 7, 3, 2_000_000_000]
    found = meter.end_epoch(loader, lambda row: torch.tensor([row, others]))
    assert found == ShareUse(3, waited_seconds=4.0, missed=12, read_again=5, saved_cpu_seconds=2.5, slowest_training="b")
    assert meter.end_epoch(loader, lambda row: torch.tensor([row])) == ShareUse(3, 1.5, 5, 2, 0.5, "b")


@pytest.mark.parametrize("loader", [None, EchoLoader(DataLoader(range(8), batch_size=2), 1)])
def test_without_sharing_there_is_nothing_and_no_exchange(loader):
    meter = ShareMeter()
    meter.begin_epoch(loader)
    assert meter.end_epoch(loader, lambda row: pytest.fail("the ranks exchange something")) is None
