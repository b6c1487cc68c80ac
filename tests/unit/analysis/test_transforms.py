"""Members of a Compose, timed by a clock that nothing else moves."""

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset
from torchvision import transforms as v1
from torchvision.transforms import v2

from lightning_echo import StagedDataset
from lightning_echo.analysis.parts import TimedTransforms


class Clock:
    now = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: Clock.now)


class Takes:
    """A transform that takes a while."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, example):
        Clock.now += self.seconds
        return example + 1


class Slow(torch.nn.Module):
    def forward(self, example):
        Clock.now += 0.5
        return example + 1


class Transformed(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __getitem__(self, index):
        return self.transform(torch.tensor(index))

    def __len__(self):
        return 10


def negative(example):
    Clock.now += 2.0
    return -example


@pytest.mark.parametrize("compose", [v1.Compose, v2.Compose])
def test_each_transform_of_a_compose_is_timed_and_returns_what_it_did(compose):
    dataset = Transformed(compose([Takes(0.25), negative, Slow()]))
    expected = [dataset[index] for index in (0, 3)]
    timed = TimedTransforms(dataset)
    assert timed.take() == {"Takes": 0, "negative": 0, "Slow": 0}
    assert [dataset[index] for index in (0, 3)] == expected
    assert timed.take() == {"Takes": 0.5, "negative": 4.0, "Slow": 1.0}
    assert timed.take() == {"Takes": 0, "negative": 0, "Slow": 0}


def test_equal_names_are_numbered_and_a_compose_in_a_compose_is_looked_into():
    dataset = Transformed(v2.Compose([Takes(0.25), v2.Compose([Takes(0.5), negative]), Takes(1.0)]))
    timed = TimedTransforms(dataset)
    dataset[0]
    assert timed.take() == {"Takes": 0.25, "Takes (2)": 1.0, "Takes (3)": 0.5, "negative": 2.0}


@pytest.mark.parametrize(
    "around",
    [
        lambda dataset: Subset(dataset, [1, 2]),
        lambda dataset: ConcatDataset([dataset, Transformed(torch.neg)]),
        lambda dataset: StagedDataset.of(dataset, augment=torch.neg),
    ],
)
def test_data_sets_around_it_are_looked_into(around):
    dataset = around(Transformed(v2.Compose([Takes(0.25)])))
    timed = TimedTransforms(dataset)
    dataset[0]
    assert timed.take() == {"Takes": 0.25}


def test_a_transform_that_fails_is_timed_too_and_its_attributes_are_seen():
    def fails(example):
        Clock.now += 1.0
        raise ValueError("a mistake")

    dataset = Transformed(v1.Compose([Takes(0.25), fails]))
    timed = TimedTransforms(dataset)
    with pytest.raises(ValueError, match="a mistake"):
        dataset[0]
    assert timed.take() == {"Takes": 0.25, "fails": 1.0}
    assert dataset.transform.transforms[0].seconds == 0.25


def test_without_a_compose_nothing_is_timed():
    circle = Transformed(torch.neg)
    circle.myself = circle
    assert TimedTransforms(circle).take() == {}
