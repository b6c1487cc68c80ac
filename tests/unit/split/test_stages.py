"""The two stages of a data set, as methods, as a named cut, and routed through Subset and ConcatDataset."""

from pathlib import Path

import pytest
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from lightning_echo.split.make import concat_stages, method_stages, subset_stages
from lightning_echo.split.staged import StagedDataset, Stages, is_raw, is_staged, uncut_stages


class Numbers(Dataset):
    def __init__(self, size=10, offset=0):
        self.size, self.offset = size, offset

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.offset + index

    def __len__(self):
        return self.size

    def names(self):
        return [f"n{index}" for index in range(self.size)]


class Batched(Numbers):
    def __init__(self, *args):
        super().__init__(*args)
        self.calls = []

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        return [self[index] for index in indices]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1])


def double(example):
    return example * 2


@pytest.mark.parametrize("call", ["read", "decode", "load", "augment"])
def test_a_missing_stage_is_named(call):
    missing = r"augment\(example\)" if call == "augment" else r"load\(index\), or read\(index\) and decode\(raw\)"
    with pytest.raises(NotImplementedError, match=f"Empty must implement {missing}"):
        getattr(type("Empty", (StagedDataset,), {})(), call)(0)


def annotated(annotation):
    def load(source):
        raise AssertionError("called")

    load.__annotations__["source"] = annotation
    return {"load": load, "augment": double}


@pytest.mark.parametrize(
    ("attributes", "raw", "staged"),
    [
        ({"load": lambda index: index, "augment": double}, False, True),
        ({"load": lambda index: index, "augment": True}, False, False),
        ({"load": "file.csv", "augment": double}, False, False),
        ({}, False, False),
        (annotated(int), False, True),
        *[(annotated(kind), False, False) for kind in (str, "str", Path, "Path")],
        ({"read": lambda index: index, "decode": lambda raw: raw, "augment": double}, True, True),
        ({"read": lambda index: index, "decode": lambda file: file}, True, False),
        ({"read": lambda index: index, "decode": lambda raw: raw, "augment": True}, True, False),
        ({"read": lambda path: path, "decode": lambda raw: raw, "augment": double}, False, False),
        ({"read": lambda index: index, "decode": lambda raw, mode: raw}, False, False),
        ({"read": lambda: 0, "decode": lambda raw: raw}, False, False),
        ({"read": lambda index: index, "decode": lambda raw: raw, "augment": lambda a, b: a}, False, False),
        ({"read": lambda index: index}, False, False),
        ({"decode": lambda raw: raw, "read": "r"}, False, False),
    ],
)
def test_only_callables_that_take_no_path_count_as_the_protocol(attributes, raw, staged):
    dataset = Numbers()
    vars(dataset).update(attributes)
    assert (is_raw(dataset), is_staged(dataset)) == (raw, staged)


def test_a_named_cut_augments_the_items_of_the_inner_data_set_and_has_its_attributes():
    inner = Numbers(5, 100)
    dataset = StagedDataset.of(inner, augment=double)
    assert [dataset[index] for index in range(len(dataset))] == [200, 202, 204, 206, 208]
    assert (dataset.load(3), dataset.augment(103)) == (103, 206)
    assert dataset.names() == ["n0", "n1", "n2", "n3", "n4"]
    dataset.offset = 50  # as a worker_init_fn does
    assert (inner.offset, dataset[1]) == (50, 102)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = dataset.nothing_like_it
    decoded = StagedDataset.of(dataset, decode=str, augment=double)
    assert (decoded.read(1), decoded.load(1), decoded[1]) == (102, "102", "102102")


@pytest.mark.parametrize(
    ("dataset", "options", "reason"),
    [
        (Numbers(), {"augment": True}, "augment must be callable, got True"),
        (Numbers(), {"augment": abs, "decode": "utf-8"}, "decode must be callable or None, got 'utf-8'"),
        (Stream(), {"augment": double}, r"must be map-style .*, got Stream"),
    ],
)
def test_a_named_cut_that_is_none_is_refused(dataset, options, reason):
    with pytest.raises(TypeError, match=reason):
        StagedDataset.of(dataset, **options)


def test_a_concat_leads_each_example_to_the_stages_that_it_came_from():
    concat = ConcatDataset([Numbers(3, 0), Numbers(0), Numbers(4, 100)])

    def stages_of(k, part):
        return Stages(part.__getitem__, lambda index, example: (k, index, example), reused=("load",), redone=("flip",))

    stages = concat_stages(concat, list(map(stages_of, range(3), concat.datasets)))
    seen = [stages.augment(index, stages.load(index)) for index in [0, 2, 3, 6, -1, -7]]
    assert seen == [(0, 0, 0), (0, 2, 2), (2, 0, 100), (2, 3, 103), (2, 3, 103), (0, 0, 0)]
    assert [stages.load(index) for index in range(-7, 7)] == [concat[index] for index in range(-7, 7)]
    assert (stages.reused, stages.redone) == (("load",), ("flip",))


def test_batched_reading_is_kept_through_subsets_and_named_cuts():
    inner = Batched(10, 100)
    dataset = Subset(StagedDataset.of(Subset(inner, [5, 6, 7, 8]), augment=double), [3, 0])
    assert uncut_stages(dataset).load_many([0, 1]) == [216, 210]
    stages = subset_stages(dataset, method_stages(dataset.dataset))
    loaded = stages.load_many([0, 1])
    assert loaded == [108, 105]
    assert inner.calls == [[8, 5]] * 2
    assert [stages.augment(place, example) for place, example in enumerate(loaded)] == [216, 210]
