"""What can be held of a data set at an insertion point, and what of it saves the most time per byte."""

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from lightning_echo import StagedDataset
from lightning_echo.cache import holding
from lightning_echo.cache.arena import Arena
from lightning_echo.cache.holding import holds_of, measured, quickest
from lightning_echo.cache.reads import ExampleStore
from lightning_echo.split.describe import SplitRefused
from lightning_echo.split.prove import find_split, make_stages
from lightning_echo.split.staged import uncut_stages


class Texts(StagedDataset):
    def read(self, index):
        return bytes([index]) * 100

    def decode(self, raw):
        return torch.tensor(list(raw) * 10, dtype=torch.float64)  # 80 times the bytes

    def augment(self, example):
        return example + torch.rand(1)

    def __len__(self):
        return 20


class Whole(Dataset):
    def __getitem__(self, index):
        return torch.full((3,), index)

    def __len__(self):
        return 4


RAW, LOADED = find_split(Texts(), raw=True), find_split(Texts())


@pytest.mark.parametrize(("split", "number"), [(RAW, 1), (LOADED, 2), (None, 2)])
def test_what_fits_stands_before_what_an_echo_reuses_the_earliest_cut_first(split, number):
    holds = holds_of(Texts(), None, split, "auto")
    assert [(hold.name, hold.what) for hold in holds] == [("raw", "read"), ("loaded", "load")][:number]


@pytest.mark.parametrize(
    ("split", "name", "others"), [(RAW, "loaded", "'raw'"), (RAW, "whole", "'raw'"), (LOADED, "whole", "'raw' or 'loaded'")]
)
def test_what_does_not_fit_is_refused_with_what_does(split, name, others):
    with pytest.raises(ValueError, match=f"cache.hold='{name}' does not fit the insertion point.* Use {others}"):
        holds_of(Texts(), None, split, name)


def test_a_data_set_is_held_whole_if_its_owner_says_so_and_two_reads_agree():
    (hold,) = holds_of(Whole(), None, None, "whole")
    held = hold.make(Whole(), uncut_stages(Whole()))
    assert torch.equal(held.stages.load(2), torch.full((3,), 2))
    assert held.finish is None

    class Random(Whole):
        def __getitem__(self, index):
            return torch.rand(1)

    with pytest.raises(SplitRefused, match=r"cannot be held whole: dataset\[0\] is another example when it is read again"):
        holds_of(Random(), None, None, "whole")


@pytest.mark.parametrize(("name", "least_bytes"), [("raw", 100), ("loaded", 8000)])
def test_what_is_held_and_finished_is_what_the_data_set_returns(name, least_bytes):
    (hold,) = holds_of(Texts(), None, None, name)
    assert least_bytes <= hold.example_bytes < least_bytes + 300
    held = hold.make(Texts(), uncut_stages(Texts()))
    example = held.stages.load(3)
    torch.manual_seed(1)
    finished = held.finish(3, example)
    torch.manual_seed(1)
    assert torch.equal(finished, Texts()[3])
    assert held.may_draw


def test_a_raw_item_before_a_loaded_example_is_only_decoded():
    (hold,) = holds_of(Texts(), None, LOADED, "raw")
    held = hold.make(Texts(), make_stages(Texts(), LOADED.conventions))
    assert held.stages.load(3) == bytes([3]) * 100
    assert torch.equal(held.finish(3, held.stages.load(3)), Texts().load(3))
    assert not held.may_draw


class Pictures(StagedDataset):
    """Images, which Pillow holds with four bytes per pixel and a record with three."""

    def load(self, index):
        return Image.new("RGB", (400, 100 + index))

    def augment(self, example):
        return example

    def __len__(self):
        return 5


@pytest.mark.parametrize("dataset", [Pictures(), Texts()], ids=["images", "small raw items"])
def test_the_bytes_of_a_hold_are_about_those_that_the_arena_takes(dataset):
    hold = holds_of(dataset, None, None, "auto")[0]
    arena = Arena.create(len(dataset), 2**22)
    store, load = ExampleStore(arena), hold.make(dataset, uncut_stages(dataset)).stages.load
    assert all(store.put(index, load(index)) for index in range(len(dataset)))
    assert arena.counts.bytes / len(dataset) == pytest.approx(hold.example_bytes, rel=0.01, abs=128)


@pytest.mark.parametrize(
    ("seconds", "size", "name", "looks"),
    [
        ({}, 10**9, "loaded", []),
        ({"raw": 1.0, "loaded": 1.5}, 20_000, "raw", [("raw", [0, 1, 2]), ("loaded", [3, 4, 5])]),
        ({"raw": 1.0, "loaded": 1000.0}, 20_000, "loaded", [("raw", [0, 1, 2]), ("loaded", [3, 4, 5])]),
        ({"raw": 1.0, "loaded": 1000.0}, 2000, "raw", None),
    ],
    ids=["room for all", "cheap to decode", "dear to decode", "no room for a loaded example"],
)
def test_what_saves_most_seconds_per_byte_is_held_measured_on_examples_of_its_own(monkeypatch, seconds, size, name, looks):
    timed = []

    def read(dataset, hold, make, indices):
        timed.append((hold.name, list(indices)))
        return [], [seconds[hold.name]] * len(indices)

    monkeypatch.setattr(holding, "read_held", read)
    holds = measured(Texts(), holds_of(Texts(), None, None, "auto"), uncut_stages, range(20), size)
    assert quickest(holds, 20, size).name == name
    assert looks in (None, timed)


def test_where_no_example_fits_one_is_taken_all_the_same():
    holds = holds_of(Texts(), None, None, "auto")
    assert quickest(holds, 20, 1) in holds


class Padded(Dataset):
    """Pads the examples of a batch to the longest of them."""

    def __getitems__(self, indices):
        return [torch.full((max(indices) + 1,), index) for index in indices]

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __len__(self):
        return 20


def test_a_data_set_that_makes_examples_fit_the_others_of_a_batch_is_refused():
    """What one batch needs would be delivered in another one."""
    why = r"its __getitems__ returns dataset\[0\] otherwise when it is asked for other examples, too \(tensors of shape"
    with pytest.raises(SplitRefused, match=why):
        holds_of(Padded(), None, None, "whole")
    cut = StagedDataset.of(Padded(), augment=torch.neg)
    with pytest.raises(ValueError, match=why):
        holds_of(cut, None, None, "auto")
    with pytest.raises(ValueError, match=why):
        holds_of(cut, None, find_split(cut), "loaded")
