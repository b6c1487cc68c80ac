"""The page and its figures: well formed, closed in itself, drawn as worked out by hand, with the same figures as the text."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from analyses import ANALYSIS
from measured_stages import MS

from lightning_echo.analysis.measured import Spread
from lightning_echo.analysis.report import _POINT_COLORS, draw, page, save_page
from lightning_echo.insertion import POINTS

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


def test_tags_match_nothing_is_fetched_and_it_says_what_the_text_says():
    text = page(ANALYSIS)
    found = Reader(text)
    assert {"svg", "table", "h1", "style"} <= found.tags
    assert not {"script", "link", "img", "iframe"} & found.tags
    assert all(link.startswith("#") for link in found.links)
    assert set(re.findall(r"\w+://[^\"'\s<]*", text)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", text))
    assert "@import" not in text
    assert len(re.findall("<!DOCTYPE|<[?]xml", text)) == 1
    assert found.texts["h1"] == ["Stall analysis: the accelerator is busy 25% of the time"]
    why = ["The accelerator is idle 75% of the time.", "A step takes 80 ms; 20 ms if its batch is ready."]
    assert found.texts["p"][:3] == [ANALYSIS.verdict.message, *why]
    assert ["fetch stall", "30", "38%"] in found.rows
    assert ["num_workers=4", "34", "34 to 34", "41%", "2.00x", "workers"] in found.rows  # as in test_text
    assert ["the real run", "68", "80", "72 to 88", "-15%"] in found.rows
    assert "li" not in found.texts
    assert found.texts["code"] == ["num_workers=4"], "the size of the cache is not known"


def test_what_others_named_is_shown_in_the_file_and_not_obeyed(tmp_path):
    """Echoing after augmentation: a transform that takes 50 ms, with four workers, starves a step of 20 by itself."""
    stages = replace(ANALYSIS.stages, augment=Spread.exactly(50 * MS), points=("after_augmentation", "after_batching"))
    names = {"<img src=x>": 50 * MS, "$verdict ${tables}": 5 * MS}
    analysis = replace(ANALYSIS, stages=stages, transforms=names, notes=("a & b <script>naïve</script>",))
    assert "<img src=x>" in analysis.verdict.message
    save_page(analysis, tmp_path / "page.html")
    found = Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert found.texts["p"][0] == analysis.verdict.message
    assert ["<img src=x>", "50"] in found.rows
    assert ["$verdict ${tables}", "5"] in found.rows
    assert found.texts["li"] == ["a & b <script>naïve</script>"]
    assert not {"script", "img"} & found.tags


def lines_of(figure):
    """Those of the second axes, by their label: factor and speed-up."""
    return {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in figure.axes[1].lines}


def bars_of(figure):
    return [(bar.get_x(), bar.get_width()) for bar in figure.axes[0].patches]


def test_the_bar_is_made_of_the_parts_and_the_lines_of_what_is_predicted():
    assert list(_POINT_COLORS) == list(POINTS)
    assert len(set(_POINT_COLORS.values())) == len(POINTS)
    figure = draw(ANALYSIS)
    # ms: step, copy, prep stall, fetch stall
    assert bars_of(figure) == [pytest.approx(bar, abs=1e-9) for bar in ((0, 20), (20, 1), (21, 29), (50, 30))]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == [
        "step: 20 ms (25%)",
        "copy to the device: 1 ms (1%)",
        "prep stall: 29 ms (36%)",
        "fetch stall: 30 ms (38%)",
    ]
    # as in test_predict
    predicted = [("after_read", 1, 68), ("after_read", 4, 38), ("before_augmentation", 4, 26), ("after_augmentation", 2, 36)]
    for point, factor, milliseconds in [*predicted, ("after_batching", 2, 34), ("after_transfer", 8, 20.125)]:
        assert lines_of(figure)[point][factor] == pytest.approx(68 / milliseconds)
    assert figure.axes[1].get_xlim()[1] == pytest.approx(8, abs=0.5)
