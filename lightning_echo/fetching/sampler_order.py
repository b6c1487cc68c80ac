"""The order of a user's sampler (or batch sampler): asked pass by pass, and never read ahead of what is needed."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, cycle, islice
from typing import Any

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
from lightning_echo.planning.order import Order
from lightning_echo.planning.spreading import identity, spread
from lightning_echo.protecting.holders import is_stateful
from lightning_echo.protecting.randomness import OwnRandomStates, preserved_random_states, seed_all

__all__ = ["SamplerOrder"]


# Of these is known that they draw from their generator alone.
_OF_TORCH = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def draws_by_itself(sampler: Any) -> bool:
    """Whether a sampler leaves the global random states alone, once it has a generator: one of torch's own classes.

    A sampler with an attribute ``generator`` may draw from it only in part (torchgeo's ``RandomGeoSampler``).
    """
    return type(sampler.sampler if type(sampler) is BatchSampler else sampler) in _OF_TORCH


class SamplerOrder(Order):
    """The order of a user's sampler or batch sampler.

    A pass is asked for by ``iter(sampler)`` when its first item is needed. Before that the sampler is told the number of the
    pass (``set_epoch``), and its state is kept (``state_dict``, or that of its torch ``generator``), from which a resumed run
    asks for the same pass again. A sampler of torch's that has no generator gets one that is seeded from seed and pass. Any
    other may draw from the global random states: it runs under states of its own, seeded likewise, and must not run beside the
    training in another thread.

    Args:
        sampler: Yields indices, or lists of them.
        seed: Seeds the generators of samplers that have none.
        preserves: Whether the random states of the training are put back after each call. Not beside the training in another
            thread, and not needed where the caller does so.
    """

    def __init__(self, sampler: Any, *args: int, seed: int, preserves: bool = False, **kwargs: int) -> None:
        super().__init__(*args, **kwargs)
        self._sampler, self._preserves = sampler, preserves
        self._source = _deciding(sampler)
        self._stateful = is_stateful(self._source)
        generator = getattr(self._source, "generator", None)
        self._generator = generator if isinstance(generator, torch.Generator) else None
        self._seed = seed
        alone = draws_by_itself(sampler)
        self._lends = alone and hasattr(self._source, "generator") and self._generator is None
        if self._lends:
            self._lend_generator()
        self._own_states = None if alone else OwnRandomStates()
        self.exact = alone or self._stateful or self._generator is not None or _hears_of_passes(sampler, self._source)
        self._states: dict[int, Any] = {}  # per pass: the sampler's state before it
        self._entries: Iterator[Any] = iter(())
        self._dealt: Iterator[Any] = iter(())
        self._tail: deque[Any] = deque(maxlen=0)

    def take(self, count: int) -> list[Any]:
        if not count:
            return []
        with self._random_states(self._preserves):
            return super().take(count)

    def seek(self, position: int) -> None:
        with self._random_states(True):  # before a thread has begun
            self._seek(position)

    def _random_states(self, preserves: bool) -> AbstractContextManager[None]:
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
            super().take(self.pass_length if current < number else offset)

    def state(self, position: int) -> dict[str, Any]:
        self.prune(position)
        return {
            **super().state(position),
            "sampler": [[number, state] for number, state in self._states.items()],
        }

    def prune(self, position: int) -> None:
        # At a pass's end the next one may not have begun: its state is found by going through this one again.
        needed = min(self._first_needed(position // self.pass_length), max(self._states, default=0))
        self._states = {number: state for number, state in self._states.items() if number >= needed}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._states = {int(number): value for number, value in state.get("sampler", [])}

    def _first_needed(self, number: int) -> int:
        """The pass from which on all must be gone through to find pass ``number`` as it was rearranged."""
        while self._distance(number):
            number -= 1
            if not self._reaches_tail(number):
                break
        return number

    def _lend_generator(self) -> None:
        source = copy.copy(self._source)
        source.generator = self._generator = torch.Generator()
        if self._source is self._sampler:
            self._sampler = source
        else:
            self._sampler = copy.copy(self._sampler)
            self._sampler.sampler = source
        self._source = source

    def _restore(self, number: int) -> None:
        state = self._states.get(number)
        if state is not None and self._stateful:
            self._source.load_state_dict(state)
        elif state is not None and self._generator is not None:
            self._generator.set_state(state)

    def _drain(self) -> None:
        deque(self._dealt, maxlen=0)  # what other ranks get: all must see the same end of the pass
        deque(islice(self._entries, self.length), maxlen=0)  # the dropped tail, which the plain loader draws too

    def _begin(self, number: int) -> Iterator[Any]:
        self._drain()
        for target in {id(each): each for each in (self._sampler, self._source)}.values():
            if callable(set_epoch := getattr(target, "set_epoch", None)):
                set_epoch(number)
        if self._own_states is not None:
            seed_all(mix(self._seed, number))
        if self._stateful:
            self._states[number] = self._source.state_dict()
        elif self._generator is not None and self._lends:
            self._generator.manual_seed(mix(self._seed, number))
        elif self._generator is not None:
            self._states[number] = self._generator.get_state()
        entries: Iterator[Any] = iter(self._sampler)
        own_start: list[Any] | None = None
        if (distance := self._distance(number)) and self._tail:
            seen = {identity(index): len(self._tail) - i for i, index in enumerate(self._tail)}
            places, looked_at = spread(islice(entries, self.length), seen, distance)
            entries = chain([looked_at[place] for place in places], entries)
            own_start = None if self._reaches_tail(number) else looked_at
        self._entries, self._dealt = entries, self._deal(entries, own_start)
        return islice(self._dealt, self.rank, None, self.replicas)

    def _deal(self, entries: Iterator[Any], own_start: list[Any] | None) -> Iterator[Any]:
        """The slots of a pass: cut, or filled up from its start."""
        end, tail = self.pass_length * self.replicas, deque[Any](maxlen=self._slots)
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
    """What decides the order: a batch sampler leaves that to the sampler inside."""
    return sampler.sampler if hasattr(sampler, "batch_size") and hasattr(sampler, "sampler") else sampler


def _hears_of_passes(*samplers: Any) -> bool:
    return any(hasattr(sampler, "set_epoch") for sampler in samplers)
