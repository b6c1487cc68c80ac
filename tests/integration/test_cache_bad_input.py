"""A cache that cannot be is refused before training: which argument, what was expected, what came, and the way out."""

import pytest
import torch
from cached_data_cases import Kind, Loaded
from torch.utils.data import DataLoader, Dataset

from lightning_echo import CacheConfig, EchoLoader, StagedDataset
from lightning_echo.cache import node_cache

WHOLE = {"size": "2MiB", "hold": "whole"}


class Random(Loaded):
    """Augments in a way that nobody can see from outside."""

    def __getitem__(self, index):
        return super().__getitem__(index) + torch.rand(())


class Endless(Dataset):
    """Has examples, and no length."""

    def __getitem__(self, index):
        return torch.tensor(index)


class ByName(Dataset):
    """Its indices are names alone."""

    def __getitem__(self, name):
        return {"cat": 1, "dog": 2}[name]

    def __len__(self):
        return 2


class Broken(Loaded):
    def __getitem__(self, index):
        raise OSError("disk")


IMAGES = StagedDataset.of(Loaded("image"), augment=lambda image: image)
NO_SPLIT = r"cache is impossible here: Loaded .*StagedDataset.*StagedDataset\.of\(dataset, augment=\.\.\.\).*cache\.hold='whole'"
NOT_TWICE = (
    r"cannot be held whole: dataset\[0\] is another example when it is read again.*"
    r"use cache\.hold='loaded' or 'raw', or leave the cache out"
)
DATA_SETS = {
    "no split": (Loaded("tensor"), "2MiB", NO_SPLIT),
    "not the same twice": (Random("tensor"), WHOLE, NOT_TWICE),
    "images that cannot be read without decoding": (IMAGES, {"size": "2MiB", "hold": "raw"}, "^cache is impossible here: "),
    "no example that can be read": (Broken("tensor"), WHOLE, "^disk$"),
    "too large": (Kind("tensor"), "900TiB", r"'900TiB' is more than the [\d.e+]+ GiB of memory that are free.*on a local disk"),
    "nowhere": (Kind("tensor"), {"size": "2MiB", "path": "/nowhere"}, "does not exist"),
}


@pytest.mark.parametrize(("dataset", "cache", "said"), DATA_SETS.values(), ids=DATA_SETS)
def test_what_cannot_be_held_is_refused_with_the_reason_and_a_hint(dataset, cache, said):
    with pytest.raises((ValueError, OSError), match=said):
        EchoLoader(DataLoader(dataset, 4, collate_fn=list), 2, cache=cache)


@pytest.mark.parametrize(
    ("dataset", "options", "said"),
    [
        (Endless(), {"batch_size": 4, "sampler": [1, 2, 3]}, "Endless has no length, .*: add __len__"),
        (Endless(), {"batch_sampler": [[1, 2], [3]]}, "Endless has no length, .*: add __len__"),
        (ByName(), {"batch_size": 1, "sampler": ["cat", "dog"]}, r"its sampler \(list\) seems to yield no integers: .* KeyError"),
    ],
    ids=["no length", "no length, batches", "names"],
)
def test_a_data_set_without_a_length_or_without_numbers_is_refused(dataset, options, said):
    with pytest.raises(ValueError, match=f"cache is impossible here: {said}"):
        EchoLoader(DataLoader(dataset, **options), 2, insertion_point="after_batching", cache=WHOLE)


FITS = {
    "after_read": {"raw"},
    "before_augmentation": {"raw", "loaded"},
    "after_augmentation": {"raw", "loaded", "whole"},
    "after_batching": {"raw", "loaded", "whole"},
}


@pytest.mark.parametrize("hold", ["raw", "loaded", "whole"])
@pytest.mark.parametrize("point", FITS)
def test_what_is_held_must_come_before_what_an_echo_reuses(point, hold):
    plain = DataLoader(Loaded("tensor") if hold == "whole" else Kind("tensor"), batch_size=4)
    options = {"insertion_point": point, "cache": {"size": "2MiB", "hold": hold}}
    if hold in FITS[point]:
        loader = EchoLoader(plain, 2, **options)
        list(loader)
        assert loader.cache_counts.hold == hold
    else:
        said = f"^cache.hold='{hold}' does not fit the insertion point, at which an echo reuses .*must come before that. Use "
        with pytest.raises(ValueError, match=said) as told:
            EchoLoader(DataLoader(Kind("tensor"), batch_size=4), 2, **options)
        assert all(repr(other) in str(told.value) for other in FITS[point])


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
    loader = EchoLoader(DataLoader(OpenedInWorkers(), 4, num_workers=1, worker_init_fn=open_in_worker), 1, cache=WHOLE)
    assert [torch.cat(list(loader)).tolist() for _ in range(2)] == [list(range(24))] * 2
    assert loader.cache_counts.hits > 0
    loader.close()


class Large(Dataset):
    def __getitem__(self, index):
        return torch.full((240_000,), index, dtype=torch.uint8)

    def __len__(self):
        return 8


def test_a_loader_that_goes_on_with_the_cache_of_another_one_needs_no_memory_for_a_second(monkeypatch):
    """After a reload, what is held takes the memory that the cache was given."""
    free, held = 3 * 2**20, []
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


def test_one_process_says_once_that_there_is_nothing_to_partition_and_trains_as_without():
    def batches(**options):
        loader = EchoLoader(DataLoader(Kind("tensor"), batch_size=4, shuffle=True), 1.5, seed=3, **options)
        return [batch.tolist() for _ in range(3) for batch in loader], loader

    expected, _ = batches()
    with pytest.warns(UserWarning, match=r"cache\.partitioned=True changes nothing here, since there is one process") as caught:
        found, cached = batches(cache=CacheConfig("2MiB", partitioned=True))
    assert found == expected
    assert len(caught) == 1
    assert cached.cache_counts.nodes == 1
