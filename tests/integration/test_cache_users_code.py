"""A user's code may edit, change, grow, raise, differ by worker: batches are those without a cache, or an error says why."""

import sys

import pytest
import torch
from cached_data_cases import READS, Loaded, note_read, plain_values, told
from loader_cases import epochs, nothing_left_behind
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.cache.reads import StaleCacheError

LENGTH = 24
CACHE = {"size": "2MiB"}


def echo(dataset, factor=1, *, cache=CACHE, point="auto", workers=0, collate=None, **options):
    plain = DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=collate, **{"shuffle": True, **options})
    return EchoLoader(plain, factor, insertion_point=point, seed=3, cache=cache)


def spoiled(examples):
    """A collate function that makes a batch, and then edits all that it was given."""
    batch = plain_values(examples)
    for example in examples:
        example["x"].fill_(-1)
        example["array"][:] = -1
        example["words"].clear()
        del example["extra"]
    return batch


@pytest.mark.parametrize(("point", "hold"), [("before_augmentation", "loaded"), ("after_augmentation", "whole")])
def test_a_collate_function_that_edits_what_it_gets_does_not_reach_the_cache(point, hold):
    if hold == "whole":
        dataset = Loaded("edited in place")
    else:
        dataset = StagedDataset.of(Loaded("edited in place"), augment=lambda example: {**example, "noise": torch.rand(1)})
    options = {"point": point, "collate": spoiled}
    cached = echo(dataset, 2.37, cache={**CACHE, "hold": hold}, **options)
    assert epochs(cached, 6) == epochs(echo(dataset, 2.37, cache=None, **options), 6)
    assert cached.cache_counts.hits > 0
    cached.close()


class Changing(Dataset):
    """Its examples are those of an edition, of which there may be a new one."""

    def __init__(self, length=LENGTH):
        self.edition = torch.zeros(length, dtype=torch.int64).share_memory_()

    def __getitem__(self, index):
        return torch.tensor([index, int(self.edition[index])])

    def __len__(self):
        return len(self.edition)


def test_a_new_edition_is_found_within_the_audits_at_the_10th_or_100th_hit():
    dataset = Changing(80)
    loader = echo(dataset, cache={**CACHE, "hold": "whole"}, point="after_augmentation")
    epochs(loader, 2)
    assert loader.cache_counts.hits == 80
    iterator = iter(loader)
    next(iterator)
    dataset.edition += 1  # within an epoch: at its beginning it would be noticed
    with pytest.raises(StaleCacheError, match=r"example \d+ has changed since it was cached") as said:
        list(iterator)
    assert "tensors that differ in 1 of 2 elements" in str(said.value)
    assert "leave the cache out, or move what changes after the cut" in str(said.value)
    assert loader.cache_counts.hits + 4 >= 99


class Broken(Loaded):
    """Some of its examples cannot be read."""

    error, text = OSError, "unexpected end of file"

    def __getitem__(self, index):
        if index == 17:
            raise self.error(self.text)
        return super().__getitem__(index)


class BrokenCalls(Broken):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def error_of(loader, passes):
    with pytest.raises((OSError, RuntimeError)) as raised:
        epochs(loader, passes)
    loader.close()
    message = str(raised.value).splitlines()[-1].removeprefix(f"{type(raised.value).__name__}: ")  # as torch tells it of a worker
    notes = getattr(raised.value, "__notes__", [])
    if sys.version_info < (3, 11):  # there are no notes: it stands in the message
        message, mark, note = message.partition(" (reading ")
        notes = [f"(reading {note}"] if mark else []
    return type(raised.value), message, notes


@pytest.mark.parametrize(("point", "workers"), [("after_augmentation", 0), ("after_batching", 1)])
def test_an_error_of_the_data_set_is_the_same_with_and_without_a_cache(point, workers):
    options = {"point": point, "workers": workers, "shuffle": False}
    expected = error_of(echo(Broken("tensor"), 2, cache=None, **options), 3)
    assert error_of(echo(Broken("tensor"), 2, cache={**CACHE, "hold": "whole"}, **options), 3) == expected
    kind, _, notes = expected
    assert kind is OSError
    assert workers or notes == ["(reading example 17 of the data set)"]


def test_a_stop_iteration_in_the_data_set_is_an_error(monkeypatch):
    monkeypatch.setattr(Broken, "error", StopIteration)
    loader = echo(BrokenCalls("tensor"), cache={**CACHE, "hold": "whole"}, point="after_augmentation", workers=1)
    assert error_of(loader, 2)[:2] == (RuntimeError, "the data set raised StopIteration while an example was read")


def test_after_an_error_the_run_goes_on_with_what_is_held(tmp_path):
    class Fragile(Loaded):
        def __getitem__(self, index):
            if index == 17 and not (tmp_path / "mended").exists():
                raise OSError("network")
            return super().__getitem__(index)

    dataset = Fragile("tensor")
    loader = echo(dataset, cache={**CACHE, "hold": "whole"}, point="after_augmentation", shuffle=False, collate=told)
    with pytest.raises(OSError, match="network"):
        list(loader)
    (tmp_path / "mended").touch()
    READS.clear()
    read = [index for _ in range(2) for batch in loader for index in batch[2]]
    assert read[:8] == list(range(16, 24)), "the batch that failed, and those after it"
    assert len(read) == 8 + 2, "and two audits"
    assert loader.cache_counts.examples == LENGTH


class Shifted(Dataset):
    shift = 0

    def __getitem__(self, index):
        note_read(index)
        return torch.tensor([index + self.shift])

    def __len__(self):
        return LENGTH


def shift_by_worker(worker):
    get_worker_info().dataset.shift = 100 * worker


def shift_alike(worker):
    get_worker_info().dataset.shift = 7


def test_a_data_set_that_worker_init_fn_changes_in_each_worker_is_refused():
    loader = echo(Shifted(), cache={**CACHE, "hold": "whole"}, workers=2, worker_init_fn=shift_by_worker)
    with (
        nothing_left_behind(),
        pytest.raises(StaleCacheError, match="another one in each worker, since worker_init_fn changes it"),
    ):
        epochs(loader, 2)


def test_a_data_set_that_worker_init_fn_changes_alike_is_held_as_it_is_then():
    loader = echo(Shifted(), cache={**CACHE, "hold": "whole"}, workers=2, worker_init_fn=shift_alike, point="after_augmentation")
    for epoch in epochs(loader, 4):
        assert sorted(int(value) for batch in epoch for value in batch) == list(range(7, LENGTH + 7))
    assert loader.cache_counts.examples == LENGTH
    assert loader.cache_counts.hits >= 2 * LENGTH
    loader.close()
