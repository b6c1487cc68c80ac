"""MONAI's ``Compose``: cut where MONAI itself would cut it, run by its own rules, called in parts by MONAI's caching data sets.

A ``Compose`` is more than its members in a row: it maps lists of samples, hands on overrides, puts off resampling (``lazy``). So
it is never taken apart: ``compose(value, end=k)`` runs what stands before the cut, ``compose(value, start=k)`` the rest. MONAI's
random classes say that they are (``RandomizableTrait``), which its own caches go by; all else of MONAI is deterministic unless it
calls somebody else's code (``Lambda``, ``CropForeground(select_fn=...)``).

MONAI is never imported: classes are known by qualified name, and whose class is looked for has imported it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Part", "is_compose", "is_deterministic", "parts_of", "stand_in"]

_COMPOSE = "monai.transforms.compose.Compose"
_TRANSFORM = "monai.transforms.transform.Transform"
_RANDOM = {"monai.transforms.traits.RandomizableTrait", "monai.transforms.transform.Randomizable"}
_LAZY = "monai.transforms.traits.LazyTrait"

_Judge = Callable[[Any], bool]


class Part:
    """Some members of a ``Compose`` in a row, as a transform.

    Args:
        compose: MONAI's.
        start: The first member.
        end: The one after the last; None: all that follow.

    Attributes:
        names: What people call the members.
        is_first: Whether it is what stands before the cut.
    """

    def __init__(self, compose: Any, start: int, end: int | None) -> None:
        self._compose, self._start, self._end = compose, start, end
        self.names = _names(compose.transforms[start:end])
        self.is_first = end is not None

    def __call__(self, value: Any) -> Any:
        if type(value) is _Begun:  # the data set has run the first members itself
            return value.value
        return self._compose(value, start=self._start, end=self._end)


class _Begun:
    """What the first part has returned already."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def is_compose(transform: Any) -> bool:
    """Whether it is MONAI's ``Compose`` itself, and no subclass (``OneOf``, ``SomeOf``, ``RandomOrder``)."""
    return _name(type(transform)) == _COMPOSE


def parts_of(compose: Any, is_known: _Judge) -> list[Part]:
    """The part before the first random member and the rest; without those that are empty.

    Args:
        compose: MONAI's.
        is_known: Whether a transform of others is known to be deterministic.
    """
    cut = _cut(compose, is_known)
    parts = [Part(compose, 0, cut)] if cut else []
    return parts if cut == len(compose.transforms) else [*parts, Part(compose, cut, None)]


def is_deterministic(transform: Any, is_known: _Judge) -> bool:
    """Whether a transform is one of MONAI's that draws no random numbers and calls nobody else's code."""
    if is_compose(transform):
        return all(is_deterministic(member, is_known) for member in transform.transforms)
    kind = type(transform)
    bases = {_name(base) for base in kind.__mro__}
    return (
        kind.__module__.startswith("monai.transforms.")
        and _TRANSFORM in bases
        and not bases & _RANDOM
        and all(_is_own(held, is_known) for held in _held_by(transform))
    )


def stand_in(compose: Any, keep: Callable[..., Any], is_known: _Judge) -> Any:
    """Returns what to put in place of a ``Compose`` in a data set: one that keeps what it is called with.

    MONAI's caching data sets run the first members themselves (``end=k``) and the others at each read (``start=k``). It is a
    ``Compose``, since they ask for that, and runs what they want to keep.

    Args:
        compose: Left as it is.
        keep: Called with the value, or with one at which the part before the cut has ended.
        is_known: See `parts_of`.
    """
    kind, cut = type(compose), _cut(compose, is_known)

    def call(self: Any, value: Any, *range_: Any, start: int = 0, end: int | None = None, **options: Any) -> Any:
        if range_:
            return keep(value, *range_)  # nobody calls it like that: it is refused
        if end is not None:
            return kind.__call__(self, value, start=start, end=end, **options)
        if not start:
            return keep(value)
        if start > cut:
            name = type(compose.transforms[cut]).__name__
            return keep(value, **{f"start={start} (and {name}, number {cut}, counts as random)": start})
        return keep(_Begun(kind.__call__(self, value, start=start, end=cut, **options)))

    taken = types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(__call__=call))
    made: Any = object.__new__(taken)
    made.__dict__.update(vars(compose))
    return made


def _cut(compose: Any, is_known: _Judge) -> int:
    """The number of members before the first random one.

    Where resampling may be put off, those that do it go together: what is before the cut is carried out there.
    """
    members = compose.transforms
    cut = next((i for i, member in enumerate(members) if not _is_member_deterministic(member, is_known)), len(members))
    if cut < len(members) and compose.lazy is not False:
        return next((i for i in range(cut) if _LAZY in map(_name, type(members[i]).__mro__)), cut)
    return cut


def _is_member_deterministic(member: Any, is_known: _Judge) -> bool:
    return is_deterministic(member, is_known) or is_known(member)


def _held_by(transform: Any) -> list[Any]:
    """What its attributes hold, and the members of containers among them."""
    held = list(vars(transform).values())
    members = [list(value.values()) if isinstance(value, dict) else value for value in held]
    return held + [member for value in members if isinstance(value, list | tuple) for member in value]


def _is_own(value: Any, is_known: _Judge) -> bool:
    """Whether it is no function, or one of MONAI's: its other transforms, its predicates."""
    if not callable(value) or isinstance(value, type):
        return True
    if isinstance(value, types.FunctionType):
        return value.__module__.startswith("monai.")
    return is_deterministic(value, is_known) or is_known(value)


def _names(members: Sequence[Any]) -> tuple[str, ...]:
    nested = [_names(member.transforms) if is_compose(member) else (type(member).__name__,) for member in members]
    return tuple(name for names in nested for name in names)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
