"""The summary of a finished training: a verdict first, then where the time went; and ``echo_summary.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import groupby
from textwrap import fill
from typing import Any, NamedTuple

from lightning_echo.insertion import InsertionPoint, Needs, Reads, points_from
from lightning_echo.measure.control import (
    ENOUGH_STEPS,
    MOST_OF_READER,
    TAKING_SECONDS,
    Decision,
    Observation,
    Reason,
    busy,
    callback_line,
    cores_elsewhere,
    fewest_elsewhere,
    least_of_most,
    no_workers,
    number_of,
    over_last,
    percent,
    three_digits,
    whole_cores,
)
from lightning_echo.measure.target_idle import LARGE_FACTOR, NO_GAIN_HELPS, TARGET
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
        passes: Passes over the data in the run so far.
        effective_factor: Uses per fresh example in this epoch.
        idle_fraction: Share of the epoch's time in which the job waited for input, 0 to 1.
        slowest_rank: The rank that the others waited for most often; None if there is only one rank.
        slowest_node: The node of that rank; None if there is only one node.
        data_wait_seconds: Seconds of waiting per step.
        step_seconds: Seconds per step without the waiting.
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
    passes: float | None = None
    effective_factor: float | None = None
    idle_fraction: float | None = None
    slowest_rank: int | None = None
    slowest_node: int | None = None
    data_wait_seconds: float | None = None
    step_seconds: float | None = None
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
LOGGED = tuple(field.name for field in fields(EpochReport) if field.name not in _NOT_LOGGED)


# ---------------------------------------------------------------------- echo summary
# ``echo_summary.json``: saved for other programs, and for a later run that replays its decisions.

FILE_NAME = "echo_summary.json"
VERSION = 1


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
    """The contents of ``echo_summary.json``: reports of epochs, factors in order from the first, and versions of packages.

    ``verdict`` is None if too little was measured.

    Example:
        >>> summary = RunSummary([EpochReport(0, 10, 2.0, 40, 40)], [FactorUse(0, 0, 2.0)], {"lightning_echo": "0.1.0"})
        >>> RunSummary.from_json(summary.to_json()) == summary
        True
    """

    reports: Sequence[EpochReport] = ()
    decisions: Sequence[FactorUse] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    verdict: RunVerdict | None = None

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunSummary:
        """Reads the text of a file; raises a ValueError if it is another text, or of a later version."""
        found = json.loads(text)  # a JSONDecodeError is a ValueError
        version = found.get("version") if isinstance(found, dict) else None
        if not isinstance(version, int):
            raise ValueError(f"this is not an {FILE_NAME}: it must be an object with version, reports and decisions")
        if version > VERSION:
            raise ValueError(
                f"the {FILE_NAME} has version {version}, this lightning_echo knows up to {VERSION}: upgrade lightning_echo"
            )
        try:
            reports = rows(found, "reports", partial(record, EpochReport))
            decisions = rows(found, "decisions", partial(record, FactorUse))
            return cls(reports, decisions, entry(found, "packages", dict), entry(found, "verdict", RunVerdict | None))
        except FieldError as error:
            raise ValueError(f"the {FILE_NAME} is damaged: {error}") from None


# ---------------------------------------------------------------------- summary

_COLUMNS = 120
_WITHOUT_ECHOING = ("cache", "share")  # options that have an effect at factor 1, too
_BUSY_EXCHANGE = 0.5  # share of an epoch: a saturated exchange takes this much, because a node also waits for the others
_IDLE = 0.1
_CLOSE = 1.1  # uses within this ratio of the factor are those of the factor
_STARVED = (Reason.starved, Reason.at_maximum, Reason.downstream_too_slow)
_READS, _MOSTLY = 64, 0.5  # reads in flight that are advised, if workers wait for this share of their time
CACHE_SHARE = 0.5  # share of the free memory, as an option of a cache that is advised
_HELPS = 1.05  # a remedy helps if steps take this many times as long without it


# ---------------------------------------------------------------------- the verdict


@dataclass(frozen=True)
class RunVerdict:
    """The verdict on a training."""

    message: str  # the advice, in one sentence
    why: tuple[str, ...] = ()  # the figures that lead to it, in words: at most three
    next_line: str = ""  # to paste; empty if nothing needs a change, or if too little was measured
    others: tuple[str, ...] = ()  # lines of the other remedies in their order, each with what it gains by itself


@dataclass(frozen=True)
class Waiting:
    """How workers wait, and what else is known of the data and of the machine that they read it on.

    Attributes:
        fraction: Share of their time in which they neither compute nor wait for a processor; None if unknown.
        may_read_ahead: Whether the data set may have something that threads can read ahead.
        workers: Number of these workers on a rank; 0 if unknown.
        batch_size: Examples in a batch, if workers on other machines could prepare them; otherwise 0.
        ranks: Number of ranks.
        cached_fraction: Share of the data that a cache would hold; 0 if it can hold nothing, or if there is one. None if the
            weight of an example is not known.
        has_cluster: Whether this program is connected to a Ray cluster.
        program: The file, or the module, that this process runs.
        other_runs: Number of other runs of that program on this machine, with which this one could share the reading.
    """

    fraction: float | None
    may_read_ahead: bool
    workers: int = 0
    batch_size: int = 0
    ranks: int = 1
    cached_fraction: float | None = 0.0
    has_cluster: bool = False
    program: str = ""
    other_runs: int = 0

    @property
    def mostly(self) -> bool:
        """Whether the workers wait rather than compute."""
        return self.fraction is not None and self.fraction >= _MOSTLY


def advise(
    observation: Observation,
    recommended: Decision,
    cores: int = 1,
    chosen: Mapping[str, Any] | None = None,
    waiting: Waiting | None = None,
) -> RunVerdict:
    """Returns the verdict on a training, of which the last epoch, joined with those before it if it is short, was observed.

    If the device waits, the first remedy that is possible and would help is advised (``waiting`` has what is known for it), and
    the others follow. The advice never asks for more workers than ``cores``. Lines to paste repeat the user's ``chosen`` options.
    If the workers compute, and ``cores`` cannot feed the device, a sentence says how many cores on other machines would.

    Example:
        >>> seen = Observation(epoch=0, factor=1.0, steps=50, idle_fraction=0.5, step_seconds=0.02)
        >>> verdict = advise(seen, Decision(2.0, Reason.starved, ""))
        >>> verdict.why
        ('idle 50% (last 50 steps)', 'each step: 10 ms compute, 10 ms waiting for data', 'the echo factor was 1')
        >>> verdict.next_line
        'EchoCallback(factor=2)'
    """
    chosen, waiting = chosen or {}, waiting or Waiting(None, may_read_ahead=False)
    workers, idle, seconds = _workers_wanted(observation, recommended, cores), observation.idle_fraction, observation.step_seconds
    echoing = _Remedy(
        "echoing",
        _message(observation, recommended, workers, waiting),
        _next_line(observation, recommended, workers, chosen),
        _gain_of_echoing(observation, recommended),
    )
    if workers or recommended.reason not in _STARVED or idle is None or seconds is None:
        return RunVerdict(echoing.message, _why(observation), echoing.line)
    # While the training waits, a step lasts as long as the host needs for a batch.
    before = _before_echoing(observation, seconds, cores, chosen, waiting)
    first, *others = *before, echoing
    has_workers = any(each.line.startswith("num_workers") for each in before)
    elsewhere = "" if has_workers or waiting.has_cluster else _elsewhere(observation, waiting, cores, chosen)
    found = tuple(f"{each.line}{each.gain}" for each in others if each.line)
    return RunVerdict(f"{first.message}{elsewhere}", _why(observation), first.line, found)


# ---------------------------------------------------------------------- remedies
# Their order: more workers, reads in flight, a cache, sharing, workers of a cluster, echoing. Fresh examples teach more than
# echoed ones, and what costs nothing comes first. Each is advised only where it is possible and would help, as far as a run can
# tell without reading. `StallAnalyzer` measures what each brings. Each gain is that of the remedy by itself.


class _Remedy(NamedTuple):
    name: str
    message: str  # the advice, in one sentence
    line: str  # to paste
    gain: str  # in words; empty if it is not known


def _times_as_fast(times: float, how: str = "about") -> str:
    gain = f"{times:.1f}".removesuffix(".0")
    return f", {how} {gain} times as fast" if gain != "1" else ""


def _before_echoing(
    observation: Observation, host_seconds: float, cores: int, chosen: Mapping[str, Any], waiting: Waiting
) -> list[_Remedy]:
    """Returns the remedies that come before echoing. ``host_seconds`` are those of the host for a batch."""
    work, found = _work_seconds(observation), list[_Remedy]()
    why = busy(observation.idle_fraction or 0.0, only=True, last=observation.steps)

    def add(name: str, request: str, reason: str, line: str, host: float, *, how: str = "about", when: str = "") -> None:
        times = host_seconds / max(host, work) if work else math.inf
        if times >= _HELPS:
            gain = f"{_times_as_fast(times, how) if work else ''}{when}"
            found.append(_Remedy(name, f"{request}{gain}: {why}{reason}.", line, gain))

    if now := waiting.workers:  # more than there are cores are no gain
        wanted = min(math.ceil(now * host_seconds / work), cores) if work else cores
        free = f", and there are {cores} cores for {number_of(now, 'worker', 'workers')}"
        add("more workers", f"Set num_workers to {wanted}", free, f"num_workers={wanted}", host_seconds * now / wanted)
    if waiting.mostly and waiting.may_read_ahead and "reads_in_flight" not in chosen and waiting.fraction is not None:
        line = callback_line({**chosen, "factor": chosen.get("factor", 1.0), "reads_in_flight": _READS})
        waits = f", and the workers wait {percent(waiting.fraction)} of theirs, rather than compute"
        request = f"Set reads_in_flight to {_READS}, if threads may read the data set"
        name, left = "reads_in_flight, if threads may read the data set,", host_seconds * (1 - waiting.fraction)
        add(name, request, waits, line, left, how="up to")
    held = waiting.cached_fraction
    if held != 0 and not {"cache", "share"} & set(chosen):
        known = "" if held is None else f"half of the free memory holds {percent(held)} of the data"
        why_cache = f", and {known or 'what it holds is not read again'}{_about_waits(waiting)}"
        saved = (1.0 if held is None else held) * _cacheable_share(observation)
        line, when = callback_line({**chosen, "cache": CACHE_SHARE}), " from the second pass on"
        add("a cache", "Keep examples in a cache", why_cache, line, host_seconds * (1 - saved), how="up to", when=when)
    if (others := waiting.other_runs) and _may_have_reader(chosen):
        alone = others == 1
        who = f"the {'other run' if alone else f'{others} other runs'} of {waiting.program} here {'trains' if alone else 'train'}"
        alike = f"if {who} on the same data"
        collated = _collated_share(observation)  # each training collates by itself, and the reader has the workers of all
        left = host_seconds * (collated + (1 - collated) / (others + 1))
        line, each = callback_line({**chosen, "share": "train"}), ", and each of them reads and prepares by itself"
        add(f"sharing, {alike},", "Share the reading", each, line, left, how="up to", when=f" {alike}")
    if waiting.has_cluster and (elsewhere := _cores_elsewhere(observation, waiting, cores, chosen)) is not None:
        share = {"name": "train", "cluster": "ray", "cluster_workers": elsewhere.workers * waiting.ranks}
        words = f", and the {number_of(cores, 'core', 'cores')} here are the limit"
        line = callback_line({**chosen, "share": share})
        taken = f"Take {number_of(elsewhere.workers * waiting.ranks, 'worker', 'workers')} of the cluster"
        add("workers of the cluster", taken, words, line, work)
    return found


def _work_seconds(observation: Observation) -> float:
    return (observation.step_seconds or 0.0) * (1 - (observation.idle_fraction or 0.0))


def _may_have_reader(chosen: Mapping[str, Any]) -> bool:
    """Whether a run with these options could have a reader: it has none, and nothing that a reader cannot serve."""
    point, cache = InsertionPoint(chosen.get("insertion_point", InsertionPoint.auto)), chosen.get("cache")
    is_late = point is InsertionPoint.auto or point in points_from(Needs.examples)
    return "share" not in chosen and is_late and not (isinstance(cache, Mapping) and cache.get("partitioned"))


def _collated_share(observation: Observation) -> float:
    """Returns the share of collation in the host's time for a batch of fresh examples; 0 if it is not known."""
    costs = observation.costs
    whole = 0.0 if costs is None else costs.reused_seconds + costs.redone_seconds
    return costs.collate_seconds / whole if costs is not None and whole else 0.0


def _cacheable_share(observation: Observation) -> float:
    """Returns the share of the host's time that a cache of everything would save; 1 if nobody has measured it by itself."""
    costs = observation.costs
    if costs is None or "augment" not in InsertionPoint(costs.insertion_point).properties.redone:
        return 1.0
    saved = costs.source_seconds / observation.factor
    whole = saved + costs.rest_seconds + costs.collate_seconds
    return saved / whole if whole else 0.0


def _why(observation: Observation) -> tuple[str, ...]:
    idle, seconds, costs = observation.idle_fraction, observation.step_seconds, observation.costs
    if idle is None or seconds is None:
        return ()
    waits, works = (three_digits(1e3 * seconds * share) for share in (idle, 1 - idle))
    loading = f"loading a batch of fresh examples takes {three_digits(1e3 * costs.host_seconds(1))} ms" if costs else ""
    return (
        f"idle {percent(idle)}{over_last(observation.steps)}",
        f"each step: {works} ms compute, {waits} ms waiting for data",
        loading or f"the echo factor was {observation.factor:g}",
    )


def _next_line(observation: Observation, recommended: Decision, workers: int, chosen: Mapping[str, Any]) -> str:
    if observation.idle_fraction is None or recommended.reason is Reason.not_measured:
        return ""
    if workers:
        return f"num_workers={workers}"
    if recommended.factor == observation.factor:
        return ""
    if recommended.factor == 1:
        return callback_line({name: value for name, value in chosen.items() if name in _WITHOUT_ECHOING})
    return callback_line({"factor": recommended.factor, **{name: value for name, value in chosen.items() if name != "factor"}})


def _workers_wanted(observation: Observation, recommended: Decision, cores: int) -> int:
    """Returns how many workers deliver a batch per step, if each is as fast as the training's process; 0: none are missing."""
    reason, costs = recommended.reason, observation.costs
    is_starved = reason in (Reason.starved, Reason.at_maximum)
    if reason is not Reason.no_workers and not (is_starved and costs is not None and not costs.workers):
        return 0
    if costs is None or not costs.device_seconds:
        return 1
    return max(1, min(math.ceil(costs.host_seconds(1) / costs.device_seconds), cores))


class _Elsewhere(NamedTuple):
    """Cores that a rank's fresh examples take, and the workers on other machines that make up for those that are missing."""

    needed: int
    workers: int


def _cores_elsewhere(observation: Observation, waiting: Waiting, cores: int, chosen: Mapping[str, Any]) -> _Elsewhere | None:
    """Returns the cores of other machines that are missing; None if those here are enough, or may be, or if others are no cure.

    The workers' time gives their processor time: they wait for a share of it, and if they are more than the cores, they take
    turns. The training's own processor time is not known here.
    """
    costs = observation.costs
    if not waiting.batch_size or costs is None or not costs.device_seconds or waiting.fraction is None:
        return None
    if not _may_have_reader(chosen):
        return None
    seconds = costs.host_seconds(1) * min(waiting.workers, cores)  # of a worker with a core of its own, per batch
    busy_seconds, longest_step = seconds * (1 - waiting.fraction), costs.device_seconds / (1 - TARGET)
    if waiting.mostly or busy_seconds <= cores * longest_step:
        return None
    collated, taking = _collated_share(observation), waiting.batch_size * TAKING_SECONDS  # collation stays here

    def feeds(workers: int) -> bool:
        here = (taking + collated * busy_seconds) / cores, busy_seconds / cores
        return least_of_most([here, (taking * waiting.ranks, 0.0), ((1 - collated) * seconds / workers, 0.0)]) <= longest_step

    fewest, needed = fewest_elsewhere(feeds), whole_cores(busy_seconds / costs.device_seconds)
    if fewest is None or (workers := max(fewest, needed - cores)) * waiting.ranks > MOST_OF_READER:
        return None
    return _Elsewhere(needed, workers)


def _elsewhere(observation: Observation, waiting: Waiting, cores: int, chosen: Mapping[str, Any]) -> str:
    """Returns the sentence on cores of other machines; empty if none are missing."""
    found = _cores_elsewhere(observation, waiting, cores, chosen)
    return "" if found is None else f" {cores_elsewhere(found.needed, cores, found.workers, waiting.ranks)}"


def _message(observation: Observation, recommended: Decision, workers: int, waiting: Waiting) -> str:
    """Returns the advice in one sentence, with the number of steps: it stands next to figures of other steps."""
    idle, factor, steps, reason = observation.idle_fraction, observation.factor, observation.steps, recommended.reason
    if idle is None:
        return "Too few steps were measured for advice."
    if reason is Reason.not_measured:
        return f"No advice: {recommended.message}{over_last(steps)}."
    if workers:
        return no_workers(workers, idle, last=steps)
    if reason is Reason.downstream_too_slow:
        not_enough = f"At this insertion point no factor is enough; {recommended.message}{over_last(steps)}."
        if recommended.factor <= factor:
            return not_enough
        larger = f"{'Echo with factor' if factor == 1 else 'Raise the factor to'} {recommended.factor:g}"
        return f"{larger}{_gain_of_echoing(observation, recommended)}: {not_enough[0].lower()}{not_enough[1:]}"
    finding = f"{busy(idle, last=steps)}{_what_else_helps(recommended)}"
    if idle > TARGET and observation.costs is not None and observation.costs.keeps_up:
        finding += "; it does not wait for loading, since the workers had nothing to do for a part of the time"
    if recommended.factor < factor:
        return _advise_lower(recommended, finding)
    if recommended.factor > factor:
        return _advise_larger(observation, recommended, finding, waiting)
    return (
        f"Do not echo: {finding}." if factor == 1 and reason is not Reason.at_maximum else f"Keep factor {factor:g}: {finding}."
    )


def _advise_lower(recommended: Decision, finding: str) -> str:
    lower = "Do not echo" if recommended.factor == 1 else f"Lower the factor to {recommended.factor:g}"
    if recommended.reason is Reason.no_gain:
        return f"{lower}: {finding}."
    if recommended.reason is Reason.at_maximum:
        why = "a larger one is seldom worth it" if recommended.factor >= LARGE_FACTOR else "max_factor allows no larger one"
        return f"Lower the factor to {recommended.factor:g}: {why}."
    if recommended.factor == 1:
        return f"{lower}: fresh examples alone feed the accelerator, and are worth more than echoed ones."
    return f"{lower}: that is enough to feed the accelerator, and fresh examples are worth more than echoed ones."


def _advise_larger(observation: Observation, recommended: Decision, finding: str, waiting: Waiting) -> str:
    larger = f"{'Echo with factor' if observation.factor == 1 else 'Raise the factor to'} {recommended.factor:g}"
    if recommended.reason is Reason.at_minimum:
        return f"{larger}, since min_factor allows no smaller one: {finding}."
    only = busy(observation.idle_fraction or 0.0, only=True, last=observation.steps)
    gain, waits = _gain_of_echoing(observation, recommended), _about_waits(waiting)
    redone = _NOT_KNOWN_APART if gain and observation.costs is not None and observation.costs.from_waiting else ""
    return f"{larger}{gain}: {only}{waits}{_what_else_helps(recommended)}{redone}."


def _about_waits(waiting: Waiting) -> str:
    """Returns what to do if the workers mostly wait, but nothing of the data set may be read by threads yet."""
    if not waiting.mostly or waiting.may_read_ahead or waiting.fraction is None:
        return ""
    return f"; the workers wait {percent(waiting.fraction)} of their time: the doctor says what reads_in_flight needs here"


_NOT_KNOWN_APART = "; what is augmented and collated again for echoes is not known of a plain loader, and makes the gain smaller"


def _gain_of_echoing(observation: Observation, recommended: Decision) -> str:
    costs, seconds, factor = observation.costs, observation.step_seconds, observation.factor
    if costs is None or seconds is None or recommended.factor <= factor or recommended.reason is Reason.at_minimum:
        return ""
    host = costs.host_seconds(factor)
    if costs.workers and 0 < host < seconds:
        costs = costs.slower(seconds / host)  # while the device waits, the host takes as long as a step lasts
    how = "up to" if costs.from_waiting else "about"
    return _times_as_fast(costs.step_seconds(factor) / costs.step_seconds(recommended.factor), how)


def _what_else_helps(recommended: Decision) -> str:
    """Returns the remedies besides a larger factor; empty if the recommended factor is enough."""
    if recommended.reason is Reason.at_maximum:
        larger = "; a larger factor rarely does" if recommended.factor >= LARGE_FACTOR else ", or a larger max_factor"
        return f"; a faster data source would help more{larger}"
    if recommended.reason is Reason.no_gain:
        return f", and a larger factor brings too little; {NO_GAIN_HELPS}"
    return ""


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
_JITTER = 1.15  # ``make bench ARGS="--only claims"``: 18 of 20 claims had the truth, while other programs ran


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


def _speedup_line(low: float, high: float) -> str:
    return f"{low:.1f} to {high:.1f} times as fast as with fresh examples alone (estimated from what the workers took for them)"


# ---------------------------------------------------------------------- the verdict on demand
# On demand a factor is not advised. The verdict says how much of the data was fresh. If the training has waited in spite of
# echoes, it says why. What an echo teaches is not measured, so the verdict claims no speed-up of the training.

_USED_UP = 0.9  # of ``max_factor``: with this many uses per fresh example, the accounts of the workers are empty at times
_MANY_ECHOES = 1.25  # from this many uses per fresh example on, more fresh ones are worth advice


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


def advise_on_demand(
    reports: Sequence[EpochReport],
    observation: Observation,
    cores: int = 1,
    chosen: Mapping[str, Any] | None = None,
    waiting: Waiting | None = None,
    *,
    can_arrive: bool = True,
    repeats: bool = False,
    decided_by: str = "",
    reads: Reads = "examples",
) -> RunVerdict:
    """Returns the verdict on a training that echoed on demand. The last of its ``reports`` is of the epoch that was observed.

    ``can_arrive``: whether examples arrive while a step runs. ``repeats``: whether it is a replay. ``decided_by``: the controller
    that has set the bound; empty if the user has. ``reads``: what is read at a time. The other arguments are as in `advise`.

    Example:
        >>> report = EpochReport(0, 400, 4.0, 1600, 4800, max_factor=8.0)
        >>> seen = Observation(epoch=0, factor=8.0, steps=400, idle_fraction=0.01, step_seconds=0.02)
        >>> verdict = advise_on_demand([report], seen)
        >>> verdict.message.partition(":")[0], verdict.why[-1]
        ('400 steps while the source delivered 100 fresh batches', '4 uses per fresh example, at most 8')
    """
    idle, seconds, last = observation.idle_fraction, observation.step_seconds, reports[-1]
    if idle is None or seconds is None:
        return RunVerdict(f"{_delivered(reports)}; too few steps were measured for advice.")
    uses = number_of(last.factor, "use per fresh example", "uses per fresh example")
    why = (*_why(observation)[:2], f"{uses}, {_bound(last.factor, observation.factor)}")
    if repeats:
        return RunVerdict(
            f"{_delivered(reports)}, as in the run that was repeated. A replay echoes what its journal says, however fast the "
            "source is: advice follows from that run's summary.",
            why,
        )
    finding = busy(idle, last=observation.steps)
    if idle > TARGET and not can_arrive:
        workers = _workers_wanted(observation, Decision(1.0, Reason.no_workers, ""), cores)
        return RunVerdict(no_workers(workers, idle, last=observation.steps), why, f"num_workers={workers}")
    if idle > TARGET:
        reason = _why_waited(last, observation, decided_by, reads)
        return RunVerdict(f"{_delivered(reports)}, and yet the training waited: {finding}; {reason}.", why)
    if not last.echoed_examples:
        return RunVerdict(f"The source kept up: nothing was echoed, and factor='demand' costs nothing then; {finding}.", why)
    if last.factor < _MANY_ECHOES:
        return RunVerdict(f"{_delivered(reports)}: {finding}.", why)
    chosen, waiting, costs = chosen or {}, waiting or Waiting(None, may_read_ahead=False), observation.costs
    # The host's time for a batch of fresh examples; if nobody has measured it, the time in which they arrive.
    fresh = costs.host_seconds(1) if costs is not None else seconds * last.factor
    helping = _before_echoing(replace(observation, factor=1.0), fresh, cores, chosen, waiting)
    elsewhere = "" if helping else _elsewhere(observation, waiting, cores, chosen)
    waits = f", and the workers wait {percent(waiting.fraction)} of their time" if waiting.fraction and waiting.mostly else ""
    helps = f"; {helping[0].name} would make more of them fresh" if helping else ""
    lines = [each.line for each in helping]
    return RunVerdict(f"{_delivered(reports)}: {finding}{waits}{helps}.{elsewhere}", why, "".join(lines[:1]), tuple(lines[1:]))


def _delivered(reports: Sequence[EpochReport]) -> str:
    last, steps = reports[-1], sum(report.steps for report in reports)
    delivered = last.fresh_examples + last.echoed_examples
    if not steps or not delivered:
        return f"{last.echoed_examples:,} echoed examples while the source delivered {last.fresh_examples:,} fresh ones"
    fresh = number_of(round(steps * last.fresh_examples / delivered), "fresh batch", "fresh batches")
    return f"{number_of(steps, 'step', 'steps')} while the source delivered {fresh}"


def _bound(uses: float, bound: float) -> str:
    """Returns the bound beside the uses, which may be more: it fell, or an account that was earned before was spent."""
    return f"at most {bound:g}" if uses <= bound else f"max_factor {bound:g} at the end"


def _why_waited(last: EpochReport, observation: Observation, decided_by: str, reads: Reads) -> str:
    """Returns why a training on demand has waited in its last steps, and what helps."""
    bound, costs, uses = observation.factor, observation.costs, last.effective_factor
    by, larger = (f", which {decided_by} has set,", "") if decided_by else ("", ", or a larger max_factor")
    if bound == 1:
        return f"with max_factor=1{by} nothing is echoed, so a faster source (more workers, a cache) helps{larger}"
    if uses is None or uses >= _USED_UP * bound:
        return (
            f"the fresh examples were used as often as max_factor={bound:g}{by} allows, so a faster source (more workers, a "
            f"cache) helps{larger}"
        )
    if costs is not None and costs.workers and costs.redone_seconds / costs.workers * (1 - TARGET) > costs.device_seconds:
        work, step = (three_digits(1e3 * each) for each in (costs.redone_seconds / costs.workers, costs.device_seconds))
        later = [each for each in costs.at_later_points() if not InsertionPoint(each.insertion_point).by_batches]
        instead = f"echo at {InsertionPoint(later[0].insertion_point).option}, or " if later and costs.rest_seconds else ""
        return f"what is redone for each use takes {work} ms per batch, and a step {step} ms, so {instead}use more workers"
    too_long = "the source stalled for longer than memory bridges (a larger buffer_size helps)"
    return f"either {_HELD_UP[reads]}, or {too_long}"


_HELD_UP: dict[Reads, str] = {
    "examples": "a single read held up its worker (more workers or reads_in_flight help)",
    "calls": "a call of __getitems__ held up its worker for longer than the batches that it had made before (more workers or a "
    "larger prefetch_factor help)",
    "stream": "the stream held up a worker (more workers help)",
    "batches": "copies of whole batches take long beside such steps",
}


# ---------------------------------------------------------------------- the summary


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
        how = f"on demand{uses} ({_bound(mean, last.max_factor)})"
    elif mean and is_of_end(last.factor, mean):
        how = f"factor {last.factor:g} at the end{uses}"
    else:
        how = f"factor {last.factor:g}"
    return f"{epochs}: {how}{idle}{slow}" + (f"; {last.message}" if changes else "")
