"""Which runs there are, and the rules by which they are judged, fixed before the first of them.

Tasks, targets and rates are those of the study of reuse (``learning/reuse``), and so are the report's seeds, of which these are
the first. All settings of echoing but the factor are the package's defaults: insertion point, buffer, rule of reuse, controller.
For each task and seed, behind each source of `RATIOS`, one run after the other, so that what else the machine does reaches all:

1. `NO_ECHO`, to the target.
2. `STEP`: a factor of 4 R, which the source never starves, for `STEP_STEPS` steps. Its mean step after the first batch is d: the
   step as it is beside workers that read as slowly. (The step measured alone, on an idle machine, stands beside it.)
3. `FIXED`: a factor of R, to the target.
4. `TARGET_IDLE`: the factor is found, from 1 on; to the target.
5. `SETTLED`: the factor that run 4 has ended with, for as many steps as that run.

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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from learning.reuse.due import ReuseProgress
from learning.reuse.studies import NO_ECHO as WITHOUT
from learning.reuse.studies import ReuseArm, Study

__all__ = [
    "AT_MOST_SLOWER",
    "CELLS",
    "FIXED",
    "NO_ECHO",
    "OF_ALLOWED",
    "RATIOS",
    "REPLAY_WITHIN",
    "SEEDS",
    "SETTLED",
    "STEP",
    "STEP_STEPS",
    "TARGET_IDLE",
    "Plan",
    "next_plan",
    "rates_of",
]

NO_ECHO, STEP, FIXED = "no echo", "step at 4 R", "factor R"
TARGET_IDLE, SETTLED = "TargetIdle", "factor that TargetIdle settled on"
RATIOS = (4, 8, 16)
SEEDS = (301, 302, 303)
CELLS = tuple((task, ratio) for task in ("language_model", "glyphs") for ratio in RATIOS)
STEP_STEPS = 200
OF_ALLOWED, REPLAY_WITHIN, AT_MOST_SLOWER = 0.95, 0.05, 1.05


@dataclass(frozen=True)
class Plan:
    """A run to do.

    Attributes:
        task: Name of the task.
        ratio: R as wanted.
        arm: One of the five.
        factor: Echo factor, at the start.
        rate: Learning rate.
        seed: Of split, weights, order and augmentation.
        steps: When it ends, also if the target is reached before; 0: at the target.
    """

    task: str
    ratio: int
    arm: str
    factor: float
    rate: float
    seed: int
    steps: int = 0


def next_plan(
    study: Study, rates: Mapping[float, float], ratio: int, seed: int, done: Sequence[tuple[Plan, int, float]]
) -> Plan | None:
    """The next run of a task behind one source with one seed; None if all are done.

    Args:
        study: The task.
        rates: Learning rate of each factor, and that without echoing as the one of factor 1.
        ratio: R.
        seed: Of the report.
        done: What was run already, with the steps and the last factor of each.
    """
    arms = {plan.arm: (steps, factor) for plan, steps, factor in done if (plan.ratio, plan.seed) == (ratio, seed)}
    nearest = rates[min((factor for factor in rates if factor > 1), key=lambda factor: abs(factor - ratio))]
    found = arms.get(TARGET_IDLE)
    options: list[tuple[str, float, float, int]] = [
        (NO_ECHO, 1, rates[1], 0),
        (STEP, 4 * ratio, nearest, STEP_STEPS),
        (FIXED, ratio, nearest, 0),
        (TARGET_IDLE, 1, nearest, 0),
    ]
    if found is not None:
        options.append((SETTLED, found[1], nearest, found[0]))
    for arm, factor, rate, steps in options:
        if arm not in arms:
            return Plan(study.task.name, ratio, arm, factor, rate, seed, steps)
    return None


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
