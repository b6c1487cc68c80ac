"""The runs that are done: one CSV row each, appended when a run ends, so that the next call goes on after it."""

from __future__ import annotations

import csv
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from learning.arms import Arm
from learning.rules import quality_at_end, reached_at
from learning.run import Run
from learning.task import Task

__all__ = ["Row", "Store", "row_of"]


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        task: Its name.
        arm: Its name.
        rate: Learning rate.
        seed: Of split, weights, order and augmentation; from 100 on a tuning seed.
        fresh_to_target: Fresh examples until the target; infinite if it was missed.
        steps_to_target: Optimizer steps until then.
        quality: Mean metric over the last window of the budget; nan where the run ended before.
        fresh: In the whole run.
        steps: In the whole run.
        last: The last metric.
        seconds: Of the whole run, on a machine that did other things beside it.
        values: The metric at each multiple of the spacing, separated by spaces.
    """

    task: str
    arm: str
    rate: float
    seed: int
    fresh_to_target: float
    steps_to_target: float
    quality: float
    fresh: int
    steps: int
    last: float
    seconds: float
    values: str


def row_of(task: Task, arm: Arm, rate: float, seed: int, run: Run) -> Row:
    """What is kept of a run."""
    reached = reached_at(task, run.evaluations)
    quality = quality_at_end(task, run.evaluations, arm.budget_examples(task))
    end = run.evaluations[-1]
    return Row(
        task=task.name,
        arm=arm.name,
        rate=rate,
        seed=seed,
        fresh_to_target=math.inf if reached is None else reached.fresh,
        steps_to_target=math.inf if reached is None else reached.steps,
        quality=math.nan if quality is None else round(quality, 4),
        fresh=end.fresh,
        steps=end.steps,
        last=round(end.value, 4),
        seconds=round(run.seconds, 1),
        values=" ".join(f"{one.value:.4g}" for one in run.evaluations),
    )


class Store:
    """Rows in one CSV file.

    Args:
        folder: Of the files.
        name: Of the file: the task's.
        kind: The data class that a row is.
    """

    def __init__(self, folder: Path, name: str, kind: type[Any] = Row) -> None:
        self._path, self._kind = folder / f"{name}.csv", kind
        self.rows: list[Any] = []
        if self._path.exists():
            with open(self._path, newline="") as file:
                self.rows = [_parsed(kind, record) for record in csv.DictReader(file)]

    def add(self, row: Any) -> None:
        """Appends a row, at once."""
        self.rows.append(row)
        is_new = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", newline="") as file:
            writer = csv.DictWriter(file, [one.name for one in fields(self._kind)], lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(asdict(row))


def _parsed(kind: type[Any], record: dict[str, str]) -> Any:
    types: dict[str, Any] = {"str": str, "int": int, "float": float, "bool": "True".__eq__}
    there = [
        one for one in fields(kind) if one.name in record
    ]  # rows that were written before a field was there have its default
    return kind(**{one.name: types[str(one.type)](record[one.name]) for one in there})
