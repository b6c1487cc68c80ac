"""Which runs there are, and the rules by which they are judged, fixed before the first of them.

Tasks, targets and rates are those of the study of reuse (``learning/reuse``), and so are the report's seeds, of which these are
the first. All settings of echoing but the factor are the package's defaults: insertion point, buffer, rule of reuse, controller.
For each task and seed, behind a steady source of each of `RATIOS`, one run after the other, so that what else the machine does
reaches all:

1. `NO_ECHO`, to the target.
2. `STEP`: a factor of 4 R, which the source never starves, for `STEP_STEPS` steps. Its mean step after the first batch is d: the
   step as it is beside workers that read as slowly. (The step measured alone, on an idle machine, stands beside it.)
3. `FIXED`: a factor of R, to the target.
4. `TARGET_IDLE`: the factor is found, from 1 on; to the target.
5. `SETTLED`: the factor that run 4 has ended with, for as many steps as that run.
6. `DEMAND`: on demand, with the default `max_factor`; to the target.
7. `DEMAND_16`: the same with ``max_factor=16``, at R = 16 alone, where the default cannot feed the step.
8. `EQUAL`: a factor of R, for as many steps as the run on demand that is judged (`judged_arm`).

Behind the other two sources, which are R = 8 times as slow as the step on average, all arms but one have `READS_IN_FLIGHT` reads
in flight: the constant factors of `CONSTANTS`, `DEMAND_16` and `DEMAND`. `TORCH` is factor 8 with one read at a time in each
worker. `BURSTS` are `BURST_STEPS` steps at twice the speed, then as many with nothing; `HEAVY_TAIL` is lognormal. The storage has
as many lanes as there are workers, so however many reads are in flight, it is no faster (``source.py``).

Rules. A figure is the median over the seeds, and judged by that:

1. *Of what learning allows.* The steps of `FIXED`, each of which takes the longer one of d and its share of reading, h / R, are
   at least `OF_ALLOWED` of its time. What is missing is split into the first batch, the filling of the buffer (what
   `replayed_time` says of the run's fresh examples, beyond steps and first batch), other idle time, and what is
   left: longer steps than d.
2. *The replay.* In each cell of `CELLS` the time of `FIXED` divided by that of `NO_ECHO` is within `REPLAY_WITHIN` of what
   the replay of both runs' fresh examples says, with h and d as measured.
3. *The controller.* `TARGET_IDLE` takes at most `AT_MOST_SLOWER` times as long as `SETTLED`. Its time to the target is shown with
   its interval, and has no goal: it is the luck of seeds.
4. *The headline.* At R = 8 `TARGET_IDLE` reaches the target of each task at least four times as soon as `NO_ECHO` (rule 8 of
   ``learning/reuse/rules.py``).

Those of echo on demand and of the `TargetIdle` that looks sooner, fixed before their first run, are in ``rules.py``. The rows of
the `TargetIdle` before are in ``results/wallclock_before_demand``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from learning.reuse.due import ReuseProgress
from learning.reuse.rules import FULL_SEEDS, HEADLINE_RATIO
from learning.reuse.studies import NO_ECHO as WITHOUT
from learning.reuse.studies import ReuseArm, Study

from lightning_echo.config import MAX_FACTOR

__all__ = [
    "AT_MOST_SLOWER",
    "BURSTS",
    "BURST_STEPS",
    "CELLS",
    "CONSTANTS",
    "DEMAND",
    "DEMAND_16",
    "EQUAL",
    "FIXED",
    "HEAVY_TAIL",
    "NO_ECHO",
    "OF_ALLOWED",
    "RATIOS",
    "READS_IN_FLIGHT",
    "REPLAY_WITHIN",
    "SEEDS",
    "SETTLED",
    "SOURCES",
    "SOURCE_ARMS",
    "SOURCE_RATIO",
    "STEADY",
    "STEP",
    "STEP_STEPS",
    "TARGET_IDLE",
    "TASKS",
    "TORCH",
    "Plan",
    "judged_arm",
    "next_plan",
    "rates_of",
    "seeds_of",
]

NO_ECHO, STEP, FIXED = "no echo", "step at 4 R", "factor R"
TARGET_IDLE, SETTLED = "TargetIdle", "factor that TargetIdle settled on"
DEMAND, DEMAND_16, EQUAL = "on demand", "on demand, max_factor 16", "factor R, as many steps as on demand"
CONSTANTS = {f"factor {factor}": factor for factor in (2, 4, 8, 16)}
TORCH = "factor 8, torch's prefetching"
STEADY, BURSTS, HEAVY_TAIL = SOURCES = ("steady", "bursts", "heavy tail")
SOURCE_ARMS = {**CONSTANTS, TORCH: 8, DEMAND_16: 16, DEMAND: int(MAX_FACTOR)}
SOURCE_RATIO, READS_IN_FLIGHT, BURST_STEPS = 8, 16, 80
TASKS = ("language_model", "glyphs")
RATIOS = (4, 8, 16)
SEEDS = FULL_SEEDS.report  # of R = 8, where the headline is
FEWER_SEEDS = SEEDS[:3]
CELLS = tuple((task, ratio) for task in TASKS for ratio in RATIOS)
STEP_STEPS = 200
OF_ALLOWED, REPLAY_WITHIN, AT_MOST_SLOWER = 0.95, 0.05, 1.05


@dataclass(frozen=True)
class Plan:
    """A run to do.

    Attributes:
        task: Name of the task.
        ratio: R as wanted.
        arm: One of those above.
        factor: Echo factor, at the start; on demand ``max_factor``.
        rate: Learning rate.
        seed: Of split, weights, order and augmentation.
        steps: When it ends, also if the target is reached before; 0: at the target.
        source: One of `SOURCES`.
    """

    task: str
    ratio: int
    arm: str
    factor: float
    rate: float
    seed: int
    steps: int = 0
    source: str = STEADY

    @property
    def options(self) -> dict[str, Any]:
        """Those of echoing that are not the package's defaults."""
        is_on_demand = self.arm in (DEMAND, DEMAND_16)
        options: dict[str, Any] = {"factor": "demand", "max_factor": self.factor} if is_on_demand else {"factor": self.factor}
        if self.source != STEADY:
            options["reads_in_flight"] = 1 if self.arm == TORCH else READS_IN_FLIGHT
        return options


def seeds_of(source: str, ratio: int) -> tuple[int, ...]:
    """The seeds of a cell: all where the headline is, and behind the sources that are not steady."""
    return SEEDS if source != STEADY or ratio == HEADLINE_RATIO else FEWER_SEEDS


def judged_arm(ratio: int) -> str:
    """The run on demand that is judged behind a steady source: the default, unless it cannot feed the step."""
    return DEMAND if ratio <= MAX_FACTOR else DEMAND_16


def next_plan(
    study: Study,
    rates: Mapping[float, float],
    ratio: int,
    seed: int,
    done: Sequence[tuple[Plan, int, float]],
    source: str = STEADY,
) -> Plan | None:
    """The next run of a task behind one source with one seed; None if all are done.

    Args:
        study: The task.
        rates: Learning rate of each factor, and that without echoing as the one of factor 1.
        ratio: R.
        seed: Of the report.
        done: What was run already, with the steps and the last factor of each.
        source: One of `SOURCES`.
    """
    case = (ratio, seed, source)
    arms = {plan.arm: (steps, factor) for plan, steps, factor in done if (plan.ratio, plan.seed, plan.source) == case}
    options = _steady(rates, ratio, arms) if source == STEADY else _unsteady(rates, ratio)
    for arm, factor, rate, steps in options:
        if arm not in arms:
            return Plan(study.task.name, ratio, arm, factor, rate, seed, steps, source)
    return None


_Option: TypeAlias = tuple[str, float, float, int]
"""Arm, factor, rate and steps."""


def _steady(rates: Mapping[float, float], ratio: int, arms: Mapping[str, tuple[int, float]]) -> list[_Option]:
    nearest, found, judged = _nearest(rates, ratio), arms.get(TARGET_IDLE), arms.get(judged_arm(ratio))
    options: list[_Option] = [
        (NO_ECHO, 1, rates[1], 0),
        (STEP, 4 * ratio, nearest, STEP_STEPS),
        (FIXED, ratio, nearest, 0),
        (TARGET_IDLE, 1, nearest, 0),
    ]
    if found is not None:
        options.append((SETTLED, found[1], nearest, found[0]))
    options.append((DEMAND, MAX_FACTOR, nearest, 0))
    if judged_arm(ratio) == DEMAND_16:
        options.append((DEMAND_16, 16, nearest, 0))
    if judged is not None:
        options.append((EQUAL, ratio, nearest, judged[0]))
    return options


def _unsteady(rates: Mapping[float, float], ratio: int) -> list[_Option]:
    """A constant factor has the rate that was tuned for it; what runs on demand has that of R."""
    of_arm = {arm: ratio if arm in (DEMAND, DEMAND_16) else factor for arm, factor in SOURCE_ARMS.items()}
    return [(arm, factor, _nearest(rates, of_arm[arm]), 0) for arm, factor in SOURCE_ARMS.items()]


def _nearest(rates: Mapping[float, float], wanted: float) -> float:
    """The rate of the tuned factor that is nearest."""
    return rates[min((factor for factor in rates if factor > 1), key=lambda factor: abs(factor - wanted))]


def rates_of(study: Study, progress: ReuseProgress, reuse: str) -> dict[float, float]:
    """The rates that the study has tuned, by factor: those of the default rule of reuse with the most memory; 1: without echoing.

    Raises:
        LookupError: The study has not got that far.
    """
    found = {1.0: progress.rate(WITHOUT)}
    for factor in study.factors:
        arms = [arm for arm in study.arms() if (arm.reuse, arm.factor) == (reuse, factor)]
        largest = max(arms, key=_memory)
        found[float(factor)] = progress.rate(largest)
    known = {factor: rate for factor, rate in found.items() if rate is not None}
    if missing := sorted(found.keys() - known.keys()):
        raise LookupError(
            f"the study of reuse has tuned no rate for {study.task.name} at a factor of {missing}: run "
            'make evidence ARGS="--study reuse" first'
        )
    return known


def _memory(arm: ReuseArm) -> float:
    return float("inf") if arm.batches is None else arm.batches
