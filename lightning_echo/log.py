"""The one logger of the package, ``lightning_echo``, and the handler for programs that have set up no logging."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import TextIO

# `FallbackHandler` looks for other handlers when a line is logged, not at import. So a program may set up logging before or after
# it imports this package. If it has done so, only its handlers show the lines, in its format. If not, the lines are on stderr, as
# Lightning's are.

LOGGER = logging.getLogger("lightning_echo")

# The two packages of Lightning write their own lines to the logger of the one that was imported last. A program that imports only
# ``pytorch_lightning`` keeps its logger, although this package will import ``lightning`` (``training/package.py``).
_RANK_ZERO = "lightning_utilities.core.rank_zero"
_IS_ONLY_OTHER = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
OTHER_LOGGER: logging.Logger | None = sys.modules[_RANK_ZERO].log if _IS_ONLY_OTHER else None
_PREFIX = "lightning_echo: "


class FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]  # which Python 3.10 does not take
    """Writes a line to stderr, if no other handler gets it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # StreamHandler's would set the stream

    @property
    def stream(self) -> TextIO:  # as logging.lastResort: stderr may be another object tomorrow
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return
            logger = logger.parent if logger.propagate else None
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line if line.startswith(_PREFIX) else _PREFIX + line


def set_up() -> None:
    """Makes the lines about choices and their reasons visible by default. A level that the program has set stays."""
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    if not any(isinstance(handler, FallbackHandler) for handler in LOGGER.handlers):
        LOGGER.addHandler(FallbackHandler())


class Says:
    """The lines of a run for its user, once per job and with the name of the loader.

    ``name`` is that of the loader among several; empty if it is the only one.
    """

    def __init__(self, rank: Callable[[], int]) -> None:
        self._rank, self.name = rank, ""
        self._said: set[str] = set()

    def warn(self, message: str) -> None:
        if self._rank() == 0:
            self.warn_here(message)

    def warn_here(self, message: str) -> None:
        """Warns on the rank that it is about."""
        warnings.warn(f"lightning_echo: {self._prefix}{message}", UserWarning, stacklevel=4)

    def inform(self, message: str) -> None:
        """Logs a message, as text: a handler that stores the record must not keep the loader and its workers alive."""
        if self._rank() == 0:
            LOGGER.info("%s%s", self._prefix, message)

    def once(self, message: str) -> None:
        """Logs a message unless one with the same beginning, up to a colon, was logged already. An empty one is not logged."""
        if message and (what := message.partition(":")[0]) not in self._said:
            self._said.add(what)
            self.inform(message)

    @property
    def _prefix(self) -> str:
        return f"{self.name}: " if self.name else ""
