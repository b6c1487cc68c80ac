"""What loaders hear of their Trainer, and for how long: a Trainer that has its progress and nothing else."""

import math
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader, IterableDataset
from trainers import trainer_at

from lightning_echo import EchoLoader
from lightning_echo.training.trainer import TrainerLink


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(22))


def loader_over(data):
    return EchoLoader(DataLoader(data, 4), 2, insertion_point="after_augmentation", seed=0)


@pytest.fixture
def loader():
    return loader_over(range(22))


def connected(trainer, loader, trained_on=None):
    attached = SimpleNamespace(trainer=trainer)
    link = TrainerLink(attached, "EchoCallback")
    link.connect(loader, loader if trained_on is None else trained_on)
    return link, attached


def test_a_loader_of_its_own_asks_where_the_trainer_is(loader):
    connected(trainer_at(3, done=2, ckpt_path="x.ckpt"), loader)
    place = loader.trainer_place()
    assert (place.in_epoch, place.epoch_batches, place.in_step, place.limit) == (3, 10, True, 0.5)
    assert (place.ended, place.is_over, place.resumes) == (0, False, True)
    assert loader.epoch_goes_on is None
    assert loader.factor_owner == "EchoCallback"


@pytest.mark.parametrize(("epochs", "is_over"), [((2, 2, 2), True), ((2, 2, 1), False), ((2, 1, 1), False)])
def test_an_epoch_is_over_when_all_that_were_begun_are(loader, epochs, is_over):
    connected(trainer_at(epochs=epochs), loader)
    assert loader.trainer_place().is_over is is_over
    assert loader.trainer_place().ended == epochs[2]


@pytest.mark.parametrize("changed", [{"training": False}, {"num_training_batches": math.inf}])
def test_where_nothing_is_trained_or_no_length_is_known_no_epoch_has_batches(loader, changed):
    connected(trainer_at(3, **changed), loader)
    assert loader.trainer_place().epoch_batches == -1


@pytest.mark.parametrize(("batches", "goes_on"), [(0, False), (1, True), (9, True), (10, False)])
def test_one_of_several_asks_whether_the_epoch_goes_on(loader, batches, goes_on):
    connected(trainer_at(batches), loader, {"scans": loader, "text": [1, 2]})
    assert loader.epoch_goes_on() is goes_on
    assert loader.trainer_place is None


def test_where_a_batch_is_fetched_ahead_the_loader_hears_which_one_is_in_use():
    loader = loader_over(Stream())
    connected(trainer_at(3, length=math.inf), loader)
    assert loader.batches_used() == (103, 3)


def test_the_place_that_is_kept_is_none_of_a_training(loader):
    link, attached = connected(trainer_at(3, ckpt_path="x.ckpt"), loader)
    link.disconnect([loader])
    attached.trainer = None
    place = loader.trainer_place()
    assert (place.in_epoch, place.epoch_batches, place.resumes) == (3, -1, False)
    next(iter(loader))
    assert loader.trainer_place() is None
