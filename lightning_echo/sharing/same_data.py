"""Whether two trainings that give the same name have the same data: what is compared, and what differs.

* The fingerprint of all parts of the loader that the reader gets (``loader_parts.py``): what they hold, and their code.
* If the data is read by index: up to eight examples, spread over the data and read under fixed seeds. Their bytes show other
  files. They are read in a process that ends, with one thread of torch. An example that differs when it is read again is not
  compared.

What the user names in ``ShareConfig(ignore=...)`` is not compared. Neither are workers, pinning and all other options of the
training; nor batch size, collate function and ``drop_last``, unless whole batches are shared.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from lightning_echo.caching.keys import Keys, NoKeysError
from lightning_echo.caching.node_cache import sample_places
from lightning_echo.caching.record import digest_of
from lightning_echo.fetching.source import Source
from lightning_echo.log import LOGGER
from lightning_echo.protecting.copies import throw_away_copy
from lightning_echo.protecting.elsewhere import NotRead, read_elsewhere
from lightning_echo.protecting.fingerprints.code import LOADED_LATER
from lightning_echo.protecting.fingerprints.contents import TRAINED, digest_of_texts
from lightning_echo.protecting.fingerprints.fingerprint import Fingerprint, fingerprint
from lightning_echo.protecting.objects import is_of_lightning
from lightning_echo.protecting.randomness import preserved_random_states, seed_all
from lightning_echo.sharing.reader.loader_parts import Unit, parts_of, unit_of
from lightning_echo.splitting.staged import read_batch

__all__ = ["difference", "difference_of_code", "in_short", "print_of", "trained_parts"]

_NAME, _IGNORE, _REST = "data set", "ignored", "the rest"
_OF_CODE, _EXAMPLE = "@", "example "  # begin the names of texts
_NOT_COMPARED = ("num_workers", "multiprocessing_context", "generator")
_MOST_BYTES = 40_000  # of what is sent in one message


def print_of(source: Source, ignore: Sequence[str] = ()) -> dict[str, str]:
    """Returns what is compared of a loader's data, as texts by name.

    Args:
        source: The loader.
        ignore: Names of attributes that are not compared.
    """
    unit = unit_of(source)
    found = fingerprint(_compared(parts_of(source)), [*ignore, *(("batch_size",) if unit is Unit.batch else ())])
    return {
        _NAME: _data_sets(source),
        **found.held,
        **{f"{_OF_CODE}{name}": text for name, text in found.code.items()},
        **(_examples(source) if unit is Unit.indexed else {}),
        **({_IGNORE: json.dumps(list(ignore))} if ignore else {}),
    }


def difference(here: dict[str, str], there: dict[str, str]) -> str:
    """Returns what differs, in words; empty if nothing differs.

    Args:
        here: The `print_of` the training's data.
        there: The `print_of` the reader's data.

    Example:
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
    return "" if here[_NAME] == there[_NAME] else f"{_NAME}: {here[_NAME]} and {there[_NAME]}"


def in_short(data_print: dict[str, str]) -> dict[str, str]:
    """Returns a print that fits into a message. What is too long is only compared as a whole."""
    short: dict[str, str] = {}
    size = 0
    left: list[str] = []
    for name, text in sorted(data_print.items(), key=lambda item: item[0] not in (_NAME, _IGNORE)):
        size += len(json.dumps([name, text]))
        if size <= _MOST_BYTES:
            short[name] = text
        else:
            left += name, text
    return {**short, _REST: digest_of_texts(left)} if left else short


def difference_of_code(sent: dict[str, str], parts: dict[str, Any]) -> str:
    """Returns how the code of this process differs from that of the training that has sent its loader; empty if it does not.

    Args:
        sent: The `print_of` the training's data.
        parts: The parts of the loader that have come.
    """
    ignore = json.loads(sent.get(_IGNORE, "[]"))
    there = _fingerprint_in(sent).code
    for name in there:
        if name.startswith(LOADED_LATER):
            with suppress(Exception):  # a module may raise anything: the data set gets it when it reads
                importlib.import_module(name.removeprefix(LOADED_LATER))
    return Fingerprint({}, there).difference(Fingerprint({}, fingerprint(_compared(parts), ignore).code))


def trained_parts(data_print: dict[str, str]) -> list[str]:
    """Returns the paths of weights that the training may change, which the reader would not see."""
    return [name for name, text in data_print.items() if TRAINED in text]


def _fingerprint_in(data_print: dict[str, str]) -> Fingerprint:
    code = {name[len(_OF_CODE) :]: text for name, text in data_print.items() if name.startswith(_OF_CODE)}
    others = (_NAME, _IGNORE, _REST)
    held = {name: text for name, text in data_print.items() if not name.startswith((_OF_CODE, _EXAMPLE)) and name not in others}
    return Fingerprint(held, code)


def _compared(parts: dict[str, Any]) -> dict[str, Any]:
    kept = {name: part for name, part in parts.items() if name not in _NOT_COMPARED}
    if is_of_lightning(kept.get("worker_init_fn")):
        del kept["worker_init_fn"]  # it has the rank in it, and examples are seeded by the reader
    return kept


def _data_sets(source: Source) -> str:
    dataset = getattr(source.loader, "dataset", None)
    if not source.rebuilds:
        return " over ".join(type(each).__name__ for each in (source.loader, dataset) if each is not None)
    try:
        return ", ".join(f"{name} of {length:,}" for name, length in Keys(dataset).parts)[:1000]
    except NoKeysError:
        return type(dataset).__name__


def _examples(source: Source) -> dict[str, str]:
    """Returns digests of some examples; none if it is not known which indices can be read."""
    if source.readable_index is None:
        return {}
    indices = source.readable_indices
    at = indices if indices is not None else range(len(source.loader.dataset))
    chosen = [at[place] for place in sample_places(len(at))]
    found = read_elsewhere(source.loader, _digests, chosen)
    if isinstance(found, NotRead):
        LOGGER.info("examples are not compared with those of other trainings: %s", found.reason)
        return {}
    return {f"{_EXAMPLE}{index}": digest for index, digest in zip(chosen, found, strict=True) if digest}


def _digests(dataset: Any, indices: Iterable[Any]) -> list[str]:
    """Returns a digest of each example; an empty text for one that differs when it is read again at once."""
    dataset = throw_away_copy(dataset)  # this may be the training's process, where no other can be forked
    found = []
    with preserved_random_states():
        for index in indices:
            digests = set()
            for _ in range(2):
                seed_all(0)
                digests.add(digest_of(read_batch(dataset, [index])).hex())
            found.append(digests.pop() if len(digests) == 1 else "")
    return found
