"""A stall analysis as text, as a page and as a picture; and the saved results at a path."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from lightning_echo.analysis.measured import Spread
from lightning_echo.analysis.predict import (
    TrainingSetting,
    cached_example,
    costs_of,
    fitting_fraction,
    possible_holds,
    predict,
    size_for,
    waiting_for_long_batches,
)
from lightning_echo.analysis.result import StallAnalysis, to_keep
from lightning_echo.insertion import POINTS
from lightning_echo.measure import page as figures
from lightning_echo.measure import report as run_report
from lightning_echo.measure.control import busy, fewer_fresh, number_of, percent, three_digits
from lightning_echo.measure.page import (
    BLUE,
    BROAD,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    PINK,
    SKY,
    VERMILION,
    HtmlPage,
    Table,
    as_block,
    as_text,
    verdict_blocks,
)
from lightning_echo.measure.summary import FILE_NAME, RunSummary
from lightning_echo.pipeline.journal import fresh_counts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ---------------------------------------------------------------------- saved
# The content of a path (a file, or the folder that contains it): a run's ``echo_summary.json`` or a stall analysis.
#
# If a folder has both, the run is shown, and a sentence mentions the analysis.

_ANALYSIS = "analysis.json"
_NAMED = 3  # most other folders that an error names


@dataclass(frozen=True)
class Saved:
    """The content of a path, to be shown in three ways; ``beside`` is a sentence on other results there, or empty."""

    text: Callable[[], str]
    save_page: Callable[[str | Path], None]
    save_png: Callable[[str | Path], None]
    beside: str = ""


def read_saved(path: str | Path) -> Saved:
    """Reads a file, or the run or analysis in a folder.

    It raises an OSError if the file cannot be read, or the folder has neither; a ValueError if the file is neither, or of a later
    version.
    """
    path = Path(path)
    if not path.is_dir():
        return _saved_run(path) if _is_run(path) else _saved_analysis(path)
    run, analysis = path / FILE_NAME, path / _ANALYSIS
    if run.exists():
        return _saved_run(run, f"There is a stall analysis, too: lightning-echo report {analysis}" if analysis.exists() else "")
    if analysis.exists():
        return _saved_analysis(analysis)
    raise FileNotFoundError(f"run_dir must be a folder with {FILE_NAME} or {_ANALYSIS}, got {path}, {_where_else(path)}")


def _is_run(path: Path) -> bool:
    if path.name == FILE_NAME:
        return True
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # not JSON: the function that reads an analysis raises the error
        return False
    return isinstance(found, dict) and "decisions" in found and "reports" in found


def _saved_run(path: Path, beside: str = "") -> Saved:
    try:
        run = RunSummary.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    journal = partial(run_report.from_journal, run, partial(fresh_counts, str(path.parent)))
    return Saved(
        lambda: run_report.report(run) + (f"\n\n{beside}" if beside else ""),
        lambda page: run_report.save_page(run, page, journal()),
        lambda png: run_report.save_png(run, png, journal()),
        beside,
    )


def _saved_analysis(path: Path) -> Saved:
    analysis = StallAnalysis.from_json(path)
    return Saved(partial(report, analysis), partial(save_page, analysis), partial(save_png, analysis))


def _where_else(path: Path) -> str:
    """Names folders below that have such a file, the latest first: a user may have given the folder of all runs."""
    below = [found for pattern in ("*", "*/*") for name in (FILE_NAME, _ANALYSIS) for found in path.glob(f"{pattern}/{name}")]
    latest = sorted(below, key=lambda found: found.stat().st_mtime, reverse=True)
    folders = list(dict.fromkeys(str(found.parent) for found in latest))
    if not folders:
        return "which has neither; a training with EchoCallback writes the first at the end of fit, if it has a logger"
    more = "" if len(folders) <= _NAMED else f" and {len(folders) - _NAMED} more"
    return f"which has neither; these below have: {', '.join(folders[:_NAMED])}{more}"


# ---------------------------------------------------------------------- questions

HELD = {"raw": "raw items", "loaded": "loaded examples"}
"""What a cache holds, by its ``hold``, in words."""

_FACTORS = (2.0, 4.0, 8.0)
_TRAININGS = 4  # that share one process that reads
_QUEUES = (2, 4)  # times as long as the measured one
_UNKNOWN_SHARE = 0.5  # asked about if it is unknown how much memory holds


def questions(analysis: StallAnalysis) -> list[tuple[str, TrainingSetting]]:
    """Returns each question in words and as a setting. The measured setting comes first.

    * The questions about workers and sharing are left out if the data set fails in workers.
    * Prefetching is asked about if steps wait behind single long batches, and pinning if it is possible.
    * The questions about storages are left out if reading could not be measured.
    * The questions about reads in flight are about the numbers that were measured.
    * Workers on other machines are asked about if the verdict names their number.
    * For each form in which a cache can hold examples, there is a question about the largest share that memory holds, and one
      about the whole data set. If the data set cannot be cut, these are about a share in the page cache.
    """
    stages = analysis.stages
    asked = [TrainingSetting()]
    if stages.can_have_workers:  # the powers of two below the number of cores, and that number
        numbers = [2**power for power in range(stages.cores.bit_length()) if 2**power < stages.cores]
        asked += [TrainingSetting(workers=workers) for workers in (*numbers, stages.cores)]
    if waiting_for_long_batches(stages, TrainingSetting()) > 1:
        asked += [TrainingSetting(prefetch_factor=times * stages.prefetch_factor) for times in _QUEUES]
    if stages.pinning is not None:
        asked.append(TrainingSetting(pin_memory=True))
    if analysis.cached is not None and (stages.read.median or stages.read_cached.median):
        if not possible_holds(stages):
            asked += [TrainingSetting(cached_fraction=share) for share in (_UNKNOWN_SHARE, 1.0)]
        asked.append(TrainingSetting(storage_speedup=2.0))
    asked += [TrainingSetting(reads_in_flight=each.reads) for each in stages.in_flight[1:]]
    for hold in possible_holds(stages):
        fitting = fitting_fraction(stages, hold)
        shares = dict.fromkeys((_UNKNOWN_SHARE if fitting is None else fitting, 1.0))
        asked += [TrainingSetting(cached_fraction=share, hold=hold) for share in shares if share]
    if stages.can_have_workers:
        asked.append(TrainingSetting(shared_by=_TRAININGS))
    if (elsewhere := analysis.verdict.elsewhere) is not None:
        asked.append(elsewhere)
    asked.append(TrainingSetting(step_speedup=2.0))
    asked += [TrainingSetting(factor=factor, insertion_point=point) for point in stages.points for factor in _FACTORS]
    return [(in_words(setting), setting) for setting in asked]


def in_words(setting: TrainingSetting) -> str:
    """Returns the differences between a setting and the measured one, in words.

    >>> in_words(TrainingSetting()), in_words(TrainingSetting(factor=2))
    ('as measured', 'factor 2 at after_batching')
    >>> in_words(TrainingSetting(workers=4, cached_fraction=0.5))
    'num_workers=4, 50% of the data set in memory'
    >>> in_words(TrainingSetting(prefetch_factor=8, pin_memory=True))
    'prefetch_factor=8, pin_memory=True'
    >>> in_words(TrainingSetting(cached_fraction=0.5, hold="raw"))
    '50% of the data set in a cache of raw items'
    >>> in_words(TrainingSetting(reads_in_flight=16))
    '16 reads in flight'
    >>> in_words(TrainingSetting(shared_by=4))
    '4 such trainings that share the reading'
    >>> in_words(TrainingSetting(cluster_workers=7))
    '7 workers on other machines'
    """
    words = [f"{name}={value}" for name, value in setting.loader_options.items()]
    if setting.cached_fraction:
        where = "memory" if setting.hold is None else f"a cache of {HELD[setting.hold]}"
        words.append(f"{percent(setting.cached_fraction)} of the data set in {where}")
    if setting.shared_by > 1:
        words.append(f"{setting.shared_by} such trainings that share the reading")
    if setting.cluster_workers:
        words.append(f"{number_of(setting.cluster_workers, 'worker', 'workers')} on other machines")
    if setting.reads_in_flight > 1:
        words.append(f"{setting.reads_in_flight} reads in flight")
    if setting.storage_speedup != 1:
        words.append(f"storage {three_digits(setting.storage_speedup)}x as fast")
    if setting.step_speedup != 1:
        words.append(f"accelerator {three_digits(setting.step_speedup)}x as fast")
    if setting.factor != 1:
        words.append(f"factor {three_digits(setting.factor)} at {setting.insertion_point}")
    return ", ".join(words) or "as measured"


# ---------------------------------------------------------------------- tables
# The tables of a report as values: text and page show the same figures in the same words.

_NOTABLE_CONTENTION = 1.2
_BY_WORK = "In the order of the times without the waiting for a processor."
_LARGEST_BUFFER = (
    "Echo with as large a buffer_size as memory allows in addition to the cache: the further apart the uses of an example, the "
    "better."
)


def headline(analysis: StallAnalysis) -> str:
    return f"Stall analysis: {busy(analysis.idle_fraction)}"


def figures_of(analysis: StallAnalysis) -> list[str]:
    """Returns the three figures on which the verdict is based: the idle fraction, and the step with and without waiting.

    If other programs took the cores, a sentence before them says so.
    """
    stages = analysis.stages
    host = milliseconds(costs_of(stages, TrainingSetting()).host_seconds(1))
    setup = f"{number_of(stages.workers, 'worker', 'workers')} on {number_of(stages.cores, 'core', 'cores')}"
    loaded = ["The cores were not this program's alone: these figures are worth little (see the notes)."]
    return [
        *(loaded if analysis.is_loaded else []),
        f"The accelerator is idle {percent(analysis.idle_fraction)} of the time.",
        f"A step takes {milliseconds(analysis.step_seconds)} ms; {milliseconds(stages.step.median)} ms if its batch is ready.",
        f"The loader takes {host} ms per batch, with {setup}.",
    ]


def tables(analysis: StallAnalysis) -> list[Table]:
    every = (_steps, _stalls, _rates, _costliest, _in_flight, _ranks, _what_if, _caches, _remedies, _tried, _proved)
    return [table for table in (make(analysis) for make in every) if table.rows]


def shares_of_step(analysis: StallAnalysis) -> list[tuple[str, float]]:
    """Returns the parts of the step time of the real run, with the share of each; together the shares are 1."""
    fetch, prep, copy = analysis.fetch_stall_fraction, analysis.prep_stall_fraction, analysis.copy_fraction
    first = [("step", 1 - analysis.idle_fraction), ("copy to the device", copy)]
    if fetch is None or prep is None:
        return [*first, ("waiting for input (prep and fetch stall together)", analysis.idle_fraction - copy)]
    return [*first, ("prep stall", prep), ("fetch stall", fetch)]


def milliseconds(seconds: float) -> str:
    return three_digits(1000 * seconds)


def _steps(analysis: StallAnalysis) -> Table:
    stages = analysis.stages
    times = [("the real run, from step to step", analysis.real)]
    if analysis.cached is not None:
        times.append(("the same with its data in memory", analysis.cached))
    times.append(("the step alone (ingestion)", stages.step))
    setup = f"batch size {three_digits(stages.batch_size)}, num_workers {stages.workers}, cores {stages.cores}"
    remarks = [f"The accelerator is idle {percent(analysis.idle_fraction)} of the time, with {setup}."]
    if stages.contention > _NOTABLE_CONTENTION:
        remarks.append(
            f"Decoding and augmentation take {stages.contention:.2g} times as long during the training as alone: the training's "
            "threads need the same processors (waiting OpenMP threads, too: try OMP_WAIT_POLICY=passive, or fewer threads). "
            "Predictions for other settings are less certain then."
        )
    rows = tuple((words, milliseconds(spread.median), _range(spread.low, spread.high)) for words, spread in times)
    return Table("Step time", ("", "ms", "low to high"), rows, tuple(remarks))


def _stalls(analysis: StallAnalysis) -> Table:
    shares = shares_of_step(analysis)
    return Table(
        "Where the step time goes",
        ("", "ms", "of step time"),
        tuple((words, milliseconds(share * analysis.step_seconds), percent(share)) for words, share in shares),
        shares=tuple(share for _, share in shares),
    )


def _rates(analysis: StallAnalysis) -> Table:
    prepare = "preparation, P: the most that the workers prepare, without reading"
    if analysis.fetch_rate is None:
        prepare = "preparation and fetch together: the most that the workers deliver"
    rates = [
        ("the real run", analysis.stages.batch_size / analysis.step_seconds),
        ("ingestion, G: the most that the accelerator takes", analysis.ingestion_rate),
        (prepare, analysis.preparation_rate),
    ]
    if analysis.fetch_rate is not None:
        rates.append(("fetch, F: the most that the workers read", analysis.fetch_rate))
    rows = tuple((words, "no limit" if math.isinf(rate) else three_digits(rate)) for words, rate in rates)
    return Table("Rates", ("", "examples/s"), rows)


def _costliest(analysis: StallAnalysis) -> Table:
    rows = tuple(
        (each.name, milliseconds(each.seconds), "" if each.cpu_seconds is None else milliseconds(each.cpu_seconds))
        for each in analysis.costliest
    )
    return Table(
        "What takes a worker longest",
        ("", "ms per example", "processor ms"),
        rows,
        (_BY_WORK,) if analysis.is_loaded else (),
    )


def _in_flight(analysis: StallAnalysis) -> Table:
    known = analysis.stages.in_flight
    rows = tuple(
        (
            str(each.reads),
            milliseconds(each.seconds.median),
            _range(each.seconds.low, each.seconds.high),
            f"{known[0].seconds.median / each.seconds.median:.3g}x" if each.seconds.median else "",
            milliseconds(each.cpu_seconds),
        )
        for each in known
    )
    what = f"Threads run: {analysis.stages.read_ahead}. The times are those of all workers together."
    return Table("Reads in flight", ("", "ms per example", "low to high", "as fast", "processor ms"), rows, (what,))


def _ranks(analysis: StallAnalysis) -> Table:
    rows = tuple(
        (f"rank {rank}", milliseconds(each.host_seconds), milliseconds(each.step_seconds))
        for rank, each in enumerate(analysis.ranks)
    )
    slow = analysis.slow_rank
    which = "No rank's loader is notably slower than the others'."
    if slow is not None:
        which = f"Rank {slow} is slow: its loader alone takes notably longer than the others', and all ranks wait for it."
    rest = "Everything else in this report is about the rank with the slowest loader."
    return Table("Ranks", ("", "loader alone, ms per batch", "step ms"), rows, (which, rest))


def _what_if(analysis: StallAnalysis) -> Table:
    asked = [(words, predict(analysis.stages, setting)) for words, setting in questions(analysis)]
    remarks = []
    if any(found.limit == "cores" for _, found in asked):
        remarks.append("Limited by cores: all processors are busy, so that more workers change nothing.")
    if any(found.limit == "queue" for _, found in asked):
        remarks.append("Limited by queue: single long batches are waited for. More of them prefetched even that out.")
    if any(found.limit == "storage" for _, found in asked):
        remarks.append("Limited by storage: workers share what it delivers, so that more of them change nothing.")
    if analysis.verdict.elsewhere is not None and analysis.stages.read.median:
        remarks.append(
            "Workers on other machines are taken to read as more workers here would. What a storage that they share can deliver "
            "was not measured."
        )
    if analysis.stages.points:
        remarks.append(f"Echoing is not free: with factor 4 {fewer_fresh(4)}.")
    return Table(
        "What if: predicted",
        ("", "step ms", "low to high", "idle", "speed-up", "limited by"),
        tuple(
            (
                words,
                milliseconds(found.step_seconds),
                _range(*found.step_seconds_range),
                percent(found.idle_fraction),
                f"{found.speedup:,.2f}x",
                found.limit,
            )
            for words, found in asked
        ),
        tuple(remarks),
    )


def _caches(analysis: StallAnalysis) -> Table:
    stages, rows = analysis.stages, []
    for hold in possible_holds(stages):
        example, share = cached_example(stages, hold), fitting_fraction(stages, hold)
        if example is None or share is None:
            continue
        setting = TrainingSetting(cached_fraction=share, hold=hold) if share else TrainingSetting()
        found = predict(stages, setting)
        rows.append(
            (
                f"{HELD[hold]} (hold='{hold}')",
                three_digits(example.bytes / 1024),
                size_for(stages, hold, 1.0) or "",
                percent(share),
                milliseconds(example.hit.median),
                milliseconds(costs_of(stages, setting).host_seconds(1)),
                milliseconds(found.step_seconds),
                f"{found.speedup:,.2f}x",
            )
        )
    free = f"{(stages.free_bytes or 0) / 2**30:.3g} GiB of memory were free; a cache may take three fourths of it."
    return Table(
        "A cache: what memory holds of the data set, and what it would bring",
        ("", "KiB each", "all", "fits", "hit ms", "fresh batch ms", "step ms", "speed-up"),
        tuple(rows),
        (free,),
    )


def _remedies(analysis: StallAnalysis) -> Table:
    found = analysis.verdict.remedies
    predicted = [predict(analysis.stages, remedy.setting) for remedy in found]
    rows = tuple(
        (
            in_words(remedy.setting),
            milliseconds(each.step_seconds),
            percent(each.idle_fraction),
            "yes" if remedy.is_enough else "no",
        )
        for remedy, each in zip(found, predicted, strict=True)
    )
    remarks = [_LARGEST_BUFFER] if found and found[-1].setting.factor > 1 else []
    return Table("Remedies, in this order", ("", "step ms", "idle", "enough"), rows, tuple(remarks))


def _tried(analysis: StallAnalysis) -> Table:
    """Returns the predictions next to the measurements.

    The real run comes first, since the model should agree with its own measurements.
    """
    real: tuple[str, TrainingSetting, Spread] = ("the real run", TrainingSetting(), analysis.real)
    tried = [real, *((in_words(each.setting), each.setting, each.step_seconds) for each in analysis.checked)]
    rows = []
    for words, setting, measured in tried:
        predicted = predict(analysis.stages, setting).step_seconds
        off = round(100 * (predicted / measured.median - 1))
        times = milliseconds(predicted), milliseconds(measured.median), _range(measured.low, measured.high)
        rows.append((words, *times, f"{off:+,d}%"))
    columns = ("", "predicted ms", "measured ms", "low to high", "difference")
    return Table("Tried: predicted against measured", columns, tuple(rows))


def _proved(analysis: StallAnalysis) -> Table:
    """Returns the gains that were proved, and what to keep."""
    rows = [
        (in_words(each.setting), f"{each.gain:,.2f}x", f"{each.low:,.2f} to {each.high:,.2f}", f"{each.blocks}")
        for each in analysis.proved
    ]
    kept = to_keep(analysis.proved)
    keep = "None of them is proved to be faster: keep what you have."
    if kept is not None:
        what, lines = in_words(kept.setting), "; ".join(kept.setting.lines)
        keep = f"Keep {what}{f': {lines}' if lines not in ('', what) else ''}."
    remarks = (
        keep,
        "Blocks took turns with the training as it is. If they do so again, the interval has the gain with a probability of 95%.",
    )
    return Table(
        "Proved: steps per second, relative to the training as it is", ("", "gain", "interval", "blocks"), tuple(rows), remarks
    )


def _range(low: float, high: float) -> str:
    return f"{milliseconds(low)} to {milliseconds(high)}"


# ---------------------------------------------------------------------- text
# A report for a terminal: the verdict, why, and the lines to paste; then the tables.


def report(analysis: StallAnalysis) -> str:
    verdict = analysis.verdict
    first = verdict_blocks(verdict.message, figures_of(analysis), verdict.lines)
    blocks = [*first, headline(analysis), *map(as_text, tables(analysis)), as_block("Notes", analysis.notes)]
    return "\n\n".join(filter(None, blocks))


# ---------------------------------------------------------------------- plot
# A report as a picture: the parts of the step time, and the speed-up by echo factor at each insertion point.
#
# Each line is thinner than the one before, so lines at the same place can still be seen.

_PART_COLORS = (BLUE, SKY, ORANGE, VERMILION)
_POINT_COLORS = dict(  # one colour is spare
    zip((point.value for point in POINTS), (ORANGE, VERMILION, GREEN, BLUE, PINK, SKY), strict=False)
)
_LARGEST_FACTOR = 8.0
_STEPS = 56  # points of a line: one for each eighth of a factor: its bend is then at the right place


def draw(analysis: StallAnalysis, width: float = BROAD) -> Figure:
    is_broad = width >= BROAD
    figure = figures.new_figure(width, 6.4 if is_broad else 7.4)
    above, below = figure.subplots(2, 1, height_ratios=(1, 5))
    _draw_parts(above, analysis, is_broad=is_broad)
    _draw_speedups(below, analysis, is_broad=is_broad)
    return figures.dressed(figure)


def save_png(analysis: StallAnalysis, path: str | Path) -> None:
    figures.save(draw(analysis), path)


def _draw_parts(axes: Axes, analysis: StallAnalysis, *, is_broad: bool) -> None:
    begin = 0.0
    for (words, share), color in zip(shares_of_step(analysis), _PART_COLORS, strict=False):
        seconds = share * analysis.step_seconds
        label = f"{words}: {milliseconds(seconds)} ms ({percent(share)})"
        axes.barh(
            [0], [1000 * seconds], left=[1000 * begin], color=color, edgecolor=PAPER, label=fill(label, 90 if is_broad else 44)
        )
        begin += seconds
    axes.set(xlabel="step time of the real run (ms)", yticks=[], xlim=(0, 1000 * begin))
    axes.spines[["left", "right", "top"]].set_visible(False)
    ncols = 2 if is_broad else 1
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=ncols, frameon=False)


def _draw_speedups(axes: Axes, analysis: StallAnalysis, *, is_broad: bool) -> None:
    measured = _measured(analysis)
    largest = max([_LARGEST_FACTOR, *(factor for _, factor, _ in measured)])
    factors = [1 + (largest - 1) * step / _STEPS for step in range(_STEPS + 1)]
    points = analysis.stages.points
    for place, point in enumerate(points):
        speedups = [predict(analysis.stages, TrainingSetting(factor=factor, insertion_point=point)).speedup for factor in factors]
        thickness = 1.6 + 1.1 * (len(points) - 1 - place)
        axes.plot(factors, speedups, label=point, color=_POINT_COLORS[point], linewidth=thickness)
    real = analysis.step_seconds
    for point, factor, spread in measured:
        speedup, color = real / spread.median, _POINT_COLORS[point]
        around = [[speedup - real / spread.high], [real / spread.low - speedup]]
        axes.errorbar([factor], [speedup], around, capsize=3, ecolor=INK, zorder=3)
        axes.plot([factor], [speedup], "o", color=color, markeredgecolor=INK, markersize=8, zorder=4)
    axes.plot([1], [1], "o", color=PAPER, markeredgecolor=INK, markersize=8, zorder=3, label="measured")
    axes.set(xlabel="echo factor", ylabel="speed-up (steps per second,\ntimes those without echoing)", ylim=(0, None))
    figures.add_grid(axes)
    where: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    if not is_broad:
        where = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.18), "ncols": 2, "fontsize": 9, "columnspacing": 1}
    axes.legend(frameon=False, title="insertion point", **where)


def _measured(analysis: StallAnalysis) -> list[tuple[str, float, Spread]]:
    """Returns the tried settings that belong to a line: only the echoing differs from the measured setting."""
    stages, found = analysis.stages, []
    for each in analysis.checked:
        setting = each.setting
        only_echoing = TrainingSetting(setting.workers, setting.factor, setting.insertion_point)
        if setting == only_echoing and setting.workers in (None, stages.workers) and setting.insertion_point in stages.points:
            found.append((setting.insertion_point, setting.factor, each.step_seconds))
    return found


# ---------------------------------------------------------------------- page


def page(analysis: StallAnalysis) -> str:
    """Returns a report as HTML; needs matplotlib."""
    figure, narrow = figures.as_svgs(partial(draw, analysis))
    return HtmlPage(
        headline=headline(analysis),
        figure=figure,
        narrow=narrow,
        figure_words="Parts of the step time, and speed-up by echo factor, as in the tables",
        tables=tables(analysis),
        verdict=analysis.verdict.message,
        why=figures_of(analysis),
        lines=analysis.verdict.lines,
        notes=analysis.notes,
    ).text()


def save_page(analysis: StallAnalysis, path: str | Path) -> None:
    Path(path).write_text(page(analysis), encoding="utf-8")
