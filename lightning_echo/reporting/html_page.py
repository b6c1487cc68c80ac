"""A report as one HTML page. It contains everything it shows: no script, no font and no picture is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from string import Template

from lightning_echo.reporting.table import Table

__all__ = ["HtmlPage"]

_WORDS = 8  # a first cell with at least this number of characters has words
_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$headline</title>
<style>
:root { color-scheme: light dark; --line: #8884; --mark: #0072B2; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
.verdict { border-left: 0.4rem solid var(--mark); background: #0072B21a; padding: 0.8rem 1rem; font-size: 1.1rem; }
.wide { overflow-x: auto; }
.figure { background: white; margin: 2rem 0; }
.figure svg { display: block; width: 100%; min-width: 30rem; height: auto; }
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
@media (max-width: 40rem) { table { font-size: 0.85rem; } th, td { padding-left: 0.7rem; } }
</style>
</head>
<body>
<h1>$headline</h1>$verdict
<div class="wide figure" role="img" aria-label="$figure_words">
$figure
</div>
$tables
$notes
</body>
</html>
""")


@dataclass(frozen=True)
class HtmlPage:
    """What a page shows, from top to bottom. Everything except the figure is plain text: a tag in it is shown as it is.

    Attributes:
        headline: The title.
        figure: An SVG element.
        figure_words: What the figure shows, for people who cannot see it.
        tables: The tables below the figure.
        verdict: What to do; empty: the page has no verdict.
        why: The figures on which the verdict is based, in words.
        lines: The lines to paste.
        notes: Sentences at the end.
    """

    headline: str
    figure: str
    figure_words: str
    tables: Sequence[Table]
    verdict: str = ""
    why: Sequence[str] = ()
    lines: Sequence[str] = ()
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Returns the page."""
        above = [f'<p class="verdict">{escape(self.verdict)}</p>'] if self.verdict else []
        above += [f'<p class="why">{escape(words)}</p>' for words in self.why]
        above += [f"<p>Next: <code>{escape(line)}</code></p>" for line in self.lines]
        return _PAGE.substitute(
            headline=escape(self.headline),
            verdict="".join(f"\n{each}" for each in above),
            figure=self.figure,
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
