"""Whole batches of any iterable, read pass after pass and used again: on the host or on the device."""

from __future__ import annotations

import pickle
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import fields, is_dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import get_sharing_strategy
from torch.utils.data import DataLoader

from lightning_echo.data.copies import copy_example
from lightning_echo.data.difference import LentBatch, rebuild, separate, tensors_in
from lightning_echo.data.objects import is_stateful
from lightning_echo.data.randomness import preserved_random_states, seed_all
from lightning_echo.pipeline.requests import BatchRequests, check_length, tell_pass
from lightning_echo.pipeline.worker import Report
from lightning_echo.plan.plan import mix

# ---------------------------------------------------------------------- passes
# `PassReader` reads a loader that is not rebuilt: any iterable of batches, pass after pass. Only its whole batches can be echoed.
#
# Positions count batches. A loader's length is the length of each pass. Without a length, a pass ends where its iteration ends,
# which only reading shows. A pass over a stream ends at its length, or earlier where its iteration ends. The reader is also the
# order that `BatchRequests` needs: which position belongs to which pass.
#
# A resumed run begins at the oldest live batch and reads forward from there, once: from the loader's own state if it has
# ``state_dict`` and ``load_state_dict`` (saved after each batch, kept as long as a later batch may be read again); else from the
# start of the pass, under the same seeds. A loader without a length can only begin with a new pass.

_END: Any = object()
_NOTHING_KNOWN = Report()


class PassOver(Exception):
    """A pass without a known length has ended. The position that was asked for becomes the first one of the next pass."""


class PassReader:
    """Reads a plain iterable of batches forward, and knows which position belongs to which pass.

    The random numbers that the iterable draws from the global random states depend only on seed and position, so a pass that is
    read again is the same. They are equal on all ranks, as under ``seed_everything``. ``is_estimate``: whether a pass may end
    before the length. With several workers and ``drop_last``, torch's length of a stream is too large: each worker drops its own
    rest.
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
        self.may_come_late: frozenset[int] = frozenset()  # positions that a resumed run may ask for after later ones
        self._read_early: dict[int, Any] = {}  # batches at such positions that were read, and not yet asked for

    # ------------------------------------------------------------------ an order: only the position of a batch is known

    def take(self, count: int) -> list[None]:
        """Returns None for each of the next ``count`` batches: their indices are not known."""
        self.position += count
        return [None] * count

    def seek(self, position: int) -> None:
        self.position = position
        if not self._is_resumed:
            self._next = self._pass_of(position)[1]

    def state(self, position: int) -> dict[str, Any]:
        """Returns the state for resuming at ``position``. Its types are plain if those of the loader's state are."""
        state: dict[str, Any] = {}
        if self._length is None:
            present = self._pass_of(position)[0]
            state["passes"] = [list(entry) for entry in self._passes if entry[0] >= present]
        if position in self._states:
            state["loader"] = {"position": position, "state": pickle.loads(self._states[position])}
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Loads a `state`. The next call must be `seek`."""
        self._passes = [(number, first) for number, first in state.get("passes", [(0, 0)])]
        if self._is_stateful and "loader" in state:
            self._next, loaded = state["loader"]["position"], state["loader"]["state"]
            self._states[self._next] = pickle.dumps(loaded)
            self._pass_number = self._pass_of(self._next)[0]
            self._tell_pass()
            self._batches.load_state_dict(loaded)  # type: ignore[attr-defined]
            self._is_resumed = True

    def prune(self, position: int) -> None:
        """Forgets the parts that only positions before ``position`` need."""
        present = self._pass_of(position)[0]
        self._passes = [entry for entry in self._passes if entry[0] >= present]
        for remembered in (self._states, self._read_early):
            for earlier in [at for at in remembered if at < position]:
                del remembered[earlier]

    def _pass_of(self, position: int) -> tuple[int, int]:
        if self._length is not None:
            number = position // self._length
            return number, number * self._length
        return next(entry for entry in reversed(self._passes) if entry[1] <= position)

    # ------------------------------------------------------------------ a reader

    def read(self, position: int) -> tuple[Any, Report]:
        """Returns the batch at a position, and an empty report; raises `PassOver` if the pass has ended before this position."""
        if position in self._read_early:
            return self._read_early.pop(position), _NOTHING_KNOWN
        with preserved_random_states():
            while self._next < position:
                batch = self._read_next()
                if self._next - 1 in self.may_come_late:
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
            self._iterator = None
            if self._next == first:
                raise RuntimeError(
                    f"the loader yielded no batch in pass {number}: it must be iterable again in every pass, from its beginning. "
                    "If it is an iterator, as DALI's, pass an object with a method that begins again: "
                    "def __iter__(self): it.reset(); yield from it"
                )
            if self._length is not None:
                raise RuntimeError(
                    f"the loader ended after {self._next - first} batches, but its length is {self._length}. Correct its "
                    "__len__. If its length counts examples, as that of torchrl's replay buffer, pass an object that has no "
                    "length: with def __iter__(self): yield from buffer"
                )
            self._passes.append((number + 1, self._next))
            self._save_state()
            raise PassOver
        self._next += 1
        if self._length is None and self._next - first == self._estimate:
            self._passes.append((number + 1, self._next))
        self._save_state()
        return batch

    def _begin(self, number: int, first: int) -> None:
        """Begins to iterate, under the seed of the first batch of the pass: a loader may draw the order of the pass here."""
        if self._iterator is not None and self._is_stateful:
            next(self._iterator, _END)  # only after this, the loader's state shows that the pass has ended
        self._pass_number = number
        if not self._is_resumed or self._iterator is not None:  # a resumed loader was told before its state was loaded
            self._tell_pass()
            if self._length is not None and isinstance(self._batches, Sized):
                check_length(len(self._batches), self._length, number)
        seed_all(mix(self._seed, first))
        if self._next == 0 and not self._is_resumed:  # the order may have been drawn when the loader was made, or is drawn now
            self._save_state()
        batches = self._batches
        self._iterator = iter(batches)
        # A torch loader may draw the order of the pass with its first batch. Any other loader with a state may draw more numbers
        # when it resumes than when it begins.
        is_within = self._next != first or (self._is_stateful and not isinstance(batches, DataLoader))
        # Without workers, and if the user's batch sampler saves no state, torchdata's loader draws the order of a pass only with
        # the first batch that is read from a state. The random numbers of that batch then differ from those of a run that was
        # not killed.
        draws_order_late = getattr(batches, "num_workers", None) == 0 and getattr(batches, "batch_size", 0) is None
        if is_within and not draws_order_late:
            seed_all(mix(self._seed, self._next))

    def _tell_pass(self) -> None:
        """Gives the pass to the loader and its samplers: Lightning does not find the samplers inside an `EchoLoader`."""
        batch_sampler = getattr(self._batches, "batch_sampler", None)
        samplers = getattr(self._batches, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
        tell_pass(self._pass_number, self._batches, *samplers)

    def _save_state(self) -> None:
        if self._is_stateful:
            self._states[self._next] = pickle.dumps(self._batches.state_dict())  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- batches
# Whole batches, used again. The plan names the batch of each step; a batch with uses left is held here:
#
# * **On the host** (``after_batching``): the first use is the batch as read, and a copy is held, because the loader may use its
#   memory again. A further use is a copy of the held batch, because the training step may edit its batch. The last use is the
#   held batch itself. A thread that fetches ahead does the copying.
# * **On the device** (``after_transfer``): the training gets a `BatchUse`. It contains the same `LiveBatch` for all uses, and the
#   host batch until that is prepared. At the transfer it becomes a batch::
#
#       BatchUse --prepare--> the host batch, changed once    on_before_batch_transfer
#                --transfer-> the device batch, moved once    transfer_batch_to_device
#                ----------> aliases of it, for each use      on_after_batch_transfer, then the step
#
#   After the last use, nothing here refers to the `LiveBatch`, and its device memory is free.

_DESCRIPTORS_SHARE = 4  # live batches keep at most a fourth of the files open that a process may have open


class BatchEcho(Iterator[tuple[Any, Report]]):
    """Yields delivered batches, each with its report: its counts of examples and, if it was read, the seconds of reading.

    ``source`` yields the batches that are read, in the order of ``requests``, or is asked for their positions. Its report has no
    seconds if they are unknown. If the batches are live on the device, each use of one is a `UseToCome`. ``are_owned``: whether
    no other code uses the memory of the batches that are read. Then live batches are not copied, unless they would keep too many
    files open.
    """

    def __init__(
        self,
        requests: BatchRequests,
        source: Iterator[tuple[Any, Report]] | PassReader,
        *,
        on_device: bool = False,
        are_owned: bool = False,
    ) -> None:
        self._requests, self._on_device, self._are_owned = requests, on_device, are_owned
        self._batches: Iterator[tuple[Any, Report]] = source if isinstance(source, Iterator) else iter(())
        self._reader = None if isinstance(source, Iterator) else source
        self._held: dict[int, tuple[Any, int]] = {}  # by position: the held batch, and its number of examples

    def __next__(self) -> tuple[Any, Report]:
        step = self._requests.step()
        for position in step.forget:
            self._held.pop(position, None)
        is_last = not step.stays_live
        if step.is_read:
            try:
                batch, cost = next(self._batches) if self._reader is None else self._reader.read(step.position)
            except PassOver:  # the batch of this step is the first one of the next pass
                self._requests.put_back(step)
                raise
            size = step.size if step.size >= 0 else count_examples(batch)
            if self._on_device:
                held: Any = LiveBatch(batch if is_last or self._may_hold(batch) else copy_example(batch))
            else:
                held = None if is_last else copy_example(batch)
            fresh, echoed, refetched = (size, 0, 0) if step.is_fresh else (0, size, size)
            lookups = (cost.hits, cost.misses, cost.received) if step.is_fresh else (0, 0, 0)
            report = Report(fresh, echoed, refetched, cost.source, cost.rest, cost.collate, cost.note, *lookups, cost.waited)
        else:
            held, size = self._held[step.position]
            batch = held if self._on_device or is_last else copy_example(held)
            report = Report(0, size)
        if is_last:
            self._held.pop(step.position, None)
        else:
            self._held[step.position] = held, size
        return (UseToCome(held, is_last) if self._on_device else batch), report

    def _may_hold(self, batch: Any) -> bool:
        """Returns whether one more batch like this may be held as it came from a worker: with an open file for each tensor."""
        if not self._are_owned:
            return False
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most == resource.RLIM_INFINITY or get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]
            return True
        return (len(self._held) + 1) * sum(map(_is_shared, tensors_in(batch))) <= most // _DESCRIPTORS_SHARE


def _is_shared(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor of the host is in memory that it shares with another process."""
    try:
        return tensor.device.type == "cpu" and bool(tensor.is_shared())  # type: ignore[no-untyped-call]
    except Exception:  # a class without memory of its own
        return False


# ---------------------------------------------------------------------- on the device


class UseToCome:
    """A use of a live batch that was fetched ahead.

    The thread that fetches refers to this object for a while after the training has got the use. So `hand_out` drops the batch:
    after the last use, its device memory is free as soon as the step has dropped it.
    """

    __slots__ = ("_is_last", "_live")

    def __init__(self, live: LiveBatch, is_last: bool) -> None:
        self._live: LiveBatch | None = live
        self._is_last = is_last

    def hand_out(self) -> BatchUse:
        """Returns the use. It may be called only once."""
        live, self._live = self._live, None
        assert live is not None
        return live.use(self._is_last)


class BatchUse(NamedTuple):
    """One use of a live batch. ``host`` is the batch as it was read; None after the live batch is prepared.

    It is a named tuple, because a precision plugin of Lightning's converts the tensors in the loader's output. The plugin
    rebuilds tuples, and so finds the host batch. It does not look into a `LiveBatch`.
    """

    live: LiveBatch
    host: Any
    is_last: bool


class LiveBatch:
    """A live batch: first on the host and, from its transfer on, on the device.

    >>> live = LiveBatch([1.0])
    >>> for is_last in (False, True):
    ...     use = live.use(is_last)
    ...     live.prepare(use.host, lambda batch: [*batch, 2.0])
    ...     print(use.host, live.transfer(tuple, is_last=use.is_last))
    [1.0] (1.0, 2.0)
    None (1.0, 2.0)
    """

    __slots__ = ("_device", "_host", "_is_prepared")

    def __init__(self, host: Any) -> None:
        self._host, self._is_prepared = host, False
        self._device: LentBatch | None = None

    def use(self, is_last: bool) -> BatchUse:
        """Returns a use, when the training gets it. If the training drops it, the next use contains the host batch."""
        return BatchUse(self, None if self._is_prepared else self._host, is_last)

    def prepare(self, host: Any, change: Callable[[Any], Any]) -> None:
        """Applies ``change`` to the host batch, at the first use only."""
        if not self._is_prepared:
            self._host, self._is_prepared = change(host), True

    @property
    def nbytes(self) -> int:
        return 0 if self._device is None else self._device.nbytes

    def let_go_if_edited(self) -> bool:
        """Drops a device batch that was edited in place, so that `transfer` moves the host batch; returns whether it was."""
        is_edited = self._device is not None and self._device.is_edited()
        if is_edited:
            self._device = None
        return is_edited

    def transfer(self, move: Callable[[Any], Any], *, is_last: bool) -> Any:
        """Returns the batch on the device; calls ``move`` only if there is no device batch yet. The last use keeps nothing."""
        host, device = self._host, self._device
        if is_last:
            self._host = self._device = None
            return move(host) if device is None else device.batch
        if device is None:
            device = self._device = LentBatch(move(rebuild(host)))
            self._host = separate(host, device)  # if the device is the host, an edit would reach both batches
        return device.hand_out()


# ---------------------------------------------------------------------- counting


_STATES_NOTHING = (list, tuple, dict, str, bytes, type(None))  # any other object may state its number of examples


def count_examples(batch: Any) -> int:
    size = size_of(batch)
    return 1 if size is None else size


def size_of(batch: Any) -> int | None:
    """Returns the number of examples in a batch of unknown form; None if the batch raises an error: counting may end no training.

    The first of these rules that fits decides:

    1. For a tensor, it is the size of the first dimension.
    2. An object may have the number as ``batch_size`` (PyTorch Geometric, DGL, TensorDict; for a graph with several types of
       nodes, the sum over the types that have one), else as ``num_nodes``.
    3. Several lists or tuples of the same length, side by side (``zip(*examples)``), have one example at each place.
    4. In a mapping, it is the common length of the lists and tuples, if a tensor has it, too: what cannot be stacked is
       listed once per example, while a tensor of boxes has a row for each box (Ultralytics).
    5. The first tensor inside counts as in rule 1, or an object before it that has a ``batch_size``.
    6. For a list or tuple, it is the length.
    7. Anything else is one example.
    """
    try:
        return _size_of(batch)
    except Exception:  # the batch's own code: a property, a lazy member, a mapping
        return None


def _size_of(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):  # first, since asking for a Mapping costs more than all the rest
        return len(batch) if batch.ndim else 1
    if not isinstance(batch, _STATES_NOTHING):
        stated = _stated_by(batch)
        stated = _size_in(batch, "num_nodes") if stated is None else stated
        if stated is not None:
            return stated
    if isinstance(batch, Mapping):
        batch = list(batch.values())
        lengths = {len(member) for member in batch if isinstance(member, list | tuple)}
        if len(lengths) == 1:
            (length,) = lengths
            if any(isinstance(member, torch.Tensor) and member.shape[:1] == (length,) for member in batch):
                return length
    is_sequence = isinstance(batch, list | tuple) and len(batch) > 0
    if is_sequence and len(batch) > 1 and all(isinstance(part, list | tuple) and part for part in batch):
        lengths = {len(part) for part in batch}
        if len(lengths) == 1:
            return lengths.pop()
    found = _first_size(batch)
    if found is not None:
        return found
    return len(batch) if is_sequence else 1


def _stated_by(batch: Any) -> int | None:
    """Returns the number of examples that an object states; None if it states none."""
    if (size := _size_in(batch, "batch_size")) is not None:
        return size
    stores = getattr(batch, "node_stores", None)  # of a graph with nodes of several types
    if isinstance(stores, list):
        sizes = [size for store in stores if (size := _size_in(store, "batch_size")) is not None]
        if sizes:
            return sum(sizes)
    return None


def _size_in(batch: Any, name: str) -> int | None:
    value = getattr(batch, name, None)
    if isinstance(value, torch.Size):
        return value[0] if value else None
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def _first_size(batch: Any) -> int | None:
    """Returns the number of examples by the first tensor, or the first object that states it; None if there is neither."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, list | tuple):
        parts: Iterable[Any] = batch
    else:
        if not isinstance(batch, _STATES_NOTHING) and (stated := _stated_by(batch)) is not None:
            return stated
        if isinstance(batch, Mapping):
            parts = batch.values()
        elif is_dataclass(batch) and not isinstance(batch, type):
            held = getattr(batch, "__dict__", {})
            slots = [each.name for each in fields(batch) if each.name not in held and hasattr(batch, each.name)]
            parts = [*held.values(), *(getattr(batch, name) for name in slots)]
        else:
            parts = ()
    return next((found for part in parts if (found := _first_size(part)) is not None), None)
