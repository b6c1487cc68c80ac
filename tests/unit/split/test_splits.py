"""Data sets are split where they can be, the split is proved, and the user's objects stay as they were.

The expectation is always the data set itself: under the same seeds, ``dataset[i]`` is what the stages have
to return.
"""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from split_cases import CROP_AND_FLIP, Arrays, Staged, behaves_like, flip_or_not, proved
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split
from torchvision import datasets
from torchvision import transforms as v1
from torchvision.transforms import v2

from lightning_echo.split.describe import Convention, SplitRefused
from lightning_echo.split.prove import find_split
from lightning_echo.split.staged import StagedDataset


class TestNested:
    def test_subset_concat_and_random_split_in_any_order(self, folder):
        resized = v1.Compose([v1.Resize((9, 9)), v1.RandomCrop(4), v1.ToTensor()])
        padded = v1.Compose([v1.Pad(1), v1.RandomCrop(4), v1.ToTensor()])
        files = datasets.ImageFolder(folder, transform=resized)
        fakes = datasets.FakeData(7, (3, 12, 12), transform=padded)
        part, rest = random_split(files, [4, 2])
        for dataset in (
            Subset(files, [5, 0]),
            Subset(Subset(files, [5, 4, 3]), [2, 0]),
            part,
            ConcatDataset([files, fakes]),
            ConcatDataset([part, rest, fakes]),
            ConcatDataset([Subset(fakes, [6]), ConcatDataset([part, Subset(fakes, [])]), files]),
            Subset(ConcatDataset([files, fakes]), [12, 0, 5, 6]),
            random_split(ConcatDataset([part, fakes]), [6, 5])[1],
        ):
            split, stages = proved(dataset)
            assert set(split.reused) <= {"load", "Resize", "Pad"}
            assert split.redone == ("RandomCrop", "ToTensor")
            assert behaves_like(dataset, stages)

    def test_each_data_set_inside_is_proved_on_what_is_presented_of_it(self):
        read = {}

        class Recorded(Arrays):
            def image(self, index):
                read.setdefault(self.name, []).append(int(index))
                return super().image(index)

        a, b, c = (Recorded(transform=CROP_AND_FLIP, name=name) for name in "abc")
        inside = ConcatDataset([Subset(a, [4, 1, 2]), b, Subset(a, [3, 5])])
        find_split(Subset(ConcatDataset([inside, c]), [1, 9, 8, 4, 2, 6]))
        assert {name: sorted(set(indices)) for name, indices in read.items()} == {"a": [1, 2], "b": [3, 5]}
        assert all(read[name].count(index) == 3 for name in read for index in set(read[name]))

        read.clear()
        find_split(ConcatDataset([b, Subset(a, [2, 0]), c, Subset(b, [1, 4])]))
        assert {name: sorted(set(indices)) for name, indices in read.items()} == {
            "a": [0, 2],
            "b": [0, 4],
            "c": [0, 5],
        }

    def test_one_wrong_data_set_inside_is_enough_to_refuse(self):
        class Twice(Arrays):
            def __getitem__(self, index):
                return self.transform(self.transform(self.image(index))), index

        good, wrong = Arrays(transform=CROP_AND_FLIP), Twice(transform=v2.RandomHorizontalFlip(0.01))
        assert find_split(ConcatDataset([good, good])).redone == ("RandomCrop", "RandomHorizontalFlip")
        with pytest.raises(SplitRefused, match="calls its transform 2 times"):
            find_split(ConcatDataset([good, wrong]))
        with pytest.raises(SplitRefused, match="TensorDataset has neither"):
            find_split(ConcatDataset([good, TensorDataset(torch.zeros(3))]))

    def test_the_estimated_memory_is_that_of_the_largest_example_of_all(self):
        small, large = (StagedDataset.of([torch.zeros(size)], augment=torch.neg) for size in (10, 1000))
        for parts in ([small, large], [large, small]):
            assert 4000 <= find_split(ConcatDataset(parts)).example_bytes < 4200

    def test_mixed_conventions(self):
        staged = StagedDataset.of(Arrays(), augment=flip_or_not)
        dataset = ConcatDataset([Arrays(transform=v2.RandomHorizontalFlip()), staged])
        split, stages = proved(dataset)
        assert split.conventions == (Convention.transform, Convention.protocol)
        assert split.redone == ("RandomHorizontalFlip", "augment")
        assert behaves_like(dataset, stages)


class ShapeOfStaged:
    """The protocol without the base class."""

    load, augment, __len__ = Staged.load, Staged.augment, Staged.__len__

    def __getitem__(self, index):
        return self.augment(self.load(index))


class TestStaged:
    @pytest.mark.parametrize(
        "dataset",
        [
            Staged(),
            ShapeOfStaged(),
            StagedDataset.of(Arrays(), augment=flip_or_not),
            Subset(Staged(), [3, 1]),
        ],
        ids=["inherited", "protocol", "named cut", "inside a subset"],
    )
    def test_the_stages_are_the_data_sets_own(self, dataset):
        split, stages = proved(dataset)
        assert (split.reused, split.redone) == (("load",), ("augment",))
        assert split.conventions == (Convention.protocol,)
        assert behaves_like(dataset, stages)

    def test_a_named_cut_may_stand_on_deterministic_transforms(self, folder):
        dataset = StagedDataset.of(
            datasets.ImageFolder(folder, transform=v1.Compose([v1.Resize((8, 8)), v1.PILToTensor()])),
            augment=flip_or_not,
        )
        _, stages = proved(dataset)
        assert stages.load(1)[0].shape == (3, 8, 8)
        assert behaves_like(dataset, stages)

    def test_a_generator_that_the_data_set_holds_may_augment(self):
        class OwnGenerator(Staged):
            def __init__(self):
                self.rng = np.random.default_rng(1)

            def augment(self, example):
                return example[0] + self.rng.random(), example[1]

        dataset = OwnGenerator()
        assert find_split(dataset).redone == ("augment",)
        assert dataset.rng.random() == np.random.default_rng(1).random()

    def test_a_load_that_draws_is_refused(self):
        class Drawing(Staged):
            def load(self, index):
                return torch.rand(2), index

        with pytest.raises(SplitRefused, match=r"would be reused \(load\) draws random numbers from torch"):
            find_split(Drawing())

    @pytest.mark.parametrize("kind", ["numpy", "random"])
    def test_all_global_states_are_watched(self, kind):
        class Drawing(Staged):
            def load(self, index):
                return torch.zeros(2) + (np.random.rand() if kind == "numpy" else random.random()), index

        with pytest.raises(SplitRefused, match=f"draws random numbers from {kind}"):
            find_split(Drawing())

    def test_a_load_that_draws_from_a_generator_that_the_data_set_holds_is_refused(self):
        class Drawing(Staged):
            rng = None

            def load(self, index):
                return torch.zeros(2) + self.rng.random(), index

        dataset = Drawing()
        dataset.rng = np.random.default_rng(0)
        with pytest.raises(SplitRefused, match="from a generator that the data set holds"):
            find_split(dataset)

    def test_an_augmentation_that_needs_what_the_last_load_left_is_refused(self):
        class Remembers(Staged):
            def load(self, index):
                self.last = index
                return super().load(index)

            def augment(self, example):
                return example[0] + self.last, example[1]

        with pytest.raises(SplitRefused, match=r"dataset\[0\] is not what .* return .* \(at \[0\]: tensors"):
            find_split(Remembers())

    def test_an_item_that_is_more_than_its_stages_is_refused(self):
        class More(Staged):
            def __getitem__(self, index):
                return super().__getitem__(index)[0]

        with pytest.raises(SplitRefused, match=r"dataset\[0\] is not what .* \(a Tensor and a tuple"):
            find_split(More())

    def test_an_item_that_draws_more_than_its_stages_is_refused_also_when_it_is_equal(self):
        class DrawsMore(Staged):
            def __getitem__(self, index):
                item = super().__getitem__(index)
                return item if random.random() < 2 else None

        with pytest.raises(SplitRefused, match=r"same random numbers .* by itself and in stages"):
            find_split(DrawsMore())


@pytest.mark.own_interpreter  # sees what is imported
def test_importing_the_splits_imports_neither_lightning_nor_torchvision_nor_pillow():
    program = (
        "import sys, types, pathlib\n"
        "package = types.ModuleType('lightning_echo')\n"  # its own __init__ may import more
        f"package.__path__ = [str(pathlib.Path({find_split.__code__.co_filename!r}).parents[1])]\n"
        "sys.modules['lightning_echo'] = package\n"
        "from lightning_echo.split.prove import find_split\n"
        "from torch.utils.data import Dataset\n"
        "class Own(Dataset):\n"
        "    transform = staticmethod(lambda value: value)\n"
        "    def __getitem__(self, index): return self.transform(index)\n"
        "    def __len__(self): return 2\n"
        "print(find_split(Own()).redone)\n"
        "print(sorted({'lightning', 'torchvision', 'PIL'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["('<lambda>',)", "[]"]


class WithGaps(Arrays):
    """Returns None for an example that it cannot read, as data sets do whose collate function leaves such out."""

    gaps = (0,)

    def __getitem__(self, index):
        return None if index in self.gaps else super().__getitem__(index)


class ManyWithGaps(WithGaps):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [WithGaps, ManyWithGaps])
@pytest.mark.parametrize("index", [0, 2, -1])
def test_none_in_the_place_of_an_example_stays_none(kind, index):
    dataset = kind(transform=CROP_AND_FLIP)
    dataset.gaps = (range(len(dataset))[index],)
    _, stages = proved(dataset)
    assert behaves_like(dataset, stages)
    if stages.load_many is not None:
        loaded = stages.load_many(list(range(len(dataset))))
        assert [place for place, example in enumerate(loaded) if example is None] == list(dataset.gaps)


def test_of_none_alone_nothing_is_proved():
    dataset = WithGaps(transform=CROP_AND_FLIP)
    dataset.gaps = range(len(dataset))
    with pytest.raises(SplitRefused, match=r"it returns None for dataset\[0\] and dataset\[\d+\]"):
        find_split(dataset)
