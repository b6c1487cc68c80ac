"""Bad input is refused at once, by an error that names the argument, what came, and the way out."""

import inspect
import math

import pytest
import torch
from loader_cases import Values
from torch.utils.data import DataLoader, TensorDataset

from lightning_echo import EchoLoader


def plain(**options):
    return DataLoader(Values(options.pop("length", 24)), **{"batch_size": 4, **options})


class Unsized(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(24))


# The checks of all values of an option: tests/unit/loader/test_options.py.
OPTIONS = [
    ({"insertion_point": "AFTER_BATCHING"}, ValueError, "insertion_point must be one of 'after_read'.* got 'AFTER_BATCHING'"),
    ({"buffer_size": 0}, ValueError, "buffer_size must be at least 1, got 0; leave it out for the default"),
    ({"seed": 1.5}, TypeError, "seed must be an integer, or None .* got 1.5"),
    ({"rank": 1}, ValueError, "num_replicas and rank must be given together"),
]
LOADERS = [
    (lambda: DataLoader(TensorDataset(torch.zeros(0)), batch_size=4), ValueError, "loader is empty: it has no batch"),
    (lambda: plain(length=3, drop_last=True), ValueError, "loader is empty: it has no batch"),
    (list, ValueError, "loader is empty: it has no batch"),
    (lambda: EchoLoader(plain(), 2), ValueError, r"echoed already: pass the loader inside .* or set \.factor on it"),
    (lambda: None, TypeError, "loader must be a DataLoader or .* got NoneType"),
    (lambda: Values(24), TypeError, "loader must be a DataLoader or .* got Values"),
    (lambda: iter([1]), TypeError, r"iterable again in every pass.*pass the object that it was made from"),
    (lambda: (batch for batch in [1]), TypeError, "loader must be iterable again in every pass"),
    (lambda: plain(sampler=Unsized()), TypeError, r"loader must have a length.*Give its sampler \(or its data set\) a __len__"),
]
if "in_order" in inspect.signature(DataLoader).parameters:
    LOADERS.append((lambda: plain(num_workers=2, in_order=False), ValueError, r"in_order=False.*Set in_order=True"))


@pytest.mark.parametrize(("options", "error", "said"), OPTIONS, ids=str)
def test_an_option_of_a_wrong_type_or_value_is_refused(options, error, said):
    with pytest.raises(error, match=said):
        EchoLoader(plain(), **{"factor": 2, **options})


@pytest.mark.parametrize(("make", "error", "said"), LOADERS)
def test_a_loader_that_cannot_be_echoed_is_refused_with_the_reason(make, error, said):
    with pytest.raises(error, match=said):
        EchoLoader(make(), 2)


def test_a_bad_factor_is_refused_when_it_is_set_and_nothing_changes():
    loader = EchoLoader(plain(), 2, seed=0)
    for factor in (0.5, math.nan, "2x"):
        with pytest.raises((ValueError, TypeError), match="factor must be"):
            loader.factor = factor
    next(iter(loader))
    assert loader.factor == 2


@pytest.mark.parametrize(("workers", "factor", "needed"), [(0, 4, 3), (2, 1.5, 4)])
def test_a_buffer_too_small_for_a_batch_is_refused_with_the_least_that_works(workers, factor, needed):
    """A batch of 4 takes floor(4 / e) fresh examples at least, and the others must be live in its worker."""
    assert needed == max(workers, 1) * (4 - math.floor(4 / factor))
    with pytest.raises(ValueError, match=rf"buffer_size={needed - 1} is too small .*factor.*Use at least {needed}"):
        EchoLoader(plain(num_workers=workers), factor, insertion_point="after_augmentation", buffer_size=needed - 1)
    loader = EchoLoader(plain(num_workers=workers), factor, insertion_point="after_augmentation", buffer_size=needed, seed=0)
    assert [len(set(batch["index"].tolist())) for batch in loader] == [4] * 6


def test_a_rank_whose_share_is_less_than_a_batch_gets_none_with_drop_last_as_from_the_plain_loader():
    loader = EchoLoader(plain(length=6, drop_last=True), 2, num_replicas=3, rank=0)
    assert len(loader) == 0
    assert list(loader) == []


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


class Overstated:
    """Yields fewer batches than it says."""

    def __len__(self):
        return 5

    def __iter__(self):
        return iter([torch.zeros(1)] * 3)


class TooFew(torch.utils.data.Sampler):
    def __len__(self):
        return 24

    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Overstated, r"the loader ended after 3 batches, but its length is 5.*__len__"),
        (
            lambda: plain(sampler=TooFew(), num_workers=1),
            r"the sampler yielded too few items in pass 0: its length is 24.*__len__",
        ),
        (NeedsAReset, r"no batch in pass 1.*def __iter__\(self\): it\.reset\(\); yield from it"),
    ],
)
def test_a_pass_that_ends_before_its_length_is_an_error_and_no_short_epoch(make, said):
    loader = EchoLoader(make(), 1, seed=0)
    with pytest.raises(RuntimeError, match=said):
        list(loader), list(loader)
