"""The tables as Markdown, and their place on a page of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from report import Table

BEGIN, END = "<!-- peers:begin -->", "<!-- peers:end -->"


def markdown(tables: Sequence[Table]) -> str:
    """The tables, one after another."""
    return "\n".join(table.markdown() for table in tables)


def insert(text: str, page: Path) -> bool:
    """Puts the text in place of what stands between the markers; whether the page is there.

    Raises:
        ValueError: The page has not each marker once, in this order.
    """
    if not page.exists():
        return False
    before, *rest = page.read_text().split(BEGIN)
    parts = rest[0].split(END) if len(rest) == 1 else []
    if len(parts) != 2:
        raise ValueError(f"{page} must have {BEGIN} and, after it, {END}, each once: add them where the tables belong")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{parts[1]}")
    return True
