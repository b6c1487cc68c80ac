"""Tables as text, pages and figures: no word is lost, what would be a tag is shown as text, a figure is the same each time."""

import struct
import sys

import pytest

from lightning_echo.measure import page as figures
from lightning_echo.measure.page import HtmlPage, Table, as_block, as_text

PICTURE = "<svg></svg>"


def test_a_table_as_text_aligns_figures_draws_bars_and_loses_no_word():
    lines = as_text(Table("Rates", ("what", "examples/s"), (("run", "7"), ("loader", "1,000")))).splitlines()
    assert {len(line) for line in lines[1:]} == {len(lines[1])}
    assert [line.split()[-1] for line in lines[1:]] == ["examples/s", "7", "1,000"]
    lines = as_text(Table("Parts", ("", "ms"), (("step", "1"), ("wait", "2")), shares=(1 / 3, 2 / 3))).splitlines()
    assert [line.count("#") for line in lines] == [0, 0, 10, 20]
    words = " ".join(f"word{number}" for number in range(60))
    text = as_text(Table("Names", ("", "ms"), ((words, "5"),)))
    assert max(map(len, text.splitlines())) <= 100
    assert sorted(text.split()) == sorted(["Names", "ms", "5", *words.split()])
    assert (as_block("Why", []), as_block("Why", ["a", "b"])) == ("", "Why\n  a\n  b")


def test_a_page_has_verdict_figure_and_tables_in_this_order_and_nothing_of_what_is_empty():
    table = Table("Epochs", ("epoch", "idle"), (("0", "5%"),), ("A remark.",))
    full = HtmlPage("Head", PICTURE, "lines", (table,), "Echo.", ("one", "two"), ("num_workers=4",), ("A note.",), ("factor",))
    order = [
        "<h1>Head",
        "Echo.",
        "one",
        "two",
        "Next: <code>num_workers=4",
        "Then: <code>factor",
        "<svg>",
        "Epochs",
        "5%",
        "A remark.",
        "A note.",
    ]
    text = full.text()
    body = text[text.index("<body>") :]
    places = [body.index(words) for words in order]
    assert places == sorted(places)
    assert '<table class="numbered">' in full.text(), "a column of numbers takes no more room than it needs"
    words = HtmlPage("", "", "", (Table("", ("why", "idle"), (("0", "5%"), ("at the beginning", "5%"))),))
    assert "<table>" in words.text()
    bare = HtmlPage("A & B", PICTURE, "two lines", ()).text()
    assert [part for part in ('class="verdict"', 'class="why"', "Next", "Then", "<table", "Notes", "<li>") if part in bare] == []
    assert PICTURE in bare


def test_what_would_be_a_tag_is_shown_as_text():
    name = "<script>$figure</script>"
    table = Table(name, (name,), ((name,),), (name,))
    text = HtmlPage(name, PICTURE, f'"{name}', (table,), name, (name,), (name,), (name,)).text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;$figure&lt;/script&gt;") == 11  # the headline twice, the words of the figure, and 8 texts
    assert 'aria-label="&quot;' in text


def drawn():
    figure = figures.new_figure(4, 3)
    figure.subplots().plot([1, 2], [3, 4], color=figures.BLUE)
    return figure


def test_a_figure_has_120_dots_an_inch_or_is_one_svg_element_the_same_each_time(tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="figures need matplotlib")
    figures.save(drawn(), tmp_path / "figure.png")
    written = (tmp_path / "figure.png").read_bytes()
    assert (written[:8], struct.unpack(">II", written[16:24])) == (b"\x89PNG\r\n\x1a\n", (480, 360))
    settings = dict(matplotlib.rcParams)
    svg = figures.as_svg(drawn())
    assert (svg[:5], svg[-6:]) == ("<svg ", "</svg>")
    assert figures.as_svg(drawn()) == svg
    assert dict(matplotlib.rcParams) == settings


def test_it_is_said_what_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"^pictures need matplotlib, .*pip install 'lightning-echo\[report\]'$"):
        figures.check_matplotlib("pictures")
    with pytest.raises(ModuleNotFoundError, match=r"^figures need matplotlib"):
        figures.new_figure(4, 3)
