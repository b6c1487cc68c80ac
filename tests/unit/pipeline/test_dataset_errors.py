"""An exception in a worker keeps its type and message, and tells which example it was."""

import sys

import pytest
from cache_cases import LENGTH, Whole, make_cache, make_requests, request
from torch.utils.data import Dataset

from lightning_echo.pipeline.worker import EchoDataset
from lightning_echo.split.staged import StagedDataset


class Broken(StagedDataset):
    """Fails at index 31, in one of its stages."""

    class Error(RuntimeError):
        pass

    def __init__(self, stage):
        self.stage = stage

    def load(self, index):
        if self.stage == "load" and index == 31:
            raise self.Error("cannot decode")
        return index

    def augment(self, example):
        if self.stage == "augment" and example == 31:
            raise self.Error("cannot decode")
        return example

    def __len__(self):
        return LENGTH


class BrokenCalls(Broken):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def text_of(error):
    return " ".join([str(error), *getattr(error, "__notes__", [])])


class TestErrors:
    @pytest.mark.parametrize("kept", ["000", "111"])
    @pytest.mark.parametrize("stage", ["load", "augment"])
    @pytest.mark.parametrize("point", ["after_augmentation", "before_augmentation"])
    def test_an_exception_keeps_type_and_message_and_tells_the_index(self, point, stage, kept):
        cache = make_cache(Broken(stage), point)
        with pytest.raises(Broken.Error, match="cannot decode") as caught:
            cache.fetch(request([0, 1, 2], fresh=3, indices=[30, 31, 32], stays_live=kept))
        assert "example 31 of the data set" in text_of(caught.value)

    def test_an_exception_in_an_echo_tells_the_index_too(self):
        cache = make_cache(Broken("augment"), "before_augmentation")
        with pytest.raises(Broken.Error) as caught:
            cache.fetch(request([0, 1], fresh=1, indices=[30, 31]))
        assert "(augmenting example 31 of the data set)" in text_of(caught.value)

    @pytest.mark.parametrize("kept", ["000", "111"])
    def test_an_exception_in_a_call_for_a_whole_batch_tells_all_its_indices(self, kept):
        with pytest.raises(Broken.Error, match="cannot decode") as caught:
            make_cache(BrokenCalls("load")).fetch(request([0, 1, 2], fresh=3, indices=[30, 31, 32], stays_live=kept))
        assert "examples [30, 31, 32] of the data set" in text_of(caught.value)

    @pytest.mark.parametrize("kept", ["000", "111"])
    def test_an_exception_in_the_augmentation_of_a_whole_batch_tells_the_index(self, kept):
        dataset = StagedDataset.of(Whole(), augment=lambda example: 1 / (example[0] - 31))
        with pytest.raises(ZeroDivisionError) as caught:
            make_cache(dataset, "before_augmentation").fetch(request([0, 1], fresh=2, indices=[30, 31], stays_live=kept[:2]))
        assert "(augmenting example 31 of the data set)" in text_of(caught.value)

    def test_without_notes_the_index_is_added_to_the_message(self):
        class Old(Exception):
            """As exceptions are before Python 3.11."""

            @property
            def add_note(self):
                raise AttributeError

        class Failing:
            def __getitem__(self, index):
                raise Old("cannot decode", "two")

        with pytest.raises(Old) as caught:
            make_cache(Failing()).fetch(request([0], fresh=1, indices=[31]))
        assert caught.value.args == ("cannot decode (reading example 31 of the data set)", "two")

    @pytest.mark.skipif(sys.version_info < (3, 11), reason="the message itself is changed there")
    def test_the_message_itself_is_left_alone(self):
        with pytest.raises(Broken.Error) as caught:
            make_cache(Broken("load")).fetch(request([0], fresh=1, indices=[31]))
        assert caught.value.args == ("cannot decode",)


def test_an_end_that_a_data_set_raises_is_an_error_and_not_the_end_of_the_epoch():
    class Data(Dataset):
        def __getitem__(self, index):
            return next(iter(()))

        def __len__(self):
            return LENGTH

    dataset = EchoDataset(make_cache(Data()))
    with pytest.raises(RuntimeError, match="the data set raised StopIteration while an example was read"):
        dataset.__getitems__(next(make_requests(2)))
