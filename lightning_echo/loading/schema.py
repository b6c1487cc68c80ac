"""Reading a state: the type of a field tells what its value must be, and the error names the field that is wrong.

A state comes from a file. Without these checks, a wrong value would show long after loading: as an error about something else, or
as training on other data. The classes of ``state.py``, and those that it uses, are the only list of the fields. The type of a
field says what the file holds:

=====================  ========================================================================================
type                   in the file
=====================  ========================================================================================
dataclass              a dictionary with exactly these keys; a field with a default may be missing
named tuple            a list with one entry for each field
``tuple[X, ...]``      a list of any length
``int``                an integer >= 0: a count, a position, a number
``float``              an echo factor
``bool``, an enum      True or False; the value of a member
``str``                a text
``Any``                an object of the user's, which is not checked
``Annotated[X, mark]``  `Least`: an integer with another smallest value; `ROW`: a dataclass that is written as a list
=====================  ========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_echo.insertion import InsertionPoint
from lightning_echo.planning.ratio import MOST_FACTOR
from lightning_echo.saved import EchoStateError

__all__ = ["LEFT_OUT", "ROW", "EchoStateError", "Least", "LeftOut", "plain", "read", "require"]

T = TypeVar("T")
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
    """Returns an object of a class of ``state.py``, from the plain types of a file.

    Args:
        cls: The class.
        value: What the file holds.
        path: The place of ``value`` in the state, for messages.

    Raises:
        EchoStateError: A field is missing, superfluous or wrong; the message names it.
    """
    found: T = _form(cls).read(value, path)
    return found


def plain(value: Any) -> Any:
    """Returns an object of a class of ``state.py`` in plain types, from which `read` makes it again."""
    return _form(type(value)).write(value)


def require(holds: bool, path: Path | str, expected: str, value: Any) -> None:
    """Refuses a state if a condition does not hold.

    Raises:
        EchoStateError: The message names the field, what was expected and what came.
    """
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
    defaults: dict[str, Any] = getattr(cls, "_field_defaults", {})  # of the last columns; what has its default is left out

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
    # What has such a default is left out of the file, so that older versions can read it where they know no such field.
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
