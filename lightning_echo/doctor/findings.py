"""A finding of the doctor, as a value: a status, one sentence, and the way out. All findings together as text or as a document.

The document is for programs. Its first field is its version. ``name`` says what was checked, and stays the same. ``sentence`` and
``way_out`` are for people. ``figures`` are the measured values, with the units in their names.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Figure", "Finding", "Status", "as_document", "as_text", "error", "ok", "warning", "worst"]

_VERSION = 1
_COLUMNS = 110
_INDENT = " " * 10

Figure = int | float | str | bool | None


class Status(str, Enum):
    """How bad a finding is. The members are in order, the worst last."""

    ok = "ok"
    warning = "warning"
    error = "error"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: What was checked, in one word for programs, e.g. ``"shared_memory"``.
        status: How bad it is.
        sentence: What was found, for people.
        way_out: What to do; empty if there is nothing to do.
        figures: The measured values, by name. The names contain the units.
        about: To what the finding belongs: ``"machine"``, ``"data"``, or the name of one of several loaders.
    """

    name: str
    status: Status
    sentence: str
    way_out: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    about: str = "machine"


def ok(name: str, sentence: str, **figures: Figure) -> Finding:
    """Returns a finding with nothing to do."""
    return Finding(name, Status.ok, sentence, figures=figures)


def warning(name: str, sentence: str, way_out: str, **figures: Figure) -> Finding:
    """Returns a finding that costs time or may surprise."""
    return Finding(name, Status.warning, sentence, way_out, figures)


def error(name: str, sentence: str, way_out: str, **figures: Figure) -> Finding:
    """Returns a finding with which a training would fail."""
    return Finding(name, Status.error, sentence, way_out, figures)


def worst(findings: Sequence[Finding]) -> Status:
    """Returns the worst status; ``ok`` if there is no finding.

    >>> worst([ok("cores", "2 cores."), warning("workers", "No workers.", "Set num_workers=2.")]).value
    'warning'
    """
    order = list(Status)
    return max((finding.status for finding in findings), key=order.index, default=Status.ok)


def as_text(findings: Sequence[Finding]) -> str:
    """Returns all findings for a terminal, each with its way out below it, and a line that counts them at the end.

    >>> print(as_text([warning("workers", "The loader has no workers.", "Set num_workers=2.")]))
    machine
      warning The loader has no workers.
              Set num_workers=2.
    <BLANKLINE>
    0 errors, 1 warning
    """
    blocks = []
    for about in dict.fromkeys(finding.about for finding in findings):
        lines = [about]
        for finding in findings:
            if finding.about == about:
                lines += _wrapped(f"  {finding.status.value:<7} ", finding.sentence)
                lines += _wrapped(_INDENT, finding.way_out)
        blocks.append("\n".join(lines))
    errors, warnings = (sum(finding.status is status for finding in findings) for status in (Status.error, Status.warning))
    return "\n\n".join([*blocks, f"{_counted(errors, 'error')}, {_counted(warnings, 'warning')}"])


def as_document(findings: Sequence[Finding]) -> str:
    """Returns all findings as JSON.

    >>> json.loads(as_document([]))
    {'lightning_echo_doctor': 1, 'status': 'ok', 'findings': []}
    """
    rows = [
        {
            "about": finding.about,
            "name": finding.name,
            "status": finding.status.value,
            "sentence": finding.sentence,
            "way_out": finding.way_out,
            "figures": dict(finding.figures),
        }
        for finding in findings
    ]
    return json.dumps({"lightning_echo_doctor": _VERSION, "status": worst(findings).value, "findings": rows}, indent=2)


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, initial_indent=start, subsequent_indent=_INDENT, break_long_words=False)


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
