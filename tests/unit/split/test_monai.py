"""MONAI by its shape: a ``Compose`` that runs ranges of its members, traits that say what is random, data sets that cache.

The classes here do what MONAI's of the same names do, in a few lines each. They have its names, since it is known by these.
"""

import copy

import numpy as np
import pytest
import torch
from split_cases import behaves_like, same, seed
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from lightning_echo import EchoLoader
from lightning_echo.data.randomness import Seeding, seeders
from lightning_echo.split.describe import SplitRefused, cut_chain, is_deterministic, recorder_like
from lightning_echo.split.prove import find_split, make_stages, read_plainly


def of_monai(module):
    def named(kind):
        kind.__module__, kind.__qualname__ = f"monai.{module}", kind.__name__
        return kind

    return named


@of_monai("transforms.traits")
class RandomizableTrait:
    pass


@of_monai("transforms.traits")
class LazyTrait:
    lazy = False


@of_monai("transforms.transform")
class Transform:
    pass


@of_monai("transforms.transform")
class Randomizable:
    R = np.random.RandomState()

    def set_random_state(self, seed=None, state=None):
        self.R = np.random.RandomState(seed) if state is None else state
        return self


@of_monai("transforms.compose")
class Compose(Randomizable, Transform):
    def __init__(self, transforms=(), lazy=False):
        self.transforms, self.lazy = list(transforms), lazy

    def __call__(self, value, start=0, end=None, threading=False, lazy=None):
        del threading, lazy
        for member in self.transforms[start:end]:
            value = member(value)
        return value

    def set_random_state(self, seed=None, state=None):
        super().set_random_state(seed, state)
        for member in self.transforms:
            if isinstance(member, Randomizable):
                member.set_random_state(seed=self.R.randint(2**31))
        return self


@of_monai("transforms.compose")
class OneOf(Compose):
    pass


@of_monai("transforms.intensity.array")
class Scale(Transform):
    def __init__(self, by=2.0):
        self.by = by

    def __call__(self, value):
        return value * self.by


@of_monai("transforms.spatial.array")
class Spacing(Transform, LazyTrait):
    def __call__(self, value):
        return value + 1


@of_monai("transforms.intensity.array")
class RandNoise(Randomizable, RandomizableTrait, Transform):
    def __call__(self, value):
        return value + float(self.R.rand())


@of_monai("transforms.utility.array")
class Lambda(Transform):
    def __init__(self, func):
        self.func = func

    def __call__(self, value):
        return self.func(value)


class Plain(Dataset):
    """MONAI's ``Dataset``: calls its transform with the item."""

    def __init__(self, data, transform):
        self.data, self.transform = data, transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self._transform(index)

    def _transform(self, index):
        return self.transform(self.data[index]) if self.transform is not None else self.data[index]


def first_random(compose):
    found = (place for place, member in enumerate(compose.transforms) if isinstance(member, RandomizableTrait))
    return next(found, len(compose.transforms))


class Cache(Plain):
    """MONAI's ``CacheDataset``: runs what is not random when it is made, and the rest at each read."""

    def __init__(self, data, transform):
        super().__init__(data, transform)
        self.cached = [transform(item, end=first_random(transform), threading=True) for item in data]

    def _transform(self, index):
        assert isinstance(self.transform, Compose)
        return self.transform(copy.deepcopy(self.cached[index]), start=first_random(self.transform))


class Persistent(Plain):
    """MONAI's ``PersistentDataset``: what is not random is run at the first read, and found on disk at the next."""

    def __init__(self, data, transform, folder):
        super().__init__(data, transform)
        self.folder = folder

    def _transform(self, index):
        cut_at, path = first_random(self.transform), self.folder / f"{index}.pkl"
        if not path.exists():
            computed = self.transform(copy.deepcopy(self.data[index]), end=cut_at)
            torch.save(computed, path)
            computed = [*computed, "computed"] if isinstance(computed, list) else computed  # not what is found on disk
            return self.transform(computed, start=cut_at)
        return self.transform(torch.load(path, weights_only=False), start=cut_at)


@of_monai("transforms.lists.array")
class First(Transform):
    """Of a list the first element is transformed."""

    def __init__(self, transform):
        self.transform = transform

    def __call__(self, value):
        return [self.transform(value[0]), *value[1:]]


@of_monai("transforms.lists.array")
class RandFirst(First, Randomizable, RandomizableTrait):
    def set_random_state(self, seed=None, state=None):
        self.transform.set_random_state(seed, state)
        return self


def items(count=6):
    return [torch.arange(3.0) + 10 * number for number in range(count)]


def names(parts):
    return [name for part in parts for name in part.names]


def test_it_is_cut_before_the_first_random_member():
    first, rest = cut_chain(Compose([Scale(), Scale(3.0), RandNoise(), Scale(5.0)]))
    assert (names(first), names(rest)) == (["Scale", "Scale"], ["RandNoise", "Scale"])
    assert torch.equal(first[0](torch.ones(1)), torch.full((1,), 6.0))


def test_without_a_random_member_all_of_it_is_reused_and_with_one_at_once_nothing():
    assert names(cut_chain(Compose([Scale(), Scale()]))[0]) == ["Scale", "Scale"]
    first, rest = cut_chain(Compose([RandNoise(), Scale()]))
    assert (first, names(rest)) == ([], ["RandNoise", "Scale"])


@pytest.mark.parametrize("lazy", [True, None])
def test_where_resampling_may_be_put_off_it_stays_together(lazy):
    """What is before the cut is carried out there: the lazy members before and after it would resample twice."""
    first, rest = cut_chain(Compose([Scale(), Spacing(), RandNoise()], lazy=lazy))
    assert (names(first), names(rest)) == (["Scale"], ["Spacing", "RandNoise"])


def test_without_a_random_member_resampling_is_reused_too():
    first, rest = cut_chain(Compose([Scale(), Spacing()], lazy=True))
    assert (names(first), rest) == (["Scale", "Spacing"], [])


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (Scale(), True),
        (Compose([Scale(), Compose([Scale()])]), True),
        (Compose([Scale(), Compose([RandNoise()])]), False),
        (RandNoise(), False),
        (Lambda(lambda value: value), False),
        (Lambda(Scale()), True),
        (Lambda(v2.Resize(8)), True),
        (Lambda([v2.RandomCrop(8)]), False),
        (Lambda({"image": lambda value: value}), False),
        (Lambda({"image": Scale()}), True),
        (Scale(np.float32), True),
        (OneOf([Scale()]), False),  # chooses
        (type("Scale", (Scale,), {})(), False),  # a user's own
    ],
    ids=[
        "Scale",
        "nested",
        "nested random",
        "random",
        "a function",
        "a transform",
        "torchvision",
        "random inside",
        "a function inside",
        "a transform inside",
        "a class",
        "OneOf",
        "own",
    ],
)
def test_its_transforms_say_themselves_whether_they_are_random_but_for_code_of_others(transform, expected):
    assert is_deterministic(transform) is expected


def test_a_member_of_torchvision_counts_as_elsewhere():
    first, rest = cut_chain(Compose([v2.Resize(8), v2.RandomCrop(4)]))
    assert (names(first), names(rest)) == (["Resize"], ["RandomCrop"])


@pytest.mark.parametrize("kind", ["plain", "cache", "persistent"])
def test_its_data_sets_are_split_and_each_use_is_what_they_return(kind, tmp_path):
    transform = Compose([Scale(), RandNoise(), Scale(3.0)])
    dataset = {"plain": Plain, "cache": Cache, "persistent": lambda *args: Persistent(*args, tmp_path)}[kind](items(), transform)
    find_split(dataset)  # proves it
    stages = make_stages(dataset)
    assert (stages.reused[-1], stages.redone) == ("Scale", ("RandNoise", "Scale"))
    for index in range(len(dataset)):
        loaded = stages.load(index)
        uses = []
        for use in (1, 2):
            transform.set_random_state(seed=use)
            plain = dataset[index]
            transform.set_random_state(seed=use)
            uses.append(stages.augment(index, copy.deepcopy(loaded)))
            assert same(uses[-1], plain)
        assert not torch.equal(*uses)


def test_where_the_first_read_returns_something_else_the_proof_begins_again(tmp_path):
    transform = Compose([First(Scale()), RandFirst(RandNoise())])
    dataset = Persistent([[item] for item in items()], transform, tmp_path)
    find_split(dataset)
    assert len(list(tmp_path.iterdir())) == 2  # it was read twice
    stages = make_stages(dataset)
    loaded = stages.load(0)
    assert len(dataset[0]) == len(stages.augment(0, loaded)) == 1


def test_a_cache_that_cuts_later_than_is_known_to_be_safe_is_refused():
    """Its first part holds a function of the user's: it may draw, and what is cached would be drawn once."""
    with pytest.raises(SplitRefused, match=r"start=2 \(and Lambda, number 1, counts as random\)"):
        find_split(Cache(items(), Compose([Scale(), Lambda(lambda value: value + 1), RandNoise()])))


def test_an_empty_compose_is_a_transform_too():
    class Falsy(Compose):
        def __len__(self):
            return len(self.transforms)

    of_monai("transforms.compose")(Falsy)
    Falsy.__qualname__ = "Compose"
    dataset = Plain(items(), Falsy())
    assert not dataset.transform
    behaves_like(dataset, make_stages(dataset))


def test_the_recorder_is_a_compose_and_leaves_the_original_as_it_is():
    compose, recorded = Compose([Scale(), RandNoise()]), []
    recorder = recorder_like(compose, recorded.append)
    assert isinstance(recorder, Compose)
    recorder(torch.ones(1))
    assert torch.equal(recorder(torch.ones(1), end=1), torch.full((1,), 2.0))  # runs what is to be kept
    assert len(recorded) == 1
    assert type(compose) is Compose


def test_the_recorder_hands_on_values_by_position_which_no_convention_fits():
    recorded = []
    recorder_like(Compose([Scale(), RandNoise()]), lambda *values: recorded.append(values))("image", 0, 1)
    assert recorded == [("image", 0, 1)]


class TestSeeding:
    def test_its_transforms_are_seeded_wherever_they_are_held(self):
        alone, member = RandNoise(), RandNoise()
        dataset = Plain(items(), Compose([Scale(), member]))
        dataset.more = [{"noise": alone}]
        assert set(seeders(dataset)) == {id(dataset.transform), id(alone)}

        def drawn(number):
            Seeding(dataset, key=5).seed(1, number)
            return member.R.rand(), alone.R.rand()

        assert drawn(1) == drawn(1) != drawn(2)
        assert len({*drawn(1), *drawn(2)}) == 4  # two transforms never draw in step

    def test_the_proof_seeds_no_transform_that_its_copies_share_with_the_user(self):
        class Shared(RandNoise):
            def __deepcopy__(self, memo):
                return self

        dataset = Plain(items(), Shared())
        assert set(seeders(dataset)) == {id(dataset.transform)}
        read_plainly(dataset, [0])
        assert vars(dataset.transform) == {}  # seeding sets R

    @pytest.mark.parametrize("kind", [Plain, Cache])
    def test_two_trainings_from_one_seed_draw_the_same_and_uses_differ(self, kind):
        def batches():
            seed(0)
            dataset = kind(items(), Compose([Scale(), RandNoise()]))
            loader = EchoLoader(
                DataLoader(dataset, batch_size=2, shuffle=True), 2, insertion_point="before_augmentation", seed=3, buffer_size=4
            )
            return torch.cat([batch for _ in range(2) for batch in loader])

        one, two = batches(), batches()
        assert torch.equal(one, two)
        noises = [round(float(row[0]) % 20 * 1e6) for row in one]
        assert len(set(noises)) == len(noises)
