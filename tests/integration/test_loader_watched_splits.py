"""Data sets that do something else with some of their examples than the two examples on which a split was proved.

What each example may be is known from the data set alone: it is recomputed here from its index.
"""

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
    """Two rows that are the index, and the label. ``transforms_it`` says which examples are transformed."""

    def __init__(self, transforms_it=lambda index: True):
        self.transform, self.transforms_it = erase, transforms_it

    def image(self, index):
        return torch.full((2, 2), float(index), dtype=torch.float64)  # noise beside 1000 keeps its digits: none is there twice

    def __getitem__(self, index):
        image = self.image(index)
        return (self.transform(image) if self.transforms_it(index) else image), index

    def __len__(self):
        return LENGTH


class InCalls(Images):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def mostly(index):
    return index % 5 != 1


def seldom(index):
    return index % 5 == 0


def check(uses, transforms_it):
    for label, images in uses.items():
        for image in images:
            assert image[0].tolist() == [label] * 2
            assert (image[1].min() >= 1000) if transforms_it(label) else (image[1].tolist() == [label] * 2)


def delivered(dataset, *, factor=4, workers=0, epochs=8, point="auto", **options):
    """Every use of every example, by its label; what was warned about; and the loader."""
    plain = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=workers)
    loader = EchoLoader(plain, factor, insertion_point=point, seed=0, **options)
    uses = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            for images, labels in loader:
                for image, label in zip(images, labels.tolist(), strict=True):
                    uses.setdefault(label, []).append(image)
    loader.close()
    return uses, [str(each.message) for each in caught if issubclass(each.category, UserWarning)], loader


@pytest.mark.parametrize(
    ("dataset", "workers", "factor"),
    [(Images(mostly), 0, 4), (InCalls(mostly), 2, 4), (Subset(Images(mostly), range(LENGTH)), 0, 1)],
)
def test_examples_that_stay_as_they_are_are_left_as_they_are(dataset, workers, factor):
    uses, said, loader = delivered(dataset, factor=factor, workers=workers)
    assert loader.insertion_point == "before_augmentation"
    check(uses, mostly)
    assert {mostly(label) for label in uses} == {True, False}
    assert len(said) == 1
    assert "does not fit the split of the data set: it calls its transform 0 times where 1 would be expected" in said[0]
    assert "Use insertion_point='after_augmentation'" in said[0]
    assert factor == 1 or 3.2 < loader.counts.factor < 4.01  # they are echoed as before
    again = [images for images in uses.values() if len({tuple(image[1].tolist()) for image in images}) == len(images) > 1]
    assert len(again) > LENGTH / 4  # and each use is augmented anew


def test_where_the_point_was_asked_for_such_an_example_is_an_error():
    with pytest.raises(ValueError, match=r"example \d+: it calls its transform 0 times") as refused:
        delivered(Images(mostly), workers=1, point="before_augmentation")
    assert "insertion_point='after_augmentation'" in str(refused.value)


@pytest.mark.parametrize(("workers", "factor"), [(0, 1), (1, 4)])
def test_where_many_examples_do_not_fit_the_run_continues_at_a_later_point(workers, factor):
    uses, said, loader = delivered(Images(seldom), factor=factor, workers=workers, epochs=12)
    assert loader.insertion_point == "after_augmentation"
    check(uses, seldom)
    assert re.search(r"continues at insertion_point='after_augmentation' from batch \d+ on: .*do not fit .*0 times", said[1])
    assert "\n" not in said[1]
    assert len(said) == 2
    assert loader.counts.delivered == 12 * LENGTH


def test_with_a_cache_as_many_as_do_not_fit_are_read_whole():
    uses, said, loader = delivered(Images(seldom), factor=2, cache="16MiB")
    assert loader.insertion_point == "before_augmentation"
    assert "does not fit the split" in said[0]
    check(uses, seldom)


def of_torch(self):
    return torch.rand((), dtype=torch.float64)


class Noisy(Images):
    """Draws noise of its own for a sixth of the examples, from any generator."""

    def __init__(self, noise=of_torch):
        super().__init__()
        self.noise, self.generator = noise, np.random.default_rng(0)

    def image(self, index):
        image = super().image(index)
        if index % 6 == 3:
            image[0] += 1000 + self.noise(self)
        return image


class NoisyStages(Noisy, StagedDataset):
    def load(self, index):
        return self.image(index), index

    def augment(self, example):
        return erase(example[0]), example[1]

    def __getitem__(self, index):
        return self.augment(self.load(index))


@pytest.mark.parametrize(
    ("dataset", "workers"),
    [
        (Noisy(), 2),
        (Noisy(lambda self: np.random.rand()), 0),
        (Noisy(lambda self: self.generator.random()), 1),
        (NoisyStages(), 0),
    ],
    ids=["torch", "numpy", "own generator", "stages"],
)
def test_noise_that_only_some_examples_have_is_drawn_anew_for_each_use(dataset, workers):
    uses, said, loader = delivered(dataset, workers=workers)
    assert loader.insertion_point == "before_augmentation"
    noisy = {label: [float(image[0, 0]) for image in images] for label, images in uses.items() if label % 6 == 3}
    assert sum(map(len, noisy.values())) > 30
    assert all(1000 <= noise - label <= 1001 for label, drawn in noisy.items() for noise in drawn)
    assert max(Counter(noise for drawn in noisy.values() for noise in drawn).values()) == 1
    assert all(image[0, 0] == label for label, images in uses.items() if label % 6 != 3 for image in images)
    assert len(said) == 1
    assert "loading it draws random numbers from" in said[0]
    assert loader.counts.factor > 3.2


@pytest.mark.filterwarnings("ignore:.*does not fit the split", "ignore:.*continues at")
@pytest.mark.parametrize(
    ("dataset", "workers"),
    [(InCalls(mostly), 1), (Noisy(), 0), (Images(seldom), 0)],
    ids=["partly, in calls", "noisy", "a run that leaves the split"],
)
def test_a_resumed_run_goes_on_bit_equal(dataset, workers):
    def run():
        return EchoLoader(DataLoader(dataset, batch_size=16, shuffle=True, num_workers=workers), 3, seed=3)

    first, states, batches, points = run(), [], [], []
    for _ in range(5):
        for images, labels in first:
            batches.append((images.clone(), labels.clone()))
            states.append(first.state_dict())
            points.append(first.insertion_point)
    first.close()
    assert (points[43] == "after_augmentation") == (dataset.transforms_it is seldom)
    for at in [at for at in (20, 43) if points[at] == points[43]]:
        second = run()
        second.load_state_dict(states[at])
        expected, found = batches[at + 1 :], []
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

    uses, said, _ = delivered(Picky())
    check(uses, lambda index: True)
    assert len(said) == 1
    assert "loading it in stages raised AssertionError" in said[0]
    for point in ("auto", "before_augmentation"):
        with pytest.raises(OSError, match="cannot read 8"):
            delivered(Broken(), point=point)
