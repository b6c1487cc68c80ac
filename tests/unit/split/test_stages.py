"""The two stages of a data set, as methods, as a named cut, and routed through Subset and ConcatDataset."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, random_split

from lightning_echo.data.objects import is_concat, is_subset
from lightning_echo.split.make import concat_stages, method_stages, subset_stages
from lightning_echo.split.staged import StagedDataset, Stages, is_staged, unchanged, uncut_stages


class Squares(StagedDataset):
    def load(self, index):
        return index * index

    def augment(self, example):
        return -example

    def __len__(self):
        return 10


class Numbers(Dataset):
    """A data set with some attributes and no batched reading."""

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
    """A data set that reads whole batches, and counts its calls."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls = []

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        return [self[index] for index in indices]


def double(example):
    return example * 2


class TestStagedDataset:
    def test_an_item_is_the_augmented_loaded_example(self):
        assert [Squares()[index] for index in range(4)] == [0, -1, -4, -9]

    @pytest.mark.parametrize(("call", "missing"), [("load", r"load\(index\)"), ("augment", r"augment\(example\)")])
    def test_a_missing_stage_is_named(self, call, missing):
        class Empty(StagedDataset):
            pass

        with pytest.raises(NotImplementedError, match=f"Empty must implement {missing}"):
            getattr(Empty(), call)(0)

    @pytest.mark.parametrize(
        ("attributes", "expected"),
        [
            ({"load": lambda index: index, "augment": lambda example: example}, True),
            ({"load": lambda index: index}, False),
            ({"load": lambda index: index, "augment": True}, False),
            ({"load": "file.csv", "augment": lambda example: example}, False),
            ({}, False),
        ],
    )
    def test_only_callables_count_as_the_protocol(self, attributes, expected):
        dataset = Numbers()
        vars(dataset).update(attributes)
        assert is_staged(dataset) is expected

    @pytest.mark.parametrize("annotation", [str, "str", Path, "Path"])
    def test_a_method_that_takes_a_path_does_not_count(self, annotation):
        def load(source):
            raise AssertionError("called")

        load.__annotations__["source"] = annotation
        dataset = Numbers()
        vars(dataset).update(load=load, augment=double)
        assert not is_staged(dataset)
        load.__annotations__["source"] = int
        assert is_staged(dataset)


class TestNamedCut:
    def test_items_are_augmented_items_of_the_inner_data_set(self):
        dataset = StagedDataset.of(Numbers(5, 100), augment=double)
        assert isinstance(dataset, StagedDataset)
        assert [dataset[index] for index in range(len(dataset))] == [200, 202, 204, 206, 208]
        assert dataset.load(3) == 103
        assert dataset.augment(103) == 206

    def test_attributes_are_those_of_the_inner_data_set(self):
        inner = Numbers(2)
        dataset = StagedDataset.of(inner, augment=double)
        assert dataset.names() == ["n0", "n1"]
        dataset.offset = 50  # as a worker_init_fn does
        assert inner.offset == 50
        assert dataset[1] == 102
        with pytest.raises(AttributeError, match="nothing_like_it"):
            _ = dataset.nothing_like_it

    def test_special_methods_of_the_inner_data_set_do_not_speak_for_it(self):
        class Iterable(Numbers):
            def __iter__(self):
                return iter([1])

        assert hasattr(Iterable(), "__iter__")
        assert not hasattr(StagedDataset.of(Iterable(), augment=double), "__iter__")

    @pytest.mark.parametrize("duplicate", [lambda d: pickle.loads(pickle.dumps(d)), copy.copy, copy.deepcopy])
    def test_it_can_be_pickled_and_copied(self, duplicate):
        again = duplicate(StagedDataset.of(Numbers(3, 7), augment=double))
        assert [again[index] for index in range(3)] == [14, 16, 18]
        assert again.size == 3

    def test_a_plain_loader_sees_augmented_batches_read_in_one_call(self):
        inner = Batched(6)
        loader = DataLoader(StagedDataset.of(inner, augment=double), batch_size=4)
        assert [batch.tolist() for batch in loader] == [[0, 2, 4, 6], [8, 10]]
        assert inner.calls == [[0, 1, 2, 3], [4, 5]]

    def test_a_plain_loader_sees_augmented_batches_of_a_data_set_that_reads_one_by_one(self):
        loader = DataLoader(StagedDataset.of(Numbers(3), augment=double), batch_size=2)
        assert [batch.tolist() for batch in loader] == [[0, 2], [4]]

    def test_a_data_set_without_a_length_has_none(self):
        class Endless(Dataset):
            def __getitem__(self, index):
                return index

        dataset = StagedDataset.of(Endless(), augment=double)
        assert dataset[1000] == 2000
        with pytest.raises(TypeError, match="len"):
            len(dataset)

    def test_an_augmentation_that_is_not_callable_is_refused(self):
        with pytest.raises(TypeError, match="augment must be callable, got True"):
            StagedDataset.of(Numbers(), augment=True)

    def test_a_stream_is_refused(self):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter([1])

        with pytest.raises(TypeError, match=r"must be map-style .*, got Stream"):
            StagedDataset.of(Stream(), augment=double)


class TestRouting:
    def test_subset_and_concat_are_looked_through_only_if_they_do_nothing_else(self):
        class Shifted(Subset):
            def __getitem__(self, index):
                return super().__getitem__(index) + 1

            def __getitems__(self, indices):
                return [self[index] for index in indices]

        class Named(Subset):
            name = "train"

        class Reversed(ConcatDataset):
            def __getitem__(self, index):
                return super().__getitem__(len(self) - 1 - index)

        inner = Numbers()
        assert is_subset(Subset(inner, [1]))
        assert is_subset(random_split(inner, [4, 6])[0])
        assert is_subset(Named(inner, [1]))
        assert not is_subset(Shifted(inner, [1]))
        assert not is_subset(inner)
        assert is_concat(ConcatDataset([inner]))
        assert not is_concat(Reversed([inner]))

    @pytest.mark.parametrize("indices", [[7, 2, 5], range(9, 0, -3), torch.tensor([4, 0]), (3,)])
    def test_a_subset_leads_to_the_indices_that_it_chooses(self, indices):
        subset = Subset(Squares(), indices)
        stages = subset_stages(subset, method_stages(Squares()))
        expected = [int(index) ** 2 for index in indices]
        assert [stages.load(place) for place in range(len(indices))] == expected
        assert [stages.augment(place, stages.load(place)) for place in range(len(indices))] == [-n for n in expected]

    def test_a_concat_leads_each_example_to_the_stages_that_it_came_from(self):
        parts = [Numbers(3, 0), Numbers(0), Numbers(4, 100)]
        concat = ConcatDataset(parts)
        stages = concat_stages(
            concat,
            [
                Stages(
                    part.__getitem__,
                    lambda index, example, k=k: (k, index, example),
                    reused=("load",),
                    redone=("flip",),
                )
                for k, part in enumerate(parts)
            ],
        )
        seen = [stages.augment(index, stages.load(index)) for index in [0, 2, 3, 6, -1, -7]]
        assert seen == [(0, 0, 0), (0, 2, 2), (2, 0, 100), (2, 3, 103), (2, 3, 103), (0, 0, 0)]
        assert [stages.load(index) for index in range(-7, 7)] == [concat[index] for index in range(-7, 7)]
        assert (stages.reused, stages.redone) == (("load",), ("flip",))

    def test_a_concat_of_which_nothing_is_redone_redoes_nothing(self):
        concat = ConcatDataset([Numbers(2), Subset(Numbers(9), [8])])
        stages = concat_stages(concat, [uncut_stages(part) for part in concat.datasets])
        assert stages.augment is unchanged
        assert [stages.load(index) for index in range(3)] == [0, 1, 8]

    def test_a_subset_of_a_concat_of_subsets(self):
        first, second = Squares(), StagedDataset.of(Numbers(5, 10), augment=double)
        inside = [Subset(first, [9, 8]), second]
        concat = ConcatDataset(inside)
        subset = Subset(concat, [6, 1, 2])
        stages = subset_stages(
            subset,
            concat_stages(concat, [subset_stages(inside[0], method_stages(first)), method_stages(second)]),
        )
        assert [stages.augment(place, stages.load(place)) for place in range(3)] == [28, -64, 20]
        assert [subset[place] for place in range(3)] == [28, -64, 20]

    def test_a_subset_of_a_subset_of_a_concat(self):
        first, second = Squares(), StagedDataset.of(Numbers(5, 10), augment=double)
        concat = ConcatDataset([first, second])
        inner = Subset(concat, [12, 3])
        subset = Subset(inner, [1, 0])
        stages = subset_stages(subset, subset_stages(inner, concat_stages(concat, [method_stages(first), method_stages(second)])))
        assert [stages.augment(place, stages.load(place)) for place in range(2)] == [-9, 24]

    def test_names_of_different_data_sets_are_joined_without_repeats(self):
        flips = Stages(abs, abs, reused=("load", "Resize"), redone=("Flip",))
        crops = Stages(abs, abs, reused=("load", "Pad"), redone=("Crop", "Flip"))
        stages = concat_stages(ConcatDataset([Numbers(), Numbers()]), [flips, crops])
        assert repr(stages) == "reuse [load, Resize, Pad], redo [Flip, Crop]"


class TestUncutStages:
    def test_nothing_is_redone(self):
        stages = uncut_stages(Numbers(4, 5))
        example = stages.load(2)
        assert example == 7
        assert stages.augment(2, example) is example
        assert (stages.reused, stages.redone) == (("load", "augment"), ())

    def test_batched_reading_is_kept_through_subsets_and_named_cuts(self):
        inner = Batched(10, 100)
        dataset = Subset(StagedDataset.of(Subset(inner, [5, 6, 7, 8]), augment=double), [3, 0])
        assert uncut_stages(dataset).load_many([0, 1]) == [216, 210]
        assert inner.calls == [[8, 5]]

    @pytest.mark.parametrize(
        "dataset",
        [
            Numbers(),
            Subset(Numbers(), [1, 2]),
            Subset(Subset(Numbers(), [1, 2]), [0]),
            StagedDataset.of(Numbers(), augment=double),
            ConcatDataset([Batched(3), Batched(3)]),  # the plain loader reads it one by one, too
        ],
        ids=["leaf", "subset", "subset of subset", "named cut", "concat"],
    )
    def test_what_only_loops_is_not_taken_for_batched_reading(self, dataset):
        assert uncut_stages(dataset).load_many is None


class TestBatchedLoading:
    def test_a_named_cut_loads_a_batch_in_one_call(self):
        inner = Batched(8, 10)
        stages = method_stages(StagedDataset.of(inner, augment=double))
        loaded = stages.load_many([3, 1])
        assert loaded == [13, 11]
        assert inner.calls == [[3, 1]]
        assert [stages.augment(index, example) for index, example in zip([3, 1], loaded, strict=True)] == [
            26,
            22,
        ]

    def test_a_subset_passes_the_batch_on_as_one(self):
        inner = Batched(8)
        subset = Subset(StagedDataset.of(inner, augment=double), [7, 5, 3])
        stages = subset_stages(subset, method_stages(subset.dataset))
        assert stages.load_many([0, 2]) == [7, 3]
        assert inner.calls == [[7, 3]]

    def test_without_batched_reading_inside_there_is_none(self):
        subset = Subset(StagedDataset.of(Numbers(), augment=double), [1])
        assert subset_stages(subset, method_stages(subset.dataset)).load_many is None
        assert method_stages(Squares()).load_many is None
