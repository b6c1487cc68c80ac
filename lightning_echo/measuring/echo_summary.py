"""``echo_summary.json``: what a run saves for other programs, and for a later run that replays its decisions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from lightning_echo.measuring.report import EpochReport
from lightning_echo.measuring.summary import RunVerdict
from lightning_echo.saved import FieldError, entry, record, rows

__all__ = ["FILE_NAME", "VERSION", "FactorUse", "RunSummary"]

FILE_NAME = "echo_summary.json"
VERSION = 1


@dataclass(frozen=True)
class FactorUse:
    """A factor, and the batches that it was used for: from one batch on, until the next `FactorUse`.

    Attributes:
        step: Number of batches of the run after which the controller decided on it; 0 at the beginning. None: other code than
            the controller has set it.
        batch: Number of the first batch of the run with this factor, from 0. With several loaders: a mapping from their names to
            such numbers.
        factor: Echo factor.
        reason: The controller's reason, for programs: a value of `Reason`, or empty.
        message: The controller's reason, for people.
    """

    step: int | None
    batch: int | Mapping[str, int]
    factor: float
    reason: str = ""
    message: str = ""


@dataclass(frozen=True)
class RunSummary:
    """What is in the file.

    Attributes:
        reports: An `EpochReport` for each epoch.
        decisions: The factors of the run, in order. The first is the factor that the run began with.
        packages: Versions of the packages by name.
        verdict: What to do, why, and the line to paste. None if too little was measured, and in files of older versions.

    Example:
        >>> summary = RunSummary([EpochReport(0, 10, 2.0, 40, 40)], [FactorUse(0, 0, 2.0)], {"lightning_echo": "0.1.0"})
        >>> RunSummary.from_json(summary.to_json()) == summary
        True
    """

    reports: Sequence[EpochReport] = ()
    decisions: Sequence[FactorUse] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    verdict: RunVerdict | None = None

    def to_json(self) -> str:
        """Returns the text of the file."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunSummary:
        """Reads the text of a file.

        Raises:
            ValueError: It is not the text of such a file, or it is of a later version.
        """
        found = json.loads(text)  # a JSONDecodeError is a ValueError
        version = found.get("version") if isinstance(found, dict) else None
        if not isinstance(version, int):
            raise ValueError(f"this is not an {FILE_NAME}: it must be an object with version, reports and decisions")
        if version > VERSION:
            raise ValueError(
                f"the {FILE_NAME} has version {version}, this lightning_echo knows up to {VERSION}: upgrade lightning_echo"
            )
        try:
            reports = rows(found, "reports", partial(record, EpochReport))
            decisions = rows(found, "decisions", partial(record, FactorUse))
            verdict = entry(found, "verdict", RunVerdict | None, None)
            return cls(reports, decisions, entry(found, "packages", dict, {}), verdict)
        except FieldError as error:
            raise ValueError(f"the {FILE_NAME} is damaged: {error}") from None
