"""The rules of this study, fixed before its first run: constants and pure functions.

1. *Reached.* A run is evaluated at equal spacing of optimizer steps, and has reached the target at the end of the first
   window of `Task.window_evaluations` evaluations whose mean is there. (By steps, not by fresh examples as in
   ``learning/rules.py``: what is asked is the time. An arm that takes longer has more chances, so this can only flatter
   the slower one.)
2. *Missed.* A run ends at the target or at `Study.most_steps`, three times what training without echoing takes. A miss
   counts as infinite, never dropped.
3. *Rates.* One grid for all arms of a task, tried on three tuning seeds with splits of their own. The best rate reaches
   the target on the most seeds, then in the fewest steps. The rate that training without echoing has chosen is taken
   where it is as good: as many seeds, and in the mean not more than one evaluation later. Else a best rate at the edge
   extends the grid.
4. *Seeds.* Eight report seeds that nothing used before; paired: the same split and the same initial weights in every
   arm. Figures are medians with bootstrap 95% intervals.
5. *Time* at any R is replayed from the fresh examples of each batch (``clock.py``).
6. *The default rule of reuse.* Cells: each deciding task at R = 4, 8, 16 with e = R, `DECIDING_BATCHES` of memory each.
   A cell is the paired ratio of the times to the target, confirmed below 0.95 and contradicted above 1, by its whole
   interval. ``memory`` becomes the default in the place of ``each`` if no cell contradicts it and each task confirms it
   in one cell at least. The falling share becomes the default if it does the same against that winner. It stays, as an
   option, if at one R all tasks confirm it against that winner; else it goes. Cells at other memory, and digits, are
   shown and decide nothing.
7. *max_factor* becomes the largest factor at which each deciding task needs at most 1.25 times the steps without
   echoing, by the upper end of the interval, under the default rule with the most memory that was run for it; never
   less than 4, which it is today.
8. *Headline.* Default settings, R = 8, the factor found by the controller, each deciding task: the time to the target
   is at least 4 times shorter than without echoing, by the median of the paired ratio, or it is said to be missed. Real
   runs decide it, by the clock (``benchmarks/wallclock``); the replay says beforehand what to expect.

One rule was added when the cells of rule 6 were there, and before any run with its seeds:

9. *Asked again.* By rule 6, ``each`` stays: five of six cells speak for ``memory``, but with e = 16 the
   language model misses its target on all eight seeds with ``memory`` and on six with ``each``, and a pair that both miss counts
   against the arm. No training has that factor by default: rule 7 forbids it, for either rule of reuse. So the question of rule 6
   is asked again about what a training does by default: at R = 4, 8, 16 with e the smaller one of R and `AGAIN_MOST_FACTOR`, the
   same memory and the rates tuned before, on eight seeds that nothing has used. All else is as in rule 6. Both answers are shown;
   this one decides about ``memory`` and ``each``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from learning.rules import Interval, Seeds, verdict

__all__ = [
    "AGAIN_MOST_FACTOR",
    "AGAIN_SEEDS",
    "DECIDING_BATCHES",
    "DECIDING_RATIOS",
    "FULL_SEEDS",
    "HEADLINE_RATIO",
    "HEADLINE_SPEEDUP",
    "MOST_STEPS_RATIO",
    "QUICK_SEEDS",
    "Cell",
    "default_reuse",
    "falling_stays",
    "is_headline",
    "is_tie",
    "largest_factor",
    "wins",
]

FULL_SEEDS = Seeds((201, 202, 203), (301, 302, 303, 304, 305, 306, 307, 308))
AGAIN_SEEDS = Seeds(FULL_SEEDS.tuning, (401, 402, 403, 404, 405, 406, 407, 408))
AGAIN_MOST_FACTOR = 8
QUICK_SEEDS = Seeds((201,), (301, 302))
DECIDING_RATIOS = (4, 8, 16)
DECIDING_BATCHES = 64
MOST_STEPS_RATIO = 1.25
MAX_FACTOR_BEFORE = 4
HEADLINE_RATIO, HEADLINE_SPEEDUP = 8, 4.0


class Cell(NamedTuple):
    """The time of one arm divided by another one's, paired by seed.

    Attributes:
        task: Its name.
        ratio: R; the factor is the same number.
        interval: Median and its interval.
    """

    task: str
    ratio: int
    interval: Interval


def is_tie(steps: Sequence[float], best: Sequence[float], spacing_steps: int) -> bool:
    """Whether a rate is as good as the best one: as many seeds, one evaluation later in the mean at most (rule 3).

    Args:
        steps: Steps to the target on the tuning seeds, infinite where it was missed.
        best: Those of the best rate.
        spacing_steps: Steps from evaluation to evaluation.

    Example:
        >>> is_tie([600, 620, 640], [600, 600, 600], spacing_steps=20), is_tie([600, 640, 640], [600, 600, 600], spacing_steps=20)
        (True, False)
    """
    ours, theirs = ([one for one in runs if math.isfinite(one)] for runs in (steps, best))
    return len(ours) == len(theirs) and sum(ours) - sum(theirs) <= spacing_steps * len(ours)


def wins(cells: Sequence[Cell]) -> bool:
    """Whether the first of two rules beats the second: nowhere contradicted, in each task confirmed once at least (rule 6)."""
    verdicts = [verdict(cell.interval) for cell in cells]
    confirmed = {cell.task for cell, said in zip(cells, verdicts, strict=True) if said == "confirmed"}
    return bool(cells) and "contradicted" not in verdicts and confirmed == {cell.task for cell in cells}


def default_reuse(memory_to_each: Sequence[Cell], falling_to_each: Sequence[Cell], falling_to_memory: Sequence[Cell]) -> str:
    """``"each"``, ``"memory"`` or ``"falling"`` (rule 6).

    Args:
        memory_to_each: The cells of ``memory`` divided by ``each``.
        falling_to_each: Those of the falling share divided by ``each``.
        falling_to_memory: Those of the falling share divided by ``memory``.
    """
    winner, falling = ("memory", falling_to_memory) if wins(memory_to_each) else ("each", falling_to_each)
    return "falling" if wins(falling) else winner


def falling_stays(falling_to_winner: Sequence[Cell]) -> bool:
    """Whether the falling share is kept as an option: at one R it is confirmed in all tasks (rule 6)."""
    by_ratio: dict[int, list[str]] = {}
    for cell in falling_to_winner:
        by_ratio.setdefault(cell.ratio, []).append(verdict(cell.interval))
    return any(set(said) == {"confirmed"} for said in by_ratio.values())


def largest_factor(step_ratios: Mapping[int, Sequence[Interval]]) -> int:
    """What `max_factor` becomes (rule 7).

    Args:
        step_ratios: For each factor the ratio of the steps to those without echoing, of each task.
    """
    fitting = [factor for factor, tasks in step_ratios.items() if all(one.high <= MOST_STEPS_RATIO for one in tasks)]
    return max([MAX_FACTOR_BEFORE, *fitting])


def is_headline(time_ratios: Sequence[Interval]) -> bool:
    """Whether the headline may be said (rule 8).

    Args:
        time_ratios: The time with default settings divided by that without echoing, of each task.
    """
    return bool(time_ratios) and all(one.middle <= 1 / HEADLINE_SPEEDUP for one in time_ratios)
