"""What is run: the tasks with their steps, the arms, and their order, the most telling ones first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

from learning.digits import DIGITS
from learning.glyphs import GLYPHS
from learning.language_model import LANGUAGE_MODEL
from learning.reuse.rules import AGAIN_MOST_FACTOR, DECIDING_BATCHES, DECIDING_RATIOS
from learning.task import Task

__all__ = ["AGAIN", "NO_ECHO", "STUDIES", "ReuseArm", "Study", "in_order"]

UNBOUNDED = None


class ReuseArm(NamedTuple):
    """One way to train.

    Attributes:
        reuse: ``"none"``, ``"each"`` and ``"memory"`` (as in `EchoLoader`), or ``"falling"`` (``falling.py``).
        factor: Echo factor.
        batches: How many batches of examples memory holds; None: as many as a pass allows.
    """

    reuse: str
    factor: int
    batches: int | None

    @property
    def name(self) -> str:
        """In tables and CSV files.

        >>> ReuseArm("memory", 8, None).name, ReuseArm("each", 4, 16).name
        ('memory, e=8, unbounded', 'each, e=4, 16 batches')
        """
        if self.reuse == "none":
            return "no echo"
        return f"{self.reuse}, e={self.factor}, {'unbounded' if self.batches is None else f'{self.batches} batches'}"

    def buffer_size(self, batch_size: int, pass_batches: int) -> int:
        """The buffer in examples. A pass must hold a batch beside it, or an index could be held twice."""
        return batch_size * (pass_batches - 1 if self.batches is None else self.batches)


NO_ECHO = ReuseArm("none", 1, UNBOUNDED)


@dataclass(frozen=True)
class Study:
    """One task of this study.

    Attributes:
        task: Data, model, target and the grid of rates; its points, budget and spacing of examples are not used here.
        point: The insertion point of all arms, the one that ``auto`` picks: what is decided here are the defaults.
        spacing_steps: Steps from evaluation to evaluation.
        most_steps: A run that has not reached the target by then has missed it.
        factors: Echo factors, in the order in which they are run.
        rounds: What is run at each factor, rule and batches of memory; the second round begins after the first at all factors.
        cached_batches: Caches that stand beside the arms, by replaying the runs without echoing; for tasks of many passes.
        decides: Whether defaults are decided by it.
    """

    task: Task
    point: str
    spacing_steps: int
    most_steps: int
    factors: tuple[int, ...]
    rounds: tuple[tuple[tuple[str, int | None], ...], ...]
    cached_batches: tuple[int, ...] = ()
    decides: bool = True

    def stages(self) -> Iterator[list[ReuseArm]]:
        """The arms, some at a time, in order."""
        yield [NO_ECHO]
        for rules in self.rounds:
            for factor in self.factors:
                yield [ReuseArm(reuse, factor, batches) for reuse, batches in rules]

    def arms(self) -> list[ReuseArm]:
        """All arms, in order."""
        return [arm for stage in self.stages() for arm in stage]

    def quick(self) -> Study:
        """The same, just long enough to see that every table fills."""
        few = tuple(rules[:3] for rules in self.rounds[:1])
        return replace(self, task=self.task.quick(), spacing_steps=10, most_steps=40, factors=(8,), rounds=few)


def in_order(studies: Sequence[Study]) -> list[tuple[Study, ReuseArm]]:
    """The arms of all studies: those that decide stage by stage together, the others after them."""
    order = []
    for decides in (True, False):
        together = [study for study in studies if study.decides is decides]
        for stages in zip_longest(*(study.stages() for study in together), fillvalue=[]):
            order += [(study, arm) for study, stage in zip(together, stages, strict=True) for arm in stage]
    return order


FACTORS = (8, 16, 4, 32)
ROUNDS = (
    (("memory", UNBOUNDED), ("memory", 64), ("each", 64), ("falling", 64)),
    (("memory", 16), ("memory", 256), ("each", 16), ("each", 256)),
)

STUDIES = {
    study.task.name: study
    for study in (
        Study(
            task=replace(LANGUAGE_MODEL, rates=(1e-3, 2e-3, 4e-3)),  # training without echoing chose 0.002 before
            point="after_augmentation",
            spacing_steps=20,
            most_steps=1800,
            factors=FACTORS,
            rounds=ROUNDS,
        ),
        Study(
            task=GLYPHS,
            point="before_augmentation",
            spacing_steps=25,
            most_steps=2100,
            factors=FACTORS,
            rounds=ROUNDS,
        ),
        Study(
            task=DIGITS,
            point="before_augmentation",
            spacing_steps=10,
            most_steps=2000,
            factors=(4, 8),
            rounds=((("memory", UNBOUNDED), *((reuse, size) for size in (9, 18) for reuse in ("memory", "each")), ("each", 37)),),
            cached_batches=(9, 18, 37),
            decides=False,
        ),
    )
}

AGAIN = {
    name: replace(
        study,
        factors=tuple(sorted({min(ratio, AGAIN_MOST_FACTOR) for ratio in DECIDING_RATIOS})),
        rounds=((("memory", DECIDING_BATCHES), ("each", DECIDING_BATCHES)),),
    )
    for name, study in STUDIES.items()
    if study.decides
}
"""What rule 9 asks again."""
