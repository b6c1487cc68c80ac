"""Lightning looks at the workers of a plain ``DataLoader`` alone: what it would say of an echoed one is said all the same."""

import os
import warnings

import pytest
from torch.utils.data import DataLoader
from trainer_runs import Recorder, Scans, trainer

from lightning_echo import EchoCallback, EchoDataModule, EchoLoader


def said(workers, way, cores, monkeypatch):
    """The warnings of a run of two epochs about the number of workers."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    loader = DataLoader(Scans(16), 4, num_workers=workers)
    callbacks = [EchoCallback(factor=2, summary=False)] if way == "callback" else []
    trains = trainer(max_epochs=2, callbacks=callbacks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == "datamodule":
            trains.fit(Recorder(), datamodule=EchoDataModule.from_dataloaders(loader, factor=2))
        else:
            trains.fit(Recorder(), EchoLoader(loader, 2) if way == "loader" else loader)
    texts = [(warning.category.__name__, str(warning.message)) for warning in caught if "many workers" in str(warning.message)]
    return [(kind, text.removeprefix("lightning_echo: ").rstrip(".")) for kind, text in texts]


@pytest.mark.parametrize("way", ["callback", "datamodule", "loader"])
def test_few_workers_are_said_once_in_lightnings_words(way, monkeypatch):
    assert said(0, way, 8, monkeypatch) == said(0, "plain", 8, monkeypatch) != []


def test_enough_workers_or_few_cores_are_not_said(monkeypatch):
    assert said(2, "loader", 8, monkeypatch) == said(0, "loader", 2, monkeypatch) == []
