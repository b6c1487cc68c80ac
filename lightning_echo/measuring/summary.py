"""What is told at the end of a training: where the time went, which factors were used and why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from lightning_echo.measuring.control import Decision, Observation, Reason
from lightning_echo.measuring.report import EpochReport

__all__ = ["advise", "summarize"]


def summarize(reports: Sequence[EpochReport], advice: str) -> str:
    """The summary of a training, some lines of at most about 120 columns.

    Args:
        reports: Of its epochs, in order.
        advice: The last line.

    Example:
        >>> report = EpochReport(0, 10, 1.0, 80, 0, idle_fraction=0.5, data_wait_seconds=0.01, step_seconds=0.01)
        >>> print(summarize([report], "Echo with factor 2."))
        lightning_echo: 10 steps in 0.2 s: 0.1 s of work, 0.1 s waiting for input (idle 50%), 0 s for first batches
          epoch 0: factor 1, idle 50%
          80 fresh and 0 echoed examples
          Echo with factor 2.
    """
    if not reports:
        return f"lightning_echo: no epoch was measured\n  {advice}"
    lines = [_times(reports)]
    lines += [_stretch(list(stretch)) for _, stretch in groupby(reports, key=lambda report: report.factor)]
    last = reports[-1]
    passes = f", {last.passes:.3g} passes over the data" if last.passes is not None else ""
    lines.append(f"{last.fresh_examples:,} fresh and {last.echoed_examples:,} echoed examples{passes}")
    if last.speedup is not None and last.factor > 1:
        lines.append(f"about {last.speedup:.2f} times as fast as factor 1 (estimated from the measured costs)")
    return "\n  ".join([*lines, advice])


def advise(observation: Observation, recommended: Decision) -> str:
    """What to do, in one sentence.

    Args:
        observation: At the end of the last epoch.
        recommended: What `recommend` says to it.
    """
    idle, factor, costs = observation.idle_fraction, observation.factor, observation.costs
    if idle is None:
        return "Too few steps were measured for advice."
    busy = f"the accelerator is busy {1 - idle:.0%} of the time"
    if recommended.reason in (Reason.downstream_too_slow, Reason.no_workers, Reason.not_measured):
        return f"{'Do not echo' if factor == 1 else 'Echoing alone does not help'}: {recommended.message}."
    if recommended.factor <= 1 and factor == 1:
        return f"Do not echo: {busy}."
    if recommended.factor == factor:
        return f"Keep factor {factor:g}: {busy}."
    if recommended.factor < factor:
        what = "Do not echo" if recommended.factor == 1 else f"Lower the factor to {recommended.factor:g}"
        return f"{what}: that is enough to feed the accelerator, and fresh data is worth more than echoed data."
    gain = costs.step_seconds(factor) / costs.step_seconds(recommended.factor) if costs is not None else None
    times = f"about {gain:.2g} times as fast" if gain is not None else "faster"
    what = "Echo with" if factor == 1 else "Raise the factor to"
    limit = "; more than that is seldom worth it, a faster source is" if recommended.reason is Reason.at_maximum else ""
    return f"{what} factor {recommended.factor:g}: {times}, for {busy}{limit}."


def _times(reports: Sequence[EpochReport]) -> str:
    steps = sum(report.steps for report in reports)
    waited = sum(report.steps * (report.data_wait_seconds or 0) for report in reports)
    worked = sum(report.steps * (report.step_seconds or 0) for report in reports)
    first = sum(report.first_batch_seconds or 0 for report in reports)
    total = waited + worked
    if not total:
        return f"lightning_echo: {steps:,} steps; how long they waited for input could not be measured"
    return (
        f"lightning_echo: {steps:,} steps in {total:.3g} s: {worked:.3g} s of work, {waited:.3g} s waiting for input "
        f"(idle {waited / total:.0%}), {first:.2g} s for first batches"
    )


def _stretch(reports: Sequence[EpochReport]) -> str:
    """Epochs with the same factor, and what was decided at their end."""
    first, last = reports[0], reports[-1]
    epochs = f"epoch {first.epoch}" if first.epoch == last.epoch else f"epochs {first.epoch} to {last.epoch}"
    waited = sum(report.steps * (report.data_wait_seconds or 0) for report in reports)
    total = waited + sum(report.steps * (report.step_seconds or 0) for report in reports)
    idle = f", idle {waited / total:.0%}" if total else ""
    slow = f", slowest rank {last.slowest_rank}" if last.slowest_rank else ""
    changes = last.next_factor not in (None, last.factor)
    return f"{epochs}: factor {last.factor:g}{idle}{slow}" + (f"; {last.message}" if changes else "")
