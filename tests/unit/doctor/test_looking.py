"""What is known of a loader: its insertion points, and its first batch."""

import pytest
import torch
from loaders_with_traps import Examples, Stream, Unreadable, good_loader
from torch.utils.data import TensorDataset

from lightning_echo.doctor.looking import UserCodeError, first_batch, look
from lightning_echo.insertion import POINTS

ALL = ["after_read", "before_augmentation", "after_augmentation", "after_batching", "after_transfer"]


@pytest.mark.parametrize(
    ("dataset", "possible", "chosen", "refused"),
    [
        (Examples(), ALL, "before_augmentation", ""),
        (TensorDataset(torch.zeros(8, 3)), ALL[2:], "after_augmentation", "TensorDataset has n"),
        (Stream(), ALL[2:], "after_augmentation", "the data set is a stream, which has no index"),
    ],
)
def test_each_insertion_point_is_possible_or_has_a_reason(dataset, possible, chosen, refused):
    looked = look(good_loader(dataset, shuffle=None))
    assert [point.value for point in looked.possible] == possible
    assert {*looked.possible, *looked.refused} == set(POINTS)
    assert looked.choice.point.value == chosen
    for reason in looked.refused.values():
        assert reason.startswith(refused)


def test_what_a_cache_can_hold_or_why_it_can_hold_nothing_is_known():
    assert [hold.name for hold in look(good_loader()).holds] == ["raw", "loaded"]
    assert "no index" in look(good_loader(Stream(), shuffle=None)).no_cache
    uncut = look(good_loader(TensorDataset(torch.zeros(8, 3))))
    assert uncut.holds == ()
    assert "TensorDataset has neither" in uncut.no_cache


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (iter([1]), "got the iterator"),
        (3, "must be a DataLoader or another iterable"),
        (good_loader(Examples(0), shuffle=None), "empty"),
    ],
)
def test_what_cannot_be_echoed_at_all_is_refused(loader, message):
    with pytest.raises((TypeError, ValueError), match=message):
        look(loader)


def test_the_first_batch_is_timed_weighed_and_its_tensors_are_counted():
    times = iter([10.0, 12.5])
    batches = [{"image": torch.zeros(4, 8), "labels": [torch.zeros(2), torch.zeros(2)], "names": ("a", "b")}]
    first = first_batch(batches, clock=lambda: next(times))
    assert (first.seconds, first.tensors) == (2.5, 3)
    assert first.bytes >= 4 * (32 + 2 + 2)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "LookupError: the loader ends"),
        (good_loader(Unreadable(), num_workers=0, persistent_workers=False), "FileNotFoundError: image"),
    ],
)
def test_a_first_batch_that_does_not_come_is_one_of_the_users_code(loader, message):
    with pytest.raises(UserCodeError, match=message):
        first_batch(loader)


def test_a_value_error_of_the_data_set_is_not_taken_for_a_reason_of_the_package():
    class Damaged(Unreadable):
        def __getitem__(self, index):
            raise ValueError("insertion_point is no point of mine")

    looked = look(good_loader(Damaged()))
    assert str(looked.unreadable) == "reading an example of Damaged raised ValueError: insertion_point is no point of mine"
    assert (looked.choice, looked.refused) == (None, {})
