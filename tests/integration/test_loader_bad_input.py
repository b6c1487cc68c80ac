"""Bad input is refused at once, by an error that names the argument, what came, and the way out."""

import inspect
import math
import re

import pytest
import torch
from loader_cases import Values
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_echo import EchoLoader


def plain(**options):
    return DataLoader(Values(options.pop("length", 24)), **{"batch_size": 4, **options})


@pytest.mark.parametrize("factor", [0.5, 0, -1, -2.5, math.nan, math.inf, -math.inf, 0.999999])
def test_a_factor_below_one_or_not_finite_is_refused(factor):
    with pytest.raises(ValueError, match=rf"factor must be a finite number >= 1, got {factor!r}; use 1 to switch echoing off"):
        EchoLoader(plain(), factor)


@pytest.mark.parametrize("factor", ["2x", "2", None, True, [2], 2j])
def test_a_factor_that_is_no_number_is_refused(factor):
    with pytest.raises(TypeError, match=r"factor must be a real number >= 1") as refused:
        EchoLoader(plain(), factor)
    assert repr(factor) in str(refused.value)


@pytest.mark.parametrize("factor", [0.5, math.nan, "2x"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_bad_factor_is_refused_when_it_is_set_and_nothing_changes(factor, begun):
    loader = EchoLoader(plain(), 2, seed=0)
    if begun:
        next(iter(loader))
    with pytest.raises((ValueError, TypeError), match="factor must be"):
        loader.factor = factor
    assert loader.factor == 2


def test_numbers_of_other_libraries_are_factors():
    import fractions

    import numpy as np

    for factor in (np.float32(2.5), np.int64(2), fractions.Fraction(5, 2)):
        assert EchoLoader(plain(), factor).factor == float(factor)


@pytest.mark.parametrize("point", ["before", "AFTER_BATCHING", "", None, 3])
def test_an_unknown_insertion_point_is_refused_and_the_known_ones_are_listed(point):
    with pytest.raises(ValueError, match="insertion_point must be one of") as refused:
        EchoLoader(plain(), 2, insertion_point=point)
    for known in (
        "'after_read'",
        "'before_augmentation'",
        "'after_augmentation'",
        "'after_batching'",
        "'auto'",
        f"got {point!r}",
    ):
        assert known in str(refused.value)


@pytest.mark.parametrize("buffer_size", [0, -1])
def test_a_buffer_of_no_examples_is_refused(buffer_size):
    with pytest.raises(ValueError, match=f"buffer_size must be at least 1, got {buffer_size}; leave it out for the default"):
        EchoLoader(plain(), 2, buffer_size=buffer_size)


@pytest.mark.parametrize(("buffer_size", "error"), [(1.5, ValueError), ("64", ValueError), (True, TypeError)])
def test_a_buffer_size_that_is_neither_a_number_of_examples_nor_memory_is_refused(buffer_size, error):
    known = 'an integer (live examples per rank), a string with a unit such as "4GiB", or a share of the free memory such as 0.2'
    with pytest.raises(error, match=f"buffer_size must be .*{re.escape(known)}") as refused:
        EchoLoader(plain(), 2, buffer_size=buffer_size)
    assert repr(buffer_size) in str(refused.value)


@pytest.mark.parametrize(("workers", "factor", "needed"), [(0, 4, 3), (2, 4, 6), (2, 1.5, 4), (3, 8, 12)])
def test_a_buffer_too_small_for_a_batch_is_refused_with_the_least_that_works(workers, factor, needed):
    """A batch of 4 takes floor(4 / e) fresh examples at least, and the others must be live in its worker."""
    assert needed == max(workers, 1) * (4 - math.floor(4 / factor))
    with pytest.raises(ValueError, match=rf"buffer_size={needed - 1} is too small .*factor.*Use at least {needed}"):
        EchoLoader(plain(num_workers=workers), factor, insertion_point="after_augmentation", buffer_size=needed - 1)
    loader = EchoLoader(plain(num_workers=workers), factor, insertion_point="after_augmentation", buffer_size=needed, seed=0)
    assert [len(set(batch["index"].tolist())) for batch in loader] == [4] * 6


def test_a_factor_that_the_buffer_is_too_small_for_is_refused_when_it_is_set():
    loader = EchoLoader(plain(), 2, insertion_point="after_augmentation", buffer_size=2)
    with pytest.raises(ValueError, match=r"buffer_size=2 is too small.*factor.*8.*Use at least 4"):
        loader.factor = 8
    assert loader.factor == 2


class Huge(Dataset):
    """Examples that say that they are large, without being it."""

    def __getitem__(self, index):
        return torch.zeros(1).expand(2**40)

    def __len__(self):
        return 24


def test_a_buffer_that_memory_cannot_hold_is_refused_and_a_default_shrinks_with_a_warning():
    huge = DataLoader(Huge(), batch_size=4)
    with pytest.raises(ValueError, match=r"buffer_size=16 cannot fit: 16 live examples of .* MiB.*Use a smaller one"):
        EchoLoader(huge, 2, insertion_point="after_augmentation", buffer_size=16)
    with pytest.warns(UserWarning, match=r"buffer_size is 2 instead of 8: .*Set buffer_size to choose another"):
        assert EchoLoader(huge, 2, insertion_point="after_augmentation", reuse="each").buffer_size == 2


def test_a_default_that_follows_the_memory_shrinks_to_what_a_batch_needs_and_needs_no_warning():
    """No example fits into a tenth of the memory, and with a large factor nearly all four of a batch are echoes."""
    assert EchoLoader(DataLoader(Huge(), batch_size=4), 2, insertion_point="after_augmentation").buffer_size == 4


@pytest.mark.parametrize("epoch_length", ["full", "", None, 10])
def test_an_unknown_epoch_length_is_refused(epoch_length):
    with pytest.raises(ValueError, match=f"epoch_length must be 'fixed' or 'full_pass', got {epoch_length!r}"):
        EchoLoader(plain(), 2, epoch_length=epoch_length)


@pytest.mark.parametrize("seed", [1.5, "1", True])
def test_a_seed_that_is_no_integer_is_refused(seed):
    with pytest.raises(TypeError, match="seed must be an integer, or None") as refused:
        EchoLoader(plain(), 2, seed=seed)
    assert repr(seed) in str(refused.value)


@pytest.mark.parametrize("ranks", [{"num_replicas": 2}, {"rank": 1}])
def test_one_of_num_replicas_and_rank_alone_is_refused(ranks):
    with pytest.raises(ValueError, match=r"num_replicas and rank must be given together.*leave both out.*or give 1 and 0"):
        EchoLoader(plain(), 2, **ranks)


@pytest.mark.parametrize(("num_replicas", "rank"), [(2, 2), (2, -1), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(num_replicas, rank):
    with pytest.raises(ValueError, match=rf"rank must be in .*rank={rank} and num_replicas={num_replicas}"):
        EchoLoader(plain(), 2, num_replicas=num_replicas, rank=rank)


@pytest.mark.skipif("in_order" not in inspect.signature(DataLoader).parameters, reason="this torch has no such option")
def test_a_loader_that_delivers_out_of_order_is_refused():
    with pytest.raises(ValueError, match=r"in_order=False.*Set in_order=True"):
        EchoLoader(plain(num_workers=2, in_order=False), 2)


@pytest.mark.parametrize(
    "empty",
    [
        lambda: DataLoader(TensorDataset(torch.zeros(0)), batch_size=4),
        lambda: plain(length=3, drop_last=True),
        lambda: [],
    ],
)
def test_an_empty_loader_is_refused(empty):
    with pytest.raises(ValueError, match="loader is empty: it has no batch"):
        EchoLoader(empty(), 2)


def test_a_rank_whose_share_is_less_than_a_batch_gets_none_with_drop_last_as_from_the_plain_loader():
    loader = EchoLoader(plain(length=6, drop_last=True), 2, num_replicas=3, rank=0)
    assert len(loader) == 0
    assert list(loader) == []


def test_a_loader_already_echoed_is_refused():
    with pytest.raises(ValueError, match=r"loader is echoed already: pass the loader inside .* or set \.factor on it"):
        EchoLoader(EchoLoader(plain(), 2), 2)


@pytest.mark.parametrize("loader", [None, 3, Values(24)])
def test_what_is_no_loader_is_refused(loader):
    with pytest.raises(TypeError, match=f"loader must be a DataLoader or .* got {type(loader).__name__}"):
        EchoLoader(loader, 2)


def test_an_iterator_is_refused_because_it_ends_after_one_pass():
    with pytest.raises(TypeError, match=r"loader must be iterable again in every pass.*pass the object that it was made from"):
        EchoLoader(iter([torch.zeros(1)]), 2)
    with pytest.raises(TypeError, match="loader must be iterable again in every pass"):
        EchoLoader((batch for batch in [torch.zeros(1)]), 2)


class BeginsAgain:
    """Its own iterator, which begins again in ``__iter__``: Lightning's own tests have such loaders."""

    length = 5

    def __iter__(self):
        self.count = 0
        return self

    def __next__(self):
        if self.count == self.length:
            raise StopIteration
        self.count += 1
        return torch.full((2,), self.count)


class SaysItsLength(BeginsAgain):
    def __len__(self):
        return self.length


class ResetsAtItsEnd(SaysItsLength):
    """As DALI's with ``auto_reset=True``: only after it was asked for more, it begins again."""

    count = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.count == self.length:
            self.count = 0
            raise StopIteration
        self.count += 1
        return torch.full((2,), self.count)


@pytest.mark.parametrize("kind", [BeginsAgain, SaysItsLength, ResetsAtItsEnd])
def test_a_loader_that_is_its_own_iterator_and_begins_again_is_echoed(kind):
    passes = EchoLoader(kind(), 1, seed=0)
    assert [[int(batch[0]) for batch in passes] for _ in range(3)] == [[1, 2, 3, 4, 5]] * 3
    echoed = EchoLoader(kind(), 2, seed=0)
    fresh = list(dict.fromkeys(int(batch[0]) for _ in range(4) for batch in echoed))
    assert fresh == [1, 2, 3, 4, 5]
    assert echoed.counts.fresh == echoed.counts.echoed


def test_such_a_loader_resumes_only_between_passes():
    """Where another iteration begins is its own affair."""
    loader = EchoLoader(SaysItsLength(), 1, seed=0)
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match="within a pass"):
        EchoLoader(SaysItsLength(), 1, seed=0).load_state_dict(loader.state_dict())
    list(batches)
    resumed = EchoLoader(SaysItsLength(), 1, seed=0)
    resumed.load_state_dict(loader.state_dict())
    assert [int(batch[0]) for batch in resumed] == [1, 2, 3, 4, 5]


class NeedsAReset(SaysItsLength):
    count = 0

    def __iter__(self):
        return self


def test_a_loader_that_does_not_begin_again_is_told_what_does():
    echoed = EchoLoader(NeedsAReset(), 1, seed=0)
    with pytest.raises(RuntimeError, match=r"no batch in pass 1.*def __iter__\(self\): it\.reset\(\); yield from it"):
        list(echoed), list(echoed)


class Overstated:
    """Yields fewer batches than it says."""

    def __len__(self):
        return 5

    def __iter__(self):
        return iter([torch.zeros(1)] * 3)


def test_an_iterable_that_ends_before_its_length_is_an_error_and_no_short_epoch():
    with pytest.raises(RuntimeError, match=r"the loader ended after 3 batches, but its length is 5.*__len__"):
        list(EchoLoader(Overstated(), 1))


class Unsized(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(24))


def test_a_sampler_without_a_length_is_refused():
    with pytest.raises(TypeError, match=r"loader must have a length.*Give its sampler \(or its data set\) a __len__"):
        EchoLoader(plain(sampler=Unsized()), 2)


class TooFew(torch.utils.data.Sampler):
    def __len__(self):
        return 24

    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_ends_before_its_length_is_an_error_and_no_short_epoch(workers):
    loader = EchoLoader(plain(sampler=TooFew(), num_workers=workers), 1)
    with pytest.raises(RuntimeError, match=r"the sampler yielded too few items in pass 0: its length is 24.*__len__"):
        list(loader)


def test_a_state_of_something_else_is_refused():
    from lightning_echo import EchoStateError

    loader = EchoLoader(plain(), 2, seed=0)
    next(iter(loader))
    state = loader.state_dict()
    for bad in (None, {}, {"version": 99}, {"version": 1}):
        with pytest.raises(EchoStateError, match="state"):
            EchoLoader(plain(), 2).load_state_dict(bad)
    with pytest.raises(EchoStateError, match="the state is of a pass of 24 items, but a pass of this loader has 30"):
        EchoLoader(plain(length=30), 2).load_state_dict(state)
