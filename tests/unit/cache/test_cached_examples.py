"""A `CachedDataset` returns what its data set returns, bit by bit, with the same random numbers, and reads less."""

import copy
import gc
import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, random_split
from torchvision.transforms.v2 import CenterCrop

from lightning_echo import CacheConfig, CachedDataset, EchoLoader, StagedDataset
from lightning_echo.cache import arena
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
        loaded = [self.load(index) for index in indices]
        return [self.augment(example) for example in loaded]


class Whole(Dataset):
    def __init__(self, count=COUNT):
        self.reads = [0] * count

    def __getitem__(self, index):
        self.reads[index] += 1
        return np.arange(5) * index

    def __len__(self):
        return len(self.reads)


class DecodesInPlace(StagedDataset):
    """Decoding changes what was read, and draws for one example."""

    def read(self, index):
        return [index]

    def decode(self, raw):
        raw.append(7)
        return torch.tensor([*raw, random.random()] if raw[0] == 5 else raw)

    def augment(self, example):
        return example

    def __len__(self):
        return COUNT


class DrawsSometimes(Staged):
    """Every third example draws where it should not."""

    def load(self, index):
        example = super().load(index)
        if index % 3 == 1:
            example["image"] += noise()
        return example


def concat():
    return ConcatDataset([Convention(), Subset(Convention(transform=torch.neg), [3, 1]), Staged()])


CASES = {
    "staged": (Staged, {}),
    "staged, raw": (lambda: Raw(), {"hold": "raw"}),
    "convention": (Convention, {}),
    "getitems": (Many, {}),
    "whole": (Whole, {"hold": "whole"}),
    "concat": (concat, {}),
    "subset": (lambda: Subset(Staged(), [7, 7, 2, 0]), {}),
    "split": (lambda: random_split(Staged(), [5, 7], torch.Generator().manual_seed(0))[1], {}),
    "named cut": (lambda: StagedDataset.of(Whole(), augment=lambda array: array + noise()), {}),
    "misfits": (DrawsSometimes, {}),
    "a small cache": (Staged, {"size": 2**20}),
}


class Raw(Staged):
    def read(self, index):
        self.reads[index] += 1
        return b"%d" % index

    def decode(self, raw):
        return {"image": torch.arange(8.0) + int(raw), "boxes": [[0]]}

    load = StagedDataset.load


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
    plain, cached = make(), cached_of(make(), **options)
    orders = [random.Random(number).sample(range(len(plain)), len(plain)) for number in range(3)]
    expected, states = read_all(plain, orders, many)
    found, states_found = read_all(cached, orders, many)
    assert difference(expected, found) is None
    assert difference(list(states), list(states_found)) is None


def test_with_a_cache_that_holds_a_part():
    class Large(Staged):
        def load(self, index):
            return {**super().load(index), "large": torch.full((50_000,), float(index))}  # 200 KB

    cached = cached_of(Large())
    orders = [list(range(COUNT))] * 3
    assert difference(read_all(Large(), orders, True), read_all(cached, orders, True)) is None
    counts = cached.cache_counts
    assert (counts.examples, counts.is_full, counts.hits, counts.misses) == (5, True, 10, 26)


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

    def test_the_constructor_reads_copies_only(self):
        for make, options in CASES.values():
            dataset = make()
            cached_of(dataset, **options)
            assert sum(getattr(dataset, "reads", [])) == 0

    def test_an_index_below_0_is_what_the_data_set_makes_of_it(self):
        cached = cached_of(Staged())
        with pytest.warns(UserWarning, match="the cache cannot hold example -1, nor others whose index is not a number"):
            assert [cached[COUNT - 1]["name"], cached[-1]["name"]] == ["example 11", "example -1"]
        assert cached.cache_counts.examples == 1

    def test_errors_are_those_of_the_data_set(self):
        cached = cached_of(Convention())
        with pytest.raises(IndexError, match="no such example"):
            cached[COUNT]
        assert len(list(cached)) == COUNT, "a loop over a data set ends with that error"

    def test_what_is_no_number_is_asked_of_the_data_set_each_time(self):
        class Named(Staged):
            def load(self, index):
                return super().load(int(index))

        dataset = Named()
        cached = cached_of(dataset)
        with pytest.warns(UserWarning, match="the cache cannot hold example '3'"):
            assert cached["3"]["name"] == "example 3"
        assert cached["3"]["name"] == "example 3", "without a word"
        assert (dataset.reads[3], cached.cache_counts.examples) == (2, 0)

    def test_an_edit_does_not_reach_the_cache(self):
        cached = cached_of(Staged())
        for _ in range(3):
            example = cached[4]
            assert len(example["boxes"]) == 1
            assert len(example["boxes"][0]) == 3
            example["image"].zero_()
            example["boxes"].clear()
            del example["name"]

    def test_a_data_set_that_changes_is_found_out(self):
        dataset = Convention()
        cached = cached_of(dataset)
        cached[3]
        dataset_of_stages = cached._cached_inside
        dataset_of_stages.transform = lambda image: image
        Convention.__getitem__, before = (
            lambda self, index: (self.transform(torch.zeros(3, 4, 4) - index), 0),
            Convention.__getitem__,
        )
        try:
            with pytest.raises(StaleCacheError, match="example 3 has changed"):
                cached[3]
        finally:
            Convention.__getitem__ = before

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

    def test_that_memory_has_run_short_is_told_once(self, monkeypatch):
        cached = cached_of(Staged())
        monkeypatch.setattr(arena, "free_memory_bytes", lambda: 0)
        with pytest.warns(
            UserWarning, match="the cache is full with 0 examples, before it has reached its size: memory is running"
        ):
            cached.__getitems__([1, 2])
        assert cached.__getitems__([3])[0]["name"] == "example 3", "without a word"

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

    @pytest.mark.filterwarnings("ignore:lightning_echo. example .* does not fit the split")
    def test_misfits_that_are_read_in_each_pass_are_a_share_of_what_is_held_too(self):
        cached = cached_of(DrawsSometimes())
        for _ in range(100):  # of the reads beside the hits, nearly all are misfits
            cached.__getitems__(list(range(COUNT)))
        assert cached.cache_counts.misses == 100 * 4 + 8

    @pytest.mark.filterwarnings("ignore:lightning_echo. example .* does not fit the split")
    def test_a_held_raw_item_that_is_decoded_twice_since_another_one_draws_is_decoded_as_it_was_read(self):
        def batches(cache):
            loader = DataLoader(DecodesInPlace(), batch_size=4, collate_fn=list)
            return list(EchoLoader(loader, 1, seed=0, cache=cache))

        expected = [[index, 7] for index in range(COUNT) if index != 5]
        for cache in (None, {"size": "1MiB", "hold": "raw"}):
            found = [example.tolist() for batch in batches(cache) for example in batch]
            assert [example for example in found if example[0] != 5] == expected

    def test_a_misfit_is_told_once(self):
        cached = cached_of(DrawsSometimes())
        with pytest.warns(UserWarning, match=r"example 1 does not fit the split.*draws random numbers") as said:
            cached.__getitems__([*range(COUNT), *range(COUNT)])
        cached.__getitems__(list(range(COUNT)))
        assert len(said) == 1
        assert cached.cache_counts.examples == 8


class TestAttributes:
    def test_are_those_of_the_data_set(self):
        dataset = Convention()
        cached = cached_of(dataset)
        assert cached.transform is jitter
        assert cached.reads is dataset.reads
        assert len(cached) == COUNT
        cached.colour = "red"
        assert dataset.colour == "red"
        assert not hasattr(cached, "something")
        assert isinstance(cached, Dataset)

    @pytest.mark.parametrize("by", ["the data set", "the cache", "a subset"])
    def test_a_transform_that_is_exchanged_is_seen(self, by):
        dataset = Convention()
        cached = cached_of(Subset(dataset, range(COUNT)) if by == "a subset" else dataset)
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

    def test_it_can_be_copied_and_pickled_and_the_cache_is_the_same(self):
        cached = cached_of(Staged())
        cached[3]
        for copied in (copy.copy(cached), copy.deepcopy(cached), pickle.loads(pickle.dumps(cached))):
            before = cached.cache_counts
            assert copied[3]["name"] == "example 3"
            assert copied[4]["name"] == "example 4"
            after = cached.cache_counts
            assert after.hits + after.misses == before.hits + before.misses + 2
            assert after.examples == 2

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


class TestRefused:
    @pytest.mark.parametrize(
        ("dataset", "message"),
        [
            (Stream(), r"Stream is a stream.*Copy it to a local disk, or echo it: EchoLoader"),
            (DataLoader(Staged()), "give it the data set of the loader"),
            (object(), "must be map-style, with __getitem__ and __len__, got object"),
            (CachedDataset(Staged(), "1MiB"), "is a CachedDataset already"),
        ],
        ids=["stream", "loader", "object", "cached"],
    )
    def test_what_is_no_map_style_data_set(self, dataset, message):
        with pytest.raises(TypeError, match=f"CachedDataset: .*{message}"):
            CachedDataset(dataset, "1MiB")

    def test_what_is_empty(self):
        with pytest.raises(ValueError, match="Staged has no example"):
            CachedDataset(Staged(0), "1MiB")

    def test_what_cannot_be_cut(self):
        class Opaque(Dataset):
            def __getitem__(self, index):
                return torch.rand(3)

            def __len__(self):
                return 3

        with pytest.raises(ValueError, match=r"cache is impossible here: Opaque has neither load.*cache\.hold='whole'"):
            CachedDataset(Opaque(), "1MiB")
        with pytest.raises(ValueError, match="cannot be held whole"):
            cached_of(Opaque(), hold="whole")

    def test_no_size(self):
        with pytest.raises(TypeError, match='cache must be a size such as "8GiB"'):
            CachedDataset(Staged(), None)

    def test_a_cache_too_small_for_an_example_is_told(self):
        class Large(Staged):
            def load(self, index):
                return torch.zeros(2**19)

            def augment(self, example):
                return example

        with pytest.warns(UserWarning, match="holds nothing: an example takes 2 MiB"):
            cached = CachedDataset(Large(), "1MiB")
        assert len(cached[0]) == 2**19


def test_options_may_be_a_mapping():
    cached = CachedDataset(Staged(), {"size": "2MiB", "hold": "loaded"})
    assert (cached.cache_counts.size, cached.cache_counts.hold) == (2**21, "loaded")
