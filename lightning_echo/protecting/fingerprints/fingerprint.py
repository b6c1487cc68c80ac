"""The fingerprint of data: taken, taken quickly, and compared."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lightning_echo.protecting.fingerprints.code import LOADED_LATER, Code
from lightning_echo.protecting.fingerprints.contents import OPENED, digest_of_texts
from lightning_echo.protecting.fingerprints.walk import Walk

__all__ = ["Fingerprint", "fingerprint", "first_difference", "glance"]

_CODE = "code of "
_NOTHING = "nothing"


class Fingerprint(NamedTuple):
    """All that decides what an example is, as texts.

    Attributes:
        held: What the objects hold: a text for each path, such as ``"dataset.transform.p"``.
        code: The code that they run, and the globals and class attributes that it names, a text for each name.
    """

    held: dict[str, str]
    code: dict[str, str]

    def digest(self) -> str:
        """Returns the fingerprint as 16 characters. What may be opened or imported later does not count."""
        held = [item for item in self.held.items() if item[1] != "None" and not item[1].startswith(OPENED)]
        code = [item for item in self.code.items() if not item[0].startswith(LOADED_LATER)]
        return digest_of_texts([part for item in (*held, *code) for part in item])

    def without(self, names: Iterable[str]) -> Fingerprint:
        """Returns the fingerprint without attributes that are given by name, or by whole path."""
        names = tuple(names)
        held, code = ({path: text for path, text in part.items() if not _is_left_out(path, names)} for part in self)
        return Fingerprint(held, code)

    def difference(self, other: Fingerprint, ignore: Iterable[str] = ()) -> str:
        """Returns the first difference, as `first_difference` does.

        Of code, only names that both have are compared: a module that is imported later is not a difference.
        """
        common = {name: text for name, text in self.code.items() if name in other.code}
        common_there = {name: other.code[name] for name in common}
        return first_difference(self.held, other.held, ignore) or first_difference(common, common_there, ignore)


def fingerprint(parts: Mapping[str, Any], ignore: Iterable[str] = ()) -> Fingerprint:
    """Returns the fingerprint of objects. What is compared stands in ``__init__.py``.

    It takes about a second per GB of arrays and tensors, and at most 0.3 s for one of them.

    Args:
        parts: Objects by name, such as ``{"dataset": dataset, "sampler": sampler}``. The names begin the paths.
        ignore: Names of attributes that are left out wherever they are (``"log_dir"``), or whole paths.

    Example:
        >>> from torch.utils.data import Subset
        >>> one, other = (fingerprint({"dataset": Subset(["a", "b", "c"], indices)}) for indices in ([0, 1], [0, 2]))
        >>> one.difference(other)
        'dataset.indices: list [0, 1] and list [0, 2]'
    """
    held, code = _taken(parts, tuple(ignore), quickly=False)
    return Fingerprint(held, {"version of Python": "{}.{}".format(*sys.version_info), **code})


def glance(parts: Mapping[str, Any], ignore: Iterable[str] = ()) -> dict[str, str]:
    """Returns what may change in objects while this process runs, as texts by path, for `first_difference`.

    These are the attributes, members, arrays and tensors, and the globals and class attributes that the code names. Tensors count
    by memory, version counter and checksum, arrays by checksum; if they are larger than 16 MiB, of some blocks. So it is much
    quicker than `fingerprint`. The texts are comparable within one process only.

    Args:
        parts: As in `fingerprint`.
        ignore: As in `fingerprint`.

    Example:
        >>> import numpy as np
        >>> labels = np.zeros(5)
        >>> before = glance({"labels": labels})
        >>> labels[3] = 1
        >>> first_difference(before, glance({"labels": labels})).partition(":")[0]
        'labels'
    """
    held, named = _taken(parts, tuple(ignore), quickly=True)
    return {**held, **named}


def first_difference(here: Mapping[str, str], there: Mapping[str, str], ignore: Iterable[str] = ()) -> str:
    """Returns the first difference of two mappings of texts, in words; empty if there is none.

    What is only opened later (a file, a connection) is not a difference.

    Args:
        here: What one process has found.
        there: What the other process, or the same process later, has found.
        ignore: Names of attributes, or whole paths, that do not count.

    Example:
        >>> first_difference({"data.file": "None", "data.p": "0.1"}, {"data.file": "open: h5py.File", "data.p": "0.25"})
        'data.p: 0.1 and 0.25'
    """
    names = tuple(ignore)
    for path in dict.fromkeys([*here, *there]):
        one, other = here.get(path, _NOTHING), there.get(path, _NOTHING)
        if one == other or _is_opened_later(one, other) or _is_opened_later(other, one):
            continue
        if _is_left_out(path, names):
            continue
        return f"the {path} is other code" if path.startswith(_CODE) else f"{path}: {one} and {other}"
    return ""


def _is_left_out(path: str, names: Iterable[str]) -> bool:
    return any(_is_within(path, name) for name in names)


def _is_within(path: str, name: str) -> bool:
    """Returns whether a path leads through an attribute that is given by its name, or by its whole path."""
    if "." in name:
        return path.startswith((f"{name}.", f"{name}[")) or path == name
    return f".{name}." in f".{path}." or f".{name}[" in f".{path}"


def _is_opened_later(before: str, after: str) -> bool:
    return before in ("None", _NOTHING) and after.startswith(OPENED)


def _taken(parts: Mapping[str, Any], ignore: tuple[str, ...], *, quickly: bool) -> tuple[dict[str, str], dict[str, str]]:
    code = Code(ignore, quickly=quickly)
    walk = Walk(ignore, quickly=quickly, meet=code.meet)
    for name, part in parts.items():
        walk.add(name, part)
    code.follow()
    return dict(walk.texts), dict(sorted(code.texts.items()))
