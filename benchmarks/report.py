"""What a benchmark hands back, how it is printed, where it is written."""

from __future__ import annotations

import csv
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from markdown import table

Cell = str | int | float


@dataclass(frozen=True)
class Table:
    """A table and the sentence that says what it shows.

    Attributes:
        name: Also the name of the CSV file.
        text: What was measured, and what was left out of it.
        columns: With units.
        rows: As many cells as columns; one named ``passed`` holds ``yes`` or ``NO``.
    """

    name: str
    text: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def print(self) -> None:
        lines = [list(self.columns), *self.cells()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        print(f"\n{self.name}: {self.text}\n")
        for number, line in enumerate(lines):
            print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
            if not number:
                print("  " + "  ".join("-" * width for width in widths))
        sys.stdout.flush()

    def cells(self) -> list[list[str]]:
        """The rows as they are printed."""
        return [[_text(cell) for cell in row] for row in self.rows]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{self.name}.csv", "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.columns)
            writer.writerows(self.cells())

    def markdown(self) -> str:
        """The table for a page: its text, then the rows; columns of numbers stand to the right."""
        numeric = [all(not isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))]
        return f"{self.text}\n\n{table(self.columns, self.cells(), numeric)}\n"

    @property
    def failures(self) -> int:
        return sum("NO" in row for row in self.rows)


def verdict(passed: bool) -> str:
    return "yes" if passed else "NO"


def progress(text: str) -> None:
    """Says what is being measured now."""
    print(f"  ... {text}", file=sys.stderr, flush=True)


def machine(options: str, load_before: float) -> Table:
    """Where and when: figures of another machine are not comparable."""
    rows: list[tuple[str, Cell]] = [
        ("processor", _processor()),
        ("cores", os.cpu_count() or 0),
        ("load average at start and end", f"{load_before:.2f}, {os.getloadavg()[0]:.2f}"),
        ("system", f"{platform.system()} {platform.release()}"),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("numpy", numpy.__version__),
        ("options", options),
    ]
    return Table("machine", "where it was measured", ("what", "value"), rows)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":")[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _text(cell: Cell) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
