"""A report as one HTML page. It contains everything it shows: no script, no font and no picture is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template

from lightning_echo.analysis.report.plot import as_svg
from lightning_echo.analysis.report.tables import Table, figures, headline, tables
from lightning_echo.analysis.result import StallAnalysis

__all__ = ["page", "save_page"]

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
p, li { overflow-wrap: anywhere; }
.remark { font-size: 0.9rem; opacity: 0.8; margin: 0.4rem 0; }
@media (max-width: 40rem) { table { font-size: 0.85rem; } th, td { padding-left: 0.7rem; } }
</style>
</head>
<body>
<h1>$headline</h1>
<p class="verdict">$verdict</p>
<p>$why</p>$next
<div class="wide figure" role="img" aria-label="Parts of the step time, and speed-up by echo factor, as in the tables">
$figure
</div>
$tables
$notes
</body>
</html>
""")


def page(analysis: StallAnalysis) -> str:
    """Returns a report as HTML.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    notes = f"<h2>Notes</h2>\n<ul>\n{_each('li', analysis.notes)}\n</ul>" if analysis.notes else ""
    return _PAGE.substitute(
        headline=escape(headline(analysis)),
        verdict=escape(analysis.verdict.message),
        why=escape(" ".join(figures(analysis))),
        next="".join(f"\n<p>Next: <code>{escape(line)}</code></p>" for line in analysis.verdict.setting.lines),
        figure=as_svg(analysis),
        tables="\n".join(map(_table, tables(analysis))),
        notes=notes,
    )


def save_page(analysis: StallAnalysis, path: str | Path) -> None:
    """Writes a report as HTML.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    Path(path).write_text(page(analysis), encoding="utf-8")


def _table(table: Table) -> str:
    rows = "\n".join(f"<tr>{_each('td', row, '')}</tr>" for row in table.rows)
    head = f"<thead><tr>{_each('th', table.columns, '')}</tr></thead>"
    remarks = "".join(f'\n<p class="remark">{escape(remark)}</p>' for remark in table.remarks)
    grid = f"<table>\n{head}\n<tbody>\n{rows}\n</tbody>\n</table>"
    return f'<h2>{escape(table.title)}</h2>\n<div class="wide">\n{grid}\n</div>{remarks}'


def _each(tag: str, texts: Iterable[str], between: str = "\n") -> str:
    return between.join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
