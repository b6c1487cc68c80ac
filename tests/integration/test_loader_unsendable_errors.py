"""An exception whose class cannot be sent between processes arrives all the same."""

import pytest
import torch
from test_loader_errors_and_cleanup import Broken, BrokenFile, broken, nothing_left_behind
from torch.utils.data import IterableDataset

from lightning_echo import EchoLoader


class BrokenStream(IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return (self.dataset[index] for index in range(len(self.dataset)))


@pytest.mark.parametrize("kind", [Broken, lambda **bad: BrokenStream(Broken(**bad))], ids=["by index", "a stream"])
@pytest.mark.parametrize("where", ["read", "collate", "init"])
def test_an_exception_of_a_class_that_no_name_finds_arrives_as_its_nearest_class_that_one_finds(where, kind, monkeypatch):
    class Local(BrokenFile):
        def __init__(self, message):
            super().__init__(message)

    def fails(*_):
        raise Local("lost in the worker")

    if where == "read":
        monkeypatch.setattr(Broken, "decode", lambda _, raw: fails() if raw == 17 else torch.tensor([raw]))
    at = {"collate": {"collate_fn": fails}, "init": {"worker_init_fn": fails}}.get(where, {})
    plain = broken(kind(), 2, timeout=20, **at)  # torch alone would wait for ever, or end the epoch of a stream
    loader = EchoLoader(plain, 1, insertion_point="after_augmentation")
    with nothing_left_behind(), pytest.raises(BrokenFile, match="Local: lost in the worker"):
        list(loader)
