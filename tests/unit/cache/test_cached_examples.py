"""A `CachedDataset` returns what its data set returns, bit by bit, with the same random numbers, and reads less."""

import copy
import gc
import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from torchvision.transforms.v2 import CenterCrop

from lightning_echo import CacheConfig, CachedDataset, StagedDataset
from lightning_echo.cache import arena as arena_file
from lightning_echo.cache import loader_cache as cached_dataset
from lightning_echo.cache.reads import StaleCacheError
from lightning_echo.data.difference import difference
from lightning_echo.data.randomness import random_states, seed_all

COUNT = 12


def noise():
    """Numbers from all three global generators."""
    return torch.rand(()).item() + float(np.random.rand()) + random.random()


class Staged(StagedDataset):
    def __init__(self, count=COUNT):
        self.reads = [0] * count

    def load(self, index):
        index = int(index)
        self.reads[index] += 1
        return {"image": torch.arange(8.0) + index, "name": f"example {index}", "boxes": [[index, 1]], "none": None}

    def augment(self, example):
        example["image"] += noise()  # in place
        example["boxes"][0].append(noise())
        example["more"] = random.random()
        return example

    def __len__(self):
        return len(self.reads)


def jitter(image):
    return image * noise()


class Convention(Dataset):
    def __init__(self, transform=jitter, count=COUNT):
        self.transform, self.reads = transform, [0] * count

    def __getitem__(self, index):
        if not 0 <= index < len(self.reads):
            raise IndexError("no such example")
        self.reads[index] += 1
        image = torch.full((3, 4, 4), float(index))
        return self.transform(image), index % 3

    def __len__(self):
        return len(self.reads)


class Many(Staged):
    """Reads a batch in one call."""

    def __getitems__(self, indices):
        return [self.augment(example) for example in map(self.load, indices)]


class Whole(Dataset):
    def __getitem__(self, index):
        return np.arange(5) * index

    def __len__(self):
        return COUNT


class DrawsSometimes(Staged):
    """Every third example draws where it should not."""

    def load(self, index):
        example = super().load(index)
        if index % 3 == 1:
            example["image"] += noise()
        return example


class Raw(Staged):
    def read(self, index):
        self.reads[index] += 1
        return b"%d" % index

    def decode(self, raw):
        return {"image": torch.arange(8.0) + int(raw), "boxes": [[0]]}

    load = StagedDataset.load


class Large(Staged):
    """A MiB has room for five."""

    def load(self, index):
        return {**super().load(index), "large": torch.full((50_000,), float(index))}


CASES = {
    "staged, raw": (Raw, {"hold": "raw"}),
    "convention": (Convention, {}),
    "getitems": (Many, {}),
    "whole": (Whole, {"hold": "whole"}),
    "concat": (lambda: ConcatDataset([Convention(), Subset(Convention(transform=torch.neg), [3, 1]), Staged()]), {}),
    "subset": (lambda: Subset(Staged(), [7, 7, 2, 0]), {}),
    "named cut": (lambda: StagedDataset.of(Whole(), augment=lambda array: array + noise()), {}),
    "misfits": (DrawsSometimes, {}),
    "for a part": (Large, {}),
}


def cached_of(dataset, size="1MiB", **options):
    return CachedDataset(dataset, CacheConfig(size, **options))


def read_all(dataset, orders, many):
    """What several passes give, and the random states that they leave."""
    seed_all(5)
    examples = []
    for order in orders:
        for start in range(0, len(order), 3):
            batch = order[start : start + 3]
            if many and hasattr(dataset, "__getitems__"):
                examples += copy.deepcopy(dataset.__getitems__(batch))
            else:
                examples += [copy.deepcopy(dataset[index]) for index in batch]
            examples.append(torch.rand(()).item())  # as a training step might
    return examples, random_states()


@pytest.mark.filterwarnings("ignore:lightning_echo. example .* does not fit the split")
@pytest.mark.parametrize("many", [False, True], ids=["one by one", "many"])
@pytest.mark.parametrize("name", CASES)
def test_each_pass_is_that_of_the_data_set_itself_under_the_same_seeds(name, many):
    make, options = CASES[name]
    plain, dataset = make(), make()
    cached = cached_of(dataset, **options)
    assert sum(getattr(dataset, "reads", [])) == 0, "the constructor reads copies only"
    orders = [random.Random(number).sample(range(len(plain)), len(plain)) for number in range(3)]
    expected, states = read_all(plain, orders, many)
    found, states_found = read_all(cached, orders, many)
    assert difference(expected, found) is None
    assert difference(list(states), list(states_found)) is None
    assert (cached.cache_counts.is_full, name == "for a part") in ((False, False), (True, True))


class TestReading:
    def test_each_example_is_read_once_and_looked_at_again_only_by_the_audit(self):
        dataset = Staged()
        cached = cached_of(dataset)
        for _ in range(3):
            for index in range(COUNT):
                cached[index]
        assert dataset.reads == [2, *[1] * 8, 2, 1, 1], "the 1st and the 10th hit are audited"
        counts = cached.cache_counts
        assert (counts.examples, counts.hits, counts.misses, counts.hold) == (COUNT, 2 * COUNT, COUNT, "loaded")

    def test_an_index_that_is_no_number_or_below_0_is_what_the_data_set_makes_of_it(self):
        cached = cached_of(Staged())
        with pytest.warns(UserWarning, match="the cache cannot hold example -1, nor others whose index is not a number"):
            assert [cached[COUNT - 1]["name"], cached[-1]["name"]] == ["example 11", "example -1"]
        assert cached.cache_counts.examples == 1
        assert cached["3"]["name"] == "example 3", "without a word"

    def test_a_batch_after_one_that_has_failed_is_its_own(self):
        class FailsOnce(Staged):
            failing = True

            def augment(self, example):
                if example["name"] == "example 5" and self.failing:
                    self.failing = False
                    raise OSError("once")
                return super().augment(example)

        cached = cached_of(FailsOnce())
        with pytest.raises(OSError, match="once"):
            cached.__getitems__([5, 6, 7])
        assert [example["name"] for example in cached.__getitems__([8, 5])] == ["example 8", "example 5"]

    def test_a_call_for_many_that_gives_fewer_is_an_error(self):
        class Fewer(Whole):
            most = 2

            def __getitems__(self, indices):
                return [self[index] for index in indices[: self.most]]

        with pytest.raises(ValueError, match=r"__getitems__ of the data set returned 2 examples for . indices"):
            cached_of(Fewer(), hold="whole")
        Fewer.most = 5
        cached = cached_of(Fewer(), hold="whole")
        with pytest.raises(ValueError, match="__getitems__ of the data set returned 5 examples for 6 indices"):
            cached.__getitems__([1, 2, 3, 4, 5, 6])

    def test_a_misfit_is_told_once(self):
        cached = cached_of(DrawsSometimes())
        with pytest.warns(UserWarning, match=r"example 1 does not fit the split.*draws random numbers") as said:
            cached.__getitems__([*range(COUNT), *range(COUNT)])
        cached.__getitems__(list(range(COUNT)))
        assert len(said) == 1
        assert cached.cache_counts.examples == 8


class TestAttributes:
    @pytest.mark.parametrize("by", ["the data set", "the cache", "a subset"])
    def test_a_transform_that_is_exchanged_is_seen(self, by):
        dataset = Convention()
        cached = cached_of(Subset(dataset, range(COUNT)) if by == "a subset" else dataset)
        assert by == "a subset" or cached.transform is jitter
        assert (len(cached), hasattr(cached, "something"), isinstance(cached, Dataset)) == (COUNT, False, True)
        cached[3], cached[3]
        if by == "the cache":
            cached.transform = torch.neg
        else:
            dataset.transform = torch.neg
        assert cached[3][0].tolist() == [[[-3.0] * 4] * 4] * 3
        assert cached.cache_counts.examples == 1

    def test_a_transform_that_is_exchanged_before_the_cut_is_found_out(self):
        cached = cached_of(Convention(transform=CenterCrop(3)))
        assert [cached[3][0].shape for _ in range(4)] == [(3, 3, 3)] * 4
        cached.transform = CenterCrop(2)
        with pytest.raises(StaleCacheError, match="example 3 has changed"):
            cached[3]

    def test_nothing_stays_when_it_goes(self):
        gc.collect()
        opened, known = set(arena_file._open), len(cached_dataset._reads)
        cached = cached_of(Staged())
        cached[3]
        assert len(set(arena_file._open) - opened) == 1
        del cached
        while gc.collect():  # Python 3.13 needs two rounds
            pass
        assert set(arena_file._open) <= opened
        assert len(cached_dataset._reads) <= known


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Opaque(Dataset):
    """Draws in a way that nobody can see from outside."""

    def __getitem__(self, index):
        return torch.rand(3)

    def __len__(self):
        return 3


@pytest.mark.parametrize(
    ("dataset", "cache", "error", "said"),
    [
        (Stream(), "1MiB", TypeError, r"CachedDataset: Stream is a stream.*Copy it to a local disk, or echo it: EchoLoader"),
        (DataLoader(Staged()), "1MiB", TypeError, "CachedDataset: .*give it the data set of the loader"),
        (object(), "1MiB", TypeError, "CachedDataset: .*must be map-style, with __getitem__ and __len__, got object"),
        (CachedDataset(Staged(), "1MiB"), "1MiB", TypeError, "CachedDataset: .*is a CachedDataset already"),
        (Staged(0), "1MiB", ValueError, "Staged has no example"),
        (Opaque(), "1MiB", ValueError, r"cache is impossible here: Opaque has neither load.*cache\.hold='whole'"),
        (Opaque(), {"size": "1MiB", "hold": "whole"}, ValueError, "cannot be held whole"),
        (Staged(), None, TypeError, 'cache must be a size such as "8GiB"'),
        (Staged(), {"size": "2MiB", "partitioned": True}, ValueError, "CachedDataset: cache.partitioned=True needs to know"),
    ],
    ids=["stream", "loader", "object", "cached", "empty", "no cut", "not the same twice", "no size", "partitioned"],
)
def test_what_cannot_have_a_cache_is_refused(dataset, cache, error, said):
    with pytest.raises(error, match=said):
        CachedDataset(dataset, cache)


def test_a_cache_too_small_for_an_example_is_told():
    class Large(Staged):
        def load(self, index):
            return {**super().load(index), "image": torch.zeros(2**19)}

    with pytest.warns(UserWarning, match="holds nothing: an example takes 2 MiB"):
        cached = cached_of(Large())
    assert len(cached[0]["image"]) == 2**19
