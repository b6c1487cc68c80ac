"""What a finished training advises: the remedy that is possible and would help, its reasons, and a line to paste."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lightning_echo.insertion import InsertionPoint, Needs, Reads, points_from
from lightning_echo.measure.control import (
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
from lightning_echo.measure.summary import EpochReport, RunVerdict, within_bound
from lightning_echo.measure.target_idle import LARGE_FACTOR, NO_GAIN_HELPS, TARGET

# ---------------------------------------------------------------------- the verdict

_WITHOUT_ECHOING = ("cache", "share")  # options that have an effect at factor 1, too
_STARVED = (Reason.starved, Reason.at_maximum, Reason.downstream_too_slow)
_READS, _MOSTLY = 64, 0.5  # reads in flight that are advised, if workers wait for this share of their time
CACHE_SHARE = 0.5  # share of the free memory, as an option of a cache that is advised
_HELPS = 1.05  # a remedy helps if steps take this many times as long without it


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


# ---------------------------------------------------------------------- the verdict on demand
# On demand a factor is not advised. The verdict says how much of the data was fresh. If the training has waited in spite of
# echoes, it says why. What an echo teaches is not measured, so the verdict claims no speed-up of the training.

_USED_UP = 0.9  # of ``max_factor``: with this many uses per fresh example, the accounts of the workers are empty at times
_MANY_ECHOES = 1.25  # from this many uses per fresh example on, more fresh ones are worth advice


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
    why = (*_why(observation)[:2], f"{uses}, {within_bound(last.factor, observation.factor)}")
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
