"""The files that ``analyze`` writes: where they are, and how it is made sure that no file is overwritten.

A name that the user gives is checked before the analysis begins, so that no measurement is lost. The analysis itself goes into
the Trainer's log directory if the user gives no name for it.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

__all__ = ["check_new", "free_path"]


def check_new(**paths: str | None) -> None:
    """Refuses names of files that exist already. None: no file is asked for.

    Raises:
        ValueError: A file exists already, or two names are the same.

    Example:
        >>> check_new(json="new.json", html=None)
        >>> check_new(json="report", html="report")
        Traceback (most recent call last):
        ...
        ValueError: json and html must be different files, got 'report' for both
    """
    seen: dict[Path, str] = {}
    for name, path in paths.items():
        if path is None:
            continue
        if Path(path).exists():
            raise ValueError(f"{name} must be a new file, got {path!r}, which exists: give another name, or remove it first")
        first = seen.setdefault(Path(path).absolute(), name)
        if first != name:
            raise ValueError(f"{first} and {name} must be different files, got {path!r} for both")


def free_path(directory: Path, name: str) -> Path:
    """Returns the path of a new file in the directory: ``analysis.json``, else ``analysis_1.json`` and so on."""
    wanted = directory / name
    numbered = (wanted.with_stem(f"{wanted.stem}_{number}") for number in count(1))
    return wanted if not wanted.exists() else next(path for path in numbered if not path.exists())
