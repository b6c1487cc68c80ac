"""Light and dark pages, and narrow ones: contrast by the formula of WCAG 2, colours and widths in what a page says."""

import io
import re
from dataclasses import replace
from functools import partial
from itertools import combinations
from math import dist
from xml.etree import ElementTree

import pytest
from analyses import ANALYSIS
from saved_runs import SHARED
from test_strip import RUN

from lightning_echo.analysis.report import draw as draw_analysis
from lightning_echo.analysis.report import page as analysis_page
from lightning_echo.measure import report as figures
from lightning_echo.measure.compare import Run, compare
from lightning_echo.measure.page import BROAD, NARROW, PALETTE, HtmlPage, Table, as_svg, as_svgs
from lightning_echo.measure.report import draw, page

PHONE = 390  # CSS pixels of a phone's width
PADDING = 2 * 16


def linear(color):
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(color):
    red, green, blue = linear(color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_the_formula_has_the_values_that_are_published():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    assert contrast("#959595", "#ffffff") == pytest.approx(3.0, abs=0.01)


@pytest.mark.parametrize("page_number", [0, 1], ids=["light", "dark"])
def test_words_and_lines_are_seen_on_each_background(page_number):
    colors = {name: each[page_number] for name, each in PALETTE.items()}
    paper = colors.pop("paper")
    assert contrast(colors.pop("ink"), paper) >= 4.5
    assert {name: color for name, color in colors.items() if contrast(color, paper) < 3} == {}
    assert len(set(colors.values())) == len(colors)


SEEN_BY = {  # Machado, Oliveira and Fernandes 2009: how linear colours look to people, severity 1
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


def in_lab(color, eyes):
    red, green, blue = (min(max(sum(a * b for a, b in zip(row, linear(color), strict=True)), 0), 1) for row in SEEN_BY[eyes])
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("eyes", SEEN_BY)
@pytest.mark.parametrize("page_number", [0, 1], ids=["light", "dark"])
def test_no_two_colours_look_alike(page_number, eyes):
    """The nearest two of Okabe's and Ito's colours have a distance (CIE 1976) of 17.88."""
    okabe_ito = ("#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7")
    nearest = min(dist(in_lab(one, eyes), in_lab(other, eyes)) for one, other in combinations(okabe_ito, 2))
    assert nearest >= 17.8
    colors = {name: each[page_number] for name, each in PALETTE.items() if name not in ("ink", "paper")}
    pairs = combinations(colors, 2)
    assert [pair for pair in pairs if dist(*(in_lab(colors[name], eyes) for name in pair)) < 15] == []


def styles_of(text):
    """The variables of the page: those of a light one, and those that a dark one has in their place."""
    light, dark = re.findall(r":root \{([^}]*)\}", text)
    return [dict(re.findall(r"--(\w+): (#\w{6});", each)) for each in (light, dark)]


@pytest.fixture(scope="module", params=["run", "analysis", "two runs"])
def shown(request, tmp_path_factory):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    if request.param == "run":
        return page(RUN)
    if request.param == "analysis":
        return analysis_page(ANALYSIS)
    path = tmp_path_factory.mktemp("page") / "page.html"
    compare(Run("logs/" + "long" * 20, RUN), Run("b", SLOWER)).save_page(path)
    return path.read_text(encoding="utf-8")


def svgs_of(text):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg .*?</svg>", text, flags=re.DOTALL)]


def test_the_page_sets_the_colours_of_both_and_a_figure_takes_no_other(shown):
    light, dark = styles_of(shown)
    assert (light, dark) == tuple({name: each[number] for name, each in PALETTE.items()} for number in (0, 1))
    assert "@media (prefers-color-scheme: dark) { :root { --ink" in shown
    assert "color-scheme: light dark" in shown
    assert "color: var(--ink); background: var(--paper)" in shown
    in_figures = re.findall(r"(?:fill|stroke): *([^;\"]+)", "".join(re.findall(r"<svg .*?</svg>", shown, flags=re.DOTALL)))
    names = {match[1] for color in in_figures if (match := re.fullmatch(r"var\(--(\w+), (#\w{6})\)", color))}
    assert names <= set(PALETTE)
    assert {"ink", "paper"} <= names
    assert {color for color in in_figures if not color.startswith("var(")} <= {"none"}


def uncoloured(element, has_fill=False, has_stroke=False, in_defs=False):
    """Yields shapes that would be black, as SVG paints what nobody has given a colour."""
    style = element.get("style", "")
    has_fill, has_stroke = has_fill or "fill:" in style, has_stroke or "stroke:" in style
    kind = element.tag.rpartition("}")[2]
    if kind in ("path", "use", "text") and not in_defs and not has_fill:
        yield element
    for child in element:
        yield from uncoloured(child, has_fill, has_stroke, in_defs or kind in ("defs", "clipPath"))


def test_nothing_in_a_figure_is_black_because_nobody_gave_it_a_colour(shown):
    svgs = svgs_of(shown)
    assert len(svgs) == 2
    for svg in svgs:
        assert list(uncoloured(svg)) == []


def test_no_id_is_twice_on_a_page_and_each_is_found(shown):
    figures_of_page = re.findall(r"<svg .*?</svg>", shown, flags=re.DOTALL)
    each = [set(re.findall(r'\bid="([^"]+)"', figure)) for figure in figures_of_page]
    assert not each[0] & each[1]
    for figure, ids in zip(figures_of_page, each, strict=True):
        assert set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', figure)) != set()
        used = {one or other for one, other in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', figure)}
        assert used <= ids


def test_a_phone_needs_no_sideways_scrolling_and_gets_the_narrow_figure(shown):
    style = re.search("<style>(.*?)</style>", shown, flags=re.DOTALL)[1]
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in shown
    fixed = [
        (float(number) * (16 if unit == "rem" else 1)) for number, unit in re.findall(r"(?<!max-)width: ([\d.]+)(px|rem)", style)
    ]
    assert [each for each in fixed if each > PHONE - PADDING] == []
    assert ".figure svg { display: block; width: 100%; height: auto; }" in style
    assert ".wide { overflow-x: auto; }" in style
    body = shown[shown.index("<body>") :]
    assert body.count("<table") == len(re.findall(r'<div class="wide">\n<table', body)), "each table scrolls by itself"
    narrow = style[style.index("max-width: 40rem") :]
    assert ".broad { display: none; }" in narrow
    assert ".narrow { display: block; }" in narrow
    assert ".narrow { display: none; }" in style[: style.index("@media (max-width")]
    broad, small = svgs_of(shown)
    assert [round(float(svg.get("viewBox").split()[2])) for svg in (broad, small)] == [round(72 * BROAD), round(72 * NARROW)]


EVERYTHING = replace(
    SHARED,
    reports=[
        replace(
            each,
            reads_in_flight=7.5,
            cache_received_fraction=0.25,
            shared_trainings=3,
            peer_wait_fraction=0.1,
            read_again_examples=4,
        )
        for each in SHARED.reports
    ],
)


SLOWER = replace(RUN, reports=[replace(each, data_wait_seconds=0.2) for each in RUN.reports])
DRAWN = {
    "on demand": partial(draw, RUN),
    "all quantities": partial(draw, EVERYTHING),
    "with labels": partial(draw, SHARED),
    "analysis": partial(draw_analysis, ANALYSIS),
    "two runs": compare(Run("logs/version_0", RUN), Run("logs/version_1", SLOWER)).draw,
}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("width", [BROAD, NARROW])
def test_words_of_a_figure_are_large_enough_where_it_is_shown_and_do_not_overlap(name, width):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    figure = DRAWN[name](width=width)
    FigureCanvasAgg(figure).draw()
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    shown_width = PHONE - PADDING if width == NARROW else 640 - PADDING  # from 640 pixels on
    assert min(text.get_fontsize() for text in texts) * shown_width / (72 * width) >= 9
    titles = [axes._left_title for axes in figure.axes]
    titles += [axes.xaxis.label for axes in figure.axes if axes.get_xlabel()]
    titles += [legend for axes in figure.axes if (legend := axes.get_legend()) is not None]
    titles += [text for axes in figure.axes for text in axes.texts]
    boxes = [text.get_window_extent() for text in titles]
    for box in boxes:
        assert -1 <= box.x0 <= box.x1 <= figure.bbox.width + 1
    assert [(one, two) for one, two in combinations(boxes, 2) if one.overlaps(two)] == []


def colors_of(png):
    image = pytest.importorskip("PIL.Image", reason="pixels need Pillow").open(io.BytesIO(png)).convert("RGB")
    return {"#" + bytes(color).hex(): count for count, color in image.getcolors(maxcolors=2**20)}


def test_a_png_is_light_whatever_style_the_program_has_chosen(tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    plain, dark = tmp_path / "plain.png", tmp_path / "dark.png"
    figures.save_png(RUN, plain)
    style = pytest.importorskip("matplotlib.style")
    with style.context("dark_background"):
        figures.save_png(RUN, dark)
        svg = as_svg(draw(RUN))
    found = colors_of(dark.read_bytes())
    assert max(found, key=found.get) == "#ffffff"
    assert found == colors_of(plain.read_bytes())
    assert "#000000" not in svg
    assert "#ffffff)" in svg


def test_one_figure_is_enough_for_a_page_that_is_given_only_one():
    text = HtmlPage("Head", "<svg></svg>", "lines", (Table("Epochs", ("epoch",), (("0",),)),)).text()
    assert text.count("<svg>") == 1
    assert '<div class="broad">' not in text
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    assert len(as_svgs(lambda width: draw(RUN, width=width))) == 2
