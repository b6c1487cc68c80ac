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
_WORDS = {float: "a number", int: "an integer", bool: "True or False", str: "a text", type(None): "None"}

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
        form: The form of the value: ``float`` and the like, a union, a ``list``, ``tuple`` or ``Mapping`` of a form, a dataclass
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
    """Reads each entry of a list in a saved dictionary with a function, and returns the results. See `entry`."""
    found = []
    for number, row in enumerate(entry(state, name, list, default)):
        with inside(f"{name}[{number}]"):
            found.append(read(row))
    return found


def record(cls: type[T], state: Any, required: Sequence[str] = ()) -> T:
    """Returns an object of a dataclass from a saved dictionary. The types of its fields are their forms, see `entry`.

    A field that has a default may be missing, because older versions did not save it, unless it is ``required``.
    """
    found: T = _read_record(cls, state, "", required)
    return found


# --- inside ---------------------------------------------------------------------------------------------------------------


def _read(form: Any, value: Any, path: str) -> Any:
    """Returns a value in the types of its form."""
    base, inner = get_origin(form) or form, get_args(form)
    if base in (Union, UnionType):
        return _read_one_of(inner, value, path)
    if isinstance(base, type) and is_dataclass(base):
        return _read_record(base, value, path)
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


def _read_record(cls: Any, value: Any, path: str, required: Sequence[str] = ()) -> Any:
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

_MOST = 2**62  # of anything that is counted
_WAY_OUT = "Resume from another checkpoint, or restart without the loader's state"


class Least(NamedTuple):
    """Marks an integer whose smallest value is not 0. None: any integer is right."""

    value: int | None


class LeftOut(Enum):
    """The default of a field that may be missing in the file, if None means something else."""

    LEFT_OUT = "left out"


ROW = "row"  # marks a dataclass that is written as a list
LEFT_OUT = LeftOut.LEFT_OUT


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
        raise EchoStateError(f"the state is damaged: {field} must be {expected}, got {value!r:.80}. {_WAY_OUT}")


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
    base, marks = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
    for mark in marks:
        if isinstance(mark, Least):
            return _Form(_integer(mark.value))
    if isinstance(base, type) and is_dataclass(base):
        return _row(base) if ROW in marks else _record(base)
    if isinstance(base, type) and issubclass(base, tuple) and hasattr(base, "_fields"):
        return _row(base)
    if isinstance(base, type) and issubclass(base, Enum):
        return _member(base)
    if get_origin(base) is tuple:
        return _list(get_args(base)[0])
    if get_origin(base) in (Union, UnionType):
        return _or_none(next(one for one in get_args(base) if one not in (type(None), LeftOut)))
    forms = {int: _integer(0), float: _factor, bool: _truth, str: _text, Any: lambda value, path: value}
    return _Form(forms[base])


_form: Callable[[Any], _Form] = cache(_form_of)


def _integer(least: int | None) -> Callable[[Any, Path], Any]:
    def read(value: Any, path: Path) -> Any:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if least is None:
            require(is_whole, path, "an integer", value)
        elif not (is_whole and least <= value <= _MOST):
            require(False, path, f"an integer >= {least}", value)
        return value

    return read


def _factor(value: Any, path: Path) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and 1 <= value <= MOST_FACTOR, path, f"a number from 1 to {MOST_FACTOR:,}", value)
    return value


def _truth(value: Any, path: Path) -> Any:
    require(isinstance(value, bool), path, "True or False", value)
    return value


def _text(value: Any, path: Path) -> Any:
    require(isinstance(value, str), path, "a text", value)
    return value


def _member(cls: type[Enum]) -> _Form:
    known = [member.value for member in cls if member.value != InsertionPoint.auto.value]  # never in a state

    def read(value: Any, path: Path) -> Any:
        require(isinstance(value, str) and value in known, path, f"one of {', '.join(known)}", value)
        return cls(value)

    return _Form(read, lambda member: member.value)


def _or_none(hint: Any) -> _Form:
    form = _form(hint)
    return _Form(
        lambda value, path: None if value is None else form.read(value, path),
        lambda value: None if value is None else form.write(value),
    )


def _list(hint: Any) -> _Form:
    form = _form(hint)

    def read(value: Any, path: Path) -> Any:
        require(isinstance(value, list | tuple), path, "a list", value)
        return tuple(form.read(item, (*path, number)) for number, item in enumerate(value))

    return _Form(read, lambda value: [form.write(item) for item in value])


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
    names = {field.name.rstrip("_"): field.name for field in fields(cls)}  # the key "pass" cannot be a name in Python
    forms = {key: _form(hints[name]) for key, name in names.items()}
    required = [field.name.rstrip("_") for field in fields(cls) if field.default is MISSING]
    # Such a default is left out of the file, so that older versions, which do not know the field, can read it.
    may_lack = {
        field.name.rstrip("_"): field.default
        for field in fields(cls)
        if field.default in (None, LEFT_OUT) or isinstance(field.default, Enum)
    }

    def read(value: Any, path: Path) -> Any:
        require(isinstance(value, Mapping), path, "a dictionary", value)
        if missing := [key for key in required if key not in value]:
            raise EchoStateError(f"the state is damaged: {_text_of(path)} lacks {', '.join(missing)}. {_WAY_OUT}")
        if unknown := [str(key) for key in value if key not in forms]:
            raise EchoStateError(
                f"the state is damaged, or of a later lightning_echo: {_text_of(path)} has {', '.join(unknown)[:80]}, which is "
                f"not known here. {_WAY_OUT}, or upgrade lightning_echo"
            )
        return cls(**{names[key]: form.read(value[key], (*path, key)) for key, form in forms.items() if key in value})

    def write(value: Any) -> Any:
        found = {key: getattr(value, name) for key, name in names.items()}
        return {key: forms[key].write(found) for key, found in found.items() if key not in may_lack or found is not may_lack[key]}

    return _Form(read, write)
