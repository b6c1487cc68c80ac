"""Lightning comes as two packages with the same classes, ``lightning`` and ``pytorch_lightning``: which one a program uses"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from importlib import import_module
from operator import or_
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException as LightningsException

from lightning_echo.log import OTHER_LOGGER

# ``lightning`` requires ``pytorch_lightning``, so both are installed. A program imports one of them, and a library may import the
# other. This package extends ``lightning``. It never imports ``pytorch_lightning``, which takes a second: it looks whether the
# program has.
#
# * A class of ours that Lightning knows by its base class gets the base class of the other package as well (`in_both`), as soon
#   as the other package is there. So ``isinstance`` is right in both, in Trainers and in the user's code.
# * A method that such a class inherits is that of ``lightning``. The other package takes it for an overridden one, since it
#   compares code. So it must be asked with its own method in place (`StandIn`).
# * Objects of the two packages cannot be mixed. Lightning itself says so (`check_same`).


@dataclass(frozen=True)
class Package:
    """One of the two packages. ``name`` is where its classes are, ``fabric`` where those of Fabric are."""

    name: str
    fabric: str

    @property
    def distribution(self) -> str:
        return self.name.partition(".")[0]

    @property
    def version(self) -> str:
        return str(sys.modules[self.distribution].__version__)

    @property
    def is_imported(self) -> bool:
        return hasattr(sys.modules.get(self.name), "Trainer")  # else it is being imported

    def get(self, path: str) -> Any:
        """Returns what the package has under a path, such as ``"loggers.CSVLogger"``."""
        return _get(f"{self.name}.{path}")

    def is_overridden(self, method: str, instance: Any) -> bool:
        """Returns whether an instance, or its class, has another method than its base class in this package."""
        return bool(self.get("utilities.model_helpers.is_overridden")(method, instance))

    def check_same(self, instance: Any) -> None:
        """Raises a TypeError, in Lightning's own words, for a model or a data module of the other package."""
        if not isinstance(instance, (self.get("LightningModule"), self.get("LightningDataModule"))):
            raise TypeError(
                f"you passed a `{package_of(instance).name}` object ({type(instance).__qualname__}) to a `{self.name}` Trainer: "
                "please switch to a single import style"
            )


LIGHTNING = Package("lightning.pytorch", "lightning.fabric")
OTHER = Package("pytorch_lightning", "lightning_fabric")


if OTHER_LOGGER is not None:
    sys.modules["lightning_utilities.core.rank_zero"].__dict__["log"] = OTHER_LOGGER


@lru_cache(maxsize=256)
def _get(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def classes(path: str) -> tuple[Any, ...]:
    """Returns the class under a path in each package that is imported, for ``isinstance``.

    >>> [each.__name__ for each in classes("loggers.CSVLogger")][:1]
    ['CSVLogger']
    """
    return _classes(path, OTHER.is_imported)


@lru_cache(maxsize=64)
def _classes(path: str, other: bool) -> tuple[Any, ...]:
    return (LIGHTNING.get(path), OTHER.get(path)) if other else (LIGHTNING.get(path),)


if TYPE_CHECKING:
    AnyDataModule: TypeAlias = pl.LightningDataModule


def __getattr__(name: str) -> Any:
    """Returns ``AnyDataModule``, the type of a data module of either package. A command line looks it up when it parses."""
    if name == "AnyDataModule":
        return reduce(or_, classes("LightningDataModule"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def package_of(thing: Any) -> Package:
    """Returns the package that an object's class, or a class, comes from or extends."""
    kind = thing if isinstance(thing, type) else type(thing)
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
    first = next((root for root in roots if root in ("lightning", OTHER.name)), "lightning")
    return OTHER if first == OTHER.name else LIGHTNING


def is_overridden(method: str, instance: Any) -> bool:
    """Returns whether a model or a data module has another method than its base class."""
    return package_of(instance).is_overridden(method, instance)


# ---------------------------------------------------------------------- in both

_OLDEST = (2, 5)
Class = TypeVar("Class", bound=type)
_OURS: list[tuple[type, str]] = []


def in_both(path: str) -> Callable[[Class], Class]:
    """Decorates a class of ours that extends the class of ``lightning`` under a path: see `join`."""

    def decorate(ours: Class) -> Class:
        _OURS.append((ours, path))
        join()
        return ours

    return decorate


def join() -> None:
    """Makes our classes subclasses of those of ``pytorch_lightning`` as well, once the program has imported it.

    Call it wherever one of our objects is made, or meets a Trainer. Later calls cost next to nothing.

    Raises:
        RuntimeError: ``pytorch_lightning`` is older than 2.5.
    """
    if not OTHER.is_imported:
        return
    for ours, path in _OURS:
        if (base := OTHER.get(path)) not in ours.__mro__:
            _check_version()
            try:
                ours.__bases__ = (*ours.__bases__, base)
            except TypeError:
                raise TypeError(_in_wrong_order(ours, base)) from None


def _in_wrong_order(ours: type, base: type) -> str:
    """Returns the message about a subclass of the user's whose bases do not allow that ours extends ``base``, too."""
    below = [ours]
    for each in below:
        below += each.__subclasses__()
    orders = {each: [each.__mro__.index(of) for of in (base, ours) if of in each.__mro__] for each in below}
    users = next((each.__name__ for each, order in orders.items() if len(order) == 2 and order[0] < order[1]), "a subclass")
    return (
        f"{users} has {base.__module__.partition('.')[0]}'s {base.__name__} before {ours.__name__} in its bases: leave it out, "
        f"since {ours.__name__} is one, too"
    )


def _check_version() -> None:
    if (found := re.match(r"(\d+)\.(\d+)", OTHER.version)) and tuple(map(int, found.groups())) < _OLDEST:
        raise RuntimeError(
            f"this program uses pytorch_lightning {OTHER.version}, which is older than {'.'.join(map(str, _OLDEST))}: install a "
            "later one, pip install --upgrade pytorch-lightning"
        )


@in_both("utilities.exceptions.MisconfigurationException")
class MisconfigurationException(LightningsException):
    """What was asked for is impossible. It is caught under the name that either package has for it."""
