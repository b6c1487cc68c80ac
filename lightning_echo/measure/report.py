"""A run as text, as a page and as a picture."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lightning_echo.measure.control import busy, number_of, percent, slice_ends, three_digits
from lightning_echo.measure.page import (
    BLUE,
    BROAD,
    DOTS_PER_INCH,
    GREEN,
    ORANGE,
    PAPER,
    PINK,
    SKY,
    VERMILION,
    HtmlPage,
    Table,
    add_grid,
    as_block,
    as_svgs,
    as_text,
    columns_of,
    dressed,
    new_figure,
    save,
    verdict_blocks,
)
from lightning_echo.measure.summary import EpochReport, FactorUse, RunSummary, RunVerdict, is_of_end, load_lines, seconds_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# ---------------------------------------------------------------------- run tables
# The tables of a run as values: text and page show the same figures in the same words. A column without a figure is left out.

_AT_END = "The factor is the one at the end of the epoch, in which it was not always the same."
_NOT_KNOWN = (
    "An empty cell of fresh and echoed is not known: the run was resumed there without the state of its callback, or its batches "
    "have no size."
)
_REMARKS = {  # by the heading of their column
    "uses": "uses: per fresh example, in the epoch.",
    "fresh": "Fresh and echoed examples are those of the epoch.",
    "passes": "passes: over the data, from the beginning of the run.",
    "start s": "start s: the wait for the first batch of an epoch in which workers had to start, in seconds.",
    "in flight": "in flight: reads under way on a rank, on average.",
    "cache hits": "cache hits: the share of the epoch's fresh examples that the cache had.",
    "other nodes": "other nodes: the share of the epoch's fresh examples that the cache of another node had.",
    "shared by": "shared by: trainings that share the reading, this one included.",
    "peer wait": "peer wait: the share of the time in which a batch waited for another training.",
    "missed": "missed: examples that only other trainings had, from the beginning of the run.",
    "read again": "read again: examples that were read for this training alone, from the beginning of the run.",
}
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
    factors = _factors(summary.decisions, "max_factor" if _on_demand(summary) else "factor")
    for table in (_epochs(summary.reports), _reading(summary.reports), factors):
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


_Columns: TypeAlias = tuple[tuple[str, str, Callable[[Any], str]], ...]  # heading, attribute of `EpochReport`, how it is written
_OF_EPOCHS: _Columns = (
    ("epoch", "epoch", str),
    ("factor", "factor", "{:.4g}".format),
    ("idle", "idle_fraction", percent),
    ("examples/s", "examples_per_second", three_digits),
    ("fresh", "fresh_in_epoch", _count),
    ("echoed", "echoed_in_epoch", _count),
    ("passes", "passes", three_digits),
    ("start s", "first_batch_seconds", three_digits),
)
_OF_EPOCHS_ON_DEMAND: _Columns = (
    _OF_EPOCHS[0],
    ("uses", "effective_factor", "{:.4g}".format),
    *_OF_EPOCHS[2:],
)  # no factor set them
_OF_READING: _Columns = (
    ("epoch", "epoch", str),
    ("in flight", "reads_in_flight", three_digits),
    ("cache hits", "cache_hit_fraction", percent),
    ("other nodes", "cache_received_fraction", percent),
    ("shared by", "shared_trainings", str),
    ("peer wait", "peer_wait_fraction", percent),
    ("missed", "missed_examples", _count),
    ("read again", "read_again_examples", _count),
)


def _measured(reports: Sequence[EpochReport], columns: _Columns) -> dict[str, list[str]]:
    """Returns the cells of each column by its heading, without columns in which nothing was measured."""
    found = {}
    for heading, name, written in columns:
        values = [getattr(report, name) for report in reports]
        if any(value is not None for value in values):
            found[heading] = ["" if value is None else written(value) for value in values]
    return found


def _epochs(reports: Sequence[EpochReport]) -> Table:
    columns = _measured(reports, _OF_EPOCHS_ON_DEMAND if any(each.max_factor is not None for each in reports) else _OF_EPOCHS)
    remarks = [_REMARKS[heading] for heading in columns if heading in _REMARKS]
    uses = [(each.factor, each.effective_factor) for each in reports if each.max_factor is None and each.effective_factor]
    if any(is_of_end(*each) for each in uses):
        remarks.append(_AT_END)
    rows = list(zip(*columns.values(), strict=True))
    own = [(each.fresh_in_epoch, each.echoed_in_epoch) for each in reports]
    known = [(fresh, echoed) for fresh, echoed in own if fresh is not None and echoed is not None]
    if len(known) < len(own):
        remarks.append(_NOT_KNOWN)
    elif reports:
        last, (fresh, echoed) = reports[-1], map(sum, zip(*known, strict=True))
        other = last.fresh_examples - fresh, last.echoed_examples - echoed
        if len(rows) > 1 or any(other):
            rows.append(tuple(_in_all(reports).get(heading, "") for heading in columns))
        if any(other):
            remarks.append(f"In all has {other[0]:,} fresh and {other[1]:,} echoed examples of epochs that have no row.")
    return Table("Epochs", tuple(columns), tuple(rows), tuple(remarks))


def _in_all(reports: Sequence[EpochReport]) -> dict[str, str]:
    """Returns the cells of a row for all epochs by the headings of their columns. Their examples are known."""
    last, (waited, worked) = reports[-1], seconds_of(reports)
    is_timed = waited + worked > 0 and all(each.idle_fraction is not None for each in reports)
    fresh, echoed = last.fresh_examples, last.echoed_examples
    return {
        "epoch": "in all",
        "uses": f"{(fresh + echoed) / fresh:.4g}" if fresh else "",
        "idle": percent(waited / (waited + worked)) if is_timed else "",
        "fresh": _count(fresh),
        "echoed": _count(echoed),
        "passes": "" if last.passes is None else three_digits(last.passes),
    }


def _reading(reports: Sequence[EpochReport]) -> Table:
    """Returns how the fresh examples came; no row if nothing of that was measured."""
    columns = _measured(reports, _OF_READING)
    rows = tuple(zip(*columns.values(), strict=True)) if len(columns) > 1 else ()
    return Table("Reading", tuple(columns), rows, tuple(_REMARKS[heading] for heading in columns if heading in _REMARKS))


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


# ---------------------------------------------------------------------- strip
# The strip shows what the input did over the time of the steps: how much of it went to work on fresh examples and on echoed
# ones, and how much to waiting. It is as long as the steps took, and each slice of an epoch (`EpochReport.slices`) is a piece of
# it.
#
# The time of work is divided as the examples of these steps are. On demand the journal has the fresh examples of each batch. In
# all other runs, and without a journal, the mean of the epoch is taken. A journal is believed if it has as many fresh examples
# in an epoch as were counted.

_NEAR = 0.02  # the last batch of a pass may be smaller, so a count of whole batches is near that of examples


class Piece(NamedTuple):
    """A piece of the strip, in seconds. If it is not known which examples were fresh, both are 0."""

    seconds: float
    waited: float
    fresh: float  # of work on fresh examples
    echoed: float


@dataclass(frozen=True)
class FromJournal:
    """What a journal tells beside the reports."""

    shares: Sequence[Sequence[float]] = ()  # for each report: the share of fresh examples in each slice; empty if not known
    note: str = ""  # for people: why epochs are without


def from_journal(summary: RunSummary, read: Callable[[], tuple[int, Sequence[int], int, bool]]) -> FromJournal:
    """Returns the shares of fresh examples in the slices of a run on demand. It raises no error: without them, epochs are shown.

    ``read`` is called for a run on demand, and may raise an OSError or a ValueError. It returns the number of the first batch,
    the fresh examples of each batch on all ranks, the number of the ranks, and whether these are batches in place of examples.
    """
    if not _on_demand(summary):
        return FromJournal()
    mean = "The strip shows the mean of each epoch"
    begin = summary.decisions[0].batch if summary.decisions else 0
    if not isinstance(begin, int):
        return FromJournal(note=f"{mean}, since several loaders have each a journal.")
    try:
        first, counts, ranks, are_batches = read()
    except (OSError, ValueError) as error:
        return FromJournal(note=f"{mean}, since the journal of the run could not be read: {error}.")
    shares, at = [], begin - first
    for report in summary.reports:
        part = counts[at : at + report.steps] if 0 <= at <= len(counts) - report.steps else []
        shares.append(_shares(report, part, ranks if are_batches else 0))
        at += report.steps
    unlike = [str(report.epoch) for report, each in zip(summary.reports, shares, strict=True) if not each]
    if not unlike:
        return FromJournal(shares)
    which = f"epoch {unlike[0]}" if len(unlike) == 1 else f"{len(unlike)} epochs from {unlike[0]} on"
    why = "the journal does not have the fresh examples that were counted, or they are not known"
    return FromJournal(shares, f"The strip shows the mean of {which}: {why}.")


def _shares(report: EpochReport, counts: Sequence[int], batches_of: int) -> list[float]:
    """Returns the share of fresh examples in each slice of an epoch; none if the counts are not those of the epoch.

    ``counts``: of the epoch's batches; 0 ``batches_of``: examples, otherwise the batches of so many ranks.
    """
    ends, fresh, echoed = slice_ends(report.steps), report.fresh_in_epoch, report.echoed_in_epoch
    if not counts or fresh is None or echoed is None or not fresh + echoed or len(ends) != len(report.slices):
        return []
    of_step = (fresh + echoed) / report.steps  # examples, all ranks
    unit, most = (of_step / batches_of, of_step + _NEAR * fresh) if batches_of else (1.0, 0.0)
    if abs(sum(counts) * unit - fresh) > most:
        return []
    return [min(sum(counts[begin:end]) * unit / (of_step * (end - begin)), 1.0) for begin, end in pairwise([0, *ends])]


def strip(summary: RunSummary, journal: FromJournal | None = None) -> list[list[Piece]]:
    """Returns the pieces of the strip, epoch by epoch; none for an epoch whose time was not measured."""
    found = []
    for number, report in enumerate(summary.reports):
        times = report.slices
        if not times and report.data_wait_seconds is not None and report.step_seconds is not None:
            waited = report.steps * report.data_wait_seconds
            times = ((waited, waited + report.steps * report.step_seconds),)
        shares: Sequence[float | None] = journal.shares[number] if journal is not None and journal.shares else ()
        pieces = []
        for (waited, seconds), share in zip(times, shares or [_mean_share(report)] * len(times), strict=True):
            if 0 <= waited <= seconds and 0 < seconds < float("inf"):
                work = seconds - waited
                parts = (0.0, 0.0) if share is None else (work * share, work * (1 - share))
                pieces.append(Piece(seconds, waited, *parts))
        found.append(pieces)
    return found


def _mean_share(report: EpochReport) -> float | None:
    fresh, echoed = report.fresh_in_epoch, report.echoed_in_epoch
    if fresh is not None and echoed is not None and fresh + echoed:
        return fresh / (fresh + echoed)
    return 1 / report.effective_factor if report.effective_factor else None


def _merged(pieces: Sequence[Piece], most: int) -> list[Piece]:
    """Returns at most so many pieces for the same time."""
    size = -(-len(pieces) // max(most, 1)) or 1
    return [Piece(*map(sum, zip(*pieces[at : at + size], strict=True))) for at in range(0, len(pieces), size)]


# ---------------------------------------------------------------------- run plot
# Panels one above the other: the strip over time; then, over the epochs, factor, idle fraction, examples, reads in flight, cache
# hits, trainings that share the reading, missed examples.
#
# * Epoch ``k`` reaches from ``k`` to ``k + 1``. A value measured over an epoch is a level line over it. A value counted from the
#   beginning of the run rises to its value at the epoch's end.
# * A factor begins at the first batch that was trained with it. A dot marks a factor that was decided on within an epoch, unless
#   there are many epochs.
# * A value that was not measured leaves a gap. A quantity that was never measured has no panel.

_PANEL, _REST, _LINE = 1.5, 0.8, 0.25  # heights in inches: of a panel, of the space around the panels, of a line of the title
_MOST_PIECES = 600  # of the strip
_PLACES = ((120.0, 1.0, "seconds"), (7200.0, 60.0, "minutes"), (float("inf"), 3600.0, "hours"))  # up to so many seconds
_NOT_MEASURED = float("nan")
_ROOM = 1.25  # an axis reaches up to this number of times the largest value
_MANY_EPOCHS = 100  # with more epochs, there is no room for marks, and only for thin lines
_THIN, _THICK = 1.0, 2.0
_BETWEEN_LABELS = 0.14  # share of a broad figure's width: labels with less distance would overlap


def draw(summary: RunSummary, title: str = "", journal: FromJournal | None = None, width: float = BROAD) -> Figure:
    """Draws the strip, and a panel for each measured quantity, with ``title`` above the panels."""
    pieces = strip(summary, journal)
    panels = [(words, draw) for name, words, draw in _PANELS if any(getattr(each, name) is not None for each in summary.reports)]
    panels.insert(0, ("uses per fresh example" if _on_demand(summary) else "echo factor", _draw_factor))
    columns, has_strip = columns_of(width), any(pieces)
    lines = "\n".join(fill(line, columns) for line in title.splitlines())
    above = (_LINE * (lines.count("\n") + 1) if lines else 0.0) + (_PANEL + _LINE if has_strip else 0.0)
    figure = new_figure(width, _PANEL * len(panels) + _REST + above)
    every = figure.subplots(len(panels) + has_strip, 1, squeeze=False)[:, 0].tolist()
    if has_strip:
        axes = every.pop(0)
        _draw_strip(axes, pieces)
        _entitle(axes, "the time of the steps", columns, ncols=3)
    for axes, (words, draw_panel) in zip(every, panels, strict=True):
        if axes is not every[-1]:
            axes.sharex(every[-1])
            axes.tick_params(labelbottom=False)
        draw_panel(axes, summary)
        _entitle(axes, words, columns, ncols=2)
        add_grid(axes)
        axes.margins(x=0.01)
    every[-1].set_xlabel("epochs" if summary.reports else "batches")
    every[-1].xaxis.get_major_locator().set_params(integer=True)
    if lines:
        figure.suptitle(lines, x=0.01, ha="left", fontsize=11)
    return dressed(figure)


def _entitle(axes: Axes, words: str, columns: int, ncols: int) -> None:
    """Puts a title above axes, and a legend beside it if there is something to tell apart; below it where there is no room."""
    labels = axes.get_legend_handles_labels()[1]
    has_room = len(words) + sum(len(label) + 5 for label in labels) < columns  # 5: for a patch of colour
    if labels:
        where: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1)}
        if not has_room:
            where = {"loc": "lower left", "bbox_to_anchor": (0, 1)}
        where |= {"borderaxespad": 0.1, "borderpad": 0.2, "handlelength": 1.2, "columnspacing": 1.2}
        axes.legend(ncols=ncols, frameon=False, fontsize=9, **where)
    axes.set_title(fill(words, columns), loc="left", fontsize=10, pad=20 if labels and not has_room else 6)


def _draw_strip(axes: Axes, epochs: Sequence[Sequence[Piece]]) -> None:
    """Draws what the time went to. A patch of it is as large as its share of the time."""
    shown = [_merged(pieces, _MOST_PIECES // len(epochs)) for pieces in epochs]
    pieces = list(chain.from_iterable(shown))
    total = sum(piece.seconds for piece in pieces)
    unit, words = next((unit, words) for most, unit, words in _PLACES if total < most)
    at = [seconds / unit for seconds in accumulate((piece.seconds for piece in pieces), initial=0.0)]
    floor = [0.0] * len(at)
    for name, color, label in (("fresh", GREEN, "work on fresh"), ("echoed", SKY, "on echoed"), ("waited", VERMILION, "waiting")):
        shares = [getattr(piece, name) / piece.seconds for piece in pieces]
        if name == "waited":  # from the top: below it may be work on examples of which it is not known whether they were fresh
            floor = [1 - share for share in (*shares, shares[-1])]
        top = [low + share for low, share in zip(floor, (*shares, shares[-1]), strict=True)]
        axes.fill_between(at, floor, top, step="post", color=color, linewidth=0, label=label)
        axes.step(at, top if name != "waited" else floor, where="post", color=PAPER, linewidth=0.8)
        floor = top
    ends = list(accumulate(sum(piece.seconds for piece in each) / unit for each in shown))
    if len(epochs) <= _MANY_EPOCHS:
        for end in ends[:-1]:
            axes.axvline(end, color=PAPER, linewidth=1.2)
    axes.set(xlim=(0, at[-1]), ylim=(0, 1), xlabel=f"{words} of steps and of their waiting")
    axes.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"])
    axes.spines[["right", "top"]].set_visible(False)


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
    free_from, between = 0.0, _BETWEEN_LABELS * BROAD * DOTS_PER_INCH / axes.figure.bbox.width
    for at, use in within:
        if at < free_from:
            continue
        is_at_end = at > (1 - between) * end
        label, offset, align = f"batch {_first_batch(use):,}", (-5 if is_at_end else 3), ("right" if is_at_end else "left")
        axes.annotate(label, (at, use.factor), (offset, 5), textcoords="offset points", ha=align, fontsize=9)
        free_from = at + between * end


def _draw_share(name: str, color: str, axes: Axes, summary: RunSummary) -> None:
    shares = [getattr(report, name) for report in summary.reports]
    percents = [None if share is None else 100 * share for share in shares]
    axes.plot(*_levels(summary.reports, percents), color=color, linewidth=_thickness(summary.reports))
    axes.set_ylim(-4, 104)
    axes.set_yticks([0, 50, 100], ["0%", "50%", "100%"])


def _draw_number(name: str, color: str, axes: Axes, summary: RunSummary) -> None:
    numbers = [getattr(report, name) for report in summary.reports]
    axes.plot(*_levels(summary.reports, numbers), color=color, linewidth=_thickness(summary.reports))
    axes.set_ylim(0, _ROOM * max(1.0, *(number for number in numbers if number is not None)))


def _draw_examples(axes: Axes, summary: RunSummary) -> None:
    at, fresh = _rising(summary.reports, [report.fresh_examples for report in summary.reports])
    _, echoed = _rising(summary.reports, [report.echoed_examples for report in summary.reports])
    axes.stackplot(at, fresh, echoed, labels=("fresh", "echoed"), colors=(GREEN, SKY))
    _set_counts(axes, [sum(each) for each in zip(fresh, echoed, strict=True)])


def _draw_missed(axes: Axes, summary: RunSummary) -> None:
    at, missed = _rising(summary.reports, [report.missed_examples or 0 for report in summary.reports])
    axes.plot(at, missed, color=PINK, linewidth=_thickness(summary.reports))
    _set_counts(axes, missed)


_PANELS: tuple[tuple[str, str, Callable[[Any, RunSummary], None]], ...] = (  # attribute of `EpochReport`, title, how it is drawn
    (
        "idle_fraction",
        "idle: share of the time that was spent waiting for input",
        partial(_draw_share, "idle_fraction", VERMILION),
    ),
    ("fresh_examples", "examples in the run so far", _draw_examples),
    ("reads_in_flight", "reads in flight: under way on a rank, on average", partial(_draw_number, "reads_in_flight", BLUE)),
    (
        "cache_hit_fraction",
        "cache hits: share of the fresh examples that the cache had",
        partial(_draw_share, "cache_hit_fraction", ORANGE),
    ),
    (
        "cache_received_fraction",
        "of another node: share of the fresh examples that its cache had",
        partial(_draw_share, "cache_received_fraction", ORANGE),
    ),
    ("shared_trainings", "shared by: trainings that share the reading", partial(_draw_number, "shared_trainings", PINK)),
    (
        "peer_wait_fraction",
        "peer wait: share of the time that a batch waited for another training",
        partial(_draw_share, "peer_wait_fraction", PINK),
    ),
    ("missed_examples", "missed examples in the run so far: other trainings had them", _draw_missed),
)


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
    blocks += [as_block(headline(summary), [summary.title]) if summary.title else headline(summary)]
    blocks += map(as_text, tables(summary, _MOST_ROWS))
    return "\n\n".join(filter(None, blocks))


def page(summary: RunSummary, journal: FromJournal | None = None) -> str:
    """Returns a run as HTML; needs matplotlib."""
    verdict = summary.verdict or RunVerdict("")
    figure, narrow = as_svgs(lambda width: draw(summary, journal=journal, width=width))
    return HtmlPage(
        headline=headline(summary),
        figure=figure,
        figure_words="What the time of the steps went to; factor, idle fraction and examples over the run, as in the tables",
        tables=tables(summary),
        verdict=verdict.message,
        why=[*verdict.why, *load_lines(summary.reports)],
        lines=[verdict.next_line] if verdict.next_line else [],
        notes=[journal.note] if journal is not None and journal.note else [],
        others=verdict.others,
        narrow=narrow,
        subtitle=summary.title,
    ).text()


def picture(summary: RunSummary, journal: FromJournal | None = None) -> Figure:
    found = headline(summary) if summary.verdict is None else summary.verdict.message
    return draw(summary, f"{found}\n{summary.title}".rstrip(), journal)


def save_page(summary: RunSummary, path: str | Path, journal: FromJournal | None = None) -> None:
    Path(path).write_text(page(summary, journal), encoding="utf-8")


def save_png(summary: RunSummary, path: str | Path, journal: FromJournal | None = None) -> None:
    save(picture(summary, journal), path)
