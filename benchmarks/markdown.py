"""Tables for the documentation, written between markers, so that text and figures stand in one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["replace_section", "table"]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool] = ()) -> str:
    """A Markdown table; columns that are ``numeric`` stand to the right.

    Example:
        >>> print(table(("a", "b"), [("1", "2")]))
        | a | b |
        | --- | --- |
        | 1 | 2 |
    """
    aligned = ["---:" if right else "---" for right in numeric] or ["---"] * len(columns)
    lines = [columns, aligned, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def replace_section(path: Path, name: str, text: str) -> None:
    """Puts ``text`` between ``<!-- name:begin -->`` and ``<!-- name:end -->``.

    Raises:
        ValueError: The file has no such markers, or not in this order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found, rest = path.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{path} must hold {begin} and, after it, {end}: the place for what is generated")
    path.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")
