"""What a user's code may do to a cache: edit what it gets, change, grow, raise, differ from worker to worker.

Either the batches are those without a cache, or training ends with an error that says what is wrong.
"""

import sys
import warnings

import pytest
import torch
from cached_data_cases import DATASETS, READS, Kind, Loaded, Misfits, Told, both_edited, note_read, plain_values
from loader_cases import epochs, nothing_left_behind
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.cache.reads import StaleCacheError

LENGTH = 24
CACHE = {"size": "2MiB"}


def echo(dataset, factor=1, *, cache=CACHE, point="auto", workers=0, collate=None, **options):
    plain = DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=collate, **{"shuffle": True, **options})
    return EchoLoader(plain, factor, insertion_point=point, seed=3, cache=cache)


# --- edits in place ------------------------------------------------------------------------------------------------------


def spoiled(examples):
    """A collate function that makes a batch, and then edits all that it was given."""
    batch = plain_values(examples)
    for example in examples:
        example["x"].fill_(-1)
        example["array"][:] = -1
        example["words"].clear()
        del example["extra"]
    return batch


@pytest.mark.grid
@pytest.mark.parametrize("factor", [1, 2.37])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("point", "hold"), [("before_augmentation", "loaded"), ("after_augmentation", "whole")])
def test_a_collate_function_that_edits_what_it_gets_does_not_reach_the_cache(point, hold, workers, factor):
    if hold == "whole":
        dataset = Loaded("edited in place")
    else:
        dataset = StagedDataset.of(Loaded("edited in place"), augment=lambda example: {**example, "noise": torch.rand(1)})
    options = {"point": point, "workers": workers, "collate": spoiled}
    cached = echo(dataset, factor, cache={**CACHE, "hold": hold}, **options)
    assert epochs(cached, 6) == epochs(echo(dataset, factor, cache=None, **options), 6)
    assert cached.cache_counts.hits > 0
    cached.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_step_that_edits_its_batch_does_not_reach_the_cache(workers):
    """Without a collate function that copies, the step has the memory of the example itself."""
    expected = [plain_values(Loaded("detection")[index]) for index in range(LENGTH)]
    READS.clear()
    loader = echo(Loaded("detection"), cache={**CACHE, "hold": "whole"}, workers=workers, collate=list, shuffle=False)
    for _ in range(4):
        for number, batch in enumerate(loader):
            for place, (image, target) in enumerate(batch):
                assert plain_values((image, target)) == expected[4 * number + place]
                image.zero_()
                target["boxes"][:, 0] = -5
                target.pop("labels")
    assert loader.cache_counts.hits == 3 * LENGTH
    loader.close()


def test_an_augmentation_that_edits_in_place_gets_a_new_copy_each_time():
    dataset = StagedDataset.of(Loaded("twice the same"), augment=both_edited)
    cached = epochs(echo(dataset, 2.37, collate=plain_values), 5)
    assert cached == epochs(echo(dataset, 2.37, cache=None, collate=plain_values), 5)


# --- data that changes ---------------------------------------------------------------------------------------------------


class Changing(Dataset):
    """Its examples are those of an edition, of which there may be a new one."""

    def __init__(self, length=LENGTH):
        self.edition = torch.zeros(length, dtype=torch.int64).share_memory_()

    def __getitem__(self, index):
        return torch.tensor([index, int(self.edition[index])])

    def __len__(self):
        return len(self.edition)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_new_edition_that_comes_while_nothing_is_read_is_the_one_that_is_delivered(workers):
    dataset = Changing()
    loader = echo(dataset, cache={**CACHE, "hold": "whole"}, point="after_augmentation", workers=workers)
    list(loader)
    loader.close()  # with all that was fetched ahead
    dataset.edition += 1
    with nothing_left_behind():
        assert {edition for batch in loader for _, edition in batch.tolist()} == {1}
        loader.close()


@pytest.mark.parametrize("passes_before", [2, 3])
def test_a_new_edition_is_found_within_the_audits_at_the_10th_or_100th_hit(passes_before):
    dataset = Changing(80)
    loader = echo(dataset, cache={**CACHE, "hold": "whole"}, point="after_augmentation")
    epochs(loader, passes_before)
    assert loader.cache_counts.hits == 80 * (passes_before - 1)
    iterator = iter(loader)
    next(iterator)
    dataset.edition += 1  # within an epoch: at its beginning it would be noticed
    if passes_before == 2:
        with pytest.raises(StaleCacheError, match=r"example \d+ has changed since it was cached") as said:
            list(iterator)
        assert "tensors that differ in 1 of 2 elements" in str(said.value)
        assert "leave the cache out, or move what changes after the cut" in str(said.value)
        assert loader.cache_counts.hits + 4 >= 99
    else:  # the 100th hit was before: the next audit is at the 1000th
        assert len(list(iterator)) == 19


def test_what_the_main_process_edits_between_two_passes_begins_the_cache_anew():
    """As a callback that makes the data harder, on a data set that is read in the main process."""
    dataset = Harder()
    loader = echo(dataset, point="before_augmentation")
    list(loader)
    dataset.level = 1000
    for batches in epochs(loader, 3):
        assert all(example >= 1000 for batch in batches for (example,) in batch.tolist())


class Harder(StagedDataset):
    level = 1

    def load(self, index):
        return torch.tensor([index * self.level + self.level])

    def augment(self, example):
        return example + torch.randint(3, (1,))

    def __len__(self):
        return LENGTH


def test_a_data_set_that_returns_something_else_at_each_read_is_refused_or_found():
    class Counts(Loaded):
        reads = 0

        def __getitem__(self, index):
            type(self).reads += 1
            return torch.tensor([index, type(self).reads])

    with pytest.raises(ValueError, match=r"cannot be held whole: dataset\[0\] is another example when it is read again"):
        echo(Counts("tensor"), cache={**CACHE, "hold": "whole"})
    late = StagedDataset.of(LateCounts("tensor"), augment=lambda example: example + torch.randint(2, (1,)))
    with pytest.raises(StaleCacheError, match="has changed since it was cached"):
        epochs(echo(late), 3)


class LateCounts(Loaded):
    """Returns the same for as long as it is looked at before training: the first and the last example."""

    reads = 0

    def __getitem__(self, index):
        type(self).reads += index not in (0, self.length - 1)
        return torch.tensor([index, type(self).reads])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_that_grows_begins_a_new_cache_and_says_so(workers, caplog):
    dataset = Changing()
    loader = echo(dataset, cache={**CACHE, "hold": "whole"}, point="after_augmentation", workers=workers)
    epochs(loader, 2)
    dataset.edition = torch.zeros(32, dtype=torch.int64).share_memory_()
    with pytest.warns(UserWarning, match="a pass has 32 examples now"), caplog.at_level("INFO", "lightning_echo"):
        grown = epochs(loader, 2)
    assert sorted(index for batch in grown[-1] for index in batch[:, 0].tolist()) == list(range(32))
    assert "the cache is emptied" in caplog.text
    assert loader.cache_counts.examples == 32
    loader.close()


# --- misfits -------------------------------------------------------------------------------------------------------------


class ManyMisfits(Misfits):
    """One of eight examples draws random numbers while it is decoded."""

    def __init__(self, kind):
        super().__init__(kind, 160)


@pytest.mark.parametrize("hold", ["loaded", "raw"])
def test_misfits_that_are_read_each_time_do_not_become_too_many_in_the_course_of_many_passes(hold):
    """Of what is read in later passes they are all: of what is used they stay an eighth."""
    dataset = ManyMisfits("tensor")
    loader = echo(dataset, cache={**CACHE, "hold": hold}, collate=plain_values)
    plain = echo(dataset, cache=None, collate=plain_values)
    with pytest.warns(UserWarning, match="does not fit the split of the data set: loading it draws random numbers from torch"):
        assert epochs(loader, 8) == epochs(plain, 8)
    counts = loader.cache_counts
    assert counts.examples == (160 if hold == "raw" else 140)


# --- errors --------------------------------------------------------------------------------------------------------------


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


class BrokenStages(Kind):
    broken = "read"

    def read(self, index):
        if index == 17 and self.broken == "read":
            raise OSError("unexpected end of file")
        return super().read(index)

    def decode(self, raw):
        if int(raw) == 17 and self.broken == "decode":
            raise OSError("no image")
        return super().decode(raw)

    def augment(self, example):
        if self.broken == "augment" and example[0] == 17:
            raise OSError("too small")
        return super().augment(example)


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


@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize(("point", "hold"), [("after_augmentation", "whole"), ("after_batching", "whole")])
def test_an_error_of_the_data_set_is_the_same_with_and_without_a_cache(point, hold, factor, workers):
    options = {"point": point, "workers": workers, "shuffle": False}
    expected = error_of(echo(Broken("tensor"), factor, cache=None, **options), 3)
    assert error_of(echo(Broken("tensor"), factor, cache={**CACHE, "hold": hold}, **options), 3) == expected
    kind, _, notes = expected
    assert kind is OSError
    assert workers or notes == ["(reading example 17 of the data set)"]


@pytest.mark.grid
@pytest.mark.parametrize("broken", ["read", "decode", "augment"])
@pytest.mark.parametrize(("point", "hold"), DATASETS["subset"][1])
def test_an_error_in_any_stage_is_the_same_with_and_without_a_cache(point, hold, broken):
    class Now(BrokenStages):
        pass

    Now.broken = broken
    options = {"point": point, "shuffle": False}
    expected = error_of(echo(Now("tensor"), 2, cache=None, **options), 3)
    assert error_of(echo(Now("tensor"), 2, cache={**CACHE, "hold": hold}, **options), 3) == expected


def test_an_error_in_a_call_for_several_examples_names_those_that_were_asked_for():
    loader = echo(BrokenCalls("tensor"), cache={**CACHE, "hold": "whole"}, point="after_augmentation", shuffle=False)
    kind, message, notes = error_of(loader, 3)
    assert (kind, message) == (OSError, "unexpected end of file")
    assert notes == ["(reading examples [16, 17, 18, 19] of the data set in one call)"]


@pytest.mark.parametrize("dataset", [Broken, BrokenCalls])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stop_iteration_in_the_data_set_is_an_error(dataset, workers, monkeypatch):
    monkeypatch.setattr(Broken, "error", StopIteration)
    options = {"point": "after_augmentation", "workers": workers, "shuffle": False}
    expected = error_of(echo(dataset("tensor"), cache=None, **options), 2)
    assert error_of(echo(dataset("tensor"), cache={**CACHE, "hold": "whole"}, **options), 2) == expected
    assert expected[:2] == (RuntimeError, "the data set raised StopIteration while an example was read")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stop_iteration_in_what_follows_a_hit_is_an_error(workers):
    class Stops(Kind):
        def augment(self, example):
            if example[0] == 17:
                raise StopIteration
            return super().augment(example)

    for cache in (None, CACHE):
        for point in ("before_augmentation", "after_augmentation"):
            loader = echo(Stops("tensor"), cache=cache, point=point, workers=workers, shuffle=False)
            assert error_of(loader, 2)[:2] == (RuntimeError, "the data set raised StopIteration while an example was read")


def test_an_index_that_does_not_exist_is_an_error_of_the_data_set():
    for cache in (None, {**CACHE, "hold": "whole"}):
        loader = echo(
            Subset(Loaded("tensor"), [3, 1, 2]), cache=cache, point="after_augmentation", shuffle=None, sampler=[0, 1, 9]
        )
        with pytest.raises(IndexError, match="list index out of range") as raised:
            list(loader)
        told = [str(raised.value), *getattr(raised.value, "__notes__", [])]  # Python 3.10 has no notes: it stands in the message
        assert " ".join(told) == "list index out of range (reading example 9 of the data set)"


def test_after_an_error_the_run_goes_on_with_what_is_held(tmp_path):
    class Fragile(Loaded):
        def __getitem__(self, index):
            if index == 17 and not (tmp_path / "mended").exists():
                raise OSError("network")
            return super().__getitem__(index)

    dataset = Fragile("tensor")
    loader = echo(dataset, cache={**CACHE, "hold": "whole"}, point="after_augmentation", shuffle=False, collate=Told())
    with pytest.raises(OSError, match="network"):
        list(loader)
    (tmp_path / "mended").touch()
    READS.clear()
    read = [index for _ in range(2) for batch in loader for index in batch[2]]
    assert read[:8] == list(range(16, 24)), "the batch that failed, and those after it"
    assert len(read) == 8 + 2, "and two audits"
    assert loader.cache_counts.examples == LENGTH


# --- workers -------------------------------------------------------------------------------------------------------------


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


def longer_by_worker(worker):
    get_worker_info().dataset.length += 1


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


class Unpicklable(Shifted):
    def __getitem__(self, index):
        return {"x": super().__getitem__(index), "name": lambda: index}


def without_names(examples):
    return torch.cat([example["x"] for example in examples])


def test_examples_that_pickle_cannot_write_are_read_each_time_where_worker_init_fn_may_change_them():
    options = {"workers": 2, "worker_init_fn": shift_by_worker, "point": "after_augmentation", "collate": without_names}
    loader = echo(Unpicklable(), cache={**CACHE, "hold": "whole"}, **options)
    with pytest.warns(UserWarning, match="the cache holds nothing: worker_init_fn may .* of type dict cannot be compared"):
        found = epochs(loader, 2)
    assert sorted(int(value) % 100 for batch in found[1] for value in batch) == list(range(LENGTH))
    assert loader.cache_counts.examples == 0
    loader.close()


def test_a_data_set_with_more_examples_in_the_workers_is_refused():
    loader = echo(
        Loaded("tensor"),
        cache={**CACHE, "hold": "whole"},
        workers=2,
        worker_init_fn=longer_by_worker,
        point="after_augmentation",
    )
    with pytest.raises(StaleCacheError, match="the data set has 25 examples here, and had 24 when the cache was made"):
        list(loader)


# --- loaders made anew ---------------------------------------------------------------------------------------------------


class Files(Dataset):
    """Examples of a list of names."""

    def __init__(self, names):
        self.names = names

    def __getitem__(self, index):
        note_read(self.names[index])
        return torch.tensor([self.names[index]])

    def __len__(self):
        return len(self.names)


def followed(first, second):
    """The loader that follows another one, as after a reload, and what it has read in two passes."""
    make = {"cache": {**CACHE, "hold": "whole"}, "point": "after_augmentation", "collate": Told()}
    before = echo(first, **make)
    epochs(before, 2)
    after = echo(second, **make)
    after.follow(before)
    before.close()
    READS.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        batches = [batch for _ in range(2) for batch in after]
    assert {int(example) for batch in batches for example in batch[0]} == set(second.names)
    return [name for batch in batches for name in batch[2]], [str(one.message) for one in said]


def test_after_a_reload_what_is_held_is_not_read_again_but_for_the_samples_and_the_audits():
    read, said = followed(Files(list(range(LENGTH))), Files(list(range(LENGTH))))
    assert len(read) <= 8 + 2
    assert not said


@pytest.mark.parametrize(
    "names", [[*range(12), *range(24, 36)], list(range(1, LENGTH + 1)), list(range(20)), list(range(LENGTH - 1, -1, -1))], ids=str
)
def test_after_a_reload_with_another_list_the_cache_begins_anew(names):
    read, said = followed(Files(list(range(LENGTH))), Files(names))
    assert set(names) <= set(read)
    assert any("the data set has changed (" in one and "): the cache is emptied" in one for one in said)


def test_the_same_data_set_object_with_another_list_begins_the_cache_anew():
    dataset = Files(list(range(LENGTH)))
    make = {"cache": {**CACHE, "hold": "whole"}, "point": "after_augmentation"}
    before = echo(dataset, **make)
    epochs(before, 2)
    dataset.names = [name + 50 for name in dataset.names]
    after = echo(dataset, **make)
    after.follow(before)
    assert sorted(int(name) for batch in epochs(after, 1)[0] for name in batch) == list(range(50, 50 + LENGTH))


def test_data_sets_of_equal_class_and_length_in_one_are_told_apart():
    files = [Files(list(range(start, start + 8))) for start in (0, 100, 200)]
    loader = echo(ConcatDataset([*files, files[0]]), cache={**CACHE, "hold": "whole"}, point="after_augmentation")
    for epoch in epochs(loader, 4):
        assert sorted(int(name) for batch in epoch for name in batch) == sorted(
            [*range(8), *range(8), *range(100, 108), *range(200, 208)]
        )
    assert loader.cache_counts.examples == LENGTH
