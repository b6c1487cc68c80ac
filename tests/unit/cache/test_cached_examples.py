"""A `CachedDataset` returns what its data set returns, bit by bit, and reads less; examples are counted, audited, and checked."""

import copy
import dataclasses
import multiprocessing
import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from torchvision.transforms.v2 import CenterCrop

from lightning_echo import CacheConfig, CachedDataset, StagedDataset
from lightning_echo.cache.arena import Arena
from lightning_echo.cache.reads import MISSING, ExampleStore, StaleCacheError
from lightning_echo.cache.record import encode, owner_of
from lightning_echo.data.difference import difference
from lightning_echo.data.randomness import random_states, seed_all

COUNT = 12


def noise():
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
    def __getitems__(self, indices):
        return [self.augment(example) for example in map(self.load, indices)]


class Whole(Dataset):
    def __getitem__(self, index):
        return np.arange(5) * index

    def __len__(self):
        return COUNT


class DrawsSometimes(Staged):
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


MIB = 2**20


@dataclasses.dataclass
class Example:
    image: torch.Tensor


def make_store(name=None):
    return ExampleStore(Arena.create(20, MIB), name)


class TestWhoseRecordItIs:
    def test_so_is_one_of_other_data_and_one_that_another_node_sends_for_another_example(self):
        arena = Arena.create(20, MIB)
        one, other = (ExampleStore(arena, data=data) for data in (7, 8))
        one.put(1, "one")
        assert one.decoded(1, arena.get(1)) == "one"
        for store, key in ((other, 1), (one, 2)):
            with pytest.raises(StaleCacheError, match=f"the record of example {key} is"):
                store.decoded(key, arena.get(1))

    def test_workers_know_of_which_data_it_is(self):
        store = ExampleStore(Arena.create(20, MIB), data=7)
        store.put(1, "one")
        assert multiprocessing.reduction.ForkingPickler.loads(multiprocessing.reduction.ForkingPickler.dumps(store)).data == 7


def test_an_audit_is_due_for_that_hit_among_several_and_for_no_miss():
    store = make_store()
    store.put(0, "a")
    assert store.look_up([0], are_fresh=False).to_audit == [], "what is not counted"
    assert store.look_up([5, 0, 0]) == ([MISSING, "a", "a"], [0], [1])
    assert store.look_up([0, 0, 5, 0, 0]).to_audit == []  # hits 3 to 6
    assert store.look_up([5, 0, 0, 5, 0, 0, 0]).to_audit == [5]  # hits 7 to 11
    assert store.look_up([0] * 1000).to_audit == [100 - 12, 1000 - 12]


class TestUnderAName:
    def make(self, tmp_path, make_new=True):
        path = str(tmp_path / "arena")
        return ExampleStore(Arena.create_file(path, 20, MIB) if make_new else Arena.open_file(path), "train")

    def test_a_pickled_one_in_the_file_is_not_read(self, tmp_path):
        store = self.make(tmp_path)
        store.arena.put(
            3, encode(Example(torch.ones(1)), checksum=True, owner=owner_of(0, 3)).parts
        )  # as somebody might have written it there
        with pytest.raises(ValueError, match="may only be read by the job that has written it"):
            store.get(3)

    @pytest.mark.parametrize("place", [0, 20, 60, -1])
    def test_a_changed_byte_is_noticed_at_the_first_hit(self, tmp_path, place):
        store = self.make(tmp_path)
        store.put(3, b"x" * 100)
        assert self.make(tmp_path, make_new=False).get(3) == b"x" * 100
        data = (tmp_path / "arena").read_bytes()
        start = data.index(b"x" * 100)
        with open(tmp_path / "arena", "r+b") as file:
            file.seek(start + place % 100)
            file.write(b"y")
        again = self.make(tmp_path, make_new=False)
        with pytest.raises(StaleCacheError, match=r"the cache 'train' is damaged: the record of example 3.*Remove its file"):
            again.get(3)
