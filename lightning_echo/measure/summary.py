"""The summary of a finished training: where the time went, what the echoes were good for; and ``echo_summary.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import groupby
from textwrap import fill
from typing import Any

from lightning_echo.measure.control import ENOUGH_STEPS, Observation, number_of, percent, three_digits
from lightning_echo.measure.target_idle import TARGET
from lightning_echo.schema import FieldError, entry, record, rows

# ---------------------------------------------------------------------- report


@dataclass(frozen=True)
class EpochReport:
    """One epoch of a job, as it is logged, saved in checkpoints and summarized. A value that could not be measured is None.

    Attributes:
        steps: Number of its steps that were measured.
        factor: Echo factor in force at its end; on demand the uses per fresh example in the run so far.
        fresh_examples: Fresh examples of all ranks, in the run so far.
        echoed_examples: Echoed examples of all ranks, in the run so far.
        fresh_in_epoch: Fresh examples of all ranks in this epoch. None if its beginning is not known (it was resumed from a
            checkpoint without this callback), or if batches have no size.
        echoed_in_epoch: The same of echoed examples.
        passes: Passes over the data in the run so far.
        effective_factor: Uses per fresh example in this epoch.
        idle_fraction: Share of the epoch's time in which the job waited for input, 0 to 1.
        slowest_rank: The rank that the others waited for most often; None if there is only one rank.
        slowest_node: The node of that rank; None if there is only one node.
        data_wait_seconds: Seconds of waiting per step.
        step_seconds: Seconds per step without the waiting.
        slices: Of each slice of the epoch's steps, in their order, the seconds of waiting and all its seconds, see `slice_ends`.
        upstream_seconds: Seconds of the host for a batch of fresh examples, before the insertion point.
        examples_per_second: Fresh and echoed examples per second, all ranks.
        recommended_factor: The factor that follows from the measurements.
        first_batch_seconds: Longest wait of any rank for the epoch's first batch, if workers had to start for it.
        fresh_batches: Batches of fresh examples in this epoch, of the loader that echoed most. None if nothing echoes on demand.
        fresh_batch_seconds: Seconds of the host for a batch in which all examples are fresh, divided by the workers. None if
            nothing echoes on demand, or if it was not measured (threads that read ahead, a shared reader, several loaders).
        stalls_bridged_seconds: How much longer the steps of the run so far would have taken with fresh examples alone, see
            `stalls_bridged`. None if nothing echoes on demand.
        cache_hit_fraction: Share of the epoch's fresh examples that the cache had, 0 to 1.
        cached_examples: Examples that the cache of a node holds.
        cache_bytes: Bytes that they take on a node.
        cache_received_fraction: Share of the epoch's fresh examples that came from another node; None if the cache is not
            partitioned.
        exchange_fraction: Share of the epoch's time in which a node sent and received examples, for the node with the largest
            share; None if the cache is not partitioned.
        reads_in_flight: Reads that were under way on a rank, on average; mean over the ranks. None if no threads read ahead.
        worker_wait_fraction: Share of the time in which the workers neither computed nor waited for a processor, 0 to 1. None if
            unknown, or if threads read ahead.
        taken_fraction: Share of the processor time that the training would have had alone which other programs took, 0 to 1. Of
            several nodes the one with the largest share. None if unknown, or if a reader is shared.
        load: A sentence on that, or on a quota that stopped the training; empty if its figures can be trusted.
        cache_hold: The form in which the cache holds an example; empty without a cache.
        cache_is_full: Whether nothing more is added to the cache.
        shared_trainings: Trainings that share the reading, this one included. This and the next three are None without sharing.
        peer_wait_fraction: Share of the epoch's time in which a batch waited for another training, 0 to 1.
        missed_examples: Examples in the run so far that other trainings had and this one did not.
        read_again_examples: Examples in the run so far that were read again for this training, since it joined within a pass.
        saved_cpu_seconds: Processor seconds saved by sharing in the run so far: those of reading this training's examples, less
            its own share of them.
        slowest_training: The training that this one waited for longest in the run so far; empty if none.
        fresh_step_seconds: Seconds that a step would have taken with fresh examples alone, at least and at most, see
            `fresh_step_seconds`. None if it is not known: on demand, with a cache, with threads that read ahead, beside a shared
            reader, for workers that cannot be measured.
        speedup: How many times as many steps a second the run so far took as with fresh examples alone, at least and at most, see
            `speedup_of`. None if nothing was echoed, or if too little was measured.
        max_factor: The bound in force at its end, if batches echo on demand; otherwise None.
        next_factor: The factor that the controller has decided on; on demand the bound.
        reason: The controller's reason, for programs: a value of `Reason`, or empty without a controller.
        message: The controller's reason, for people.

    Example:
        >>> EpochReport(epoch=0, steps=10, factor=2.0, fresh_examples=8, echoed_examples=8, idle_fraction=0.25).logged()
        {'echo/factor': 2.0, 'echo/fresh_examples': 8.0, 'echo/echoed_examples': 8.0, 'echo/idle_fraction': 0.25}
    """

    epoch: int
    steps: int
    factor: float
    fresh_examples: int
    echoed_examples: int
    fresh_in_epoch: int | None = None
    echoed_in_epoch: int | None = None
    passes: float | None = None
    effective_factor: float | None = None
    idle_fraction: float | None = None
    slowest_rank: int | None = None
    slowest_node: int | None = None
    data_wait_seconds: float | None = None
    step_seconds: float | None = None
    slices: tuple[tuple[float, float], ...] = ()
    upstream_seconds: float | None = None
    examples_per_second: float | None = None
    recommended_factor: float | None = None
    first_batch_seconds: float | None = None
    fresh_batches: float | None = None
    fresh_batch_seconds: float | None = None
    stalls_bridged_seconds: float | None = None
    cache_hit_fraction: float | None = None
    cached_examples: int | None = None
    cache_bytes: int | None = None
    cache_received_fraction: float | None = None
    exchange_fraction: float | None = None
    reads_in_flight: float | None = None
    worker_wait_fraction: float | None = None
    taken_fraction: float | None = None
    load: str = ""
    cache_hold: str = ""
    cache_is_full: bool = False
    shared_trainings: int | None = None
    peer_wait_fraction: float | None = None
    missed_examples: int | None = None
    read_again_examples: int | None = None
    saved_cpu_seconds: float | None = None
    slowest_training: str = ""
    fresh_step_seconds: tuple[float, float] | None = None
    speedup: tuple[float, float] | None = None
    max_factor: float | None = None
    next_factor: float | None = None
    reason: str = ""
    message: str = ""

    def logged(self) -> dict[str, float]:
        """Returns the values for loggers, under ``echo/...``, without those that could not be measured."""
        values = {name: getattr(self, name) for name in LOGGED}
        return {f"echo/{name}": float(value) for name, value in values.items() if value is not None}

    def state(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


_NOT_LOGGED = {"epoch", "steps", "slowest_node", "cache_hold", "cache_is_full", "saved_cpu_seconds", "slowest_training"}
_NOT_LOGGED |= {"worker_wait_fraction", "speedup", "max_factor", "next_factor", "reason", "message"}
_NOT_LOGGED |= {"fresh_batches", "fresh_batch_seconds", "fresh_step_seconds", "taken_fraction", "load"}
_NOT_LOGGED |= {"fresh_in_epoch", "echoed_in_epoch", "slices"}
LOGGED = tuple(field.name for field in fields(EpochReport) if field.name not in _NOT_LOGGED)


# ---------------------------------------------------------------------- echo summary
# ``echo_summary.json``: saved for other programs, and for a later run that replays its decisions.

FILE_NAME = "echo_summary.json"
VERSION = 2


@dataclass(frozen=True)
class FactorUse:
    """A factor, and its batches: from one batch of the run until the next `FactorUse`."""

    # The number of batches of the run after which the controller decided on it; 0 at the beginning. None: other code set it.
    step: int | None
    batch: int | Mapping[str, int]  # the first one of the run with this factor, from 0; of several loaders by their names
    factor: float  # on demand the bound
    reason: str = ""  # the controller's, for programs: a value of `Reason`, or empty
    message: str = ""  # the controller's reason, for people


@dataclass(frozen=True)
class RunSummary:
    """The contents of ``echo_summary.json``.

    Attributes:
        reports: Those of the epochs.
        decisions: The factors in order, from the first.
        packages: Versions, by name.
        verdict: None if too little was measured.
        program: The program that trained, such as ``train.py``.
        name: The run as its first logger names it, such as ``lightning_logs/version_0``; empty without a logger.
        began: When the run began, before it was resumed for the first time: local time with its zone, as ISO 8601 has it.

    Example:
        >>> summary = RunSummary([EpochReport(0, 10, 2.0, 40, 40)], [FactorUse(0, 0, 2.0)], {"lightning_echo": "0.1.0"})
        >>> RunSummary.from_json(summary.to_json()) == summary
        True
    """

    reports: Sequence[EpochReport] = ()
    decisions: Sequence[FactorUse] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    verdict: RunVerdict | None = None
    program: str = ""
    name: str = ""
    began: str = ""

    @property
    def title(self) -> str:
        """Which run it is, and when it began; empty if neither is known.

        >>> RunSummary(program="train.py", name="logs/version_3", began="2026-01-31T09:05:00+01:00").title
        'train.py, logs/version_3, began 2026-01-31 09:05:00+01:00'
        """
        began = f"began {self.began.replace('T', ' ', 1)}" if self.began else ""
        return ", ".join(filter(None, (self.program, self.name, began)))

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunSummary:
        """Reads the text of a file; raises a ValueError if it is another text, or of another version."""
        found = json.loads(text)  # a JSONDecodeError is a ValueError
        version = found.get("version") if isinstance(found, dict) else None
        if not isinstance(version, int):
            raise ValueError(f"this is not an {FILE_NAME}: it must be an object with version, reports and decisions")
        if version > VERSION:
            raise ValueError(
                f"the {FILE_NAME} has version {version}, this lightning_echo knows up to {VERSION}: upgrade lightning_echo"
            )
        if version < VERSION:
            raise ValueError(
                f"the {FILE_NAME} has version {version}, of before the first release, and only {VERSION} is known: train again"
            )
        try:
            reports = rows(found, "reports", partial(record, EpochReport))
            decisions = rows(found, "decisions", partial(record, FactorUse))
            packages, verdict = entry(found, "packages", dict), entry(found, "verdict", RunVerdict | None)
            which = [entry(found, name, str) for name in ("program", "name", "began")]
            return cls(reports, decisions, packages, verdict, *which)
        except FieldError as error:
            raise ValueError(f"the {FILE_NAME} is damaged: {error}") from None


# ---------------------------------------------------------------------- speed-up
# What the run's echoes were good for: the time that its steps would have taken with fresh examples alone, over the time that they
# took. It is joined over all epochs, and claimed as an interval.
#
# Without echoes, a step takes as long as its work, or as the workers take for a batch of fresh examples if that is longer. What
# they take is measured where they work, so workers that rested because their queue was full are not taken for slower ones. Of
# two things it says nothing:
#
# * Handing over takes time, too, and workers disturb each other. While the training waits, a step lasts as long as all that, so
#   that the measured time is at least, and what explains the steps is at most what fresh examples would have taken.
# * If nobody waits, workers may rest in turn. Without echoes all would work at once, and more of them than there are cores would
#   take turns.
#
# Echoes save at most the fresh batches that they came in place of, so no run is faster by more than its uses per fresh example.

_ENOUGH_FRESH = 10  # batches of fresh examples: fewer do not show what one takes
_JITTER = 1.15  # ``make bench ARGS="--only claims"``: 40 of 40 claims had the truth


def fresh_step_seconds(observation: Observation, cores: int = 1) -> tuple[float, float] | None:
    """Returns how long a step would have taken with fresh examples alone, at least and at most; None if that is not known.

    ``observation.costs`` have to be those that the workers measured. ``cores`` are those of a rank.

    >>> from lightning_echo.measure.control import PipelineCosts
    >>> costs = PipelineCosts("after_augmentation", 0.16, 0.0, 0.0, device_seconds=0.01, workers=4)
    >>> fed = Observation(epoch=0, factor=8.0, steps=100, idle_fraction=0.0, step_seconds=0.01, costs=costs)
    >>> fresh_step_seconds(fed, cores=4), fresh_step_seconds(fed, cores=2)
    ((0.04, 0.04), (0.04, 0.08))
    """
    idle, seconds, costs = observation.idle_fraction, observation.step_seconds, observation.costs
    if idle is None or seconds is None or costs is None:
        return None
    work, fresh = seconds * (1 - idle), costs.host_seconds(1)
    if not costs.workers:
        return fresh + work, fresh + work
    host = costs.host_seconds(observation.factor)
    slower = seconds / host if idle > TARGET and host and not costs.keeps_up else costs.workers / cores
    return max(fresh, work), max(fresh, fresh * slower, work)


def speedup_of(reports: Sequence[EpochReport]) -> tuple[float, float] | None:
    """Returns how many times as many steps a second a run took as with fresh examples alone, at least and at most.

    None if nothing was echoed, if fewer than `ENOUGH_STEPS` steps or half of all were measured, or ten batches of fresh examples.
    (In 100 steps, a late batch makes one hundredth, and the batches that workers had made before the first step hardly count.)

    >>> epoch = partial(EpochReport, 0, 200, 4.0, 400, 1200, data_wait_seconds=0.01, step_seconds=0.01, effective_factor=4.0)
    >>> [round(end, 6) for end in speedup_of([epoch(fresh_step_seconds=(0.046, 0.06))])], speedup_of([epoch()])
    ([2.0, 3.45], None)
    """
    known = [each for each in reports if each.fresh_step_seconds and each.effective_factor]
    steps, seconds = sum(each.steps for each in known), sum(seconds_of(known))
    fresh = sum(each.steps / (each.effective_factor or 1.0) for each in known)
    if steps < max(ENOUGH_STEPS, sum(each.steps for each in reports) / 2) or fresh < _ENOUGH_FRESH or not seconds:
        return None
    most = steps / fresh
    if most == 1:
        return None
    low, high = (sum(each.steps * (each.fresh_step_seconds or (0.0, 0.0))[end] for each in known) / seconds for end in (0, 1))
    return min(low, most) / _JITTER, min(high * _JITTER, most)


def stalls_bridged(reports: Sequence[EpochReport]) -> float:
    """Returns how many seconds longer the steps of all epochs would have taken with fresh examples alone: an estimate.

    Without echoes, a step takes as long as its work, or as the source takes for a batch if that is longer. The source's time is
    that of the workers (`EpochReport.fresh_batch_seconds`). If nobody has measured that, it is the rate at which fresh examples
    have arrived: a source that rested meanwhile is then taken for a slower one. Single epochs do not show the rate of a source
    that stalls, so all epochs are joined. An echo saves at most the time of the fresh batch in whose place it came. If nothing
    has arrived, the training would have waited all that time at least.

    >>> epoch = partial(EpochReport, 0, 200, 4.0, 400, 1200, data_wait_seconds=0.0, step_seconds=0.05, fresh_batches=50.0)
    >>> stalls_bridged([epoch()]), stalls_bridged([epoch(fresh_batch_seconds=0.06)])
    (30.0, 2.0)
    """
    steps, (waited, worked) = sum(report.steps for report in reports), seconds_of(reports)
    passed, fresh = waited + worked, sum(report.fresh_batches or 0 for report in reports)
    measured = [(report.fresh_batches or 0, seconds) for report in reports if (seconds := report.fresh_batch_seconds) is not None]
    of_measured = sum(batches for batches, _ in measured)
    if of_measured:
        of_batch = sum(batches * seconds for batches, seconds in measured) / of_measured
    elif fresh:
        of_batch = passed / fresh
    else:
        return passed
    return max(0.0, min(max(steps * of_batch, worked) - passed, (steps - fresh) * of_batch))


def _speedup_line(low: float, high: float) -> str:
    return f"{low:.1f} to {high:.1f} times as fast as with fresh examples alone (estimated from what the workers took for them)"


# ---------------------------------------------------------------------- the summary

_COLUMNS = 120
_BUSY_EXCHANGE = 0.5  # share of an epoch: a saturated exchange takes this much, because a node also waits for the others
_IDLE = 0.1
_CLOSE = 1.1  # uses within this ratio of the factor are those of the factor


@dataclass(frozen=True)
class RunVerdict:
    """The verdict on a training."""

    message: str  # the advice, in one sentence
    why: tuple[str, ...] = ()  # the figures that lead to it, in words: at most three
    next_line: str = ""  # to paste; empty if nothing needs a change, or if too little was measured
    others: tuple[str, ...] = ()  # lines of the other remedies in their order, each with what it gains by itself


def summarize(reports: Sequence[EpochReport], verdict: RunVerdict) -> str:
    """Returns the summary of a training, its verdict first, in lines of at most 120 columns.

    Example:
        >>> report = EpochReport(0, 10, 1.0, 80, 0, idle_fraction=0.5, data_wait_seconds=0.01, step_seconds=0.01)
        >>> print(summarize([report], RunVerdict("Echo.", ("idle 50%", "four workers"), "EchoCallback(factor=2)")))
        lightning_echo: Echo.
          why: idle 50%; four workers
          next: EchoCallback(factor=2)
          10 steps in 0.2 s: 0.1 s of work, 0.1 s waiting for input (idle 50%); 0 s more for first batches
          epoch 0: factor 1, idle 50%
          80 fresh and 0 echoed examples
    """
    lines = [f"lightning_echo: {verdict.message}"]
    lines += [f"why: {'; '.join(verdict.why)}"] if verdict.why else []
    lines += [f"next: {verdict.next_line}"] if verdict.next_line else []
    lines += [f"then: {'; '.join(verdict.others)}"] if verdict.others else []
    lines += load_lines(reports)
    if reports:
        lines.append(_times_line(reports))
        alike = groupby(reports, key=lambda report: (report.max_factor, report.max_factor is None and report.factor))
        lines += [_epochs_line(list(epochs)) for _, epochs in alike]
        last = reports[-1]
        passes = f", {number_of(last.passes, 'pass', 'passes')} over the data" if last.passes is not None else ""
        lines.append(f"{last.fresh_examples:,} fresh and {last.echoed_examples:,} echoed examples{passes}")
        if last.speedup is not None:
            lines.append(_speedup_line(*last.speedup))
        if bridged := last.stalls_bridged_seconds:
            lines.append(f"echoes bridged about {three_digits(bridged)} s of stalls (estimated: so much longer without them)")
        lines += [line for line in (_cache_line(last), _share_line(last)) if line]
    else:
        lines.append("no epoch was measured")
    indents = ["", *["  "] * (len(lines) - 1)]
    return "\n".join(
        fill(line, _COLUMNS, initial_indent=indent, subsequent_indent=f"{indent}    ", break_on_hyphens=False)
        for indent, line in zip(indents, lines, strict=True)
    )


def load_lines(reports: Sequence[EpochReport]) -> list[str]:
    """Returns a sentence if other programs, or a quota, took the cores in some of the epochs; otherwise nothing.

    >>> quiet, loaded = EpochReport(0, 10, 1.0, 80, 0), EpochReport(1, 10, 1.0, 160, 0, load="Other programs took 2 of 2 cores")
    >>> load_lines([quiet]), load_lines([quiet, loaded])
    ([], ['Other programs took 2 of 2 cores (so in 1 of 2 epochs)'])
    """
    loaded = [report.load for report in reports if report.load]
    where = "" if len(loaded) == len(reports) else f" (so in {len(loaded)} of {len(reports)} epochs)"
    return [f"{loaded[-1]}{where}"] if loaded else []


def seconds_of(reports: Sequence[EpochReport]) -> tuple[float, float]:
    """Returns the seconds that all steps waited for input, and those in which they worked."""
    waited = sum(report.steps * (report.data_wait_seconds or 0) for report in reports)
    return waited, sum(report.steps * (report.step_seconds or 0) for report in reports)


def _times_line(reports: Sequence[EpochReport]) -> str:
    steps, (waited, worked) = sum(report.steps for report in reports), seconds_of(reports)
    first = sum(report.first_batch_seconds or 0 for report in reports)
    total = waited + worked
    if not total:
        return "the time that steps waited for input could not be measured"
    where = f"{three_digits(worked)} s of work, {three_digits(waited)} s waiting for input (idle {percent(waited / total)})"
    return (
        f"{number_of(steps, 'step', 'steps')} in {three_digits(total)} s: {where}; {three_digits(first)} s more for first batches"
    )


def _cache_line(last: EpochReport) -> str:
    if last.cached_examples is None or last.cache_bytes is None:
        return ""
    hold = f"{last.cache_hold} example".strip()
    held = f"{number_of(last.cached_examples, hold, f'{hold}s')} in {three_digits(last.cache_bytes / 2**20)} MiB"
    full = "nothing more fits" if last.cache_is_full else "there is room for more"
    hits = last.cache_hit_fraction
    used = "" if hits is None else f"; {percent(hits)} of the last epoch's fresh examples came from it"
    if last.cache_received_fraction is not None:
        used += f", {percent(last.cache_received_fraction)} from other nodes"
    exchange, idle = last.exchange_fraction or 0.0, last.idle_fraction or 0.0
    if exchange >= _BUSY_EXCHANGE and idle >= _IDLE:
        used += f"; the nodes exchanged examples for {percent(exchange)} of that epoch"
        used += ": the exchange, not the storage, is the limit"
    return f"the cache holds {held}, {full}{used}"


def _share_line(last: EpochReport) -> str:
    if last.shared_trainings is None:
        return ""
    others = last.shared_trainings - 1
    beside = f"with {number_of(others, 'other training', 'other trainings')}" if others else "with no other training"
    slowest = f"a slower one, most of all {last.slowest_training}" if last.slowest_training else "a slower one"
    waited = f"; {percent(last.peer_wait_fraction)} of the last epoch waited for {slowest}" if last.peer_wait_fraction else ""
    missed = f"; {last.missed_examples:,} examples were missed" if last.missed_examples else ""
    again = f"; {last.read_again_examples:,} were read again for it, as it came late" if last.read_again_examples else ""
    saved = last.saved_cpu_seconds or 0.0
    worth = f"; reading once for all saved this one {three_digits(saved)} s of processor time" if saved else ""
    return f"the reading was shared {beside} at the end of the last epoch{worth}{waited}{missed}{again}"


def within_bound(uses: float, bound: float) -> str:
    """Returns the bound beside the uses, which may be more: it fell, or an account that was earned before was spent."""
    return f"at most {bound:g}" if uses <= bound else f"max_factor {bound:g} at the end"


def is_of_end(factor: float, uses: float) -> bool:
    """Returns whether a factor at the end of an epoch was another one before, judged by the uses per fresh example."""
    return not factor / _CLOSE <= uses <= factor * _CLOSE


def _epochs_line(reports: Sequence[EpochReport]) -> str:
    first, last = reports[0], reports[-1]
    epochs = f"epoch {first.epoch}" if first.epoch == last.epoch else f"epochs {first.epoch} to {last.epoch}"
    waited, worked = seconds_of(reports)
    total = waited + worked
    idle = f", idle {percent(waited / total)}" if total else ""
    node = f" (node {last.slowest_node})" if last.slowest_node is not None else ""
    slow = f", slowest rank {last.slowest_rank}{node}" if last.slowest_rank is not None else ""
    changes = last.next_factor not in (None, last.factor if last.max_factor is None else last.max_factor)
    known = [(report.steps, report.effective_factor) for report in reports if report.effective_factor]
    fresh = sum(steps / uses for steps, uses in known)  # batches
    mean = sum(steps for steps, _ in known) / fresh if fresh else 0
    uses = f", {number_of(mean, 'use', 'uses')} per fresh example" if mean else ""
    if last.max_factor is not None:
        how = f"on demand{uses} ({within_bound(mean, last.max_factor)})"
    elif mean and is_of_end(last.factor, mean):
        how = f"factor {last.factor:g} at the end{uses}"
    else:
        how = f"factor {last.factor:g}"
    return f"{epochs}: {how}{idle}{slow}" + (f"; {last.message}" if changes else "")
