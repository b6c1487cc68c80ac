"""What examples weigh, and what of them fits, against sizes that are worked out here."""

import pytest
import torch
from loaders_with_traps import Stream, Unreadable, good_loader
from torch.utils.data import TensorDataset

from lightning_echo.doctor.looking import FirstBatch, check_memory, check_queues, look
from lightning_echo.doctor.machine import Status

MIB = 2**20


def findings(loader, free=2**30):
    return {finding.name: finding for finding in check_memory(look(loader), free)}


def large_examples():
    """Eight examples of a mebibyte each."""
    return good_loader(TensorDataset(torch.zeros(8, MIB // 4)))


def test_examples_are_weighed_as_they_are_read_decoded_and_after_all_transforms():
    found = findings(good_loader())["example_bytes"]
    assert found.figures["before_augmentation_bytes"] == found.figures["after_augmentation_bytes"] == 3 * 4
    assert 0 < found.figures["after_read_bytes"] < 100  # a byte, as Python holds it
    assert "12 bytes decoded" in found.sentence


def test_what_a_stream_holds_is_not_known():
    found = findings(good_loader(Stream(), shuffle=None))
    assert "not known before" in found["example_bytes"].sentence
    assert found["buffer"].figures["items_in_free_memory"] is None
    assert found["cache"].figures == {"possible": False}


def test_a_buffer_is_compared_with_the_free_memory():
    figures = findings(large_examples(), free=100 * MIB)["buffer"].figures
    assert figures["items_in_free_memory"] == 100 * MIB // figures["item_bytes"]
    assert MIB <= figures["item_bytes"] < 1.001 * MIB
    assert figures["items"] > 0
    assert findings(large_examples(), free=None)["buffer"].figures["items_in_free_memory"] is None


@pytest.mark.parametrize(("free_times", "fraction"), [(2, 1), (0.5, 0.375)])
def test_a_cache_may_take_three_fourths_of_the_free_memory(free_times, fraction):
    whole = findings(good_loader())["cache"].figures["loaded_bytes"]
    figures = findings(good_loader(), free=int(whole * free_times))["cache"].figures
    assert figures["examples"] == 8
    assert figures["loaded_fraction"] == pytest.approx(fraction, rel=0.01)


def test_a_cache_that_holds_a_part_is_a_warning():
    figures = findings(good_loader())["cache"].figures
    smallest = min(figures["raw_bytes"], figures["loaded_bytes"])
    found = findings(good_loader(), free=smallest)["cache"]
    assert found.status is Status.warning
    assert max(found.figures["raw_fraction"], found.figures["loaded_fraction"]) == pytest.approx(0.75)


def test_nothing_is_said_of_examples_that_cannot_be_read():
    assert findings(good_loader(Unreadable())) == {}


@pytest.mark.parametrize(("free", "status"), [(4000, Status.ok), (3999, Status.error)])
def test_prefetched_batches_must_fit_into_shared_memory(free, status):
    first = FirstBatch(seconds=0.1, bytes=1000, tensors=1)
    found = check_queues(look(good_loader()), first, free)  # two workers prefetch two batches each
    assert (found.status, found.figures) == (status, {"batches": 4, "needed_bytes": 4000, "free_bytes": free})


def test_without_workers_tensors_or_shared_memory_nothing_is_handed_over():
    first = FirstBatch(seconds=0.1, bytes=1000, tensors=1)
    assert check_queues(look(good_loader(num_workers=0, persistent_workers=False)), first, 10) is None
    assert check_queues(look(good_loader()), FirstBatch(0.1, 1000, 0), 10) is None
    assert check_queues(look(good_loader()), first, None) is None
