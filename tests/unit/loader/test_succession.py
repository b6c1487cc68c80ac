"""Which run a later one may go on with: told by the data set that both are over, and by who still lives."""

import gc
import weakref

import pytest
import torch

from lightning_echo.loader.run import Beginning, EpochListener, predecessor_of


class Data:
    """Can be referred to weakly, and has no equal."""


class Loader:
    def __init__(self, dataset):
        self.dataset = dataset


class Run:
    """As little of a run as is asked for."""

    def __init__(self, loader, epochs=1):
        self.beginning = Beginning(epochs=epochs)
        self.predecessor = predecessor_of(self, loader)


@pytest.fixture
def data():
    return Data()


def test_the_run_that_was_made_last_over_the_same_data_is_found_by_whatever_loader(data):
    first = Run(Loader(data))
    second = Run(Loader(data))
    third = Run(Loader(data))
    assert [run.predecessor for run in (first, second, third)] == [None, first, second]
    assert third.beginning.before is second.beginning
    assert Run(Loader(Data())).predecessor is None


class Equal(Data):
    """Equals all of its class, as a data set that compares by its options does."""

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 1


class Unhashable(Equal):
    __hash__ = None


@pytest.mark.parametrize("kind", [Equal, Unhashable])
def test_data_that_is_equal_is_not_the_same_data(kind):
    data = kind()
    first = Run(Loader(data))
    assert Run(Loader(kind())).predecessor is None
    assert Run(Loader(data)).predecessor is first


def test_a_tensor_is_found_again_though_it_compares_to_no_truth_value():
    data = torch.arange(3)
    first = Run(Loader(data))
    assert Run(Loader(torch.arange(3))).predecessor is None
    assert Run(Loader(data)).predecessor is first


def test_of_one_that_is_gone_only_how_it_began_is_known(data):
    beginning = Run(Loader(data)).beginning
    gc.collect()
    later = Run(Loader(data))
    assert later.predecessor is None
    assert later.beginning.before is beginning


def test_one_that_was_made_and_never_used_is_passed_over(data):
    used = Run(Loader(data))
    unused = Run(Loader(data), epochs=0)
    later = Run(Loader(data))
    assert unused.predecessor is used
    assert later.predecessor is used
    assert later.beginning.before is used.beginning


def test_data_is_not_kept_alive_and_neither_is_a_run():
    gone, data = [], Data()
    run = Run(Loader(data))
    weakref.finalize(data, gone.append, "data")
    weakref.finalize(run, gone.append, "run")
    del run
    gc.collect()
    assert gone == ["run"]
    del data
    gc.collect()
    assert gone == ["run", "data"]


@pytest.mark.parametrize("data", [[1, 2], {"a": 1}, 7], ids=repr)
def test_over_data_that_cannot_be_referred_to_weakly_nothing_is_found(data):
    assert [Run(Loader(data)).predecessor for _ in range(2)] == [None, None]


def test_an_iterable_without_a_data_set_is_the_data_itself(data):
    first = Run(data)
    assert Run(data).predecessor is first


def test_lightning_finds_a_sampler_to_tell_the_epoch():
    told = []
    listener = EpochListener(6, told.append)
    listener.sampler.set_epoch(3)
    assert told == [3]
    assert (listener.batch_size, listener.sampler.batch_size) == (6, 6)
