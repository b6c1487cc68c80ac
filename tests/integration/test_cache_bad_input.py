"""A cache that cannot be is refused before training: which argument, what was expected, what came, and the way out."""

import os
import re

import pytest
import torch
from cached_data_cases import Kind, Loaded
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_echo import CacheConfig, CachedDataset, EchoLoader, StagedDataset
from lightning_echo.cache import node_cache

POINTS = ("after_read", "before_augmentation", "after_augmentation", "after_batching")


def refused(cache, *, dataset=None, point="auto", error=ValueError, **options):
    """What a user is told."""
    plain = DataLoader(dataset or Kind("tensor"), **{"batch_size": 4, **options})
    with pytest.raises(error) as told:
        EchoLoader(plain, 2, insertion_point=point, cache=cache)
    return str(told.value)


@pytest.mark.parametrize(
    ("size", "got"),
    [
        ("8 apples", "'8 apples'"),
        ("", "''"),
        ("8", "'8'"),
        ("-8GiB", "'-8GiB'"),
        ("0GiB", "'0GiB'"),
        ("nanGiB", "'nanGiB'"),
        ("1e3MB", "'1e3MB'"),
        ("100 kB", "'100 kB'"),
        (0, "0"),
        (-5, "-5"),
        (8, "8"),
        (0.0, "0.0"),
        (-0.5, "-0.5"),
        (1.0, "1.0"),
        (1.5, "1.5"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_impossible_sizes_are_refused_with_what_was_expected_and_what_came(size, got):
    for cache in (size, {"size": size}):
        message = refused(cache)
        assert message.startswith("cache.size")
        assert got in message
        assert "GiB" in message or "MiB" in message


@pytest.mark.parametrize("size", [True, None, [8], b"8GiB"])
def test_what_is_no_size_is_refused(size):
    message = refused({"size": size}, error=TypeError)
    assert message.startswith('cache.size must be a string with a unit such as "8GiB"')
    assert repr(size) in message


def test_a_small_integer_asks_whether_gigabytes_were_meant():
    assert 'did you mean "8GiB"?' in refused(8)


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        ({}, "cache needs a size"),
        ({"sizes": "8GiB"}, "cache has unknown options sizes: known are size, hold, path, name, partitioned"),
        ({"size": "2MiB", "hold": "decoded"}, "cache.hold must be one of 'auto', 'raw', 'loaded', 'whole', got 'decoded'"),
        ({"size": "2MiB", "name": "train"}, "cache.name='train' needs a folder on a local disk: give cache.path, too"),
        ({"size": "2MiB", "path": "/", "name": "../x"}, "cache.name must be 1 to 64 letters"),
        ({"size": "2MiB", "partitioned": True, "path": "/", "name": "x"}, "cache.partitioned=True and cache.name='x' exclude"),
    ],
)
def test_other_impossible_options_are_refused(cache, said):
    assert said in refused(cache)


def test_more_than_the_memory_that_is_free_is_refused_with_what_is_free():
    message = refused("900TiB")
    assert re.search(r"cache\.size='900TiB' is more than the [\d.e+]+ GiB of memory that are free: give less, a share", message)
    assert "cache.path on a local disk" in message


class TestPath:
    def test_a_file_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("")
        message = refused({"size": "2MiB", "path": str(tmp_path / "file")})
        assert "cache.path must be a folder on a local disk" in message
        assert message.endswith("is a file")

    def test_a_folder_that_does_not_exist_is_refused(self, tmp_path):
        assert refused({"size": "2MiB", "path": str(tmp_path / "none")}).endswith("does not exist")

    def test_one_that_cannot_be_written_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(tmp_path)))  # as for another user
        assert "cannot be written by this user: give another folder" in refused({"size": "2MiB", "path": str(tmp_path)})

    def test_a_disk_without_room_is_refused(self, tmp_path):
        assert re.search(r"cache.size.*GiB are free in cache\.path", refused({"size": "900TiB", "path": str(tmp_path)}))

    @pytest.mark.parametrize("path", ["", 7, True])
    def test_what_is_no_path_is_refused(self, path):
        assert refused({"size": "2MiB", "path": path}, error=TypeError).startswith("cache.path must be a string or None, got")


FITS = {
    "after_read": {"raw"},
    "before_augmentation": {"raw", "loaded"},
    "after_augmentation": {"raw", "loaded", "whole"},
    "after_batching": {"raw", "loaded", "whole"},
}


PAIRS = [(point, hold) for point in POINTS for hold in ("raw", "loaded", "whole")]


@pytest.mark.parametrize(("point", "hold"), [pair for pair in PAIRS if pair[1] in FITS[pair[0]]])
def test_what_comes_before_what_an_echo_reuses_can_be_held(point, hold):
    dataset = Loaded("tensor") if hold == "whole" else Kind("tensor")
    loader = EchoLoader(DataLoader(dataset, batch_size=4), 2, insertion_point=point, cache={"size": "2MiB", "hold": hold})
    list(loader)
    assert loader.cache_counts.hold == hold


@pytest.mark.parametrize(("point", "hold"), [pair for pair in PAIRS if pair[1] not in FITS[pair[0]]])
def test_what_is_held_must_come_before_what_an_echo_reuses(point, hold):
    message = refused({"size": "2MiB", "hold": hold}, point=point)
    assert message.startswith(f"cache.hold='{hold}' does not fit the insertion point, at which an echo reuses [")
    assert "what is held must come before that. Use " in message
    for other in FITS[point]:
        assert repr(other) in message


# --- data sets -----------------------------------------------------------------------------------------------------------


class Random(Loaded):
    """Augments in a way that nobody can see from outside."""

    def __getitem__(self, index):
        return super().__getitem__(index) + torch.rand(())


def test_a_data_set_that_cannot_be_split_is_refused_unless_it_is_held_whole():
    for hold in ("auto", "loaded", "raw"):
        message = refused({"size": "2MiB", "hold": hold}, dataset=Loaded("tensor"))
        assert message.startswith("cache is impossible here: Loaded ")
        for way in ("StagedDataset", "StagedDataset.of(dataset, augment=...)", "cache.hold='whole'"):
            assert way in message
    list(EchoLoader(DataLoader(Loaded("tensor"), batch_size=4), 2, cache={"size": "2MiB", "hold": "whole"}))


def test_one_that_is_to_be_held_whole_and_is_not_the_same_twice_is_refused():
    message = refused({"size": "2MiB", "hold": "whole"}, dataset=Random("tensor"))
    assert "cannot be held whole: dataset[0] is another example when it is read again" in message
    assert "use cache.hold='loaded' or 'raw', or leave the cache out" in message


def test_images_that_cannot_be_read_without_decoding_are_refused_for_raw_alone():
    dataset = StagedDataset.of(Loaded("image"), augment=lambda image: image)
    message = refused({"size": "2MiB", "hold": "raw"}, dataset=dataset, point="after_augmentation")
    assert message.startswith("cache is impossible here: ")
    list(EchoLoader(DataLoader(dataset, batch_size=4, collate_fn=list), 2, cache={"size": "2MiB"}))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(24))

    def __len__(self):
        return 24


class Opaque(DataLoader):
    def __iter__(self):
        return super().__iter__()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: DataLoader(Stream(), batch_size=4), "the data set is a stream, which has no index"),
        (lambda: DataLoader(Stream(), batch_size=None), "the data set is a stream, which has no index"),
        (lambda: Opaque(Kind("tensor"), batch_size=4), "Opaque does not tell which examples are in its batches"),
        (lambda: DataLoader(Kind("tensor"), batch_size=None), "DataLoader does not tell which examples are in its batches"),
        (lambda: [torch.zeros(4)] * 3, "list does not tell which examples are in its batches"),
    ],
    ids=["stream", "stream of batches", "opaque", "batches of the data set", "list"],
)
def test_streams_and_opaque_loaders_are_refused_with_what_works_instead(make, why):
    with pytest.raises(ValueError, match=re.escape(f"cache is impossible here: {why}, so that an example")) as told:
        EchoLoader(make(), 2, cache="2MiB")
    for way in ("Leave the cache out", "copy a stream to a local disk", "a DataLoader over a map-style data set"):
        assert way in str(told.value)


class Endless(Dataset):
    """Has examples, and no length."""

    def __getitem__(self, index):
        return torch.tensor(index)


def test_a_data_set_without_a_length_is_refused():
    for options in ({"sampler": [1, 2, 3]}, {"batch_size": 1, "batch_sampler": [[1, 2], [3]]}):
        message = refused({"size": "2MiB", "hold": "whole"}, dataset=Endless(), point="after_batching", **options)
        assert (
            message == "cache is impossible here: Endless has no length, so it is not known how many examples it has: add __len__"
        )


class OpenedInWorkers(Dataset):
    """Can be read once ``worker_init_fn`` has opened it."""

    file = None

    def __getitem__(self, index):
        return self.file[index]

    def __len__(self):
        return 24


def open_in_worker(worker):
    torch.utils.data.get_worker_info().dataset.file = list(range(24))


def test_a_data_set_that_only_workers_can_read_is_read_there():
    cache = {"size": "2MiB", "hold": "whole"}
    loader = EchoLoader(DataLoader(OpenedInWorkers(), 4, num_workers=1, worker_init_fn=open_in_worker), 1, cache=cache)
    assert [torch.cat(list(loader)).tolist() for _ in range(2)] == [list(range(24))] * 2
    assert loader.cache_counts.hits > 0
    loader.close()


class ByName(Dataset):
    """Its indices are names alone."""

    def __getitem__(self, name):
        return {"cat": 1, "dog": 2}[name]

    def __len__(self):
        return 2


def test_a_data_set_that_has_no_numbers_as_indices_is_refused_with_the_reason():
    message = refused({"size": "2MiB", "hold": "whole"}, dataset=ByName(), batch_size=1, sampler=["cat", "dog"])
    assert (
        "cache is impossible here: its sampler (list) seems to yield no integers: reading an example raised KeyError" in message
    )
    assert "leave the cache out" in message


def test_an_example_that_the_data_set_cannot_read_is_its_own_error():
    class Broken(Loaded):
        def __getitem__(self, index):
            raise OSError("disk")

    assert refused({"size": "2MiB", "hold": "whole"}, dataset=Broken("tensor"), error=OSError) == "disk"


# --- going on --------------------------------------------------------------------------------------------------------------


def test_a_loader_that_goes_on_with_the_cache_of_another_one_needs_no_memory_for_a_second(monkeypatch):
    """After a reload, what is held takes the memory that the cache was given."""
    free = 3 * 2**20
    held = []
    monkeypatch.setattr(node_cache, "free_memory_bytes", lambda: free - sum(loader.cache_counts.bytes for loader in held))

    def make():
        data = StagedDataset.of(Large(), augment=torch.neg)
        return EchoLoader(DataLoader(data, batch_size=2), 1, cache="2.5MiB", seed=1)

    held.append(make())
    list(held[0])
    assert held[0].cache_counts.bytes > 2**20
    after = make()
    after.follow(held[0])
    list(after)
    assert after.cache_counts.hits == 8
    with pytest.raises(ValueError, match="is more than the"):
        EchoLoader(DataLoader(Kind("tensor"), batch_size=2), 1, cache="4MiB")


class Large(Dataset):
    def __getitem__(self, index):
        return torch.full((240_000,), index, dtype=torch.uint8)

    def __len__(self):
        return 8


class Naturals(IterableDataset):
    """A stream."""

    def __iter__(self):
        return iter(range(20))


def test_one_process_says_once_that_there_is_nothing_to_partition_and_trains_as_without():
    plain = EchoLoader(DataLoader(Kind("tensor"), batch_size=4, shuffle=True), 1.5, seed=3)
    expected = [batch.tolist() for _ in range(3) for batch in plain]
    cached = EchoLoader(
        DataLoader(Kind("tensor"), batch_size=4, shuffle=True),
        1.5,
        seed=3,
        cache=CacheConfig("2MiB", partitioned=True),
    )
    with pytest.warns(UserWarning, match=r"cache\.partitioned=True changes nothing here, since there is one process") as caught:
        assert [batch.tolist() for _ in range(3) for batch in cached] == expected
    assert len(caught) == 1
    assert cached.cache_counts.nodes == 1


def test_a_data_set_with_a_cache_cannot_be_partitioned():
    with pytest.raises(ValueError, match=r"CachedDataset: cache\.partitioned=True needs to know which examples"):
        CachedDataset(Kind("tensor"), CacheConfig("2MiB", partitioned=True))


def test_a_stream_is_refused_partitioned_too():
    with pytest.raises(ValueError, match="cache is impossible here: the data set is a stream, which has no index"):
        EchoLoader(DataLoader(Naturals(), batch_size=4), 1, cache=CacheConfig("2MiB", partitioned=True))
