"""The one logger of the package, ``lightning_echo``, and the handler for programs that have set up no logging.

`FallbackHandler` looks for other handlers when a line is logged, not at import. Therefore a program may set up logging before or
after it imports this package. If it has set up logging, only its handlers show the lines, in its format. If it has not, the lines
are on stderr, as Lightning's are.
"""

import logging
import sys
from typing import TextIO

__all__ = ["LOGGER", "FallbackHandler", "set_up"]

LOGGER = logging.getLogger("lightning_echo")
_PREFIX = "lightning_echo: "


class FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]  # which Python 3.10 does not take
    """Writes a line to stderr, if no other handler gets it.

    Example:
        >>> import logging
        >>> logger = logging.getLogger("example_of_fallback")
        >>> logger.addHandler(FallbackHandler())
        >>> logger.addHandler(logging.NullHandler())  # the program has set up logging
        >>> logger.warning("not written twice")
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # StreamHandler's would set the stream

    @property
    def stream(self) -> TextIO:  # as logging.lastResort: stderr may be another object tomorrow
        """What ``sys.stderr`` is now."""
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record, if no other handler gets it."""
        if not self._has_other(record.name):
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, which begins with the name of the package."""
        line = super().format(record)
        return line if line.startswith(_PREFIX) else _PREFIX + line

    def _has_other(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def set_up() -> None:
    """Makes the lines about choices and their reasons visible by default. A level that the program has set stays."""
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    if not any(isinstance(handler, FallbackHandler) for handler in LOGGER.handlers):
        LOGGER.addHandler(FallbackHandler())
