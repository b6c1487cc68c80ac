"""Reading a loader that is never rebuilt: any iterable of batches, pass after pass, for the points that echo whole batches.

Positions count batches. Where the loader has a length, a pass has so many; where it has none, a pass ends where its iteration
does, which only reading tells. `PassReader` is both the order that `BatchRequests` needs (which position belongs to which pass)
and what reads. A resumed run begins at the oldest batch that is still live and reads forward from there, once:

* from the loader's own state where it has ``state_dict`` and ``load_state_dict``: one is taken after each batch, and kept while a
  batch that comes after it may have to be read again;
* else from the start of the pass, under the same seeds. A loader without a length can only begin with a new pass.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import Any

from lightning_echo.planning.hashing import mix
from lightning_echo.protecting.holders import is_stateful
from lightning_echo.protecting.randomness import preserved_random_states, seed_all

__all__ = ["PassOver", "PassReader"]

_END: Any = object()
_NOTHING_KNOWN = (0.0, 0.0, 0.0)


class PassOver(Exception):
    """A pass has ended that has no known length; the next read begins another."""


class PassReader:
    """Reads a plain iterable of batches forward, and knows which position belongs to which pass.

    What it draws from the global random states is a function of seed and position (equal on all ranks, as under
    ``seed_everything``), so that a pass that is read again is the same.

    Args:
        batches: Iterated anew for each pass. It and its samplers are told the pass by ``set_epoch`` where they have that.
        batches_per_pass: Its length; None: a pass ends with the iteration.
        seed: Seed of the passes.

    Attributes:
        position: Of the next batch that will be planned.
    """

    exact = True  # whether a resumed run reads the same is not for us to know

    def __init__(self, batches: Iterable[Any], batches_per_pass: int | None, seed: int = 0) -> None:
        self._batches, self._length, self._seed = batches, batches_per_pass, seed
        self._is_stateful = is_stateful(batches)
        self.position = 0
        self._passes = [(0, 0)]  # number and first position of those that may still be asked for; unused with a length
        self._states: dict[int, bytes] = {}  # the loader's, before it reads a position
        self._iterator: Iterator[Any] | None = None
        self._pass = 0  # the iterator's
        self._next = 0  # position that is read next
        self._resumed = False  # nothing was read since the loader's own state was loaded
        self._live: frozenset[int] = frozenset()
        self._kept: dict[int, Any] = {}

    # ------------------------------------------------------------------ the order of batches of which only the number is known

    def take(self, count: int) -> list[None]:
        """Nothing is known of the next batches but their number."""
        self.position += count
        return [None] * count

    def seek(self, position: int) -> None:
        """Goes to the oldest position that will be asked for."""
        self.position = position
        if not self._resumed:
            self._next = self._pass_of(position)[1]

    def state(self, position: int) -> dict[str, Any]:
        """What a resumed run needs to read from ``position`` on: plain types where the loader's own state is."""
        state: dict[str, Any] = {}
        if self._length is None:
            state["passes"] = [list(entry) for entry in self._passes_from(position)]
        if position in self._states:
            state["loader"] = {"position": position, "state": pickle.loads(self._states[position])}
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Takes over a `state`; call `seek` next."""
        self._passes = [(number, first) for number, first in state.get("passes", [(0, 0)])]
        if self._is_stateful and "loader" in state:
            self._next, loaded = state["loader"]["position"], state["loader"]["state"]
            self._states[self._next] = pickle.dumps(loaded)
            self._pass = self._pass_of(self._next)[0]
            self._tell_pass()
            self._batches.load_state_dict(loaded)  # type: ignore[attr-defined]
            self._resumed = True

    def prune(self, position: int) -> None:
        """Forgets what only positions before ``position`` need."""
        self._passes = self._passes_from(position)
        for remembered in (self._states, self._kept):
            for earlier in [at for at in remembered if at < position]:
                del remembered[earlier]

    def _pass_of(self, position: int) -> tuple[int, int]:
        """Number and first position of the pass that a position belongs to, as far as is known."""
        if self._length is not None:
            number = position // self._length
            return number, number * self._length
        return next(entry for entry in reversed(self._passes) if entry[1] <= position)

    def _passes_from(self, position: int) -> list[tuple[int, int]]:
        return [entry for entry in self._passes if entry[0] >= self._pass_of(position)[0]]

    # ------------------------------------------------------------------ reading

    def expect(self, live: Iterable[int]) -> None:
        """Says which positions may be asked for after later ones."""
        self._live = frozenset(live)

    def read(self, position: int) -> tuple[Any, tuple[float, float, float]]:
        """The batch at a position, and no seconds: what the loader does in the background is not known.

        Raises:
            PassOver: The pass has ended before this position; asked again, it is the first of the next pass.
            RuntimeError: The loader ended before its length, or a pass had no batch at all.
        """
        if position in self._kept:
            return self._kept.pop(position), _NOTHING_KNOWN
        with preserved_random_states():
            while self._next < position:
                batch = self._read_next()
                if self._next - 1 in self._live:
                    self._kept[self._next - 1] = batch
            return self._read_next(), _NOTHING_KNOWN

    def close(self) -> None:
        """Lets go of the iteration, and of workers that the loader itself keeps, as Lightning does with loaders of its own.

        torchdata's loader and its iterator hold each other, so that workers would live on until both are garbage; collecting them
        then takes ten seconds, since their queues are gone before they can be told to end.
        """
        self._iterator = None
        inner = getattr(self._batches, "_iterator", None)
        if callable(shut_down := getattr(inner, "_shutdown_workers", None)):
            shut_down()
            self._batches._iterator = None  # type: ignore[attr-defined]

    def _read_next(self) -> Any:
        if self._next == 0 and not self._resumed:  # the order may have been drawn when the loader was made
            self._save_state()
        seed_all(mix(self._seed, self._next))
        number, first = self._pass_of(self._next)
        if self._iterator is None or number != self._pass:
            self._begin(number)
        assert self._iterator is not None
        batch = next(self._iterator, _END)
        if batch is _END and self._resumed and self._next == first:  # the state was that of a pass that had ended
            self._begin(number)
            batch = next(self._iterator, _END)
        self._resumed = False
        if batch is _END:
            self._end(number, first)
        self._next += 1
        self._save_state()
        return batch

    def _begin(self, number: int) -> None:
        if self._iterator is not None and self._is_stateful:
            next(self._iterator, _END)  # only then its state is that of a pass that has ended
        self._pass = number
        if not self._resumed or self._iterator is not None:
            self._tell_pass()
        self._iterator = iter(self._batches)

    def _end(self, number: int, first: int) -> None:
        self._iterator = None
        if self._length is not None:
            raise RuntimeError(
                f"the loader ended after {self._next - first} batches, but its length is {self._length}. Correct its __len__."
            )
        if self._next == first:
            raise RuntimeError(
                f"the loader yielded no batch in pass {number}: it must be iterable again in every pass, from its beginning"
            )
        self._passes.append((number + 1, self._next))
        self._save_state()
        raise PassOver

    def _tell_pass(self) -> None:
        """As Lightning tells samplers the epoch: it looks for them in what it is given, and does not find these."""
        batch_sampler = getattr(self._batches, "batch_sampler", None)
        samplers = getattr(self._batches, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
        for told in {id(each): each for each in (self._batches, *samplers)}.values():
            if callable(set_epoch := getattr(told, "set_epoch", None)):
                set_epoch(self._pass)

    def _save_state(self) -> None:
        if self._is_stateful:
            self._states[self._next] = pickle.dumps(self._batches.state_dict())  # type: ignore[attr-defined]
