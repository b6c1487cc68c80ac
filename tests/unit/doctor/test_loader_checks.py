"""What is known of a loader, and said of it: workers, pickling, cuts, points, memory, and its first batch."""

import multiprocessing
import time
from dataclasses import replace

import pytest
import torch
from loaders_with_traps import Examples, Holding, Stream, Unreadable, good_loader
from torch.utils.data import Dataset, TensorDataset

from lightning_echo.doctor.looking import (
    FirstBatch,
    ReadTime,
    UserCodeError,
    check_first_batch,
    check_loader,
    check_memory,
    check_queues,
    first_batch,
    look,
)
from lightning_echo.doctor.machine import Status
from lightning_echo.insertion import POINTS

ALL = ["after_read", "before_augmentation", "after_augmentation", "after_batching", "after_transfer"]
MIB = 2**20


def findings(loader, cores=2, free=2**30):
    looked = look(loader)
    return {finding.name: finding for finding in [*check_loader(looked, cores), *check_memory(looked, free)]}


def test_a_good_loader_has_nothing_to_complain_about():
    found = findings(good_loader())
    names = [
        "loader",
        "workers",
        "pickle",
        "split",
        "insertion_points",
        "reads_in_flight",
        "core_rate",
        "example_bytes",
        "buffer",
        "cache",
    ]
    assert list(found) == names
    assert {finding.status for finding in found.values()} == {Status.ok}
    assert found["loader"].figures == {"kind": "DataLoader", "examples": 8, "batch_size": 4, "batches": 2}
    assert 0 < found["pickle"].figures["bytes"] < 10_000
    assert found["split"].figures == {"before_augmentation": True, "after_read": True}
    sizes = found["example_bytes"].figures
    assert sizes["before_augmentation_bytes"] == sizes["after_augmentation_bytes"] == 3 * 4
    assert 0 < sizes["after_read_bytes"] < 100  # a byte, as Python holds it
    assert "12 bytes decoded" in found["example_bytes"].sentence


@pytest.mark.parametrize(
    ("seconds", "waits", "said"),
    [
        (0.0125, 0.0, "takes 12.5 ms of processor time: a core makes about 80 in a second, 16 cores 1,300, without"),
        (0.0125, 0.0025, "takes 10 ms of processor time: a core makes about 100 in a second, 16 cores 1,600, without"),
        (0.0125, 0.0125, ""),  # it only waits, as far as could be measured
    ],
)
def test_what_a_core_makes_is_said_without_the_time_that_a_read_waits(seconds, waits, said):
    looked = replace(look(good_loader()), read_time=ReadTime(seconds, waits))
    found = {finding.name: finding for finding in check_loader(looked, 16)}
    assert said in (found["core_rate"].sentence if said else "")
    assert ("core_rate" in found) is bool(said)


@pytest.mark.parametrize(("workers", "cores", "status"), [(0, 1, "ok"), (0, 4, "warning"), (2, 2, "ok"), (3, 2, "warning")])
def test_workers_are_compared_with_the_cores(workers, cores, status):
    loader = good_loader(num_workers=workers, persistent_workers=workers > 0)
    found = findings(loader, cores)["workers"]
    assert (found.status.value, found.figures) == (status, {"num_workers": workers, "cores": cores})
    assert (f"num_workers={cores}" in found.hint) == (status == "warning")


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


@pytest.mark.parametrize(
    ("dataset", "possible", "chosen", "holds", "refused"),
    [
        (Examples(), ALL, "before_augmentation", ["raw", "loaded"], ""),
        (
            TensorDataset(torch.zeros(8, 3)),
            ALL[2:],
            "after_augmentation",
            [],
            "TensorDataset has neither load(index) and augment(",
        ),
        (Stream(), ALL[2:], "after_augmentation", [], "the data set is a stream, which has no index"),
    ],
    ids=["staged", "uncut", "stream"],
)
def test_each_point_and_each_form_in_a_cache_is_possible_or_has_a_reason(dataset, possible, chosen, holds, refused):
    looked = look(good_loader(dataset, shuffle=None))
    assert ([point.value for point in looked.possible], looked.choice.point.value) == (possible, chosen)
    assert {*looked.possible, *looked.refused} == set(POINTS)
    assert [hold.name for hold in looked.holds] == holds
    found = findings(good_loader(dataset, shuffle=None))
    figures = found["insertion_points"].figures
    assert (figures.pop("auto"), [point for point in figures if figures[point]]) == (chosen, possible)
    if refused:
        assert all(reason[:19] == refused[:19] for reason in looked.refused.values())
        assert "no index" in looked.no_cache or "TensorDataset has neither" in looked.no_cache
        assert found["split"].status is Status.warning
        assert refused in found["split"].sentence
        assert ("StagedDataset.of" in found["split"].hint) is not isinstance(dataset, Stream)


class Waits(Examples):
    """A read waits for 4 ms."""

    def read(self, index):
        time.sleep(0.004)
        return super().read(index)


class Computes(Examples):
    """A read computes for 4 ms."""

    def read(self, index):
        end = time.thread_time() + 0.004
        while time.thread_time() < end:
            pass
        return super().read(index)


class SaysSo(Waits):
    reads_concurrently = True


class InOneCall(Waits):
    def __getitems__(self, indices):
        time.sleep(0.004)
        return [self[index] for index in indices]


class Augments(Dataset):
    """Whole examples, which take 4 ms and have random numbers."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.rand(3) + index


class DrawsInRead(Waits):
    def read(self, index):
        torch.rand(3)
        return super().read(index)


class WaitingStream(Stream):
    def __iter__(self):
        time.sleep(0.004)
        return super().__iter__()


USERS = "read of {} is code of the user's: set reads_concurrently = True in its class, or give a number of reads_in_flight"


@pytest.mark.parametrize(
    ("dataset", "status", "is_possible", "said"),
    [
        (Waits(), "warning", False, USERS.format("Waits")),
        (Computes(), "ok", False, USERS.format("Computes")),
        (SaysSo(), "ok", True, "Threads can read ahead (reads_in_flight): what they run is reading. An example took "),
        (Augments(), "warning", False, "dataset[0] is another example when it is read again"),
        (DrawsInRead(), "warning", False, "what would be reused (read) draws random numbers from torch"),
        (InOneCall(), "ok", False, "InOneCall has a __getitems__ of its own"),
        (WaitingStream(), "ok", False, "the data set is a stream, which has no index"),
        (TensorDataset(torch.zeros(8, 3)), "ok", False, "TensorDataset has no read(index) and decode(raw)"),
    ],
    ids=["waits", "computes", "says so", "augments", "draws in read", "in one call", "stream", "in memory"],
)
def test_a_data_set_whose_reads_wait_while_no_thread_may_read_ahead_is_named(dataset, status, is_possible, said):
    found = findings(good_loader(dataset, shuffle=None))["reads_in_flight"]
    assert (found.status.value, found.figures["possible"]) == (status, is_possible)
    assert said in found.sentence
    if isinstance(dataset, Augments | DrawsInRead):
        assert "reads_concurrently" not in found.sentence
    waits = found.figures["waiting_seconds"]
    if isinstance(dataset, Waits | Augments) and not isinstance(dataset, InOneCall):
        assert 0.004 <= waits <= found.figures["read_seconds"]
        assert " of them waiting." in found.sentence
    else:
        assert "waiting" not in found.sentence


def test_an_example_that_cannot_be_read_is_an_error_of_the_users_code():
    class Damaged(Unreadable):
        def __getitem__(self, index):
            raise ValueError("insertion_point is no point of mine")

    looked = look(good_loader(Damaged()))
    assert str(looked.unreadable) == "reading an example of Damaged raised ValueError: insertion_point is no point of mine"
    assert (looked.choice, looked.refused) == (None, {})
    found = findings(good_loader(Unreadable()))
    assert found["example"].status is Status.error
    assert "FileNotFoundError: image 0" in found["example"].sentence
    assert not {"split", "buffer", "cache"} & set(found)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (iter([1]), "got the iterator"),
        (3, "must be a DataLoader or another iterable"),
        (good_loader(Examples(0), shuffle=None), "empty"),
    ],
)
def test_what_cannot_be_echoed_at_all_is_refused(loader, message):
    with pytest.raises((TypeError, ValueError), match=message):
        look(loader)


def test_a_buffer_is_compared_with_the_free_memory():
    large = good_loader(TensorDataset(torch.zeros(8, MIB // 4)))
    figures = findings(large, free=100 * MIB)["buffer"].figures
    assert figures["items_in_free_memory"] == 100 * MIB // figures["item_bytes"]
    assert MIB <= figures["item_bytes"] < 1.001 * MIB
    assert figures["items"] > 0
    assert findings(large, free=None)["buffer"].figures["items_in_free_memory"] is None


@pytest.mark.parametrize(("free_times", "fraction", "status"), [(2, 1, "ok"), (0.5, 0.375, "warning")])
def test_a_cache_may_take_three_fourths_of_the_free_memory(free_times, fraction, status):
    whole = findings(good_loader())["cache"].figures
    smallest = min(("raw_bytes", "loaded_bytes"), key=lambda name: whole[name])
    found = findings(good_loader(), free=int(whole[smallest] * free_times))["cache"]
    assert (found.status.value, found.figures["examples"]) == (status, 8)
    assert found.figures[smallest.replace("bytes", "fraction")] == pytest.approx(fraction, rel=0.01)


@pytest.mark.parametrize(("free", "status"), [(4000, Status.ok), (3999, Status.error)])
def test_prefetched_batches_must_fit_into_shared_memory(free, status):
    first = FirstBatch(seconds=0.1, bytes=1000, tensors=1)
    found = check_queues(look(good_loader()), first, free)  # two workers prefetch two batches each
    assert (found.status, found.figures) == (status, {"batches": 4, "needed_bytes": 4000, "free_bytes": free})


def test_the_first_batch_is_timed_weighed_and_told():
    times = iter([10.0, 12.5])
    batches = [{"image": torch.zeros(4, 8), "labels": [torch.zeros(2), torch.zeros(2)], "names": ("a", "b")}]
    first = first_batch(batches, clock=lambda: next(times))
    assert (first.seconds, first.tensors) == (2.5, 3)
    assert first.bytes >= 4 * (32 + 2 + 2)
    found = check_first_batch(FirstBatch(seconds=2.5, bytes=2048, tensors=2))
    assert found.sentence == "The first batch took 2.5 seconds. Its tensors (2) have 2 KiB."
    assert found.figures == {"seconds": 2.5, "batch_bytes": 2048, "tensors": 2}
    assert check_first_batch(FirstBatch(2.5, 2048, 2), 4).sentence.endswith("have 2 KiB, about 512 bytes for an example.")
    failed = check_first_batch(UserCodeError("reading the first batch", OSError("disk")))
    assert (failed.status, failed.sentence) == (Status.error, "reading the first batch raised OSError: disk.")


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "LookupError: the loader ends"),
        (good_loader(Unreadable(), num_workers=0, persistent_workers=False), "FileNotFoundError: image"),
    ],
)
def test_a_first_batch_that_does_not_come_is_one_of_the_users_code(loader, message):
    with pytest.raises(UserCodeError, match=message):
        first_batch(loader)
