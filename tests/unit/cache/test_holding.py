"""What can be held of a data set at an insertion point, and what of it saves the most time per byte."""

import pytest
import torch
from torch.utils.data import Dataset

from lightning_echo import StagedDataset
from lightning_echo.cache import holding
from lightning_echo.cache.holding import holds_of, measured, quickest
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


def test_a_raw_item_before_a_loaded_example_is_only_decoded():
    (hold,) = holds_of(Texts(), None, LOADED, "raw")
    held = hold.make(Texts(), make_stages(Texts(), LOADED.conventions))
    assert held.stages.load(3) == bytes([3]) * 100
    assert torch.equal(held.finish(3, held.stages.load(3)), Texts().load(3))
    assert not held.may_draw


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
