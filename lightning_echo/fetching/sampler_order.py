"""The order of a user's sampler or batch sampler. The sampler is iterated pass by pass, and never further than needed."""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_echo.planning.hashing import mix
from lightning_echo.planning.order import Order, entry_key, spread
from lightning_echo.protecting.objects import is_stateful
from lightning_echo.protecting.randomness import OwnRandomStates, preserved_random_states, seed_all

__all__ = ["OtherLength", "SamplerOrder", "check_length", "draws_by_itself", "origin_of", "sampler_in_words", "tell_pass"]

_DECIDING = ("num_replicas", "seed", "shuffle", "drop_last", "replacement")  # attributes of samplers

# These are known to draw from their generator alone.
_OF_TORCH = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def draws_by_itself(sampler: Any) -> bool:
    """Returns whether a sampler that has a generator does not draw from the global random states.

    This is only known of torch's own classes. Another sampler with an attribute ``generator`` may draw only a part of its numbers
    from it (torchgeo's ``RandomGeoSampler``).
    """
    return type(sampler.sampler if type(sampler) is BatchSampler else sampler) in _OF_TORCH


def origin_of(sampler: Any) -> str:
    """Returns, as text, what the order of a sampler depends on, as far as can be seen. It must be the same on all ranks."""
    inner = _deciding(sampler)
    generator = getattr(inner, "generator", None)
    if type(inner) is DistributedSampler:
        return f"DistributedSampler with seed {inner.seed}, shuffle={inner.shuffle}, drop_last={inner.drop_last}"
    if not isinstance(generator, torch.Generator):
        return type(inner).__name__
    return f"{type(inner).__name__} with random states {zlib.crc32(generator.get_state().numpy().tobytes()):08x}"


def sampler_in_words(sampler: Any) -> str:
    """Returns the class of a sampler or batch sampler, and what of it decides the order of a pass, the same on all ranks.

    What may change from pass to pass without harm is left out, such as weights.

    >>> sampler_in_words(RandomSampler(range(4), replacement=True)), sampler_in_words(SubsetRandomSampler([0, 2]))
    ('RandomSampler(replacement=True)', 'SubsetRandomSampler(indices: ae9e4c28)')
    """
    inner = _deciding(sampler)
    if inner is not sampler:
        return f"{type(sampler).__name__} of {sampler_in_words(inner)}"
    found = {name: vars(inner)[name] for name in _DECIDING if hasattr(inner, "__dict__") and name in vars(inner)}
    told = [f"{name}={value}" for name, value in found.items() if isinstance(value, bool | int)]
    if type(inner) is SubsetRandomSampler:
        told = [f"indices: {zlib.crc32(np.asarray(inner.indices).astype(np.int64).tobytes()):08x}"]
    return f"{type(inner).__name__}({', '.join(told)})"


def tell_pass(number: int, *samplers: Any) -> None:
    """Calls ``set_epoch`` with the number of a pass, once for each sampler that has it, as Lightning does with the epoch."""
    for sampler in {id(each): each for each in samplers}.values():
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(number)


class OtherLength(RuntimeError):
    """A pass begins that is longer or shorter than the pass before, because the length of a sampler follows ``set_epoch``."""


def check_length(found: int, expected: int, number: int) -> None:
    """Raises `OtherLength` if a pass that begins has not the expected length.

    Args:
        found: Its number of indices or batches, asked after its number was told.
        expected: The number in the passes before.
        number: Number of the pass.
    """
    if found != expected:
        raise OtherLength(
            f"pass {number} has {found} indices or batches, and {expected} were expected: the length of the sampler, loader or "
            "data set changes each time it is asked for. Let it follow set_epoch alone"
        )


class SamplerOrder(Order):
    """The order of a user's sampler or batch sampler.

    A pass begins by ``iter(sampler)``, when its first item is needed. Before that, the sampler is told the number of the pass
    (``set_epoch``), and its state is saved: by ``state_dict``, or that of its torch ``generator``. From this state a resumed run
    begins the same pass again.

    If a sampler of torch's has no generator, it gets one, seeded from the seed and the pass. Any other sampler may draw from the
    global random states. It runs under random states of its own, seeded in the same way, and must not run in a thread beside the
    training.

    Args:
        sampler: Yields indices, or lists of them.
        *args: Length and shares of a pass, see `Order`.
        seed: Seed for the generators and the random states that samplers get here.
        preserves: Whether each call puts the random states of the training back. It must be False in a thread beside the
            training. It may be False if the caller puts them back.
        **kwargs: As ``args``.
    """

    def __init__(self, sampler: Any, *args: int, seed: int, preserves: bool = False, **kwargs: int) -> None:
        super().__init__(*args, **kwargs)
        self._sampler, self._preserves = sampler, preserves
        self._inner = _deciding(sampler)  # has the state and the generator
        self._is_stateful = is_stateful(self._inner)
        generator = getattr(self._inner, "generator", None)
        self._generator = generator if isinstance(generator, torch.Generator) else None
        self._seed = seed
        is_torchs = draws_by_itself(sampler)
        self._lends_generator = is_torchs and hasattr(self._inner, "generator") and self._generator is None
        if self._lends_generator:
            self._lend_generator()
        self._own_states = None if is_torchs else OwnRandomStates()
        self.exact = is_torchs or self._is_stateful or self._generator is not None or _hears_of_passes(sampler, self._inner)
        self._states: dict[int, Any] = {}  # the sampler's state before each pass
        self._entries: Iterator[Any] = iter(())  # what the sampler yields in this pass
        self._dealt: Iterator[Any] = iter(())  # the slots of this pass, over all ranks
        self._tail: deque[Any] = deque(maxlen=0)  # the last slots of this pass, which the next pass keeps away from

    def take(self, count: int) -> list[Any]:
        if not count:
            return []
        with self._random_states(self._preserves):
            return super().take(count)

    def seek(self, position: int) -> None:
        with self._random_states(True):  # no thread has begun yet
            self._seek(position)

    def _random_states(self, preserves: bool) -> AbstractContextManager[None]:
        """Returns the context in which the sampler runs."""
        return self._own_states or (preserved_random_states() if preserves else nullcontext())

    def _seek(self, position: int) -> None:
        number, offset = divmod(position, self.pass_length)
        first = min(self._first_needed(number), min(self._states, default=number))
        self._entries = self._dealt = iter(())
        self._tail = deque(maxlen=0)
        for current in range(first, number + 1):
            self._drain()
            self._restore(current)
            self.position = current * self.pass_length
            self._pass = self._begin(current)
        super().take(offset)

    def state(self, position: int) -> dict[str, Any]:
        self.prune(position)
        return {
            **super().state(position),
            "sampler": [[number, state] for number, state in self._states.items()],
        }

    def prune(self, position: int) -> None:
        # At the end of a pass, the next one may not have begun. A resumed run then goes through this pass to find its state.
        needed = min(self._first_needed(position // self.pass_length), max(self._states, default=0))
        self._states = {number: state for number, state in self._states.items() if number >= needed}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._states = {int(number): value for number, value in state.get("sampler", [])}

    def _first_needed(self, number: int) -> int:
        """Returns the first pass that a resumed run must go through again, to get pass ``number`` with the same rearrangement."""
        while self._distance(number):
            number -= 1
            if not self._reaches_tail(number):
                break
        return number

    def _lend_generator(self) -> None:
        """Gives a generator to a copy of the sampler. The user's own sampler stays as it is."""
        inner = copy.copy(self._inner)
        inner.generator = self._generator = torch.Generator()
        if self._inner is self._sampler:
            self._sampler = inner
        else:
            self._sampler = copy.copy(self._sampler)
            self._sampler.sampler = inner
        self._inner = inner

    def _restore(self, number: int) -> None:
        """Puts the sampler into the state that it had before a pass, if that was saved."""
        state = self._states.get(number)
        if state is not None and self._is_stateful:
            self._inner.load_state_dict(state)
        elif state is not None and self._generator is not None:
            self._generator.set_state(state)

    def _drain(self) -> None:
        """Goes to the end of the pass."""
        deque(self._dealt, maxlen=0)  # the slots of other ranks: all ranks must see the same end of the pass
        deque(islice(self._entries, self.length), maxlen=0)  # the dropped tail, which the plain loader draws, too

    def _begin(self, number: int) -> Iterator[Any]:
        self._drain()
        tell_pass(number, self._sampler, self._inner)
        check_length(len(self._sampler), self.length, number)
        if self._own_states is not None:
            seed_all(mix(self._seed, number))
        if self._is_stateful:
            self._states[number] = self._inner.state_dict()
        elif self._generator is not None and self._lends_generator:
            self._generator.manual_seed(mix(self._seed, number))
        elif self._generator is not None:
            self._states[number] = self._generator.get_state()
        entries: Iterator[Any] = iter(self._sampler)
        own_start: list[Any] | None = None
        if (distance := self._distance(number)) and self._tail:
            seen = {entry_key(index): len(self._tail) - i for i, index in enumerate(self._tail)}
            places, looked_at = spread(islice(entries, self.length), seen, distance)
            entries = chain([looked_at[place] for place in places], entries)
            own_start = None if self._reaches_tail(number) else looked_at
        self._entries, self._dealt = entries, self._deal(number, entries, own_start)
        return islice(self._dealt, self.rank, None, self.replicas)

    def _deal(self, number: int, entries: Iterator[Any], own_start: list[Any] | None) -> Iterator[Any]:
        """Yields the slots of a pass for all ranks. Its tail is dropped, or missing slots are filled from its start.

        Args:
            number: Number of the pass.
            entries: The items of the pass, rearranged.
            own_start: The first items as the sampler yields them; None if the slots are filled with ``entries``.
        """
        end, tail = self._end(number), deque[Any](maxlen=max(self._spreading.distance, self._distance(number + 1)))
        missing = max(end - self.length, 0)
        start = [] if own_start is None else own_start[:missing]
        self._tail = tail
        for entry in islice(entries, min(end, self.length)):
            if own_start is None and len(start) < missing:
                start.append(entry)
            tail.append(entry)
            yield entry
        for entry in islice(cycle(start), missing):
            tail.append(entry)
            yield entry


def _deciding(sampler: Any) -> Any:
    """Returns the sampler that decides the order. For a batch sampler, it is the sampler inside it."""
    return sampler.sampler if hasattr(sampler, "batch_size") and hasattr(sampler, "sampler") else sampler


def _hears_of_passes(*samplers: Any) -> bool:
    """Returns whether one of them is told the number of each pass."""
    return any(hasattr(sampler, "set_epoch") for sampler in samplers)
