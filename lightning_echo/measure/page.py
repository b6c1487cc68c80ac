"""Reports: the figures, tables and pages that every report has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from string import Template
from textwrap import fill, wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# ---------------------------------------------------------------------- figure
# matplotlib is optional, and its global state (pyplot, the current figure) is not used.
#
# A figure is drawn in the colours of a light page, and a PNG keeps them. In an SVG each colour is a variable of the page, so that
# a dark page shows others. They are the colours of Okabe and Ito, which colour-blind people can tell apart, or darker where these
# have too little contrast. A test computes both.

PALETTE = {  # by the name of the variable: on a light page, and on a dark one
    "ink": ("#1f2328", "#e6e6e6"),  # of words and frames
    "paper": ("#ffffff", "#17191c"),
    "orange": ("#7a5200", "#e69f00"),
    "sky": ("#3d9ad0", "#7cc8f2"),
    "green": ("#009e73", "#009e73"),
    "blue": ("#0060a0", "#3d97d6"),
    "vermilion": ("#d55e00", "#d55e00"),
    "pink": ("#cc79a7", "#cc79a7"),
}
INK, PAPER, ORANGE, SKY, GREEN, BLUE, VERMILION, PINK = (light for light, _ in PALETTE.values())
BROAD, NARROW = 8.0, 4.2  # widths in inches: of a picture, and of the figure that a phone shows
DOTS_PER_INCH = 120
_COLUMNS_PER_INCH = 11  # of a figure's words
_OF_LIGHT_PAGE = {light: f"var(--{name}, {light})" for name, (light, _) in PALETTE.items()}


def check_matplotlib(user: str = "figures") -> None:
    """Raises a ModuleNotFoundError that names the ``user`` and the fix if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        message = f"{user} need matplotlib, which is not installed: pip install 'lightning-echo[report]'"
        raise ModuleNotFoundError(message) from error


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure, with its size in inches and a layout that keeps the contents from overlapping."""
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor=PAPER)
    figure.set_layout_engine("constrained", h_pad=0.12)
    return figure


def columns_of(width: float) -> int:
    """Returns how many letters of a title find room above the axes of a figure."""
    return int((width - 0.6) * _COLUMNS_PER_INCH)


def dressed(figure: Figure) -> Figure:
    """Gives words, ticks and frames the colours of the house. What the user has set for other figures does not count."""
    from matplotlib.text import Text

    for axes in figure.axes:
        axes.set_facecolor(PAPER)
        axes.tick_params(which="both", color=INK, labelcolor=INK)
        for spine in axes.spines.values():
            spine.set_edgecolor(INK)
    for text in figure.findobj(Text):
        text.set(color=INK)
    return figure


def add_grid(axes: Axes) -> None:
    axes.grid(color=INK, alpha=0.15, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["right", "top"]].set_visible(False)


def save(figure: Figure, path: str | Path) -> None:
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH, facecolor=PAPER)


def as_svgs(draw: Callable[[float], Figure]) -> tuple[str, str]:
    """Returns a figure as SVG elements, for a broad page and for a narrow one. ``draw`` gets the width."""
    return as_svg(draw(BROAD)), as_svg(draw(NARROW), "narrow-")


def as_svg(figure: Figure, prefix: str = "") -> str:
    """Returns a figure as an SVG element. It refers to nothing outside itself and is the same in each process.

    Its colours are the page's (`PALETTE`). ``prefix``: of all its ids, which must be unique on a page.
    """
    import matplotlib

    written = StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "lightning_echo"}):
        figure.savefig(written, format="svg", metadata=nothing, facecolor=PAPER)
    svg = written.getvalue()
    svg = re.sub("|".join(_OF_LIGHT_PAGE), lambda found: _OF_LIGHT_PAGE[found[0]], svg[svg.index("<svg") :])
    return re.sub(r'(\bid="|\bhref="#|\burl\(#)', rf"\1{prefix}", svg).strip()


# ---------------------------------------------------------------------- table
# A table as a value and as text; a terminal and a page show the same cells. Only a line to paste is longer than 100 columns.

_COLUMNS = 100
_INDENT = "  "
_GAP = "  "
_BAR = 30  # width of a bar for the whole
_NARROWEST = 12  # least width of the first column; longer text continues on the next line


@dataclass(frozen=True)
class Table:
    """A table. The first cell of a row has words, the others have figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()  # of each row in the whole, for a bar next to it; empty if the rows are not parts of a whole


def as_text(table: Table) -> str:
    """Returns a table in columns, with its title above and its remarks below.

    >>> print(as_text(Table("Rates", ("", "examples/s"), (("the real run", "100"),), ("Each is a median.",))))
    Rates
                    examples/s
      the real run         100
      Each is a median.
    """
    rows = [table.columns, *table.rows]
    bars = ["", *(_GAP + "#" * round(_BAR * share) for share in table.shares)] if table.shares else [""] * len(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    others = len(_INDENT) + sum(len(_GAP) + width for width in widths[1:]) + max(map(len, bars))
    widths[0] = min(widths[0], max(_NARROWEST, _COLUMNS - others))
    lines = []
    for row, bar in zip(rows, bars, strict=True):
        words = wrap(row[0], widths[0], subsequent_indent=_INDENT) or [""]
        figures = "".join(_GAP + cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines += [f"{_INDENT}{line}".rstrip() for line in (f"{words[0].ljust(widths[0])}{figures}{bar}", *words[1:])]
    return "\n".join([table.title, *lines, *map(as_sentence, table.remarks)])


def as_block(title: str, sentences: Sequence[str]) -> str:
    return "\n".join([title, *map(as_sentence, sentences)]) if sentences else ""


def verdict_blocks(message: str, why: Sequence[str], lines: Sequence[str], others: Sequence[str] = ()) -> list[str]:
    """Returns the first blocks of a report, without empty ones. Lines to paste are not wrapped."""
    after = [
        "\n".join([title, *(f"{_INDENT}{line}" for line in each)]) for title, each in (("Next", lines), ("Then", others)) if each
    ]
    return [block for block in (as_block("Verdict", [message]), as_block("Why", why), *after) if block]


def as_sentence(text: str) -> str:
    """Returns a text in indented lines; those after the first are indented further."""
    return fill(text, _COLUMNS, initial_indent=_INDENT, subsequent_indent=2 * _INDENT, break_on_hyphens=False)


# ---------------------------------------------------------------------- html page
# A report as one HTML page, which loads no script, no font and no picture.

_WORDS = 8  # a first cell with at least this number of characters has words
_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$headline</title>
<style>
:root { color-scheme: light dark; --line: #8884; $light }
@media (prefers-color-scheme: dark) { :root { $dark } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
body { color: var(--ink); background: var(--paper); }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
.verdict { border-left: 0.4rem solid var(--blue); background: #0060a01a; padding: 0.8rem 1rem; font-size: 1.1rem; }
.wide { overflow-x: auto; }
.figure { margin: 2rem 0; }
.figure svg { display: block; width: 100%; height: auto; }
.narrow { display: none; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0 0.2rem 1.5rem; text-align: right; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; }
td { vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; text-align: left; min-width: 10rem; }
td:first-child { white-space: normal; overflow-wrap: anywhere; }
.numbered td:first-child, .numbered th:first-child { min-width: 0; }
p, li { overflow-wrap: anywhere; }
.why { margin: 0.2rem 0; }
.remark { font-size: 0.9rem; opacity: 0.8; margin: 0.4rem 0; }
@media (max-width: 40rem) {
table { font-size: 0.85rem; }
th, td { padding-left: 0.7rem; }
.broad { display: none; }
.narrow { display: block; }
}
</style>
</head>
<body>
<h1>$headline</h1>$verdict
<div class="figure" role="img" aria-label="$figure_words">
$figures
</div>
$tables
$notes
</body>
</html>
""")


@dataclass(frozen=True)
class HtmlPage:
    """The contents of a page, from top to bottom. All of it except ``figure`` is plain text: a tag is shown as it is."""

    headline: str
    figure: str  # an SVG element
    figure_words: str  # for people who cannot see the figure
    tables: Sequence[Table]
    verdict: str = ""
    why: Sequence[str] = ()
    lines: Sequence[str] = ()
    notes: Sequence[str] = ()
    others: Sequence[str] = ()  # the lines after those, each with what it gains
    narrow: str = ""  # the figure for a narrow page; empty: the same
    subtitle: str = ""

    def text(self) -> str:
        above = [f'<p class="remark">{escape(self.subtitle)}</p>'] if self.subtitle else []
        above += [f'<p class="verdict">{escape(self.verdict)}</p>'] if self.verdict else []
        above += [f'<p class="why">{escape(words)}</p>' for words in self.why]
        above += [f"<p>Next: <code>{escape(line)}</code></p>" for line in self.lines]
        above += [f"<p>Then: <code>{escape(line)}</code></p>" for line in self.others]
        light, dark = (" ".join(f"--{name}: {of[page]};" for name, of in PALETTE.items()) for page in (0, 1))
        narrow = f'\n<div class="narrow">\n{self.narrow}\n</div>' if self.narrow else ""
        return _PAGE.substitute(
            headline=escape(self.headline),
            light=light,
            dark=dark,
            verdict="".join(f"\n{each}" for each in above),
            figures=f'<div class="broad">\n{self.figure}\n</div>{narrow}' if narrow else self.figure,
            figure_words=escape(self.figure_words),
            tables="\n".join(map(_table, self.tables)),
            notes=f"<h2>Notes</h2>\n<ul>\n{_each('li', self.notes)}\n</ul>" if self.notes else "",
        )


def _table(table: Table) -> str:
    rows = "\n".join(f"<tr>{_each('td', row, '')}</tr>" for row in table.rows)
    head = f"<thead><tr>{_each('th', table.columns, '')}</tr></thead>"
    remarks = "".join(f'\n<p class="remark">{escape(remark)}</p>' for remark in table.remarks)
    kind = ' class="numbered"' if all(len(row[0]) < _WORDS for row in table.rows) else ""  # no words that need room
    grid = f"<table{kind}>\n{head}\n<tbody>\n{rows}\n</tbody>\n</table>"
    return f'<h2>{escape(table.title)}</h2>\n<div class="wide">\n{grid}\n</div>{remarks}'


def _each(tag: str, texts: Iterable[str], between: str = "\n") -> str:
    return between.join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
