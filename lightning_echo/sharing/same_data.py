"""Whether two trainings that give the same name have the same data: what is compared, and what differs.

If the data is read by index, this is compared:

* the chain of data sets: names and lengths,
* the sampler: class and plain options,
* two examples, read under fixed seeds. Their bytes show other transforms and other files. An example that differs each time it is
  read is not compared.

For all other data, classes and plain options are compared, and nothing is read.

Batch size, collate function, ``drop_last``, workers, pinning and all other options of the training are not compared.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from torch.utils.data import DataLoader

from lightning_echo.caching.keys import Keys, NoKeysError
from lightning_echo.caching.record import digest_of
from lightning_echo.fetching.source import Source
from lightning_echo.protecting.randomness import DrawingTrap, preserved_random_states
from lightning_echo.splitting.prove import read_plainly

__all__ = ["difference", "print_of"]

_MOST_TEXT = 1000  # characters
_PLAIN = (bool, int, float, str, type(None))
_NOT_COMPARED = ("generator", "data_source")
_CERTAIN = 5  # readings that must be equal if another thread may draw from the random states now and then
_LISTENING_SECONDS = 0.05  # a thread that draws all the time is noticed in this time
_READING = threading.Lock()  # trainings in threads of a process must not seed its random states at the same time


def print_of(source: Source) -> dict[str, str]:
    """Returns what is compared of a loader's data, as texts by name."""
    if not source.rebuilds:
        loader = source.loader
        dataset = getattr(loader, "dataset", None)
        kinds = [f"{type(each).__name__}({_options(each, 'batch_size')})" for each in (loader, dataset) if each is not None]
        return {"data set": " over ".join(kinds)[:_MOST_TEXT]}
    return {
        "data set": _data_sets(source.loader.dataset)[:_MOST_TEXT],
        "sampler": _sampler(source)[:_MOST_TEXT],
        "examples": _examples(source),
    }


def difference(here: dict[str, str], there: dict[str, str]) -> str:
    """Returns what differs, in words; empty if nothing differs.

    Args:
        here: The `print_of` the training's data.
        there: The `print_of` the reader's data.

    Example:
        >>> difference({"data set": "Images of 10"}, {"data set": "Images of 20"})
        'its data set is [Images of 10], and that of the reader is [Images of 20]'
    """
    for name, found in here.items():
        if found and there.get(name) and found != there[name]:
            if name == "examples":
                return "its examples are others than those of the reader, read at the same indices under the same seeds"
            return f"its {name} is [{found}], and that of the reader is [{there[name]}]"
    return ""


def _data_sets(dataset: Any) -> str:
    try:
        return ", ".join(f"{name} of {length:,}" for name, length in Keys(dataset).parts)
    except NoKeysError:
        return type(dataset).__name__


def _sampler(source: Source) -> str:
    sampler = source.sampler
    return f"{type(sampler).__name__}({_options(sampler)}) of {len(sampler):,}"


def _options(thing: Any, *left_out: str) -> str:
    """Returns the plain attributes of an object as text; empty for a ``DataLoader``, since each training chooses its options."""
    if isinstance(thing, DataLoader):
        return ""
    plain = {
        name: value
        for name, value in getattr(thing, "__dict__", {}).items()
        if isinstance(value, _PLAIN) and name.strip("_") not in (*_NOT_COMPARED, *left_out)
    }
    return ", ".join(f"{name.strip('_')}={value!r}" for name, value in sorted(plain.items()))


def _examples(source: Source) -> str:
    """Returns a digest of two examples; empty if none can be read here, or if they differ when they are read again."""
    first = source.readable_index
    if first is None or source.prepared_in_workers:
        return ""
    dataset, indices = source.loader.dataset, source.readable_indices
    last = indices[-1] if indices is not None else len(source.sampler) - 1
    with _READING:
        others = threading.active_count() > 1
        if others and _others_draw():
            return ""
        found = {digest_of(read_plainly(dataset, [first, last]).examples) for _ in range(_CERTAIN if others else 2)}
    return found.pop().hex() if len(found) == 1 else ""


def _others_draw() -> bool:
    """Returns whether another thread draws from the random states all the time, so that it may do so during each reading."""
    with preserved_random_states():
        trap = DrawingTrap()
        trap.set()
        time.sleep(_LISTENING_SECONDS)
        return bool(trap.drawn_from())
