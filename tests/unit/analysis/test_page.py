"""The page: well formed, closed in itself, and with the same figures as the text."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from analyses import ANALYSIS, STREAM
from measured_stages import CACHED, MS

from lightning_echo.analysis.predict import Spread
from lightning_echo.analysis.report import page, save_page

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Reader(HTMLParser):
    """Fails where tags do not match; collects the cells of tables, and the text of other elements."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.rows, self.texts, self.links = [], set(), [], {}, []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())
            if self.open[-1] == "td":
                self.rows[-1].append(data)


def test_the_check_of_tags_can_fail():
    for text in ("<p><b></p></b>", "<p>"):
        with pytest.raises(AssertionError):
            Reader(text)


@pytest.mark.parametrize("analysis", [ANALYSIS, STREAM])
def test_tags_match_and_nothing_is_fetched(analysis):
    text = page(analysis)
    found = Reader(text)
    assert {"svg", "table", "h1", "style"} <= found.tags
    assert not {"script", "link", "img", "iframe"} & found.tags
    assert all(link.startswith("#") for link in found.links)
    assert set(re.findall(r"\w+://[^\"'\s<]*", text)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", text))
    assert "@import" not in text
    assert len(re.findall("<!DOCTYPE|<[?]xml", text)) == 1


def test_it_says_what_the_text_says():
    found = Reader(page(ANALYSIS))
    assert found.texts["h1"] == ["Stall analysis: the accelerator is busy 25% of the time"]
    assert found.texts["p"][0] == ANALYSIS.verdict.message
    assert ["fetch stall", "30", "38%"] in found.rows
    assert ["num_workers=4", "34", "34 to 34", "41%", "2.00x", "workers"] in found.rows  # as in test_text
    assert ["the real run", "68", "80", "72 to 88", "-15%"] in found.rows
    why = ["The accelerator is idle 75% of the time.", "A step takes 80 ms; 20 ms if its batch is ready."]
    assert found.texts["p"][1:3] == why
    assert "li" not in found.texts


def test_what_others_named_is_shown_and_not_obeyed():
    name, note = '<script>alert("1")</script>', "a & b <img src=x>"
    found = Reader(page(replace(ANALYSIS, transforms={name: 5 * MS}, notes=(note,))))
    assert [name, "5"] in found.rows
    assert found.texts["li"] == [note]
    assert not {"script", "img"} & found.tags


def test_neither_is_what_the_verdict_names():
    """Echoing after augmentation: a transform that takes 50 ms, with four workers, starves a step of 20 by itself."""
    stages = replace(ANALYSIS.stages, augment=Spread.exactly(50 * MS), points=("after_augmentation", "after_batching"))
    analysis = replace(ANALYSIS, stages=stages, transforms={"<img src=x>": 50 * MS})
    assert "<img src=x>" in analysis.verdict.message
    found = Reader(page(analysis))
    assert found.texts["p"][0] == analysis.verdict.message
    assert "img" not in found.tags


def test_a_dollar_in_a_name_is_no_placeholder():
    assert ["$verdict ${tables}", "5"] in Reader(page(replace(ANALYSIS, transforms={"$verdict ${tables}": 5 * MS}))).rows


def test_a_file_holds_the_page(tmp_path):
    analysis = replace(ANALYSIS, notes=("naïve",))
    save_page(analysis, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page(analysis)


def test_the_line_for_the_trainer_can_be_copied():
    cached = replace(
        ANALYSIS, stages=replace(CACHED, free_bytes=10**11)
    )  # 0.7 leave 1.07 * (136 - 80 * 0.7) / 4 = 21.4 ms, for 22 / 0.95
    found = Reader(page(cached))
    assert found.texts["code"] == ["num_workers=4", 'EchoCallback(factor=1, cache={"size": "701MiB", "hold": "raw"})']
    assert Reader(page(ANALYSIS)).texts["code"] == ["num_workers=4"], "the size of the cache is not known"
