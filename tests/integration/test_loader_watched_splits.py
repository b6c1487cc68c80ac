"""Data sets that do something else with some of their examples than the two examples on which a split was proved.

What each example may be is known from the data set alone: it is recomputed here from its index.
"""

import random
import re
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_echo import EchoLoader, StagedDataset

LENGTH = 161  # 0 and 160, of which the proof looks, are multiples of 5


def erase(image):
    """Augmentation that is seen: a row becomes random, and at least 1000."""
    return torch.cat([image[:1], torch.rand(1, 2) + 1000])


class Images(Dataset):
    """Two rows that are the index, and the label."""

    def __init__(self, transform=erase):
        self.transform = transform

    def image(self, index):
        return torch.full((2, 2), float(index), dtype=torch.float64)  # noise beside 1000 keeps its digits: none is there twice

    def __getitem__(self, index):
        return self.transform(self.image(index)), index

    def __len__(self):
        return LENGTH


def has_transform(index):
    return index % 5 != 1 or index in (0, LENGTH - 1)


class Partly(Images):
    """A fifth of the examples is not to be transformed."""

    def __getitem__(self, index):
        image = self.image(index)
        return (self.transform(image) if has_transform(index) else image), index


class PartlyInCalls(Partly):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Retried(Images):
    """Where the transform leaves nothing, another example is taken: the usual way."""

    def __getitem__(self, index):
        image = self.transform(self.image(index))
        if image[0].sum() == 0 and index:
            return self[random.randrange(LENGTH)]
        return image, index


class NoisyPartly(Images):
    """Draws noise of its own for a sixth of the examples, from any generator."""

    generator = None

    def __getitem__(self, index):
        image = self.image(index)
        if index % 6 == 3:
            image[0] += 1000 + self.noise()
        return self.transform(image), index

    def noise(self):
        return torch.rand((), dtype=torch.float64)


class NoisyByNumpy(NoisyPartly):
    def noise(self):
        return np.random.rand()


class NoisyByRandom(NoisyPartly):
    def noise(self):
        return random.random()


class NoisyByItself(NoisyPartly):
    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def noise(self):
        return self.generator.random()


class NoisyStages(StagedDataset):
    def load(self, index):
        image = torch.full((2, 2), float(index), dtype=torch.float64)
        if index % 6 == 3:
            image[0] += 1000 + torch.rand((), dtype=torch.float64)
        return image, index

    def augment(self, example):
        return erase(example[0]), example[1]

    def __len__(self):
        return LENGTH


def delivered(dataset, *, factor=4, workers=2, epochs=8, point="auto", batch_size=16, seed=0):
    """Every use of every example, by its label; what was warned about; and the loader."""
    loader = EchoLoader(
        DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=workers), factor, insertion_point=point, seed=seed
    )
    uses = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            for images, labels in loader:
                for image, label in zip(images, labels.tolist(), strict=True):
                    uses.setdefault(label, []).append(image)
    loader.close()
    return uses, [str(each.message) for each in caught if issubclass(each.category, UserWarning)], loader


def check_partly(uses):
    for label, images in uses.items():
        for image in images:
            assert image[0].tolist() == [label] * 2
            assert (image[1].min() >= 1000) if has_transform(label) else (image[1].tolist() == [label] * 2)


@pytest.mark.grid
@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize(
    ("dataset", "workers"), [(Partly(), 2), (Partly(), 0), (PartlyInCalls(), 2), (Subset(Partly(), range(LENGTH)), 1)]
)
def test_examples_that_stay_as_they_are_are_left_as_they_are(dataset, workers, factor):
    uses, said, loader = delivered(dataset, factor=factor, workers=workers)
    assert loader.insertion_point == "before_augmentation"
    check_partly(uses)
    assert {has_transform(label) for label in uses} == {True, False}
    assert len(said) == 1
    assert "does not fit the split of the data set: it calls its transform 0 times where 1 would be expected" in said[0]
    assert "Use insertion_point='after_augmentation'" in said[0]
    assert factor == 1 or 3.2 < loader.counts.factor < 4.01  # they are echoed as before
    again = [images for images in uses.values() if len({tuple(image[1].tolist()) for image in images}) == len(images) > 1]
    assert len(again) > LENGTH / 4  # and each use is augmented anew


def test_where_the_point_was_asked_for_such_an_example_is_an_error():
    with pytest.raises(ValueError, match=r"example \d+: it calls its transform 0 times") as refused:
        delivered(Partly(), point="before_augmentation")
    assert "insertion_point='after_augmentation'" in str(refused.value)


class Mostly(Partly):
    """Leaves four of five examples as they are."""

    def __getitem__(self, index):
        image = self.image(index)
        return (self.transform(image) if index % 5 == 0 else image), index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("factor", [1, 4])
def test_where_many_examples_do_not_fit_the_run_continues_at_a_later_point(workers, factor):
    uses, said, loader = delivered(Mostly(), factor=factor, workers=workers, epochs=12)
    assert loader.insertion_point == "after_augmentation"
    assert all((image[1].min() >= 1000) == (label % 5 == 0) for label, images in uses.items() for image in images)
    assert re.search(r"continues at insertion_point='after_augmentation' from batch \d+ on: .*do not fit .*0 times", said[1])
    assert "\n" not in said[1]
    assert len(said) == 2
    assert loader.counts.delivered == 12 * LENGTH


@pytest.mark.filterwarnings("ignore:.*does not fit the split", "ignore:.*continues at")
def test_a_run_that_has_left_the_split_resumes_exactly():
    def make():
        return EchoLoader(DataLoader(Mostly(), 16, shuffle=True), 4, seed=0)

    first = make()
    while first.insertion_point == "before_augmentation":
        list(first)
    state = first.state_dict()
    rest = [batch for _ in range(2) for batch in first]
    second = make()
    second.load_state_dict(state)
    found = [batch for _ in range(2) for batch in second]
    assert len(rest) == len(found)
    assert all(torch.equal(one[i], other[i]) for one, other in zip(rest, found, strict=True) for i in (0, 1))


def test_with_a_cache_as_many_as_do_not_fit_are_read_whole():
    loader = EchoLoader(DataLoader(Mostly(), 16, shuffle=True), 2, seed=0, cache="16MiB")
    with pytest.warns(UserWarning, match="does not fit the split"):
        uses = [use for _ in range(8) for batch in loader for use in zip(*batch, strict=True)]
    loader.close()
    assert all((image[1].min() >= 1000) == (label % 5 == 0) for image, label in uses)


def test_a_data_set_that_looks_at_what_its_transform_returns_is_not_split():
    def crop(image):
        return image * (torch.rand(()) < 0.5)

    uses, said, loader = delivered(Retried(crop), workers=0)
    assert loader.insertion_point == "after_augmentation"
    assert not said
    assert all(image[0].sum() > 0 for label, images in uses.items() if label for image in images)


@pytest.mark.grid
@pytest.mark.parametrize("kind", [NoisyPartly, NoisyByNumpy, NoisyByRandom, NoisyByItself, NoisyStages])
@pytest.mark.parametrize("workers", [0, 2])
def test_noise_that_only_some_examples_have_is_drawn_anew_for_each_use(kind, workers):
    uses, said, loader = delivered(kind(), workers=workers)
    assert loader.insertion_point == "before_augmentation"
    noisy = {label: [float(image[0, 0]) for image in images] for label, images in uses.items() if label % 6 == 3}
    assert sum(map(len, noisy.values())) > 30
    assert all(1000 <= noise - label <= 1001 for label, drawn in noisy.items() for noise in drawn)
    assert max(Counter(noise for drawn in noisy.values() for noise in drawn).values()) == 1
    assert all(image[0, 0] == label for label, images in uses.items() if label % 6 != 3 for image in images)
    assert len(said) == 1
    assert "loading it draws random numbers from" in said[0]
    assert loader.counts.factor > 3.2


@pytest.mark.parametrize("kind", [Partly, PartlyInCalls, NoisyPartly, NoisyStages])
def test_a_resumed_run_goes_on_bit_equal(kind):
    def run():
        plain = DataLoader(kind(), batch_size=16, shuffle=True, num_workers=1)
        return EchoLoader(plain, 3, seed=3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, states, batches = run(), [], []
        for _ in range(4):
            for images, labels in first:
                batches.append((images.clone(), labels.clone()))
                states.append(first.state_dict())
        first.close()
        for at in (2, 7, 20, 33):
            second = run()
            second.load_state_dict(states[at])
            expected = batches[at + 1 :]
            found = []
            while len(found) < len(expected):
                found += list(second)
            second.close()
            for (images, labels), (others, their_labels) in zip(expected, found, strict=False):
                assert labels.tolist() == their_labels.tolist()
                assert torch.equal(images, others)


def test_a_data_set_that_fails_in_stages_alone_is_read_whole_and_one_that_fails_by_itself_fails():
    class Broken(Images):
        def __getitem__(self, index):
            if index == 8:
                raise OSError(f"cannot read {index}")
            return super().__getitem__(index)

    class Picky(Images):
        """Asks something of its transform where the proof did not look."""

        def __getitem__(self, index):
            if index % 10 == 7:
                assert self.transform is erase
            return super().__getitem__(index)

    uses, said, _ = delivered(Picky(), workers=0)
    assert all(image[1].min() >= 1000 for images in uses.values() for image in images)
    assert len(said) == 1
    assert "loading it in stages raised AssertionError" in said[0]
    for point in ("auto", "before_augmentation"):
        with pytest.raises(OSError, match="cannot read 8"):
            delivered(Broken(), workers=0, point=point)
