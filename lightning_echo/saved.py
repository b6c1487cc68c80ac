"""Reading what was saved in a checkpoint or in a file: an error names the path of a field that is missing, wrong or not known.

`entry` reads one value, `record` an object, `rows` a list. They raise a `FieldError`, whose message begins with the path, such as
``reports[2].factor``. Only the outermost reader knows what the user can do, and adds it to the message: `state_of` for a
checkpoint, the ``from_json`` of a class for a file. (``loading/schema.py`` reads the state of a loader. It also checks the bounds
of numbers.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["EchoStateError", "FieldError", "entry", "inside", "record", "rows", "state_of"]

T = TypeVar("T")
_REQUIRED: Any = object()
_WORDS = {float: "a number", int: "an integer", bool: "True or False", str: "a text", type(None): "None"}

# Files turn tuples into lists, and numbers without a fraction into integers.
_ACCEPTED: dict[Any, Any] = dict.fromkeys((list, tuple, Sequence), (list, tuple)) | {float: (int, float), dict: Mapping}


class EchoStateError(ValueError):
    """A state from which a run cannot continue."""


class FieldError(ValueError):
    """A field that is missing, wrong or not known.

    Args:
        path: Its place in the saved object.
        problem: What is wrong, as the end of a sentence that begins with the path.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path or 'it'} {problem}")
        self.path, self.problem = path, problem


@contextmanager
def state_of(owner: str) -> Iterator[None]:
    """Adds to an error about a wrong field whose state it is, and the way out.

    Raises:
        EchoStateError: In place of a `FieldError`.

    Example:
        >>> with state_of("TargetIdle"):
        ...     entry({}, "slowness", float)
        Traceback (most recent call last):
            ...
        lightning_echo.saved.EchoStateError: the state of TargetIdle is damaged: slowness is missing. Resume from another ...
    """
    try:
        yield
    except FieldError as error:
        way_out = "Resume from another checkpoint, or restart without this one"
        raise EchoStateError(f"the state of {owner} is damaged: {error}. {way_out}") from None


@contextmanager
def inside(place: str) -> Iterator[None]:
    """Puts a place before the path of a `FieldError` that is raised within it."""
    try:
        yield
    except FieldError as error:
        raise FieldError(_joined(place, error.path), error.problem) from None


def entry(state: Any, name: str, form: Any, default: Any = _REQUIRED) -> Any:
    """Returns one value of a saved dictionary.

    Args:
        state: The dictionary.
        name: The key.
        form: What the value must be: ``float`` and the like, a union, a ``list``, ``tuple`` or ``Mapping`` of a form, a dataclass
            (saved as a dictionary), a named tuple (as a list), any other class, or ``Any``.
        default: The result if the value is missing, because an older version did not save it. If it is left out, the value must
            not be missing.

    Raises:
        FieldError: The value is missing, or not of this form.

    Example:
        >>> entry({"steps": 3}, "steps", int), entry({}, "since", int | None, None)
        (3, None)
    """
    _check(state, Mapping, "")
    if name not in state:
        if default is _REQUIRED:
            raise FieldError(name, "is missing")
        return default
    return _read(form, state[name], name)


def rows(state: Any, name: str, read: Callable[[Any], T], default: Any = _REQUIRED) -> list[T]:
    """Reads each entry of a list in a saved dictionary with a function, and returns the results. See `entry` for the arguments.

    Raises:
        FieldError: The list is missing, or an entry is wrong.
    """
    found = []
    for number, row in enumerate(entry(state, name, list, default)):
        with inside(f"{name}[{number}]"):
            found.append(read(row))
    return found


def record(cls: type[T], state: Any, required: Sequence[str] = ()) -> T:
    """Returns an object of a dataclass from a saved dictionary.

    Args:
        cls: The dataclass. The types of its fields are their forms, see `entry`.
        state: The dictionary. A field that has a default may be missing, because older versions did not save it.
        required: Fields that must not be missing, even if they have a default.

    Raises:
        FieldError: A field is missing, wrong or not known.
    """
    found: T = _record(cls, state, "", required)
    return found


# --- inside ---------------------------------------------------------------------------------------------------------------


def _read(form: Any, value: Any, path: str) -> Any:
    """Returns a value in the types of its form."""
    base, inner = get_origin(form) or form, get_args(form)
    if base in (Union, UnionType):
        return _read_one_of(inner, value, path)
    if isinstance(base, type) and is_dataclass(base):
        return _record(base, value, path)
    if isinstance(base, type) and issubclass(base, tuple) and hasattr(base, "_fields"):
        return _named_tuple(base, value, path)
    if isinstance(base, type) and issubclass(base, Enum):
        known = [member.value for member in base]
        if value not in known:
            raise FieldError(path, f"must be one of {', '.join(map(repr, known))}, got {value!r:.80}")
        return base(value)
    _check(value, base, path)
    if base in (list, tuple, Sequence) and inner:
        return _sequence(base, inner, value, path)
    if base in (dict, Mapping) and inner:
        return {key: _read(inner[1], each, f"{path}[{key!r}]") for key, each in value.items()}
    return value


def _check(value: Any, base: Any, path: str) -> None:
    """Refuses a value of another class. True is not a number here."""
    if base is Any or not isinstance(base, type):
        return  # a form that is not checked
    fits = isinstance(value, _ACCEPTED.get(base, base)) and (base is bool or not isinstance(value, bool))
    if not fits:
        raise FieldError(path, f"must be {_in_words(base)}, got {type(value).__name__} {value!r:.80}")


def _in_words(base: Any) -> str:
    if base in (list, tuple, Sequence):
        return "a list"
    return "a dictionary" if base in (dict, Mapping) else _WORDS.get(base, f"a {getattr(base, '__name__', base)}")


def _read_one_of(forms: Sequence[Any], value: Any, path: str) -> Any:
    """Returns a value in the first form of a union that fits. If none fits, the error is that of the last form but None."""
    if value is None and type(None) in forms:
        return None
    *others, last = (form for form in forms if form is not type(None))
    for form in others:
        try:
            return _read(form, value, path)
        except FieldError:
            continue
    return _read(last, value, path)


def _sequence(base: Any, inner: Sequence[Any], value: Any, path: str) -> Any:
    is_fixed = base is tuple and Ellipsis not in inner
    if is_fixed and len(value) != len(inner):
        raise FieldError(path, f"must be a list of {len(inner)}, got {len(value)}: {value!r:.80}")
    forms = inner if is_fixed else [inner[0]] * len(value)
    found = [_read(form, each, f"{path}[{number}]") for number, (form, each) in enumerate(zip(forms, value, strict=True))]
    return tuple(found) if base is tuple else found


def _named_tuple(cls: Any, value: Any, path: str) -> Any:
    _check(value, list, path)
    hints = get_type_hints(cls)
    if len(value) != len(hints):
        raise FieldError(path, f"must be [{', '.join(hints)}], got {value!r:.80}")
    return cls(*[_read(form, each, _joined(path, name)) for (name, form), each in zip(hints.items(), value, strict=True)])


def _record(cls: Any, value: Any, path: str, required: Sequence[str] = ()) -> Any:
    _check(value, Mapping, path)
    hints, known = get_type_hints(cls), {each.name: each for each in fields(cls) if each.init}
    for name, each in known.items():
        has_default = each.default is not MISSING or each.default_factory is not MISSING
        if name not in value and (name in required or not has_default):
            raise FieldError(_joined(path, name), "is missing")
    if unknown := [name for name in value if name not in known]:
        raise FieldError(_joined(path, str(unknown[0])), "is not known here: it is of a later lightning_echo, or wrong")
    found = {name: _read(hints[name], each, _joined(path, name)) for name, each in value.items()}
    try:
        return cls(**found)
    except ValueError as error:  # the class itself refuses the values
        raise FieldError(path, f"is impossible: {error}") from None


def _joined(place: str, path: str) -> str:
    return f"{place}{path}" if path.startswith("[") or not place or not path else f"{place}.{path}"
