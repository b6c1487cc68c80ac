from __future__ import annotations

import pytest
from markdown import replace_section


def test_only_what_is_between_the_markers_changes(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a:begin -->\nold\n<!-- a:end -->\nafter\n<!-- b:begin --><!-- b:end -->\n")
    replace_section(page, "a", "new\n")
    assert page.read_text() == "before\n<!-- a:begin -->\n\nnew\n\n<!-- a:end -->\nafter\n<!-- b:begin --><!-- b:end -->\n"
    replace_section(page, "a", "newer")
    assert page.read_text() == "before\n<!-- a:begin -->\n\nnewer\n\n<!-- a:end -->\nafter\n<!-- b:begin --><!-- b:end -->\n"


def test_a_page_without_markers_is_refused(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- a:end --><!-- a:begin -->")
    with pytest.raises(ValueError, match=r"must hold <!-- a:begin --> and, after it, <!-- a:end -->"):
        replace_section(page, "a", "new")
