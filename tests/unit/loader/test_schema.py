"""Damaged states: the error names the field that is missing, superfluous or wrong, or the run can be gone on with."""

import copy
import math
import operator
import warnings
from dataclasses import dataclass, replace
from enum import Enum
from functools import reduce
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from damage import changed
from own_states import Ends
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from lightning_echo.loader.loader import EchoLoader
from lightning_echo.loader.state import EchoState
from lightning_echo.schema import LEFT_OUT, ROW, EchoStateError, Least, LeftOut, plain, read

NUMBERS = torch.arange(30.0)


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


def loader(data, factor=2.0, reuse="each", buffer_size=16, **options):
    return EchoLoader(
        data, factor, seed=0, reuse=reuse, buffer_size=buffer_size, **options
    )  # a default forks, to look at the data


LOADERS = {
    "shuffled": lambda: loader(DataLoader(NUMBERS, 4, shuffle=True), insertion_point="after_augmentation"),
    "a sampler": lambda: loader(DataLoader(NUMBERS, 4, sampler=Own(range(30))), insertion_point="after_augmentation"),
    "batches": lambda: loader(DataLoader(NUMBERS, 4), insertion_point="after_batching"),
    "without a length": lambda: loader(Batches()),
    "stateful batches": lambda: loader(Stateful()),
    "from memory": lambda: loader(DataLoader(NUMBERS, 4, shuffle=True), insertion_point="after_augmentation", reuse="memory"),
    "a stream from memory": lambda: loader(DataLoader(Stream(30), batch_size=4), reuse="memory"),
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


REFUSING = {}  # loaders that have refused all states so far, by name


def is_refused(name, state, field):
    """Whether a state is refused by an error that names the field; else it can be gone on with, for two epochs.

    Any other error is one of the test.
    """
    echoed = REFUSING.pop(name) if name in REFUSING else LOADERS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refusal = None
        try:
            echoed.load_state_dict(state)
        except EchoStateError as error:
            refusal = str(error)
        if refusal is not None:
            assert field in refusal or refusal.startswith(OTHER_REFUSALS), (field, refusal)
            REFUSING[name] = echoed
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
    optional = {"sampler", "passes", "loader", "distances", "pending", "factors", "order_by", "in_pass"}
    accepted = []
    for path in paths(state):
        if path and path != ("version",) and not is_refused(name, changed(state, path, removes=True), named(path)):
            accepted.append(path)
    assert {named(path) for path in accepted} <= optional, accepted


@pytest.mark.parametrize("name", LOADERS)
def test_a_state_with_anything_superfluous_is_refused_by_its_name_and_its_place(name):
    state = saved(name)
    found = [(path, reduce(operator.getitem, path, state)) for path in paths(state)]
    dictionaries = [each for each in found if isinstance(each[1], dict)]
    assert len(dictionaries) >= 4 or name == "without a length"
    for path, value in dictionaries:
        for key in ("more", 7):
            with pytest.raises(EchoStateError) as refusal:
                LOADERS[name]().load_state_dict(changed(state, path, {**value, key: 1}))
            place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "it"
            assert f": {place} has {key}, which is not known here. Resume from another checkpoint" in str(refusal.value)
            assert "or upgrade lightning_echo" in str(refusal.value)


@pytest.mark.parametrize("name", LOADERS)
def test_a_list_with_an_entry_more_or_less_is_refused_or_can_be_gone_on_with(name):
    state = saved(name)
    refused = 0
    for path in paths(state):
        if isinstance(value := reduce(operator.getitem, path, state), list):
            for wrong in ([*value, value[-1] if value else 0], value[1:], value[::-1]):
                refused += is_refused(name, changed(state, path, wrong), named(path))
    assert refused > 3


@pytest.mark.parametrize("name", LOADERS)
def test_what_a_loader_saves_is_read_and_written_as_it_was(name):
    state, by_index = saved(name), name in ("shuffled", "a sampler", "batches")
    read_again = EchoState.from_dict(copy.deepcopy(state), by_index=by_index)
    assert read_again.to_dict() == state
    assert list(read_again.to_dict()) == list(state)
    assert EchoState.from_dict(read_again.to_dict(), by_index=by_index) == read_again


def test_an_order_without_a_plan_is_refused_but_where_a_pass_begins_that_has_no_known_length():
    for name in LOADERS:
        state = {**saved(name), "delivered": 0}
        if state["plan"] is not None and name != "without a length":
            assert is_refused(name, {**state, "plan": None}, "order")
    begins = {**saved("without a length"), "plan": None, "order": {"passes": [[1, 4]]}, "begin_at": [4, 4], "delivered": 4}
    assert not is_refused("without a length", begins, "order")
    for wrong in ({}, {"passes": []}, {"passes": [[1, 5]]}, {"passes": [[1, 4]], "distances": [[0, 0]]}):
        assert is_refused("without a length", {**begins, "order": wrong}, "order")


def test_that_nothing_is_known_of_the_epoch_is_another_state_than_that_nobody_was_asked():
    state = saved("shuffled")
    alone, unknown = (EchoState.from_dict(each, by_index=True) for each in (state, {**state, "epoch_goes_on": None}))
    assert (alone.epoch_goes_on, unknown.epoch_goes_on) == (LEFT_OUT, None)
    assert "epoch_goes_on" not in alone.to_dict()
    assert unknown.to_dict()["epoch_goes_on"] is None


@pytest.mark.grid
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
        (("delivered",), 10**9, r"delivered must be 3, the number of the plan, got 1000000000"),
        (("layout", "batch_size"), 0, r"layout.batch_size must be an integer >= 1, got 0"),
        (("order",), None, r"order must be given together with a plan, got None"),
        (("insertion_point",), "auto", r"insertion_point must be one of after_read, .*, got 'auto'"),
    ],
)
def test_the_error_says_what_was_expected_and_what_came(path, wrong, said):
    state = changed(saved("shuffled"), path, wrong)
    with pytest.raises(EchoStateError, match=f"the state is damaged: {said}.* Resume from another checkpoint"):
        LOADERS["shuffled"]().load_state_dict(state)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        *[({"version": version}, "version must be an integer >= 1") for version in ("1", None, 0, True, 1.5)],
        ({"version": 99}, "the state has version 99, this lightning_echo knows up to 1: upgrade"),
        ({"layout": {}, "insertion_point": "after_read"}, "the state is damaged: version is missing"),
        *[(state, r"state must be what EchoLoader.state_dict\(\) returned, got") for state in (None, [], "state", {}, {"a": 1})],
    ],
    ids=str,
)
def test_what_is_no_state_or_of_another_version_is_refused_as_that(state, said):
    with pytest.raises(EchoStateError, match=said):
        LOADERS["shuffled"]().load_state_dict({**saved("shuffled"), **state} if state and "version" in state else state)


def test_a_count_that_does_not_fit_the_items_that_are_held_is_refused():
    live = saved("shuffled")["plan"]["buffers"][0]["live"]
    more_uses = [[*live[0][:1], live[0][1] + 1, *live[0][2:]], *live[1:]]
    for wrong in (live[1:], live[:-1], [*live, live[0]], more_uses):
        with pytest.raises(EchoStateError, match=r"plan.buffers\[0\].live must be items with uses_left="):
            LOADERS["shuffled"]().load_state_dict(changed(saved("shuffled"), ("plan", "buffers", 0, "live"), wrong))
    for name, path in (("from memory", ()), ("a stream from memory", ("stream", "workers", 0))):
        path = (*path, "plan", "memories", 0, "held")
        held = reduce(operator.getitem, path, state := saved(name))
        for wrong in (0, held + 1, held + 1000):
            with pytest.raises(EchoStateError, match=r"memories\[0\]\.held must be the number of items of the calls"):
                LOADERS[name]().load_state_dict(changed(state, path, wrong))


class Kind(Enum):
    one = "first"
    auto = "auto"


class Pair(NamedTuple):
    left: int
    right: float


@dataclass(frozen=True)
class Two:
    a: int = 0
    b: int = 0


@dataclass(frozen=True, kw_only=True)
class Whole:
    kind: Kind
    pairs: tuple[Pair, ...]
    row: Annotated[Two, ROW]
    two: Two
    deep: Annotated[int, Least(-1)] | None
    free: Annotated[int, Least(None)]
    sure: bool
    own: Any
    maybe: int | None = None
    later: int = 5
    unsaid: bool | LeftOut | None = LEFT_OUT
    pass_: int


IN_FILE = {
    "kind": "first",
    "pairs": [[1, 2.5], [3, 4]],
    "row": [1, 2],
    "two": {"a": 1, "b": 2},
    "deep": -1,
    "free": -9,
    "sure": True,
    "own": {"pass_": (1, {2})},
    "later": 5,
    "pass": 7,
}
IN_MEMORY = Whole(
    kind=Kind.one,
    pairs=(Pair(1, 2.5), Pair(3, 4)),
    row=Two(1, 2),
    two=Two(1, 2),
    deep=-1,
    free=-9,
    sure=True,
    own={"pass_": (1, {2})},
    pass_=7,
)


def test_each_type_has_its_form_in_the_file():
    assert read(Whole, IN_FILE) == IN_MEMORY
    assert plain(IN_MEMORY) == IN_FILE
    assert read(Whole, {**IN_FILE, "own": (own := object())}).own is own
    assert plain(replace(IN_MEMORY, maybe=3, unsaid=None)) == {**IN_FILE, "maybe": 3, "unsaid": None}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "auto"}, "kind must be one of first, got 'auto'"),
        ({"pairs": [[1, 2.5], [3]]}, "pairs[1] must be [left, right], got [3]"),
        ({"pairs": [[1, 2.5], [3, 0]]}, "pairs[1] (right) must be a number from 1 to 1,000,000, got 0"),
        ({"row": {"a": 1, "b": 2}}, "row must be [a, b], got {'a': 1, 'b': 2}"),
        ({"two": [1, 2]}, "two must be a dictionary, got [1, 2]"),
        ({"deep": -2}, "deep must be an integer >= -1, got -2"),
        ({"free": 0.5}, "free must be an integer, got 0.5"),
        ({"sure": 1}, "sure must be True or False, got 1"),
        ({"maybe": -1}, "maybe must be an integer >= 0, got -1"),
        ({"pass": True}, "pass must be an integer >= 0, got True"),
        ({"pass_": 7}, "it has pass_, which is not known here"),
        ({"unsaid": "left out"}, "unsaid must be True or False, got 'left out'"),
        ({"later": 2**62 + 1}, "later must be an integer >= 0, got 4611686018427387905"),
        ({"two": ..., "pass": ..., "later": ..., "maybe": ...}, "the state is damaged: it lacks two, pass. Resume"),
    ],
    ids=str,
)
def test_what_has_another_form_or_is_missing_is_refused_with_its_place(change, said):
    with pytest.raises(EchoStateError) as refusal:
        read(Whole, {key: value for key, value in {**IN_FILE, **change}.items() if value is not ...})
    assert said in str(refusal.value)
