"""Reads a loader that is not rebuilt: any iterable of batches, pass after pass. Only whole batches of it can be echoed.

Positions count batches. If the loader has a length, that is the length of each pass. If it has none, a pass ends where its
iteration ends, and only reading shows where that is. A pass over a stream ends at its length, or before, where its iteration
ends. `PassReader` is both the order that `BatchRequests` needs (which position belongs to which pass) and the reader.

A resumed run begins at the oldest batch that is still live, and reads forward from there, once:

* If the loader has ``state_dict`` and ``load_state_dict``, it begins from the loader's own state. A state is taken after each
  batch, and kept as long as a later batch may have to be read again.
* Else it begins at the start of the pass, under the same seeds. A loader without a length can only begin with a new pass.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader

from lightning_echo.fetching.sampler_order import check_length, tell_pass
from lightning_echo.planning.hashing import mix
from lightning_echo.protecting.objects import is_stateful
from lightning_echo.protecting.randomness import preserved_random_states, seed_all
from lightning_echo.workers.seconds import Report

__all__ = ["PassOver", "PassReader"]

_END: Any = object()
_NOTHING_KNOWN = Report()


class PassOver(Exception):
    """A pass without a known length has ended. The next read begins another pass."""


class PassReader:
    """Reads a plain iterable of batches forward, and knows which position belongs to which pass.

    The random numbers that the iterable draws from the global random states depend only on seed and position. So a pass that is
    read again is the same. They are equal on all ranks, as under ``seed_everything``.

    Args:
        batches: The loader. It is iterated anew for each pass. It and its samplers are told the number of the pass, if they have
            ``set_epoch``.
        batches_per_pass: The loader's length; None if it has none.
        seed: Seed of the passes.
        is_estimate: Whether a pass may end before the length, where the iteration ends. With several workers and ``drop_last``,
            torch's length of a stream is too large: each worker drops its own rest.

    Attributes:
        exact: True. Only the loader can know whether a resumed run reads the same.
        position: Position of the next batch that will be planned.
    """

    exact = True

    def __init__(self, batches: Iterable[Any], batches_per_pass: int | None, seed: int = 0, *, is_estimate: bool = False) -> None:
        self._batches, self._seed = batches, seed
        self._length = None if is_estimate else batches_per_pass
        self._estimate = batches_per_pass
        self._is_stateful = is_stateful(batches)
        self.position = 0
        # The number and the first position of each pass that may still be asked for. Not used if passes have a length.
        self._passes = [(0, 0)]
        self._states: dict[int, bytes] = {}  # the loader's state before it reads a position
        self._iterator: Iterator[Any] | None = None
        self._pass_number = 0  # the pass of the iterator
        self._next = 0  # position that is read next
        self._is_resumed = False  # whether the loader's own state was loaded, and nothing was read since
        self._may_come_late: frozenset[int] = frozenset()  # positions that may be asked for after later ones
        self._read_early: dict[int, Any] = {}  # batches at such positions that were read, and not yet asked for

    # ------------------------------------------------------------------ an order: only the position of a batch is known

    def take(self, count: int) -> list[None]:
        """Returns None for each of the next ``count`` batches: their indices are not known."""
        self.position += count
        return [None] * count

    def seek(self, position: int) -> None:
        """Goes to the oldest position that will be asked for."""
        self.position = position
        if not self._is_resumed:
            self._next = self._pass_of(position)[1]

    def state(self, position: int) -> dict[str, Any]:
        """Returns what a resumed run needs to read from ``position`` on. Its types are plain if the loader's state is plain."""
        state: dict[str, Any] = {}
        if self._length is None:
            state["passes"] = [list(entry) for entry in self._passes_from(position)]
        if position in self._states:
            state["loader"] = {"position": position, "state": pickle.loads(self._states[position])}
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Loads a `state`. The next call must be `seek`."""
        begun = [(0, 0)]
        if self._length is None and self._estimate and "loader" in state:  # an earlier version has saved no passes here
            number = state["loader"]["position"] // self._estimate
            begun = [(number, number * self._estimate)]
        self._passes = [(number, first) for number, first in state.get("passes", begun)]
        if self._is_stateful and "loader" in state:
            self._next, loaded = state["loader"]["position"], state["loader"]["state"]
            self._states[self._next] = pickle.dumps(loaded)
            self._pass_number = self._pass_of(self._next)[0]
            self._tell_pass()
            self._batches.load_state_dict(loaded)  # type: ignore[attr-defined]
            self._is_resumed = True

    def prune(self, position: int) -> None:
        """Forgets what only positions before ``position`` need."""
        self._passes = self._passes_from(position)
        for remembered in (self._states, self._read_early):
            for earlier in [at for at in remembered if at < position]:
                del remembered[earlier]

    def _pass_of(self, position: int) -> tuple[int, int]:
        """Returns number and first position of the pass to which a position belongs, as far as is known."""
        if self._length is not None:
            number = position // self._length
            return number, number * self._length
        return next(entry for entry in reversed(self._passes) if entry[1] <= position)

    def _passes_from(self, position: int) -> list[tuple[int, int]]:
        return [entry for entry in self._passes if entry[0] >= self._pass_of(position)[0]]

    # ------------------------------------------------------------------ a reader

    def expect(self, positions: Iterable[int]) -> None:
        """Notes positions that may be asked for after later ones: the positions that are live when a run resumes."""
        self._may_come_late = frozenset(positions)

    def read(self, position: int) -> tuple[Any, Report]:
        """Returns the batch at a position, and an empty report, since it is not known what the loader does in the background.

        Raises:
            PassOver: The pass has ended before this position. When the position is asked for again, it is the first position of
                the next pass.
            RuntimeError: The loader ended before its length, or a pass had no batch at all.
        """
        if position in self._read_early:
            return self._read_early.pop(position), _NOTHING_KNOWN
        with preserved_random_states():
            while self._next < position:
                batch = self._read_next()
                if self._next - 1 in self._may_come_late:
                    self._read_early[self._next - 1] = batch
            return self._read_next(), _NOTHING_KNOWN

    def close(self) -> None:
        """Ends the iteration, and the workers that the loader itself keeps, as Lightning does with its own loaders.

        torchdata's loader and its iterator refer to each other, so the workers would live until both are collected as garbage.
        That takes ten seconds, because their queues are gone before the workers can be told to end.
        """
        self._iterator = None
        inner = getattr(self._batches, "_iterator", None)
        if callable(shut_down := getattr(inner, "_shutdown_workers", None)):
            shut_down()
            self._batches._iterator = None  # type: ignore[attr-defined]

    def _read_next(self) -> Any:
        number, first = self._pass_of(self._next)
        if self._iterator is None or number != self._pass_number:
            self._begin(number, first)
        else:
            seed_all(mix(self._seed, self._next))
        assert self._iterator is not None
        batch = next(self._iterator, _END)
        # The state was of a pass that had ended. Or a loader that is its own iterator hears only now of the end of its pass.
        ends_late = self._is_resumed or (isinstance(self._batches, Iterator) and self._next > 0)
        if batch is _END and ends_late and self._next == first:
            self._begin(number, first)
            batch = next(self._iterator, _END)
        self._is_resumed = False
        if batch is _END:
            self._end(number, first)
        self._next += 1
        if self._length is None and self._next - first == self._estimate:
            self._passes.append((number + 1, self._next))
        self._save_state()
        return batch

    def _begin(self, number: int, first: int) -> None:
        """Begins to iterate, under the seed of the first batch of the pass, since a loader may draw the order of the pass here.

        A loader that begins from a state draws that again, and goes to its place in it.
        """
        if self._iterator is not None and self._is_stateful:
            next(self._iterator, _END)  # only after this, the loader's state says that the pass has ended
        self._pass_number = number
        if not self._is_resumed or self._iterator is not None:  # a resumed loader was told before its state was loaded
            self._tell_pass()
            if self._length is not None and isinstance(self._batches, Sized):
                check_length(len(self._batches), self._length, number)
        seed_all(mix(self._seed, first))
        if self._next == 0 and not self._is_resumed:  # the order may have been drawn when the loader was made, or is drawn now
            self._save_state()
        self._iterator = iter(self._batches)
        if self._reseeds_after_begin(first) and not _draws_order_late(self._batches):
            seed_all(mix(self._seed, self._next))

    def _reseeds_after_begin(self, first: int) -> bool:
        """Returns whether the random states are seeded for the next batch, after the iteration has begun.

        They are not at the first batch of a torch loader, which may draw the order of the pass with it. Any other loader with a
        state may draw more numbers when it resumes than when it begins.
        """
        return self._next != first or (self._is_stateful and not isinstance(self._batches, DataLoader))

    def _end(self, number: int, first: int) -> None:
        """Notes the end of a pass, and raises what `read` raises for it."""
        self._iterator = None
        if self._next == first:
            raise RuntimeError(
                f"the loader yielded no batch in pass {number}: it must be iterable again in every pass, from its beginning. "
                "If it is an iterator, as DALI's, pass an object with a method that begins again: "
                "def __iter__(self): it.reset(); yield from it"
            )
        if self._length is not None:
            raise RuntimeError(
                f"the loader ended after {self._next - first} batches, but its length is {self._length}. Correct its __len__. If "
                "its length counts examples, as that of torchrl's replay buffer, pass an object that has no length: with "
                "def __iter__(self): yield from buffer"
            )
        self._passes.append((number + 1, self._next))
        self._save_state()
        raise PassOver

    def _tell_pass(self) -> None:
        """Tells the loader and its samplers the pass, because Lightning does not find the samplers inside an `EchoLoader`."""
        batch_sampler = getattr(self._batches, "batch_sampler", None)
        samplers = getattr(self._batches, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
        tell_pass(self._pass_number, self._batches, *samplers)

    def _save_state(self) -> None:
        if self._is_stateful:
            self._states[self._next] = pickle.dumps(self._batches.state_dict())  # type: ignore[attr-defined]


def _draws_order_late(loader: Any) -> bool:
    """Returns whether torchdata's loader draws the order of a pass with the first batch that is read from a state, not before.

    It does without workers, if the user's batch sampler saves no state. The random numbers of that batch are then others than in
    a run that was not killed.
    """
    return getattr(loader, "num_workers", None) == 0 and getattr(loader, "batch_size", 0) is None
