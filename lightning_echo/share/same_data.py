"""Whether two trainings that give the same name have the same data, and how a loader's parts are sent to a reader."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import json
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
import torch
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_echo.cache.reads import Keys, NoKeysError
from lightning_echo.cache.record import digest_of
from lightning_echo.data.contents import TRAINED, digest_of_texts
from lightning_echo.data.copies import throw_away_copy
from lightning_echo.data.elsewhere import NotRead, read_elsewhere
from lightning_echo.data.fingerprint import LOADED_LATER, Fingerprint, fingerprint
from lightning_echo.data.objects import is_of_lightning
from lightning_echo.data.randomness import preserved_random_states, seed_all
from lightning_echo.log import LOGGER
from lightning_echo.pipeline.kinds import Indexed, Kind, OwnBatches, Stream
from lightning_echo.pipeline.requests import draws_by_itself, tell_pass
from lightning_echo.plan.plan import mix
from lightning_echo.share.parts import base_of, part_of
from lightning_echo.share.window import CHUNK
from lightning_echo.split.staged import read_batch, sample_places

# ---------------------------------------------------------------------- by value
# Classes and functions of a script are sent to other processes by value. A reader starts with another main module than the
# training. So pickle finds nothing of the training's script there, and neither do the reader's own workers, if they are spawned
# (``spawn``, ``forkserver``). cloudpickle sends their code.


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # has no type hints
    """Also sends functions of a script that have a cache (``functools.lru_cache``). There, the cache is empty."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is functools._lru_cache_wrapper and value.__module__ in ("__main__", "__mp_main__"):
            return _cached_again, (value.__wrapped__, value.cache_parameters())
        return super().reducer_override(value)


class _SpawnPickler(_Pickler):
    """Also sends objects that multiprocessing can send to a process that it spawns: queues, locks, shared memory."""

    def __init__(self, file: Any) -> None:
        self.dispatch_table = ChainMap(dict(ForkingPickler(file).dispatch_table), cloudpickle.Pickler.dispatch_table)
        super().__init__(file)


def dumped(value: Any, pickler: type[_Pickler] = _Pickler) -> bytes:
    with io.BytesIO() as target:
        pickler(target).dump(value)
        return target.getvalue()


def _cached_again(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    return functools.lru_cache(**options)(function)


@dataclass
class _Call:
    """A call of a function in another process."""

    function: Callable[..., object]
    args: tuple[Any, ...]

    def __call__(self) -> None:
        self.function(*self.args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _call_from, (dumped((self.function, self.args), _SpawnPickler),)


def _call_from(data: bytes) -> _Call:
    return _Call(*cloudpickle.loads(data))


def sending_by_value(context: BaseContext) -> BaseContext:
    """Returns a copy of a multiprocessing context whose processes get their arguments by value, all of them together."""
    make: Any = context.Process  # type: ignore[attr-defined]  # each of its subclasses has one

    def process(*, target: Callable[..., object], args: tuple[Any, ...] = ()) -> Any:
        return make(target=_Call(target, args))

    sending = copy.copy(context)
    vars(sending)["Process"] = process
    return sending


# ---------------------------------------------------------------------- loader parts
# The parts of a training's loader that a reader needs to put it together again. They depend on what is shared (`unit_of`):
#
# * Data that is read by index: examples. Each reader has them in the same order, and can begin at any item. A training that reads
#   a part sends the base (``parts.py``).
# * A stream: examples, in the order in which the workers yield them. A reader can only begin at the start of a pass.
# * A loader with a batch sampler of its own: the examples of each batch. Each training collates them itself.
# * Any other loader, which makes its batches itself: whole batches.
#
# Not among the parts are pinning; ``timeout``, since the workers wait for trainings; and, if the reader makes no batches, batch
# size, collate function and ``drop_last``.


class Unit(Enum):
    """The kind of an item of the reader's stream."""

    indexed = "an example that is read by its index"  # the only unit of which each reader gives the same item at the same place
    streamed = "an example of a stream"
    examples_of_batch = "the examples of a batch"
    batch = "a batch"


def unit_of(kind: Kind) -> Unit:
    if isinstance(kind, Stream):
        return Unit.streamed
    if isinstance(kind, OwnBatches):
        return Unit.examples_of_batch
    return Unit.indexed if isinstance(kind, Indexed) else Unit.batch


def why_not_elsewhere(kind: Kind, ranks: int = 1) -> str:
    """Returns why workers on other machines cannot read a loader's examples; empty if they can.

    With several ``ranks``, a ``DistributedSampler`` is taken for Lightning's. A loader that shares does not get one.
    """
    is_divided_later = ranks > 1 and isinstance(getattr(kind.loader, "sampler", None), DistributedSampler)
    if kind.shards_itself and not is_divided_later:
        return "its sampler divides the data among ranks itself"
    unit = unit_of(kind)
    return "" if unit is Unit.indexed else f"no other machine could continue within a pass, since what is shared is {unit.value}"


def parts_of(kind: Kind) -> dict[str, Any]:
    loader, unit = kind.loader, unit_of(kind)
    is_plain = (  # torch's own loader without batches: another one with the same options does the same
        isinstance(loader, DataLoader)
        and loader.batch_sampler is None
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
    )
    if unit is Unit.batch and not is_plain:
        return {"loader": loader}
    context, part = loader.multiprocessing_context, part_of(kind)
    parts = {
        "dataset": loader.dataset if part is None else part.base,
        "num_workers": max(loader.num_workers, 1),
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": None if context is None else context.get_start_method(),
    }
    if part is not None:
        parts["sampler"] = RandomSampler(part.base)  # as of a training that reads all
    elif unit is Unit.indexed:
        sampler = parts["sampler"] = copy.copy(kind.sampler)
        if draws_by_itself(sampler) and getattr(sampler, "generator", None) is not None:
            sampler.generator = None  # the reader gives it one that follows from the name
    elif unit is Unit.examples_of_batch:
        parts["batch_sampler"] = kind.sampler
    elif unit is Unit.batch:
        sampler = None if kind.reads_stream else loader.sampler
        parts |= {"batch_size": None, "sampler": sampler, "collate_fn": loader.collate_fn, "generator": loader.generator}
    return parts


def loader_of(parts: dict[str, Any], seed: int) -> Any:
    """Returns a loader of these parts. ``seed`` is that of the sampler's random numbers."""
    if "loader" in parts:
        return parts["loader"]
    if "batch_size" in parts or "batch_sampler" in parts:
        return DataLoader(**parts)
    sampler = parts.get("sampler")  # none for a stream
    if sampler is not None and not draws_by_itself(sampler):
        sampler = ReplayedSampler(sampler, parts["dataset"], seed)
    return DataLoader(**{**parts, "sampler": sampler, "batch_size": CHUNK})


class ReplayedSampler:
    """A sampler of the user's. Each reader gets the same order for each pass, even if the sampler remembers earlier passes.

    A training sends a sampler that was not iterated yet. If a pass begins that does not follow the one before, the sampler starts
    again and yields all passes before it. This reads no data. ``dataset`` is the one that the sampler refers to: it is not
    copied.
    """

    def __init__(self, sampler: Any, dataset: Any, seed: int) -> None:
        self._untouched, self._dataset, self._seed = sampler, dataset, seed
        self._sampler: Any = None
        self._number = self._next = 0

    def __len__(self) -> int:
        return len(self._untouched)

    def set_epoch(self, number: int) -> None:
        self._number = number

    def __iter__(self) -> Iterator[Any]:
        if self._sampler is None or self._next != self._number:
            self._sampler = copy.deepcopy(self._untouched, {id(self._dataset): self._dataset})
            generator = getattr(self._sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(mix(self._seed, 0))
            for number in range(self._number):
                deque(islice(self._begin(number), 2 * len(self)), maxlen=0)  # more items than it has, so that its iteration ends
        self._next = self._number + 1
        return self._begin(self._number)

    def _begin(self, number: int) -> Iterator[Any]:
        seed_all(mix(self._seed, number))
        tell_pass(number, self._sampler)
        return iter(self._sampler)


# ---------------------------------------------------------------------- same data
# Trainings that give the same name must have the same data. Compared are:
#
# * The fingerprint of all parts of the loader that the reader gets (`parts_of`): their contents, and their code.
# * If the data is read by index: up to eight examples, spread over the data and read under fixed seeds. Their bytes show other
#   files. They are read in a process that ends, with one thread of torch. An example that differs when it is read again is not
#   compared.
#
# * The options of the cache, since the reader has one for all. It decides no example.
#
# Names in ``ShareConfig(ignore=...)`` are not compared. Neither are workers, pinning and all other options of the training; nor
# batch size, collate function and ``drop_last``, unless whole batches are shared.

_NAME, _IGNORE, _REST, CACHE = "data set", "ignored", "the rest", "cache"
_OF_CODE, _EXAMPLE = "@", "example "  # begin the names of texts
_NOT_COMPARED = ("num_workers", "multiprocessing_context", "generator")
_MOST_BYTES = 40_000  # in one message


def fingerprint_of(kind: Kind, ignore: Sequence[str] = (), cache: str = "none") -> dict[str, str]:
    """Returns the compared facts of a loader's data, as texts by name, without the attributes to ``ignore``.

    ``cache``: the options of the reader's cache, in words.
    """
    unit = unit_of(kind)
    found = fingerprint(_compared(parts_of(kind)), [*ignore, *(("batch_size",) if unit is Unit.batch else ())])
    return {
        _NAME: _data_sets(kind),
        CACHE: cache,
        **found.held,
        **{f"{_OF_CODE}{name}": text for name, text in found.code.items()},
        **(_examples(kind) if unit is Unit.indexed else {}),
        **({_IGNORE: json.dumps(list(ignore))} if ignore else {}),
    }


def difference(here: dict[str, str], there: dict[str, str]) -> str:
    """Returns what differs between the `fingerprint_of` the training's and the reader's data, in words; empty if nothing differs.

    >>> difference({"data set": "Images of 10", "dataset.p": "0.1"}, {"data set": "Images of 10", "dataset.p": "0.25"})
    'dataset.p: 0.1 and 0.25'
    """
    ignore = [name for each in (here, there) for name in json.loads(each.get(_IGNORE, "[]"))]
    if found := _fingerprint_in(here).difference(_fingerprint_in(there), ignore):
        return found
    for name in here:
        if name.startswith(_EXAMPLE) and here[name] != there.get(name, here[name]):
            return f"{name} is another one, read under the same seeds"
    if here.get(_REST) != there.get(_REST):
        return "something that is too long to be named"
    if here.get(CACHE) != there.get(CACHE):
        return f"{CACHE}: {here.get(CACHE)} and {there.get(CACHE)}"
    return "" if here[_NAME] == there[_NAME] else f"{_NAME}: {here[_NAME]} and {there[_NAME]}"


def changed_since(kind: Kind, ignore: Sequence[str], data_fingerprint: dict[str, str]) -> str:
    """Returns what of the values of a loader's data was set since a `fingerprint_of` them, in words; empty if nothing was."""
    now = fingerprint(_compared(parts_of(kind)), ignore).held
    if found := Fingerprint(_fingerprint_in(data_fingerprint).held, {}).difference(Fingerprint(now, {}), ignore):
        return found
    before, after = data_fingerprint[_NAME], _data_sets(kind)
    return "" if before == after else f"{_NAME}: {before} and {after}"


def in_short(data_fingerprint: dict[str, str]) -> dict[str, str]:
    """Returns a print that fits into a message. Texts beyond that are only compared as a whole."""
    short: dict[str, str] = {}
    size = 0
    left: list[str] = []
    for name, text in sorted(data_fingerprint.items(), key=lambda item: item[0] not in (_NAME, _IGNORE, CACHE)):
        size += len(json.dumps([name, text]))
        if size <= _MOST_BYTES:
            short[name] = text
        else:
            left += name, text
    return {**short, _REST: digest_of_texts(left)} if left else short


def difference_of_code(sent: dict[str, str], parts: dict[str, Any]) -> str:
    """Returns how the code of this process differs from that of the training whose print was ``sent``; empty if it does not."""
    ignore = json.loads(sent.get(_IGNORE, "[]"))
    there = _fingerprint_in(sent).code
    for name in there:
        if name.startswith(LOADED_LATER):
            with suppress(Exception):  # a module may raise anything: the data set gets it when it reads
                importlib.import_module(name.removeprefix(LOADED_LATER))
    return Fingerprint({}, there).difference(Fingerprint({}, fingerprint(_compared(parts), ignore).code))


def another_example(dataset: Any, data_fingerprint: dict[str, str]) -> str:
    """Returns which example of this process's copy of the data is another one than in a `fingerprint_of`; empty if none is.

    It reads the examples of that print whose index is a number, and raises their errors.
    """
    known = {name.removeprefix(_EXAMPLE): text for name, text in data_fingerprint.items() if name.startswith(_EXAMPLE)}
    chosen = [int(index) for index in known if index.isdecimal()]
    for index, digest in zip(chosen, _digests(dataset, chosen, False), strict=True):
        if digest and digest != known[str(index)]:
            return f"{_EXAMPLE}{index} is another one there, read under the same seeds"
    return ""


def trained_parts(data_fingerprint: dict[str, str]) -> list[str]:
    """Returns the paths of weights that the training may change, which the reader would not see."""
    return [name for name, text in data_fingerprint.items() if TRAINED in text]


def _fingerprint_in(data_fingerprint: dict[str, str]) -> Fingerprint:
    code = {name[len(_OF_CODE) :]: text for name, text in data_fingerprint.items() if name.startswith(_OF_CODE)}
    others = (_NAME, _IGNORE, _REST, CACHE)
    held = {
        name: text for name, text in data_fingerprint.items() if not name.startswith((_OF_CODE, _EXAMPLE)) and name not in others
    }
    return Fingerprint(held, code)


def _compared(parts: dict[str, Any]) -> dict[str, Any]:
    kept = {name: part for name, part in parts.items() if name not in _NOT_COMPARED}
    if is_of_lightning(kept.get("worker_init_fn")):
        del kept["worker_init_fn"]  # it has the rank in it, and examples are seeded by the reader
    return kept


def _data_sets(kind: Kind) -> str:
    part = part_of(kind)
    dataset = getattr(kind.loader, "dataset", None) if part is None else part.base
    if not isinstance(kind, Indexed):
        return " over ".join(type(each).__name__ for each in (kind.loader, dataset) if each is not None)
    try:
        return ", ".join(f"{name} of {length:,}" for name, length in Keys(dataset).parts)[:1000]
    except NoKeysError:
        return type(dataset).__name__


def _examples(kind: Kind) -> dict[str, str]:
    """Returns digests of some examples; none if it is not known which indices can be read."""
    if kind.readable_index is None:
        return {}
    indices, part = kind.readable_indices, part_of(kind)
    at = indices if part is None and indices is not None else range(len(kind.loader.dataset if part is None else part.base))
    chosen = [at[place] for place in sample_places(len(at))]
    found = read_elsewhere(kind.loader, _digests, chosen, part is not None)
    if isinstance(found, NotRead):
        LOGGER.info("examples are not compared with those of other trainings: %s", found.reason)
        return {}
    return {f"{_EXAMPLE}{index}": digest for index, digest in zip(chosen, found, strict=True) if digest}


def _digests(dataset: Any, indices: Iterable[Any], of_base: bool) -> list[str]:
    """Returns a digest of each example; an empty text for one that differs when it is read again at once.

    ``of_base``: whether these are indices of the data set under all subsets. There, an example that cannot be read has an empty
    text, too: that may be why the subsets leave it out.
    """
    dataset = base_of(dataset) if of_base else dataset
    dataset = throw_away_copy(dataset)  # this may be the training's process, where no other can be forked
    found = []
    with preserved_random_states():
        for index in indices:
            digests = set()
            with suppress(Exception) if of_base else nullcontext():
                for _ in range(2):
                    seed_all(0)
                    digests.add(digest_of(read_batch(dataset, [index])).hex())
            found.append(digests.pop() if len(digests) == 1 else "")
    return found
