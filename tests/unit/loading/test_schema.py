"""Damaged states: whatever field is missing or wrong, the error names it, or the state is one that can be gone on with."""

import copy
import math
import warnings

import pytest
import torch
from own_states import Ends
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from lightning_echo.loading.loader import EchoLoader
from lightning_echo.loading.schema import EchoStateError


class Numbers(Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, index):
        return torch.tensor(float(index))


class Batches:
    """A loader without a length."""

    def __iter__(self):
        return iter(torch.arange(12.0).view(4, 3))


class Stateful(Batches):
    """Saves its own state."""

    def state_dict(self):
        return {"anything": 1}

    def load_state_dict(self, state):
        pass


class Own(RandomSampler):
    pass


class Stream(Ends, IterableDataset):
    """Saves its own state, too."""


OTHER_REFUSALS = "the state is of a pass of", "the state was saved within a pass"


def loader(data, factor=2.0, **options):
    return EchoLoader(data, factor, seed=0, **options)


LOADERS = {
    "shuffled": lambda: loader(DataLoader(Numbers(), batch_size=4, shuffle=True), insertion_point="after_augmentation"),
    "a sampler": lambda: loader(
        DataLoader(Numbers(), batch_size=4, sampler=Own(range(30))), insertion_point="after_augmentation"
    ),
    "batches": lambda: loader(DataLoader(Numbers(), batch_size=4), insertion_point="after_batching"),
    "without a length": lambda: loader(Batches()),
    "stateful batches": lambda: loader(Stateful()),
    "a stream": lambda: loader(DataLoader(Stream(30), batch_size=4)),
}
WRONG = [None, True, "1", "", -1, 0, 0.5, math.nan, math.inf, -math.inf, 10**30, [], [1], {}, {"a": 1}]


def saved(name):
    """A state in the middle of a run, with a change of the factor to come."""
    echoed = LOADERS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = iter(echoed)
        for _ in range(3):
            next(batches)
    if name != "without a length":
        echoed.factor = 3.0
    else:
        list(batches)  # it can only be gone on with from the end of a pass
    return echoed.state_dict()


def paths(value, path=()):
    """Every place in a state but those of the user's own states."""
    if path and path[-1] in ("state", "stream") and path[:1] != ("stream",)[: len(path)]:
        return
    if len(path) > 1 and path[-1] in ("state", "stream"):
        return
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from paths(child, (*path, key))


def changed(state, path, *replacement):
    """The state with something else in a place, or without it."""
    state = copy.deepcopy(state)
    parent = state
    for key in path[:-1]:
        parent = parent[key]
    if replacement:
        parent[path[-1]] = replacement[0]
    else:
        del parent[path[-1]]
    return state


def is_refused(name, state, field):
    """Whether a state is refused by an error that names the field; else it can be gone on with, for two epochs."""
    echoed = LOADERS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refusal = None
        try:
            echoed.load_state_dict(state)
        except EchoStateError as error:
            refusal = str(error)
        if refusal is not None:
            assert field in refusal or refusal.startswith(OTHER_REFUSALS), (field, refusal)
            return True
        assert sum(1 for _ in range(2) for _ in echoed) >= 4
        assert echoed.state_dict()["delivered"] > 0
        return False


def named(path):
    """The last part of a path that has a name."""
    return next(key for key in reversed(path) if isinstance(key, str))


@pytest.mark.parametrize("name", LOADERS)
def test_a_state_that_lacks_anything_is_refused_by_its_name(name):
    state = saved(name)
    optional = {"factor_before", "factor_since", "passes_over", "uses_left", "sampler", "passes", "loader", "distances"}
    accepted = []
    for path in paths(state):
        if path and path != ("version",) and not is_refused(name, changed(state, path), named(path)):
            accepted.append(path)
    assert {named(path) for path in accepted} <= optional | {"pending", "factors"}, accepted


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("name", LOADERS)
def test_a_state_with_a_wrong_value_is_refused_by_its_name_or_can_be_gone_on_with(name, wrong):
    state = saved(name)
    refused = 0
    for path in paths(state):
        if path and path != ("version",):
            refused += is_refused(name, changed(state, path, wrong), named(path))
    assert refused > 10


@pytest.mark.parametrize(
    ("path", "wrong", "said"),
    [
        (("factor",), 0, r"factor must be a number from 1 to 1,000,000, got 0"),
        (("factor",), math.nan, r"factor must be a number from 1 to 1,000,000, got nan"),
        (("largest_factor",), math.inf, r"largest_factor must be a number from 1 to 1,000,000, got inf"),
        (("counts",), [1, -1, 0], r"counts \(echoed\) must be an integer >= 0, got -1"),
        (("workers",), 2, r"plan.buffers must be a list of 2"),
        (("plan", "buffers", 0, "owed"), 0.5, r"plan.buffers\[0\].owed must be an integer, got 0.5"),
        (("plan", "position"), 10**9, r"plan.position must be at most 12, by its number of batches, got 1000000000"),
        (("layout", "batch_size"), 0, r"layout.batch_size must be an integer >= 1, got 0"),
        (("order",), None, r"order must be there exactly where there is a plan, got None"),
        (("insertion_point",), "auto", r"insertion_point must be one of after_read, .*, got 'auto'"),
    ],
)
def test_the_error_says_what_was_expected_and_what_came(path, wrong, said):
    state = changed(saved("shuffled"), path, wrong)
    with pytest.raises(EchoStateError, match=f"the state is damaged: {said}.* Resume from another checkpoint"):
        LOADERS["shuffled"]().load_state_dict(state)


def test_a_live_example_that_is_missing_or_twice_is_found():
    state = saved("shuffled")
    live = state["plan"]["buffers"][0]["live"]
    for wrong in (live[1:], live[:-1], [*live, live[0]], [[*live[0][:1], live[0][1] + 1, *live[0][2:]], *live[1:]]):
        with pytest.raises(EchoStateError, match=r"plan.buffers\[0\].live must be items with uses_left="):
            LOADERS["shuffled"]().load_state_dict(changed(state, ("plan", "buffers", 0, "live"), wrong))


@pytest.mark.parametrize("version", ["1", None, 0, -1, True, 1.5, []])
def test_a_version_that_is_none_is_an_error_of_its_own(version):
    with pytest.raises(EchoStateError, match="version must be an integer >= 1"):
        LOADERS["shuffled"]().load_state_dict({**saved("shuffled"), "version": version})


def test_a_later_version_says_what_to_do():
    with pytest.raises(EchoStateError, match="the state has version 99, this lightning_echo knows up to 1: upgrade"):
        LOADERS["shuffled"]().load_state_dict({**saved("shuffled"), "version": 99})


@pytest.mark.parametrize("state", [None, [], "state", {}, {"a": 1}, 7])
def test_what_is_no_state_at_all_is_refused(state):
    with pytest.raises(EchoStateError, match=r"state must be what EchoLoader.state_dict\(\) returned"):
        LOADERS["shuffled"]().load_state_dict(state)
