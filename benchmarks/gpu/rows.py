"""The files that a run leaves: CSV rows, each written at the moment at which it is known."""

from __future__ import annotations

import csv
from pathlib import Path

__all__ = ["COLUMNS", "Cell", "add_row", "read_rows", "start_table"]

Cell = str | int | float | None  # None: not known, an empty cell

COLUMNS = {
    "machine": ("what", "value"),
    "stages": ("stage", "part", "outcome", "seconds", "said"),
    "tests": ("test", "outcome", "seconds", "said"),
    "feed": (
        *("network", "arm", "how", "workers", "R", "factor", "epochs", "images per second", "fresh share", "cache hits"),
        *("idle, EchoCallback", "idle in the profiled epoch, EchoCallback", "no kernel in the profiled epoch, torch.profiler"),
        *("first batch (s)", "said"),
    ),
    "sharing": (
        *("how", "trainings", "workers in all", "images per second in all", "slowest", "core-seconds per 1000 images"),
        *("device memory of a training (MiB)", "device memory in all (MiB)", "passes", "images a pass", "lost", "twice", "said"),
    ),
    "accuracy": ("arm", "seed", "learning rate", "factor", "clock (s)", "steps", "fresh images", "accuracy"),
}


def start_table(folder: Path, name: str) -> None:
    """Makes the file with its header, if it is not there yet."""
    if not (folder / f"{name}.csv").exists():
        _append(folder, name, COLUMNS[name])


def add_row(folder: Path, name: str, **cells: Cell) -> None:
    """Appends a row to a table. Cells are named as its columns, with ``_`` in place of all that is not a letter or a digit.

    Raises:
        ValueError: A cell is of no column.
    """
    start_table(folder, name)
    by_key = {key_of(column): column for column in COLUMNS[name]}
    if unknown := cells.keys() - by_key.keys():
        raise ValueError(f"{name} has no column {', '.join(sorted(unknown))}: columns are {', '.join(by_key)}")
    _append(folder, name, [_text(cells.get(key)) for key in by_key])


def read_rows(folder: Path, name: str) -> list[dict[str, str]]:
    """Returns the rows, by column; an empty list if there is no such file."""
    file = folder / f"{name}.csv"
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def key_of(column: str) -> str:
    """Returns the name of a column as an argument.

    Example:
        >>> key_of("idle, EchoCallback")
        'idle_EchoCallback'
    """
    return "_".join("".join(c if c.isalnum() else " " for c in column).split())


def _append(folder: Path, name: str, cells: list[str] | tuple[str, ...]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(cells)


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.4g}" if abs(cell) < 1e4 else f"{cell:.0f}"
    return " ".join(str(cell).split())  # a cell is one line
