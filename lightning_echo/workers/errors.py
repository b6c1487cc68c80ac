"""Exceptions of a worker, in a form that arrives in the main process.

torch sends the class of an exception by its name. A class that is found under no name (made in a function; or a class of the
script, in a process that did not start with the script) cannot be sent. Then the queue drops the exception: an epoch of a stream
is cut without a word, and any other epoch waits forever.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NoReturn

from torch.utils.data import get_worker_info

__all__ = ["InitThatSaysWhy", "add_note", "raise_sendable", "sendable"]


def sendable(error: Exception) -> Exception:
    """Returns the exception. If its class cannot be sent, returns one of the nearest class that can, which names the first.

    Example:
        >>> class NotThere(LookupError):
        ...     pass
        >>> NotThere.__qualname__ = "load.<locals>.NotThere"
        >>> type(sendable(NotThere("a.png"))).__name__, type(sendable(KeyError("a"))).__name__
        ('LookupError', 'KeyError')
    """
    kind = type(error)
    if _is_found(kind):
        return error
    message = f"{kind.__module__}.{kind.__qualname__}: {error}"
    nearest: type[Exception] = next(base for base in kind.__mro__ if _is_found(base))
    try:
        return nearest(message)
    except Exception:  # a class of the user's, or of Python's, that wants other arguments than a message
        return RuntimeError(message)


def _is_found(kind: type) -> bool:
    """Whether another process finds a class by its name."""
    try:
        pickle.dumps(kind)
    except Exception:  # what pickle raises depends on the reason, and on the version of Python
        return False
    return True


def raise_sendable(error: Exception) -> NoReturn:
    """Raises the exception again, in a worker as `sendable` returns it."""
    other = error if get_worker_info() is None else sendable(error)
    if other is error:
        raise error
    raise other from error


class InitThatSaysWhy:
    """A ``worker_init_fn`` whose exception arrives in the main process. It runs where torch's worker has the user's data set.

    Args:
        users: The user's ``worker_init_fn``; None if there is none.
    """

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self._users = users

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        fetcher = getattr(getattr(info, "dataset", None), "__dict__", {}).get("_echo_fetcher")
        if fetcher is not None:  # an EchoDataset: the user's code may ask for the class of its own data set
            object.__setattr__(info, "dataset", fetcher.dataset)
        try:
            if self._users is not None:
                self._users(worker)
        except Exception as error:
            raise_sendable(error)


def add_note(error: Exception, note: str) -> None:
    """Adds a note to an exception that says which example it is about. Its type and message stay."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]} {note}", *error.args[1:])
