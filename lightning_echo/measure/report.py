"""Reports: the figures, tables and pages that every report has, and a run as text, as a page and as a picture."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from io import StringIO
from itertools import accumulate
from pathlib import Path
from string import Template
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any

from lightning_echo.measure.control import busy, number_of, percent, three_digits
from lightning_echo.measure.summary import EpochReport, FactorUse, RunSummary, RunVerdict, is_of_end, load_lines, seconds_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# ---------------------------------------------------------------------- figure
# matplotlib is optional, and its global state (pyplot, the current figure) is not used. The colours are those of Okabe and Ito,
# which colour-blind people can tell apart. The background is white, to be readable on a dark page.

ORANGE, SKY, GREEN, BLUE, VERMILION, PINK = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"
_DOTS_PER_INCH = 120


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

    figure = Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, facecolor="white")
    figure.set_layout_engine("constrained", h_pad=0.12)
    return figure


def save(figure: Figure, path: str | Path) -> None:
    figure.savefig(path, format="png", dpi=_DOTS_PER_INCH)


def as_svg(figure: Figure) -> str:
    """Returns a figure as an SVG element. It refers to nothing outside itself and is the same in each process."""
    import matplotlib

    written = StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "lightning_echo"}):
        figure.savefig(written, format="svg", metadata=nothing)
    svg = written.getvalue()
    return svg[svg.index("<svg") :].strip()


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

    def text(self) -> str:
        above = [f'<p class="verdict">{escape(self.verdict)}</p>'] if self.verdict else []
        above += [f'<p class="why">{escape(words)}</p>' for words in self.why]
        above += [f"<p>Next: <code>{escape(line)}</code></p>" for line in self.lines]
        above += [f"<p>Then: <code>{escape(line)}</code></p>" for line in self.others]
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


# ---------------------------------------------------------------------- run tables
# The tables of a run as values: text and page show the same figures in the same words. A column without a figure is left out.

_COUNTED = "Examples and passes are counted from the beginning of the run, up to the end of the epoch."
_START = "start s"
_STARTS = f"{_START}: the wait for the first batch of an epoch in which workers had to start, in seconds."
_AT_END = "The factor is the one at the end of the epoch, in which it was not always the same."
_MILLION, _MOST_DIGITS = 10**6, 10**7  # from ten million on, examples are counted in millions


def headline(summary: RunSummary) -> str:
    """Returns the run in one line.

    >>> headline(RunSummary([EpochReport(0, 10, 1.0, 80, 0, data_wait_seconds=0.01, step_seconds=0.03)]))
    'Training, 1 epoch: the accelerator is busy 75% of the time'
    """
    reports = summary.reports
    if not reports:
        return "Training that ended within its first epoch"
    waited, worked = seconds_of(reports)
    total = waited + worked
    found = busy(waited / total) if total else "how long the accelerator waited for input is not known"
    return f"Training, {number_of(len(reports), 'epoch', 'epochs')}: {found}"


def tables(summary: RunSummary, most_rows: int | None = None) -> list[Table]:
    """Returns the tables of a run. A table longer than ``most_rows`` shows its last rows, with a remark; None shows all."""
    found = []
    for table in (_epochs(summary.reports), _factors(summary.decisions, "max_factor" if _on_demand(summary) else "factor")):
        left_out = 0 if most_rows is None else len(table.rows) - most_rows
        if left_out > 0:
            remark = f"{number_of(left_out, 'earlier row is', 'earlier rows are')} left out here; the page (--html) has all."
            table = Table(table.title, table.columns, table.rows[left_out:], (remark, *table.remarks))
        if table.rows:
            found.append(table)
    return found


def _on_demand(summary: RunSummary) -> bool:
    return any(report.max_factor is not None for report in summary.reports)


def _count(examples: int) -> str:
    return f"{examples:,}" if examples < _MOST_DIGITS else f"{examples / _MILLION:,.0f} M"


_OF_EPOCHS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (  # heading, attribute of `EpochReport`, how it is written
    ("epoch", "epoch", str),
    ("factor", "factor", "{:.4g}".format),
    ("idle", "idle_fraction", percent),
    ("examples/s", "examples_per_second", three_digits),
    ("fresh", "fresh_examples", _count),
    ("echoed", "echoed_examples", _count),
    ("passes", "passes", three_digits),
    (_START, "first_batch_seconds", three_digits),
    ("cache hits", "cache_hit_fraction", percent),
    ("missed", "missed_examples", _count),
)


def _epochs(reports: Sequence[EpochReport]) -> Table:
    columns = {}
    for heading, name, written in _OF_EPOCHS:
        values = [getattr(report, name) for report in reports]
        if any(value is not None for value in values):
            columns[heading] = ["" if value is None else written(value) for value in values]
    remarks: tuple[str, ...] = (_COUNTED, _STARTS) if _START in columns else (_COUNTED,)
    uses = [(each.factor, each.effective_factor) for each in reports if each.max_factor is None and each.effective_factor]
    if any(is_of_end(*each) for each in uses):
        remarks += (_AT_END,)
    return Table("Epochs", tuple(columns), tuple(zip(*columns.values(), strict=True)), remarks)


def _factors(uses: Sequence[FactorUse], name: str) -> Table:
    """Returns the factors with their reasons; no row if the run had only one factor. On demand they are the bounds."""
    rows = []
    for use in uses if len(uses) > 1 else ():
        why = use.message or ("at the beginning" if use.step == 0 else use.reason)
        batches = [use.batch] if isinstance(use.batch, int) else use.batch.values()
        first_and_last = " to ".join(f"{batch:,}" for batch in sorted({min(batches), max(batches)}))
        rows.append((why, f"{use.factor:.4g}", "" if use.step is None else f"{use.step:,}", first_and_last))
    remarks = ("A factor counts from the first batch on that was not planned yet when it was decided on.",)
    return Table("Factors", ("why", name, "decided after batch", "from batch"), tuple(rows), remarks)


# ---------------------------------------------------------------------- run plot
# Panels one above the other, over the epochs: factor, idle fraction, examples, cache hits, missed examples.
#
# * Epoch ``k`` reaches from ``k`` to ``k + 1``. A value measured over an epoch is a level line over it. A value counted from the
#   beginning of the run rises to its value at the epoch's end.
# * A factor begins at the first batch that was trained with it. A dot marks a factor that was decided on within an epoch, unless
#   there are many epochs.
# * A value that was not measured leaves a gap. A quantity that was never measured has no panel.

_PANEL, _REST, _LINE = 1.5, 0.8, 0.25  # heights in inches: of a panel, of the space around the panels, of a line of the title
_TITLE_COLUMNS = 90
_NOT_MEASURED = float("nan")
_ROOM = 1.25  # an axis reaches up to this number of times the largest value
_MANY_EPOCHS = 100  # with more epochs, there is no room for marks, and only for thin lines
_THIN, _THICK = 1.0, 2.0
_BETWEEN_LABELS = 0.12  # share of the width: labels with less distance would overlap


def draw(summary: RunSummary, title: str = "") -> Figure:
    """Draws a panel for each measured quantity, with ``title`` above the panels."""
    reports = summary.reports
    has_idle = any(report.idle_fraction is not None for report in reports)
    has_hits = any(report.cache_hit_fraction is not None for report in reports)
    has_missed = any(report.missed_examples is not None for report in reports)
    quantities: list[tuple[bool, str, Callable[[Axes, RunSummary], None]]] = [
        (True, "uses per fresh example" if _on_demand(summary) else "echo factor", _draw_factor),
        (has_idle, "idle: share of the time that was spent waiting for input", partial(_draw_share, "idle_fraction", VERMILION)),
        (bool(reports), "examples in the run so far", _draw_examples),
        (
            has_hits,
            "cache hits: share of the fresh examples that the cache had",
            partial(_draw_share, "cache_hit_fraction", ORANGE),
        ),
        (has_missed, "missed examples in the run so far: other trainings had them", _draw_missed),
    ]
    panels = [(words, panel) for has_data, words, panel in quantities if has_data]
    lines = fill(title, _TITLE_COLUMNS)
    above = _LINE * (lines.count("\n") + 1) if lines else 0.0
    figure = new_figure(8, _PANEL * len(panels) + _REST + above)
    every = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (words, panel) in zip(every, panels, strict=True):
        panel(axes, summary)
        axes.set_title(words, loc="left", fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["right", "top"]].set_visible(False)
        axes.margins(x=0.01)
    every[-1].set_xlabel("epochs" if summary.reports else "batches")
    every[-1].xaxis.get_major_locator().set_params(integer=True)
    if lines:
        figure.suptitle(lines, x=0.01, ha="left", fontsize=11)
    return figure


def _draw_factor(axes: Axes, summary: RunSummary) -> None:
    reports, uses = summary.reports, summary.decisions
    # The number of batches of the run up to the end of each epoch, if all epochs are known.
    is_whole = all(report.steps and report.epoch == number for number, report in enumerate(reports))
    ends = list(accumulate(report.steps for report in reports)) if is_whole else []
    if _on_demand(summary):  # the uses, and not the bounds
        uses_of = [report.effective_factor if report.max_factor is not None else report.factor for report in reports]
        axes.plot(*_levels(reports, uses_of), color=BLUE, linewidth=_thickness(reports))
        factors = [each for each in uses_of if each is not None]
    elif not reports:  # the run ended in its first epoch
        batches, factors = [_first_batch(use) for use in uses], [use.factor for use in uses]
        axes.step(batches, factors, "o-", where="post", color=BLUE)
    elif not ends or not uses:
        factors = [report.factor for report in reports]
        axes.plot(*_levels(reports, factors), color=BLUE, linewidth=_thickness(reports))
    else:
        # The run may have ended before the first batch with a factor.
        trained_with = [use for use in uses if _first_batch(use) < ends[-1] or (use.step or 0) > ends[-1]]
        seen = [(_place(_first_batch(use), ends), use) for use in trained_with]
        begins, factors = [at for at, _ in seen], [use.factor for _, use in seen]
        end = max(len(reports), begins[-1])
        axes.step([*begins, end], [*factors, factors[-1]], where="post", color=BLUE, linewidth=_thickness(reports))
        if len(reports) <= _MANY_EPOCHS:
            _mark(axes, [(at, use) for at, use in seen if use.step and use.step not in ends], end)
    axes.set_ylim(0, _ROOM * max(factors, default=1.0))


def _place(batch: int, ends: Sequence[int]) -> float:
    """Returns the place of a batch on the x axis. After the last epoch, batches keep the distance of the last epoch."""
    epoch = min(bisect_left(ends, batch), len(ends) - 1)
    begin = ends[epoch - 1] if epoch else 0
    return epoch + (batch - begin) / (ends[epoch] - begin)


def _mark(axes: Axes, within: Sequence[tuple[float, FactorUse]], end: float) -> None:
    """Marks factors that were decided on within an epoch. Of labels that would overlap, only the first one is written."""
    if not within:
        return
    axes.plot([at for at, _ in within], [use.factor for _, use in within], "o", color=BLUE, markersize=5)
    free_from = 0.0
    for at, use in within:
        if at < free_from:
            continue
        is_at_end = at > (1 - _BETWEEN_LABELS) * end
        label, offset, align = f"batch {_first_batch(use):,}", (-5 if is_at_end else 3), ("right" if is_at_end else "left")
        axes.annotate(label, (at, use.factor), (offset, 5), textcoords="offset points", ha=align, fontsize=8)
        free_from = at + _BETWEEN_LABELS * end


def _draw_share(name: str, color: str, axes: Axes, summary: RunSummary) -> None:
    shares = [getattr(report, name) for report in summary.reports]
    percents = [None if share is None else 100 * share for share in shares]
    axes.plot(*_levels(summary.reports, percents), color=color, linewidth=_thickness(summary.reports))
    axes.set_ylim(-4, 104)
    axes.set_yticks([0, 50, 100], ["0%", "50%", "100%"])


def _draw_examples(axes: Axes, summary: RunSummary) -> None:
    at, fresh = _rising(summary.reports, [report.fresh_examples for report in summary.reports])
    _, echoed = _rising(summary.reports, [report.echoed_examples for report in summary.reports])
    axes.stackplot(at, fresh, echoed, labels=("fresh", "echoed"), colors=(GREEN, SKY))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1, ncols=2, frameon=False)
    _set_counts(axes, [sum(each) for each in zip(fresh, echoed, strict=True)])


def _draw_missed(axes: Axes, summary: RunSummary) -> None:
    at, missed = _rising(summary.reports, [report.missed_examples or 0 for report in summary.reports])
    axes.plot(at, missed, color=PINK, linewidth=_thickness(summary.reports))
    _set_counts(axes, missed)


def _set_counts(axes: Axes, counts: Sequence[float]) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_ylim(0, _ROOM * max(*counts, 1))
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.yaxis.set_major_formatter(EngFormatter(sep=" "))


def _levels(reports: Sequence[EpochReport], values: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """Returns the points of a line that is level over each epoch, with gaps where a value or an epoch is missing."""
    at, found = [], []
    for number, (report, value) in enumerate(zip(reports, values, strict=True)):
        if number and reports[number - 1].epoch + 1 != report.epoch:
            at.append(float(report.epoch))
            found.append(_NOT_MEASURED)
        at += [float(report.epoch), report.epoch + 1.0]
        found += [_NOT_MEASURED if value is None else value] * 2
    return at, found


def _rising(reports: Sequence[EpochReport], counts: Sequence[int]) -> tuple[list[float], list[float]]:
    """Returns the points of a line that rises to the count at each epoch's end, from 0 at the beginning of epoch 0."""
    first = reports[0].epoch
    start = [(0.0, 0.0)] if first == 0 else []
    points = start + [(report.epoch + 1.0, float(count)) for report, count in zip(reports, counts, strict=True)]
    return [at for at, _ in points], [count for _, count in points]


def _first_batch(use: FactorUse) -> int:
    """Returns the first batch with a factor: with several loaders, that of the loader that has it first."""
    return use.batch if isinstance(use.batch, int) else min(use.batch.values())


def _thickness(reports: Sequence[EpochReport]) -> float:
    return _THIN if len(reports) > _MANY_EPOCHS else _THICK


# ---------------------------------------------------------------------- run report

_MOST_ROWS = 40  # of a table in a terminal


def report(summary: RunSummary) -> str:
    """Returns a run as plain text, in lines of at most 100 columns."""
    blocks, verdict = [], summary.verdict
    if verdict is not None:
        why, lines = [*verdict.why, *load_lines(summary.reports)], [verdict.next_line] if verdict.next_line else []
        blocks += verdict_blocks(verdict.message, why, lines, verdict.others)
    blocks += [headline(summary), *map(as_text, tables(summary, _MOST_ROWS))]
    return "\n\n".join(filter(None, blocks))


def page(summary: RunSummary) -> str:
    """Returns a run as HTML; needs matplotlib."""
    verdict = summary.verdict or RunVerdict("")
    return HtmlPage(
        headline=headline(summary),
        figure=as_svg(draw(summary)),
        figure_words="Factor, idle fraction and examples over the run, as in the tables",
        tables=tables(summary),
        verdict=verdict.message,
        why=[*verdict.why, *load_lines(summary.reports)],
        lines=[verdict.next_line] if verdict.next_line else [],
        others=verdict.others,
    ).text()


def picture(summary: RunSummary) -> Figure:
    return draw(summary, headline(summary) if summary.verdict is None else summary.verdict.message)


def save_page(summary: RunSummary, path: str | Path) -> None:
    Path(path).write_text(page(summary), encoding="utf-8")


def save_png(summary: RunSummary, path: str | Path) -> None:
    save(picture(summary), path)
