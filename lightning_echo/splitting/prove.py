"""The proof that a split is right: what the data set returns and what the two stages return are the same.

A batch of two examples is read twice, once as the plain loader reads it and once in stages, under the same
seeds. It shows that

* both are equal, and drew the same random numbers, so that nothing random was left out or done twice;
* loading by itself draws none, neither from the three global states nor from a generator of the data set;
* augmenting needs nothing but a copy of the loaded example: both are loaded before the first is augmented.

Everything runs on throw-away copies, and the global random states are put back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_echo.protecting.copies import throw_away_copy
from lightning_echo.protecting.difference import difference
from lightning_echo.protecting.generators import Place, places_of_generators
from lightning_echo.protecting.memory import nbytes
from lightning_echo.protecting.protect import copy_example
from lightning_echo.protecting.seeding import seeders
from lightning_echo.splitting.cut import SplitRefused
from lightning_echo.splitting.stages import Stages

_SEED = 1907_05550


@dataclass(frozen=True)
class PlainRead:
    """What a data set returns by itself.

    Attributes:
        indices: what was read, in order.
        examples: what came.
        states: the global random states afterwards.
    """

    indices: list[Any]
    examples: list[Any]
    states: dict[str, Any]


def read_plainly(dataset: Any, indices: list[Any]) -> PlainRead:
    """Reads examples as the plain loader does, from a throw-away copy; exceptions are the data set's own."""
    with _seeded():
        copied = _seeded_copy(dataset)
        return PlainRead(indices, _read_all(copied, indices), _global_states())


def _read_all(dataset: Any, indices: list[Any]) -> list[Any]:
    many = getattr(dataset, "__getitems__", None)
    return list(many(indices)) if callable(many) else [dataset[index] for index in indices]


def prove(dataset: Any, make: Callable[[Any], Stages], plain: PlainRead, *, again: bool = True) -> int:
    """Checks that stages return what the data set returns by itself.

    Args:
        dataset: the data set that ``plain`` was read from.
        make: makes the stages of a copy of it.
        plain: what they have to return.
        again: whether to begin again where a second plain read is another: a data set may return something else the first time
            that an example is read (MONAI's ``PersistentDataset``, which then finds it on disk).

    Returns:
        The bytes of the largest reused example.

    Raises:
        SplitRefused: they return something else, or cannot be run one without the other.
    """
    with _seeded():
        throw_away = _seeded_copy(dataset)
        stages = make(throw_away)
        loaded = _load(stages, plain.indices, places_of_generators(throw_away))
        example_bytes = max(map(nbytes, loaded))
        augmented = _augment(stages, plain.indices, loaded)
        where = _where_different(plain, augmented) or _who_drew(plain.states)
    if where is None:
        return example_bytes
    second = read_plainly(dataset, plain.indices)
    where_again = difference(plain.examples, second.examples)
    if where_again is None:
        raise SplitRefused(where)
    if again:
        return prove(dataset, make, second, again=False)
    raise SplitRefused(
        f"{_read(plain.indices)} came out differently when read again under the same seeds ({where_again}), so that no split "
        "can be proved; it may draw from a generator that cannot be copied"
    )


def ignores_index(dataset: Any, one: Any, other: Any) -> bool:
    """Whether a data set returns what comes next, whatever index it is asked for (TorchIO's ``Queue``).

    After a first read, ``one`` and ``other`` are read from the same state of the data set and under the same seeds: what comes is
    the same for both, and not what came at first.

    Args:
        dataset: is read from throw-away copies.
        one: an index.
        other: another one.
    """
    try:
        with _seeded():
            begun = _seeded_copy(dataset)
            first = _read_all(begun, [one])
        again = read_plainly(begun, [one]).examples
        return difference(first, again) is not None and difference(again, read_plainly(begun, [other]).examples) is None
    except Exception:  # whatever the data set raises: what is needed of it has been read
        return False


def _load(stages: Stages, indices: list[Any], places: list[Place]) -> list[Any]:
    before, private = _global_states(), [place.state() for place in places]
    with _only_in_stages(f"loading {_read(indices)}"):
        loaded = [stages.load(index) for index in indices] if stages.load_many is None else stages.load_many(indices)
    what = f"what would be reused ({', '.join(stages.reused)}) draws random numbers"
    drew = [name for name, state in _global_states().items() if difference(before[name], state)]
    if drew:
        raise SplitRefused(f"{what} from {' and '.join(drew)}")
    if difference(private, [place.state() for place in places]):
        raise SplitRefused(f"{what} from a generator that the data set holds")
    if len(loaded) != len(indices):
        raise SplitRefused(f"{len(indices)} examples were to be loaded, and {len(loaded)} came")
    return loaded


def _augment(stages: Stages, indices: list[Any], loaded: list[Any]) -> list[Any]:
    augmented = []
    for index, example in zip(indices, loaded, strict=True):
        with _only_in_stages(f"{stages.redoing} {_read([index])}"):
            augmented.append(stages.augment(index, copy_example(example)))
    return augmented


def _where_different(plain: PlainRead, augmented: list[Any]) -> str | None:
    for index, left, right in zip(plain.indices, plain.examples, augmented, strict=True):
        where = difference(left, right)
        if where is not None:
            return f"{_read([index])} is not what its stages return under the same seeds ({where})"
    return None


def _who_drew(states: dict[str, Any]) -> str | None:
    drew = [name for name, state in _global_states().items() if difference(states[name], state)]
    if not drew:
        return None
    return f"it does not draw the same random numbers ({', '.join(drew)}) by itself and in stages"


@contextmanager
def _only_in_stages(doing: str) -> Iterator[None]:
    """Turns exceptions into a refusal: the data set by itself raised none."""
    try:
        yield
    except SplitRefused:
        raise
    except Exception as error:
        raise SplitRefused(f"{doing} in stages raised {type(error).__name__}: {error}") from error


def _read(indices: list[Any]) -> str:
    return " and ".join(f"dataset[{index}]" for index in indices)


def _seeded_copy(dataset: Any) -> Any:
    """A copy to be thrown away, whose transforms with generators of their own are seeded, but those that it shares."""
    throw_away = throw_away_copy(dataset)
    shared = seeders(dataset).keys()
    for place, (identity, seed) in enumerate(seeders(throw_away).items()):
        if identity not in shared:
            seed(_SEED + place)
    return throw_away


# --- the three global random states ------------------------------------------------------------------------


def _global_states() -> dict[str, Any]:
    return {
        "torch": torch.default_generator.get_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }


@contextmanager
def _seeded() -> Iterator[None]:
    """Seeds the global states, and puts them back."""
    states = _global_states()
    try:
        # Not torch.manual_seed: it also seeds every GPU, and nothing would put that back.
        torch.default_generator.manual_seed(_SEED)
        np.random.seed(_SEED)
        random.seed(_SEED)
        yield
    finally:
        torch.default_generator.set_state(states["torch"])
        np.random.set_state(states["numpy"])
        random.setstate(states["random"])
