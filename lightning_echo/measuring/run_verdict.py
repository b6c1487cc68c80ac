"""`RunVerdict`: what a finished training says to its user first: a verdict, why, and what to paste next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["RunVerdict"]


@dataclass(frozen=True)
class RunVerdict:
    """The verdict on a training.

    Attributes:
        message: What to do, one sentence.
        why: The figures that it rests on, in words: three, or fewer if less was measured.
        next_line: What to paste; empty if nothing is to be changed.

    Example:
        >>> verdict = RunVerdict("Do not echo.", ("idle 2 % of the time",))
        >>> RunVerdict.from_plain({"message": "Do not echo.", "why": ["idle 2 % of the time"], "next_line": ""}) == verdict
        True
    """

    message: str
    why: tuple[str, ...] = ()
    next_line: str = ""

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> RunVerdict:
        """Returns the verdict that a JSON file holds.

        Raises:
            KeyError: A field is missing.
        """
        return cls(values["message"], tuple(values["why"]), values["next_line"])
