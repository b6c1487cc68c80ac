"""Sends classes and functions of a script to other processes by value.

A reader starts with another main module than the training. So pickle finds nothing of the training's script there, and neither do
the reader's own workers, if they are spawned (``spawn``, ``forkserver``). cloudpickle sends their code.
"""

from __future__ import annotations

import copy
import functools
import io
from collections import ChainMap
from collections.abc import Callable
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle

__all__ = ["dumped", "sending_by_value"]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # has no type hints
    """Also sends functions of a script that have a cache (``functools.lru_cache``). There, the cache is empty."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is functools._lru_cache_wrapper and value.__module__ in ("__main__", "__mp_main__"):
            return _cached_again, (value.__wrapped__, value.cache_parameters())
        return super().reducer_override(value)


class _SpawnPickler(_Pickler):
    """Also sends what multiprocessing can send to a process that is just spawned: queues, locks, memory that is shared."""

    def __init__(self, file: Any) -> None:
        self.dispatch_table = ChainMap(dict(ForkingPickler(file).dispatch_table), cloudpickle.Pickler.dispatch_table)
        super().__init__(file)


def dumped(value: Any, pickler: type[_Pickler] = _Pickler) -> bytes:
    """Returns the value as bytes for ``cloudpickle.loads``."""
    with io.BytesIO() as target:
        pickler(target).dump(value)
        return target.getvalue()


def _cached_again(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    return functools.lru_cache(**options)(function)


class _Call:
    """A call of a function in another process."""

    def __init__(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args

    def __call__(self) -> None:
        self._function(*self._args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _call_from, (dumped((self._function, self._args), _SpawnPickler),)


def _call_from(data: bytes) -> _Call:
    return _Call(*cloudpickle.loads(data))


def sending_by_value(context: BaseContext) -> BaseContext:
    """Returns a multiprocessing context whose processes get their arguments by value, all of them together.

    Args:
        context: The context to copy.
    """
    make: Any = context.Process  # type: ignore[attr-defined]  # each of its subclasses has one

    def process(*, target: Callable[..., object], args: tuple[Any, ...] = ()) -> Any:
        return make(target=_Call(target, args))

    sending = copy.copy(context)
    vars(sending)["Process"] = process
    return sending
