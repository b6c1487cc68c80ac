"""Workers, pickling, cuts and points of a loader, as findings."""

import multiprocessing

import pytest
import torch
from loaders_with_traps import Batches, Holding, Stream, Unreadable, good_loader
from torch.utils.data import TensorDataset

from lightning_echo.doctor.looking import FirstBatch, UserCodeError, check_first_batch, check_loader, look
from lightning_echo.doctor.machine import Status


def findings(loader, cores=2):
    return {finding.name: finding for finding in check_loader(look(loader), cores)}


def test_a_good_loader_has_nothing_to_complain_about():
    found = findings(good_loader())
    assert list(found) == ["loader", "workers", "pickle", "split", "insertion_points"]
    assert {finding.status for finding in found.values()} == {Status.ok}
    assert found["loader"].figures == {"kind": "DataLoader", "examples": 8, "batch_size": 4, "batches": 2}
    assert 0 < found["pickle"].figures["bytes"] < 10_000
    assert found["split"].figures == {"before_augmentation": True, "after_read": True}
    assert found["insertion_points"].figures["auto"] == "before_augmentation"


@pytest.mark.parametrize(("workers", "cores", "status"), [(0, 1, "ok"), (0, 4, "warning"), (2, 2, "ok"), (3, 2, "warning")])
def test_workers_are_compared_with_the_cores(workers, cores, status):
    loader = good_loader(num_workers=workers, persistent_workers=workers > 0)
    found = findings(loader, cores)["workers"]
    assert (found.status.value, found.figures) == (status, {"num_workers": workers, "cores": cores})
    assert (f"num_workers={cores}" in found.way_out) == (status == "warning")


@pytest.mark.parametrize(
    ("options", "status", "shareable"),
    [
        ({"collate_fn": lambda batch: batch, "multiprocessing_context": multiprocessing.get_context("fork")}, "warning", True),
        ({"collate_fn": lambda batch: batch, "multiprocessing_context": multiprocessing.get_context("spawn")}, "error", True),
        ({"dataset": Holding(item for item in ()), "multiprocessing_context": "spawn"}, "error", False),
    ],
)
def test_what_cannot_be_pickled_is_named_and_is_an_error_where_workers_are_spawned(options, status, shareable):
    found = findings(good_loader(**options))["pickle"]
    assert found.status.value == status
    assert found.figures["shareable"] is shareable
    assert next(iter(options)) in found.sentence
    assert ("reading can be shared" in found.sentence) is shareable


def test_a_data_set_that_cannot_be_split_has_the_reason_and_a_way_out():
    found = findings(good_loader(TensorDataset(torch.zeros(8, 3))))
    assert found["split"].status is Status.warning
    assert "TensorDataset has neither load(index) and augment(example) nor a transform" in found["split"].sentence
    assert "StagedDataset.of" in found["split"].way_out
    possible = found["insertion_points"].figures
    assert possible.pop("auto") == "after_augmentation"
    assert [point for point in possible if possible[point]] == ["after_augmentation", "after_batching", "after_transfer"]


def test_a_stream_is_not_advised_to_become_a_staged_data_set():
    found = findings(good_loader(Stream(), shuffle=None))["split"]
    assert found.sentence.endswith("before its augmentation: the data set is a stream, which has no index.")
    assert "StagedDataset" not in found.way_out


def test_an_example_that_cannot_be_read_is_an_error_with_the_message():
    found = findings(good_loader(Unreadable()))
    assert found["example"].status is Status.error
    assert "FileNotFoundError: image 0" in found["example"].sentence
    assert "split" not in found


def test_a_loader_that_is_no_dataloader_has_workers_of_its_own():
    found = findings(Batches(), cores=8)
    assert found["workers"].status is Status.ok
    assert found["loader"].figures == {"kind": "Batches", "batches": 4}


def test_a_first_batch_is_told_with_its_seconds_or_its_exception():
    found = check_first_batch(FirstBatch(seconds=2.5, bytes=2048, tensors=2))
    assert found.sentence == "The first batch took 2.5 seconds. Its tensors (2) have 2 KiB."
    assert found.figures == {"seconds": 2.5, "batch_bytes": 2048, "tensors": 2}
    assert check_first_batch(FirstBatch(2.5, 2048, 2), 4).sentence.endswith("have 2 KiB, about 512 bytes for an example.")
    failed = check_first_batch(UserCodeError("reading the first batch", OSError("disk")))
    assert (failed.status, failed.sentence) == (Status.error, "reading the first batch raised OSError: disk.")
