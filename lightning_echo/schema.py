"""Reads the contents of a checkpoint or a file: an error names the path of a field that is missing, wrong or unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_echo.insertion import InsertionPoint
from lightning_echo.plan.plan import MOST_FACTOR

# ---------------------------------------------------------------------- saved
# `entry` reads one value, `record` an object, `rows` a list. They raise a `FieldError`, whose message begins with the path of the
# field, such as ``reports[2].factor``. Only the outermost reader knows what the user can do, and adds it to the message:
# `state_of` for a checkpoint, the ``from_json`` of a class for a file. The second part of this file, which also checks the bounds
# of numbers, reads the state of a loader.

T = TypeVar("T")
_REQUIRED: Any = object()
_WORDS: dict[Any, str] = {
    **{float: "a number", int: "an integer", bool: "True or False", str: "a text", type(None): "None"},
    **dict.fromkeys((list, tuple, Sequence), "a list"),
    **dict.fromkeys((dict, Mapping), "a dictionary"),
}
# Files turn tuples into lists, and numbers without a fraction into integers.
_ACCEPTED: dict[Any, Any] = dict.fromkeys((list, tuple, Sequence), (list, tuple)) | {float: (int, float), dict: Mapping}


class EchoStateError(ValueError):
    """A state from which a run cannot continue."""


class FieldError(ValueError):
    """A field, at the path ``path``, that is missing, wrong or not known.

    ``problem`` ends a sentence that begins with the path.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path or 'it'} {problem}")
        self.path, self.problem = path, problem


@contextmanager
def state_of(owner: str) -> Iterator[None]:
    """Turns a `FieldError` into an `EchoStateError`, which adds whose state it is, and a hint.

    Example:
        >>> with state_of("TargetIdle"):
        ...     entry({}, "slowness", float)
        Traceback (most recent call last):
            ...
        lightning_echo.schema.EchoStateError: the state of TargetIdle is damaged: slowness is missing. Resume from another ...
    """
    try:
        yield
    except FieldError as error:
        hint = "Resume from another checkpoint, or restart without this one"
        raise EchoStateError(f"the state of {owner} is damaged: {error}. {hint}") from None


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
        form: The form of the value: ``float`` and the like, a union, a ``list``, ``tuple`` or ``Mapping`` of a form, a dataclass
            (saved as a dictionary), a named tuple (as a list), any other class, or ``Any``.
        default: The result if the value is missing. If it is left out, the value must not be missing.

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


def rows(state: Any, name: str, read: Callable[[Any], T]) -> list[T]:
    """Reads each entry of a list in a saved dictionary with a function, and returns the results. See `entry`."""
    found = []
    for number, row in enumerate(entry(state, name, list)):
        with inside(f"{name}[{number}]"):
            found.append(read(row))
    return found


def record(cls: type[T], state: Any, saved: Sequence[str] | None = None, path: str = "") -> T:
    """Returns an object of a dataclass from a saved dictionary. The types of its fields are their forms, see `entry`.

    ``saved``: the fields that were saved, none of which may be missing; None: all of them.
    """
    _check(state, Mapping, path)
    known = [each.name for each in fields(cls) if each.init]  # type: ignore[arg-type]
    for name in known if saved is None else saved:
        if name not in state:
            raise FieldError(_joined(path, name), "is missing")
    if unknown := [name for name in state if name not in known]:
        raise FieldError(_joined(path, str(unknown[0])), "is not known here: it is of a later lightning_echo, or wrong")
    hints = get_type_hints(cls)
    found = {name: _read(hints[name], value, _joined(path, name)) for name, value in state.items()}
    try:
        return cls(**found)
    except ValueError as error:  # the class itself refuses the values
        raise FieldError(path, f"is impossible: {error}") from None


# --- inside ---------------------------------------------------------------------------------------------------------------


def _read(form: Any, value: Any, path: str) -> Any:
    """Returns a value in the types of its form."""
    base, inner = get_origin(form) or form, get_args(form)
    if base in (Union, UnionType):
        return _read_one_of(inner, value, path)
    if isinstance(base, type) and is_dataclass(base):
        return record(base, value, path=path)
    if isinstance(base, type) and issubclass(base, tuple) and hasattr(base, "_fields"):
        _check(value, list, path)
        hints = get_type_hints(base)
        if len(value) != len(hints):
            raise FieldError(path, f"must be [{', '.join(hints)}], got {value!r:.80}")
        return base(*[_read(each, item, _joined(path, name)) for (name, each), item in zip(hints.items(), value, strict=True)])
    if isinstance(base, type) and issubclass(base, Enum):
        known = [member.value for member in base]
        if value not in known:
            raise FieldError(path, f"must be one of {', '.join(map(repr, known))}, got {value!r:.80}")
        return base(value)
    _check(value, base, path)
    if base in (list, tuple, Sequence) and inner:
        is_fixed = base is tuple and Ellipsis not in inner
        if is_fixed and len(value) != len(inner):
            raise FieldError(path, f"must be a list of {len(inner)}, got {len(value)}: {value!r:.80}")
        forms = inner if is_fixed else [inner[0]] * len(value)
        found = [_read(each, item, f"{path}[{number}]") for number, (each, item) in enumerate(zip(forms, value, strict=True))]
        return tuple(found) if base is tuple else found
    if base in (dict, Mapping) and inner:
        return {key: _read(inner[1], each, f"{path}[{key!r}]") for key, each in value.items()}
    return value


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


def _check(value: Any, base: Any, path: str) -> None:
    """Refuses a value of another class. True is not a number here."""
    if base is Any or not isinstance(base, type):
        return  # a form that is not checked
    fits = isinstance(value, _ACCEPTED.get(base, base)) and (base is bool or not isinstance(value, bool))
    if not fits:
        words = _WORDS.get(base, f"a {base.__name__}")
        raise FieldError(path, f"must be {words}, got {type(value).__name__} {value!r:.80}")


def _joined(place: str, path: str) -> str:
    return f"{place}{path}" if path.startswith("[") or not place or not path else f"{place}.{path}"


# ---------------------------------------------------------------------- schema
# A state comes from a file. Without these checks, a wrong value would show long after loading: as an error about something else,
# or as training on other data. The classes of ``loader/state.py``, and those that it uses, are the only list of the fields. The
# type of a field determines the content of the file:
#
# =====================  ========================================================================================
# type                   in the file
# =====================  ========================================================================================
# dataclass              a dictionary with exactly these keys; a field with a default may be missing
# named tuple            a list with one entry for each field
# ``tuple[X, ...]``      a list of any length
# ``int``                an integer >= 0: a count, a position, a number
# ``float``              an echo factor
# ``bool``, an enum      True or False; the value of a member
# ``str``                a text
# ``Any``                an object of the user's, which is not checked
# ``Annotated[X, mark]``  `Least`: an integer with another smallest value; `ROW`: a dataclass that is written as a list
# =====================  ========================================================================================

Path = tuple[Any, ...]  # keys, numbers of list entries, and names of columns as ``(name,)``
ROW = "row"  # marks a dataclass that is written as a list


class Least(NamedTuple):
    """Marks an integer whose smallest value is not 0. None: any integer is right."""

    value: int | None


class LeftOut(Enum):
    """The default of a field that may be missing in the file, if None means something else."""

    LEFT_OUT = "left out"


LEFT_OUT = LeftOut.LEFT_OUT
_MOST = 2**62  # of anything that is counted
_HINT = "Resume from another checkpoint, or restart without the loader's state"


def read(cls: type[T], value: Any, path: Path = ()) -> T:
    """Returns an object of a class of ``loader/state.py``, from the plain types of a file. ``path`` is its place, for messages.

    Raises an `EchoStateError` that names the field that is missing, superfluous or wrong.
    """
    found: T = _form(cls).read(value, path)
    return found


def plain(value: Any) -> Any:
    """Returns an object of a class of ``loader/state.py`` in plain types, from which `read` makes it again."""
    return _form(type(value)).write(value)


def require(holds: bool, path: Path | str, expected: str, value: Any) -> None:
    """Raises an `EchoStateError` with the field, the expected and the found value if a condition does not hold."""
    if not holds:
        field = path if isinstance(path, str) else _text_of(path)
        raise EchoStateError(f"the state is damaged: {field} must be {expected}, got {value!r:.80}. {_HINT}")


def _text_of(path: Path) -> str:
    """Returns a path for people: ``plan.buffers[0].live[3] (left)``."""
    text = ""
    for part in path:
        if isinstance(part, tuple):
            text += f" ({part[0]})"
        else:
            text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "it"


# --- the form of a type in the file -----------------------------------------------------------------------------------


class _Form(NamedTuple):
    read: Callable[[Any, Path], Any]
    write: Callable[[Any], Any] = lambda value: value


def _form_of(hint: Any) -> _Form:
    base, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    for mark in marks:
        if isinstance(mark, Least):
            return _integer(mark.value)
    if isinstance(base, type) and is_dataclass(base):
        return _row(base) if ROW in marks else _record(base)
    if isinstance(base, type) and issubclass(base, tuple) and hasattr(base, "_fields"):
        return _row(base)
    if isinstance(base, type) and issubclass(base, Enum):
        known = [member.value for member in base if member.value != InsertionPoint.auto.value]  # never in a state
        text = _checked(lambda value: isinstance(value, str) and value in known, f"one of {', '.join(known)}")
        return _Form(lambda value, path: base(text.read(value, path)), lambda member: member.value)
    if get_origin(base) is tuple:
        item = _form(get_args(base)[0])
        items = _checked(lambda value: isinstance(value, list | tuple), "a list")
        return _Form(
            lambda value, path: tuple(item.read(each, (*path, number)) for number, each in enumerate(items.read(value, path))),
            lambda value: [item.write(each) for each in value],
        )
    if get_origin(base) in (Union, UnionType):
        form = _form(next(one for one in get_args(base) if one not in (type(None), LeftOut)))
        return _Form(
            lambda value, path: None if value is None else form.read(value, path),
            lambda value: None if value is None else form.write(value),
        )
    return _integer(0) if base is int else _PLAIN[base]


_form: Callable[[Any], _Form] = cache(_form_of)


def _checked(fits: Callable[[Any], bool], expected: str) -> _Form:
    """Returns the form of a value that is in the file as it is, if it fits."""

    def read(value: Any, path: Path) -> Any:
        if not fits(value):
            require(False, path, expected, value)
        return value

    return _Form(read)


def _integer(least: int | None) -> _Form:
    if least is None:
        return _checked(lambda value: isinstance(value, int) and not isinstance(value, bool), "an integer")
    return _checked(
        lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST, f"an integer >= {least}"
    )


_PLAIN: dict[Any, _Form] = {
    float: _checked(
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= MOST_FACTOR,
        f"a number from 1 to {MOST_FACTOR:,}",
    ),
    bool: _checked(lambda value: isinstance(value, bool), "True or False"),
    str: _checked(lambda value: isinstance(value, str), "a text"),
    Any: _Form(lambda value, path: value),
}


def _row(cls: type[Any]) -> _Form:
    columns = {name: _form(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}
    defaults: dict[str, Any] = getattr(cls, "_field_defaults", {})  # of the last columns; a default is left out

    def read(value: Any, path: Path) -> Any:
        fits = isinstance(value, list | tuple) and len(columns) - len(defaults) <= len(value) <= len(columns)
        require(fits, path, f"[{', '.join(columns)}]", value)
        parts = zip(columns.items(), value, strict=False)
        return cls(*[form.read(item, (*path, (name,))) for (name, form), item in parts])

    def write(value: Any) -> Any:
        row = [form.write(getattr(value, name)) for name, form in columns.items()]
        for name, default in reversed(defaults.items()):
            if getattr(value, name) != default:
                break
            row.pop()
        return row

    return _Form(read, write)


def _record(cls: type[Any]) -> _Form:
    hints = get_type_hints(cls, include_extras=True)
    members = {field.name.rstrip("_"): field for field in fields(cls)}  # the key "pass" cannot be a name in Python
    forms = {key: _form(hints[field.name]) for key, field in members.items()}
    required = [key for key, field in members.items() if field.default is MISSING]
    # Such a default is left out of the file.
    left_out = {key: each.default for key, each in members.items() if each.default is None or isinstance(each.default, Enum)}

    def read(value: Any, path: Path) -> Any:
        require(isinstance(value, Mapping), path, "a dictionary", value)
        if missing := [key for key in required if key not in value]:
            raise EchoStateError(f"the state is damaged: {_text_of(path)} lacks {', '.join(missing)}. {_HINT}")
        if unknown := [str(key) for key in value if key not in forms]:
            raise EchoStateError(
                f"the state is damaged, or of a later lightning_echo: {_text_of(path)} has {', '.join(unknown)[:80]}, which is "
                f"not known here. {_HINT}, or upgrade lightning_echo"
            )
        return cls(**{members[key].name: form.read(value[key], (*path, key)) for key, form in forms.items() if key in value})

    def write(value: Any) -> Any:
        found = {key: getattr(value, field.name) for key, field in members.items()}
        return {key: forms[key].write(each) for key, each in found.items() if key not in left_out or each is not left_out[key]}

    return _Form(read, write)
