"""The method cards have the same headings in the same order, and each has code that runs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

METHODS = Path(__file__).parents[2] / "docs" / "methods"
CARDS = sorted(path for path in METHODS.glob("*.md") if path.stem != "index")
HEADINGS = [
    "What it does",
    "How to use it",
    "Suggested settings",
    "Interactions",
    "Cautions",
    "Attribution",
]


@pytest.mark.parametrize("card", CARDS, ids=lambda path: str(path.stem))
def test_a_card_has_these_headings_in_this_order(card: Path) -> None:
    tokens = MarkdownIt().parse(card.read_text())
    found = [text.content for opening, text in itertools.pairwise(tokens) if opening.tag == "h2" and opening.nesting == 1]
    assert found == HEADINGS


@pytest.mark.parametrize("card", CARDS, ids=lambda path: str(path.stem))
def test_a_card_has_code_under_how_to_use_it(card: Path) -> None:
    section = card.read_text().split("## How to use it")[1].split("\n## ")[0]
    assert "```python" in section


@pytest.mark.parametrize("card", CARDS, ids=lambda path: str(path.stem))
def test_suggested_settings_say_where_they_were_measured(card: Path) -> None:
    section = card.read_text().split("## Suggested settings")[1].split("\n## ")[0]
    assert "GPU" in section, "say that there is no GPU figure, or name the GPU"
    assert "](" in section or "`make " in section, "link to the figures, or name the command that measures them"
