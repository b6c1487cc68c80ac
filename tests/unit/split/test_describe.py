"""A data set is looked at once: what is written down can be printed, compared and sent, and nothing of the user's is called."""

import pickle
import weakref

import pytest
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset
from torchvision import datasets
from torchvision.datasets import folder, vision
from torchvision.transforms import v2

from lightning_echo.split.describe import Chain, Convention, describe
from lightning_echo.split.staged import StagedDataset

RESIZE_AND_FLIP = v2.Compose([v2.Resize(8), v2.RandomHorizontalFlip(), v2.ToImage()])


def must_not_run(*values, **named):
    raise AssertionError("called")


class Untouchable(Dataset):
    """Whoever reads it, or calls what it holds, is found out."""

    __getitem__ = __getitems__ = __len__ = __iter__ = must_not_run

    def __init__(self, transform=must_not_run, target_transform=None):
        self.transform, self.target_transform = transform, target_transform


class Methods:
    """The stages as methods."""

    read = decode = load = augment = __getitem__ = must_not_run


class Stream(IterableDataset):
    transform = must_not_run
    __iter__ = must_not_run


def concat(*parts):
    dataset = ConcatDataset.__new__(ConcatDataset)  # which would ask for lengths
    dataset.datasets = list(parts)
    return dataset


def test_a_description_can_be_printed_sent_and_compared():
    files = Untouchable(RESIZE_AND_FLIP, target_transform=must_not_run)
    dataset = concat(Subset(files, [1, 2]), StagedDataset.of(Methods(), augment=must_not_run), files)
    by_name = "transform(image=image)['image']", "transform(image=image, mask=mask)['image'], ['mask']"
    ways = "; ".join(["transform(image) and target_transform(target)", "transform(*sample)", "transform(sample)", *by_name])
    of_files = f"transform: Resize | RandomHorizontalFlip, ToImage; target_transform:  | must_not_run; {ways}"
    both = "load(index) and augment(example); read(index) and decode(raw)"
    described = describe(dataset)
    assert str(described).splitlines() == [
        "0: ConcatDataset strings together",
        "  1: Subset chooses indices of",
        f"    2: Untouchable reads ({of_files})",
        "  3: AugmentedDataset augments (load(index) and augment(example))",
        f"    4: Methods reads ({both})",
        f"  2: Untouchable reads ({of_files})",
    ]
    assert pickle.loads(pickle.dumps(described)) == described == describe(dataset)
    assert described != describe(concat(files))


def test_data_sets_that_are_made_when_they_are_asked_for_are_not_taken_for_each_other():
    made = []

    class Lazily(Subset):
        """Those that are known by their ids must live, or the next one could get the id of the last one."""

        @property
        def dataset(self):
            assert all(reference() is not None for reference in made)
            inside = Untouchable()
            made.append(weakref.ref(inside))
            return inside

        def __init__(self):
            pass

    assert len({part.inside[0].number for part in describe(concat(*(Lazily() for _ in range(3)))).inside}) == len(made) == 3


@pytest.mark.parametrize(
    ("make", "chains"),
    [
        (lambda: Untouchable(None), []),
        (lambda: Untouchable("resize"), []),
        (lambda: Untouchable(None, RESIZE_AND_FLIP), [("target_transform", ("Resize",), ("RandomHorizontalFlip", "ToImage"))]),
        (
            lambda: datasets.FakeData(3, transform=v2.Identity()),
            [
                ("transform", ("Identity",), ()),
                ("transforms.transform", ("Identity",), ()),
                ("transforms.target_transform", (), ()),
            ],
        ),
        (lambda: Untouchable(vision.StandardTransform(v2.Resize(4))), [("transform", (), ("StandardTransform",))]),
        (lambda: StagedDataset.of(Untouchable(v2.Resize(4)), augment=abs), []),  # those of the data set inside
        (Stream, []),
    ],
    ids=["none", "not callable", "of the target", "torchvision's pair", "a pair elsewhere", "named cut", "stream"],
)
def test_the_transforms_are_those_of_its_attributes(make, chains):
    assert list(describe(make()).chains) == [Chain(*chain) for chain in chains]


def test_a_folder_that_is_staged_too_keeps_the_transforms_that_its_files_go_through():
    class Both(datasets.ImageFolder, StagedDataset):
        load = augment = must_not_run

        def __init__(self):
            self.loader, self.transform = folder.default_loader, v2.Resize(4)

    described = describe(Both())
    assert (described.conventions, described.raw_conventions) == ((Convention.protocol,), (Convention.folder,))
    assert described.chains == (Chain("transform", ("Resize",), ()),)


def test_a_pair_that_says_nothing_new_is_no_way_of_its_own():
    dataset = datasets.FakeData(3, transform=v2.Identity())
    assert Convention.transforms_joint not in describe(dataset).conventions
    dataset.transform = None  # the pair holds another one
    assert describe(dataset).conventions == (Convention.transforms_joint,)
    dataset = datasets.FakeData(3, target_transform=v2.Identity())
    dataset.target_transform = None
    assert describe(dataset).conventions == (Convention.transforms_joint,)


@pytest.mark.parametrize("name", ["transform", "target_transform", "transforms", "_transform", "_target_transform"])
def test_an_empty_place_for_transforms_shows_the_convention(name):
    dataset = type("Empty", (Dataset,), {"__getitem__": must_not_run})()
    assert describe(dataset).conventions == ()
    setattr(dataset, name, None)
    assert describe(dataset).conventions == (Convention.transform,)
