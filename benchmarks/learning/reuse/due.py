"""Which runs are due: a pure function of the rows, in the order of ``studies.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from learning.due import Done
from learning.reuse.rows import ReuseRow
from learning.reuse.rules import is_tie
from learning.reuse.studies import NO_ECHO, ReuseArm, Study, in_order
from learning.rules import Seeds, best_rate

__all__ = ["ReuseJob", "ReuseProgress", "due"]


class ReuseJob(NamedTuple):
    """A run to do, of the study of that name."""

    task: str
    arm: ReuseArm
    rate: float
    seed: int


class ReuseProgress:
    """How far a study is.

    Args:
        study: The study.
        seeds: For tuning and for the report.
        rows: The runs that are done.
    """

    def __init__(self, study: Study, seeds: Seeds, rows: Sequence[ReuseRow]) -> None:
        self.study, self._seeds, self._done = study, seeds, Done(rows)

    def rate(self, arm: ReuseArm) -> float | None:
        """The rate chosen for an arm; None while it is not known."""
        return self._chosen(arm)[0]

    def reported(self, arm: ReuseArm) -> list[ReuseRow]:
        """The report's runs of an arm by seed, if all are there, else none."""
        rate = self.rate(arm)
        if rate is None or self._done.missing(arm.name, [rate], self._seeds.report):
            return []
        return self._done.rows(arm.name, rate, self._seeds.report)

    def due(self, arm: ReuseArm) -> list[ReuseJob]:
        """The runs of an arm that are due now."""
        rate, missing = self._chosen(arm)
        if rate is not None:
            missing = self._done.missing(arm.name, [rate], self._seeds.report)
        return [ReuseJob(self.study.task.name, arm, *one) for one in missing]

    def _chosen(self, arm: ReuseArm) -> tuple[float | None, list[tuple[float, int]]]:
        """The rate, or the tuning runs that it waits for; neither while training without echoing has no rate yet (rule 3)."""
        rates = list(self.study.task.rates)
        while True:
            if missing := self._done.missing(arm.name, rates, self._seeds.tuning):
                return None, missing
            best, beyond = best_rate(self.study.task, {rate: self._results(arm, rate) for rate in rates})
            if arm != NO_ECHO:
                usual = self.rate(NO_ECHO)
                if usual is None:
                    return None, []
                if usual in rates and is_tie(self._steps(arm, usual), self._steps(arm, best), self.study.spacing_steps):
                    return usual, []
                beyond = usual if usual not in rates else beyond
            if beyond is None:
                return best, []
            rates = sorted([*rates, beyond])

    def _results(self, arm: ReuseArm, rate: float) -> list[tuple[float, float]]:
        rows = self._done.rows(arm.name, rate, self._seeds.tuning)
        return [(row.steps_to_target, row.last) for row in rows]

    def _steps(self, arm: ReuseArm, rate: float) -> list[float]:
        return [steps for steps, _ in self._results(arm, rate)]


def due(studies: Sequence[Study], progress: Mapping[str, ReuseProgress]) -> list[ReuseJob]:
    """The runs that are due now, the most telling ones first; more may follow from their results.

    Args:
        studies: In the order in which their arms alternate.
        progress: Of each, by the name of its task.
    """
    return [job for study, arm in in_order(studies) for job in progress[study.task.name].due(arm)]
