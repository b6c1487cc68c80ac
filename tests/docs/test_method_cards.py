"""The method cards have the same headings in the same order, and each has code that runs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

CARDS = sorted((Path(__file__).parents[2] / "docs" / "methods").glob("[!i]*.md"))
HEADINGS = ["What it does", "How to use it", "Suggested settings", "Interactions", "Cautions", "Attribution"]


@pytest.mark.parametrize("card", CARDS, ids=lambda path: str(path.stem))
def test_a_card_has_its_headings_code_and_the_place_of_its_figures(card: Path) -> None:
    assert len(CARDS) >= 4
    tokens = MarkdownIt().parse(card.read_text())
    found = [text.content for opening, text in itertools.pairwise(tokens) if opening.tag == "h2" and opening.nesting == 1]
    assert found == HEADINGS
    sections = dict(zip(found, card.read_text().split("\n## ")[1:], strict=True))
    assert "```python" in sections["How to use it"]
    settings = sections["Suggested settings"]
    assert "GPU" in settings, "say that there is no GPU figure, or name the GPU"
    assert "](" in settings or "`make " in settings, "link to the figures, or name the command that measures them"
