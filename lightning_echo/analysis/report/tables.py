"""The tables of a report, as values: text and page show the same figures in the same words."""

from __future__ import annotations

import math

from lightning_echo.analysis.caches import cached_example, fitting_fraction, possible_holds, size_for
from lightning_echo.analysis.measured import Spread
from lightning_echo.analysis.predict import TrainingSetting, costs_of, predict
from lightning_echo.analysis.report.questions import HELD, in_words, questions
from lightning_echo.analysis.result import StallAnalysis
from lightning_echo.measuring.words import busy, fewer_fresh, number_of, percent, three_digits
from lightning_echo.reporting.table import Table

__all__ = ["figures", "headline", "milliseconds", "shares_of_step", "tables"]

_NOTABLE_CONTENTION = 1.2
_LARGEST_BUFFER = (
    "Echo with as large a buffer_size as memory allows beside the cache: the further apart the uses of an example, the better."
)


def headline(analysis: StallAnalysis) -> str:
    """Returns the analysis in one line."""
    return f"Stall analysis: {busy(analysis.idle_fraction)}"


def figures(analysis: StallAnalysis) -> list[str]:
    """Returns the three figures on which the verdict is based: the idle fraction, and the step with and without waiting."""
    stages = analysis.stages
    host = milliseconds(costs_of(stages, TrainingSetting()).host_seconds(1))
    setup = f"{number_of(stages.workers, 'worker', 'workers')} on {number_of(stages.cores, 'core', 'cores')}"
    return [
        f"The accelerator is idle {percent(analysis.idle_fraction)} of the time.",
        f"A step takes {milliseconds(analysis.step_seconds)} ms; {milliseconds(stages.step.median)} ms if its batch is ready.",
        f"The loader takes {host} ms per batch, with {setup}.",
    ]


def tables(analysis: StallAnalysis) -> list[Table]:
    """Returns all tables of a report, in their order."""
    every = (_steps, _stalls, _rates, _costliest, _ranks, _what_if, _caches, _remedies, _tried)
    return [table for table in (make(analysis) for make in every) if table.rows]


def shares_of_step(analysis: StallAnalysis) -> list[tuple[str, float]]:
    """Returns the parts of the step time of the real run, with the share of each; together the shares are 1."""
    fetch, prep, copy = analysis.fetch_stall_fraction, analysis.prep_stall_fraction, analysis.copy_fraction
    first = [("step", 1 - analysis.idle_fraction), ("copy to the device", copy)]
    if fetch is None or prep is None:
        return [*first, ("waiting for input (prep and fetch stall together)", analysis.idle_fraction - copy)]
    return [*first, ("prep stall", prep), ("fetch stall", fetch)]


def milliseconds(seconds: float) -> str:
    """Returns a time in milliseconds."""
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
            f"Decoding and augmentation take {stages.contention:.2g} times as long beside the training as alone: the training's "
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
    """Returns DS-Analyzer's rates, beside the rate of the real run."""
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
    return Table("Rates", ("", "examples/s"), tuple((words, _rate(rate)) for words, rate in rates))


def _costliest(analysis: StallAnalysis) -> Table:
    rows = tuple((name, milliseconds(seconds)) for name, seconds in analysis.costliest)
    return Table("What takes a worker longest", ("", "ms per example"), rows)


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
    if any(found.limit == "storage" for _, found in asked):
        remarks.append("Limited by storage: workers share what it delivers, so that more of them change nothing.")
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
    """Returns what memory holds of the data set, for each form in which a cache can hold an example."""
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
    """Returns the remedies in their order, each together with those before it."""
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
    """Returns the predictions beside the measurements.

    The real run comes first, since the model should agree with its own measurements.
    """
    real: tuple[str, TrainingSetting, Spread] = ("the real run", TrainingSetting(), analysis.real)
    tried = [real, *((in_words(each.setting), each.setting, each.step_seconds) for each in analysis.checked)]
    rows = []
    for words, setting, measured in tried:
        predicted = predict(analysis.stages, setting).step_seconds
        off = round(100 * (predicted / measured.median - 1))
        times = milliseconds(predicted), milliseconds(measured.median), _range(measured.low, measured.high)
        rows.append((words, *times, f"{off:+,d} %"))
    columns = ("", "predicted ms", "measured ms", "low to high", "difference")
    return Table("Tried: predicted against measured", columns, tuple(rows))


def _range(low: float, high: float) -> str:
    return f"{milliseconds(low)} to {milliseconds(high)}"


def _rate(rate: float) -> str:
    return "no limit" if math.isinf(rate) else three_digits(rate)
