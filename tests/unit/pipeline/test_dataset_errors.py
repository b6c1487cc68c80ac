"""An exception in a worker keeps its type and message, and tells which example it was."""

import sys

import pytest
from cache_cases import LENGTH, Whole, make_cache, make_requests, request

from lightning_echo.pipeline.worker import EchoDataset
from lightning_echo.split.staged import StagedDataset


class Broken(StagedDataset):
    """Fails at index 31, in one of its stages."""

    class Error(RuntimeError):
        pass

    def __init__(self, stage):
        self.stage = stage

    def fail_at_31(self, stage, index):
        if (self.stage, index) == (stage, 31):
            raise self.Error("cannot decode")
        return index

    def load(self, index):
        return self.fail_at_31("load", index)

    def augment(self, example):
        return self.fail_at_31("augment", example)

    def __len__(self):
        return LENGTH


class BrokenCalls(Broken):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


WHOLE = StagedDataset.of(Whole(), augment=lambda example: Broken("augment").augment(example[0]))
AFTER, BEFORE = "after_augmentation", "before_augmentation"


@pytest.mark.parametrize(
    ("dataset", "point", "fresh", "kept", "told"),
    [
        (Broken("load"), AFTER, 3, "000", "example 31 of the data set"),
        (Broken("augment"), AFTER, 3, "111", "example 31 of the data set"),
        (Broken("load"), BEFORE, 3, "111", "example 31 of the data set"),
        (Broken("augment"), BEFORE, 3, "000", "example 31 of the data set"),
        (Broken("augment"), BEFORE, 1, "000", "(augmenting example 31 of the data set)"),  # in an echo
        (BrokenCalls("load"), AFTER, 3, "000", "examples [30, 31, 32] of the data set"),
        (BrokenCalls("load"), AFTER, 3, "111", "examples [30, 31, 32] of the data set"),
        (WHOLE, BEFORE, 3, "000", "(augmenting example 31 of the data set)"),
        (WHOLE, BEFORE, 3, "111", "(augmenting example 31 of the data set)"),
    ],
)
def test_an_exception_keeps_type_and_message_and_tells_the_index(dataset, point, fresh, kept, told):
    cache = make_cache(dataset, point)
    with pytest.raises(Broken.Error, match="cannot decode") as caught:
        cache.fetch(request([0, 1, 2], fresh=fresh, indices=[30, 31, 32], stays_live=kept))
    assert told in " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    if sys.version_info >= (3, 11):  # before, the message itself is changed
        assert caught.value.args == ("cannot decode",)


class Failing:
    def __init__(self, error):
        self.error = error

    def __getitem__(self, index):
        raise self.error

    def __len__(self):
        return LENGTH


def test_without_notes_the_index_is_added_to_the_message():
    class Old(Exception):
        """As exceptions are before Python 3.11."""

        @property
        def add_note(self):
            raise AttributeError

    with pytest.raises(Old) as caught:
        make_cache(Failing(Old("cannot decode", "two"))).fetch(request([0], fresh=1, indices=[31]))
    assert caught.value.args == ("cannot decode (reading example 31 of the data set)", "two")


def test_an_end_that_a_data_set_raises_is_an_error_and_not_the_end_of_the_epoch():
    dataset = EchoDataset(make_cache(Failing(StopIteration())))
    with pytest.raises(RuntimeError, match="the data set raised StopIteration while an example was read"):
        dataset.__getitems__(next(make_requests(2)))
