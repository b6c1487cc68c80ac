"""What reading itself changes in a data set, such as a counter of reads, or a dict of what was read before.

Such changes are not changes of the data. A validation that reads the same data set in the training's process makes them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader

from lightning_echo.protecting.elsewhere import NotRead, read_elsewhere
from lightning_echo.protecting.fingerprints.changes import changed_paths
from lightning_echo.protecting.fingerprints.fingerprint import glance
from lightning_echo.splitting.sizes import sample_places
from lightning_echo.splitting.staged import read_batch

__all__ = ["changed_by_reading"]

_MOST_SECONDS = 1.0  # no further example is read after that


def changed_by_reading(
    loader: DataLoader[Any],
    parts: Callable[[Any], Mapping[str, Any]],
    ignore: Iterable[str] = (),
    indices: Sequence[Any] | None = None,
) -> set[str]:
    """Reads up to eight examples in another process. Returns the paths of what has changed there; empty if none can be read.

    Args:
        loader: A loader of a map-style data set.
        parts: Returns what is looked at of the data set, by name. It must be picklable where processes are spawned.
        ignore: As in `glance`.
        indices: The indices that can be read; None: all.
    """
    found = read_elsewhere(loader, _changed, parts, tuple(ignore), indices)
    return set() if isinstance(found, NotRead) else found


def _changed(
    dataset: Any, parts: Callable[[Any], Mapping[str, Any]], ignore: tuple[str, ...], indices: Sequence[Any] | None
) -> set[str]:
    before, started = glance(parts(dataset), ignore), perf_counter()
    indices = range(len(dataset)) if indices is None else indices
    for place in sample_places(len(indices)):
        if perf_counter() - started > _MOST_SECONDS:
            break
        with suppress(Exception):  # the training will meet it or not
            read_batch(dataset, [indices[place]])
    return changed_paths(before, glance(parts(dataset), ignore))
