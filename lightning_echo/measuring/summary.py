"""What is told at the end of a training: where the time went, which factors were used and why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from textwrap import fill

from lightning_echo.measuring.control import Decision, Observation, Reason
from lightning_echo.measuring.report import EpochReport
from lightning_echo.measuring.target_idle import LARGE_FACTOR, NO_GAIN_HELPS
from lightning_echo.measuring.words import busy, many, no_workers, of_last, percent, short

__all__ = ["advise", "summarize"]

_COLUMNS = 120


def summarize(reports: Sequence[EpochReport], advice: str) -> str:
    """The summary of a training, lines of at most 120 columns.

    Args:
        reports: Of its epochs, in order.
        advice: The last line.

    Example:
        >>> report = EpochReport(0, 10, 1.0, 80, 0, idle_fraction=0.5, data_wait_seconds=0.01, step_seconds=0.01)
        >>> print(summarize([report], "Echo with factor 2."))
        lightning_echo: 10 steps in 0.2 s: 0.1 s of work, 0.1 s waiting for input (idle 50 %); 0 s more for first batches
          epoch 0: factor 1, idle 50 %
          80 fresh and 0 echoed examples
          Echo with factor 2.
    """
    if not reports:
        return _join(["lightning_echo: no epoch was measured", advice])
    lines = [_times(reports)]
    lines += [_stretch(list(stretch)) for _, stretch in groupby(reports, key=lambda report: report.factor)]
    last = reports[-1]
    passes = f", {many(last.passes, 'pass', 'passes')} over the data" if last.passes is not None else ""
    lines.append(f"{last.fresh_examples:,} fresh and {last.echoed_examples:,} echoed examples{passes}")
    if last.speedup is not None and last.factor > 1:
        lines.append(f"about {last.speedup:.2f} times as fast as factor 1 (estimated from the measured costs)")
    return _join([*lines, advice])


def advise(observation: Observation, recommended: Decision) -> str:
    """What to do, in one sentence; it says of which steps its figures are, since others stand beside it.

    Args:
        observation: At the end of the last epoch, with those before it where it is short.
        recommended: What `recommend` says to it.
    """
    idle, factor, steps = observation.idle_fraction, observation.factor, observation.steps
    if idle is None:
        return "Too few steps were measured for advice."
    said = busy(idle, last=steps)
    if recommended.reason is Reason.not_measured:
        return f"No advice: {recommended.message}{of_last(steps)}."
    is_starved = recommended.reason in (Reason.starved, Reason.at_maximum)
    if recommended.reason is Reason.no_workers or (
        is_starved and observation.costs is not None and not observation.costs.workers
    ):
        return no_workers(1, idle, last=steps)
    if recommended.reason is Reason.downstream_too_slow:
        return f"At this insertion point no factor is enough; {recommended.message}{of_last(steps)}."
    helps = ""
    if recommended.reason is Reason.at_maximum:
        larger = "a larger factor seldom does" if recommended.factor >= LARGE_FACTOR else "or a larger max_factor"
        helps = f"; a faster source helps further, {larger}"
    if recommended.reason is Reason.no_gain:
        helps = f", and a larger factor brings too little; {NO_GAIN_HELPS}"
    if recommended.reason is not Reason.at_maximum and recommended.factor == factor == 1:
        return f"Do not echo: {said}{helps}."
    if recommended.factor == factor:
        return f"Keep factor {factor:g}: {said}{helps}."
    if recommended.factor < factor:
        if recommended.reason is Reason.no_gain:
            less = "Do not echo" if recommended.factor == 1 else f"Lower the factor to {recommended.factor:g}"
            return f"{less}: {said}{helps}."
        if recommended.reason is Reason.at_maximum:
            why = "a larger one is seldom worth it" if recommended.factor >= LARGE_FACTOR else "max_factor says so"
            return f"Lower the factor to {recommended.factor:g}: {why}."
        if recommended.factor == 1:
            return "Do not echo: fresh examples alone feed the accelerator, and are worth more than echoed ones."
        enough = "that is enough to feed the accelerator, and fresh examples are worth more than echoed ones"
        return f"Lower the factor to {recommended.factor:g}: {enough}."
    what = "Echo with factor" if factor == 1 else "Raise the factor to"
    if recommended.reason is Reason.at_minimum:
        return f"{what} {recommended.factor:g}, since min_factor says so: {said}{helps}."
    said = busy(idle, only=True, last=steps)
    return f"{what} {recommended.factor:g}{_times_as_fast(observation, recommended.factor)}: {said}{helps}."


def _times_as_fast(observation: Observation, factor: float) -> str:
    """What another factor is worth; while the device waits, the host takes as long as a step lasts."""
    costs, seconds = observation.costs, observation.step_seconds
    if costs is None or seconds is None:
        return ""
    host = costs.host_seconds(observation.factor)
    if costs.workers and 0 < host < seconds:
        costs = costs.slower(seconds / host)
    gain = f"{costs.step_seconds(observation.factor) / costs.step_seconds(factor):.1f}".removesuffix(".0")
    return f", about {gain} times as fast" if gain != "1" else ""


def _join(lines: Sequence[str]) -> str:
    """Each line after the first stands under it; what is too long goes on further in."""
    indents = ["", *["  "] * (len(lines) - 1)]
    said = [
        fill(line, _COLUMNS, initial_indent=indent, subsequent_indent=f"{indent}    ", break_on_hyphens=False)
        for indent, line in zip(indents, lines, strict=True)
    ]
    return "\n".join(said)


def _times(reports: Sequence[EpochReport]) -> str:
    steps = sum(report.steps for report in reports)
    waited = sum(report.steps * (report.data_wait_seconds or 0) for report in reports)
    worked = sum(report.steps * (report.step_seconds or 0) for report in reports)
    first = sum(report.first_batch_seconds or 0 for report in reports)
    total = waited + worked
    if not total:
        return "lightning_echo: how long steps waited for input could not be measured"
    return (
        f"lightning_echo: {many(steps, 'step', 'steps')} in {short(total)} s: {short(worked)} s of work, "
        f"{short(waited)} s waiting for input (idle {percent(waited / total)}); {short(first)} s more for first batches"
    )


def _stretch(reports: Sequence[EpochReport]) -> str:
    """Epochs with the same factor, and what was decided at their end."""
    first, last = reports[0], reports[-1]
    epochs = f"epoch {first.epoch}" if first.epoch == last.epoch else f"epochs {first.epoch} to {last.epoch}"
    waited = sum(report.steps * (report.data_wait_seconds or 0) for report in reports)
    total = waited + sum(report.steps * (report.step_seconds or 0) for report in reports)
    idle = f", idle {percent(waited / total)}" if total else ""
    slow = f", slowest rank {last.slowest_rank}" if last.slowest_rank is not None else ""
    changes = last.next_factor not in (None, last.factor)
    return f"{epochs}: factor {last.factor:g}{idle}{slow}" + (f"; {last.message}" if changes else "")
