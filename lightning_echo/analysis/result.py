"""`StallAnalysis`: what an analysis came to; a value that can be saved, compared and asked."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_echo.analysis.measured import MeasuredStages, Spread, check_number
from lightning_echo.analysis.predict import Prediction, Setting, costs_of, predict
from lightning_echo.analysis.verdict import Verdict, judge

__all__ = ["Checked", "RankSeconds", "StallAnalysis"]

_VERSION = 1
_NOTABLY = 1.1  # times as slow as the other ranks, in the middle


@dataclass(frozen=True)
class Checked:
    """A setting that was tried.

    Attributes:
        setting: Which.
        step_seconds: What it took from step to step.
    """

    setting: Setting
    step_seconds: Spread


@dataclass(frozen=True)
class RankSeconds:
    """What one rank of a distributed job came to by itself.

    Attributes:
        host_seconds: Of its loader alone, per batch, all its workers working.
        step_seconds: From step to step in the real run; the ranks wait for each other.
    """

    host_seconds: float
    step_seconds: float

    def __post_init__(self) -> None:
        for name in ("host_seconds", "step_seconds"):
            check_number(name, getattr(self, name), 0)


@dataclass(frozen=True)
class StallAnalysis:
    """Where the time of a training's steps goes, by the differential method (Mohan et al. 2021, arXiv 2007.06775, section 3.2).

    Stall time is what the real run takes longer than the step alone; of it the part that stays when the data lies in memory
    already is preparation, the rest fetching.

    Attributes:
        stages: Each stage by itself; of several ranks those of the slowest one, which the job waits for.
        real: Seconds from step to step of the real run, its data not in memory.
        cached: The same with the data in memory; None where it could not be put there.
        transforms: Seconds per example of each transform, by name.
        notes: What could not be measured as it should, or not at all, and why.
        ranks: Each rank's own seconds; none where there is one.
        checked: Settings that were tried.

    Raises:
        ValueError: A value is impossible.

    Example:
        >>> seconds = dict.fromkeys(("read_cached", "decode", "augment", "collate", "hand_over", "copy"), Spread.exactly(0.0))
        >>> stages = MeasuredStages(
        ...     read=Spread.exactly(0.01), step=Spread.exactly(0.02), **seconds, read_cpu_share=0.0, prepare_cpu_share=1.0,
        ...     step_cpu_seconds=0.0, batch_size=8, workers=1, takes_ahead=True, cores=2,
        ...     points=("after_augmentation", "after_batching"),
        ... )
        >>> analysis = StallAnalysis(stages, real=Spread.exactly(0.08), cached=Spread.exactly(0.02))  # as an analyzer measures it
        >>> analysis.fetch_stall_fraction, analysis.predict(workers=2).idle_fraction, analysis.verdict.kind.value
        (0.75, 0.5, 'cache')
    """

    stages: MeasuredStages
    real: Spread
    cached: Spread | None
    transforms: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    ranks: tuple[RankSeconds, ...] = ()
    checked: tuple[Checked, ...] = ()

    def __post_init__(self) -> None:
        if not self.real.median > 0:
            raise ValueError(f"real must take time, got {self.real!r}")
        for name, seconds in self.transforms.items():
            check_number(name, seconds, 0)

    @classmethod
    def of_ranks(cls, analyses: Sequence[StallAnalysis]) -> StallAnalysis:
        """That of the job: with the stages of the rank whose loader is the slowest, since steps wait for all ranks."""
        if len(analyses) == 1:
            return analyses[0]
        alone = [replace(each.stages, contention=1.0) for each in analyses]  # a rank also waits for the others
        host = [costs_of(stages, Setting()).host_seconds(1) for stages in alone]
        ranks = tuple(RankSeconds(seconds, each.step_seconds) for seconds, each in zip(host, analyses, strict=True))
        slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].host_seconds)
        return replace(analyses[slowest], ranks=ranks)

    @property
    def slow_rank(self) -> int | None:
        """The rank whose loader is notably slower than the others'; None where there is none."""
        if not self.ranks:
            return None
        host = [rank.host_seconds for rank in self.ranks]
        slowest = host.index(max(host))
        others = host[:slowest] + host[slowest + 1 :]
        return slowest if host[slowest] > _NOTABLY * statistics.median(others) else None

    @property
    def step_seconds(self) -> float:
        """From step to step in the real run."""
        return self.real.median

    @property
    def ingestion_seconds(self) -> float:
        """Of a step whose batch is ready on the device: no training is faster than that."""
        return self.stages.step.median

    @property
    def idle_fraction(self) -> float:
        """Share of the real run in which the accelerator waits, copying included."""
        return max(0.0, 1 - self.ingestion_seconds / self.step_seconds)

    @property
    def copy_fraction(self) -> float:
        """Share of the real run that copying to the device takes."""
        return min(self.stages.copy.median / self.step_seconds, self.idle_fraction)

    @property
    def fetch_stall_fraction(self) -> float | None:
        """Share of the real run in which the accelerator waits for reading; None where the data could not be put into memory."""
        if self.cached is None:
            return None
        stall = max(0.0, self.step_seconds - max(self.cached.median, self.ingestion_seconds)) / self.step_seconds
        return min(stall, self.idle_fraction - self.copy_fraction)

    @property
    def prep_stall_fraction(self) -> float | None:
        """Share of the real run in which it waits for decoding, augmentation, collation and hand-over; None as above."""
        fetch = self.fetch_stall_fraction
        return None if fetch is None else self.idle_fraction - self.copy_fraction - fetch

    @property
    def ingestion_rate(self) -> float:
        """Examples per second that the accelerator takes at most: DS-Analyzer's G."""
        return self.stages.batch_size / self.ingestion_seconds

    @property
    def preparation_rate(self) -> float:
        """Examples per second that the workers prepare at most, nothing to be read: P."""
        stages = self.stages
        per_batch = stages.batch_size * (stages.decode.median + stages.augment.median) + stages.collate.median
        return _rate(stages.batch_size * max(stages.workers, 1), per_batch)

    @property
    def fetch_rate(self) -> float | None:
        """Examples per second that the workers read at most, nothing in memory: F; None where that could not be measured."""
        return None if self.cached is None else _rate(max(self.stages.workers, 1), self.stages.read.median)

    @property
    def costliest(self) -> tuple[tuple[str, float], ...]:
        """The three stages or transforms that take a worker longest, with their seconds per example; a stream is one stage."""
        stages, transforms = self.stages, dict(self.transforms)
        if self.cached is None:
            return (("the loader as a whole", stages.decode.median),)
        rest = max(0.0, stages.decode.median + stages.augment.median - sum(transforms.values()))
        each = {"decode": stages.decode.median, "augment": stages.augment.median}
        if transforms:
            each = {**transforms, "decode and augment, besides these transforms": rest}
        costs = {"read": stages.read.median, **each, "collate": stages.collate.median / stages.batch_size}
        ordered = sorted(costs.items(), key=lambda item: -item[1])
        return tuple(item for item in ordered[:3] if item[1] > 0)

    @property
    def verdict(self) -> Verdict:
        """What to do."""
        return judge(self.stages, self.step_seconds, self.transforms)

    def predict(self, **setting: Any) -> Prediction:
        """What another setting would bring.

        Args:
            **setting: Options of `Setting`.

        Raises:
            TypeError: An option is not known.
            ValueError: An option has an impossible value.
        """
        return predict(self.stages, Setting(**setting))

    def with_check(self, checked: Checked) -> StallAnalysis:
        """The same with one setting more that was tried."""
        return replace(self, checked=(*self.checked, checked))

    def to_json(self, path: str | Path) -> None:
        """Writes it as JSON, with the version of the format."""
        Path(path).write_text(json.dumps({"lightning_echo_analysis": _VERSION, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def from_json(cls, path: str | Path) -> StallAnalysis:
        """Reads what `to_json` has written.

        Raises:
            ValueError: It is no such file, is damaged, or of a newer version.
        """
        try:
            state = json.loads(Path(path).read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no analysis: it holds no JSON ({error})") from None
        version = state.pop("lightning_echo_analysis", None) if isinstance(state, dict) else None
        if not isinstance(version, int):
            raise ValueError(f"{path} is no analysis: write one with StallAnalysis.to_json")
        if version > _VERSION:
            raise ValueError(
                f"{path} has version {version} of the format, known are those up to {_VERSION}: update lightning_echo"
            )
        try:
            return _from_state(state)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error!r}") from None


def _rate(examples: float, seconds: float) -> float:
    return examples / seconds if seconds else math.inf


def _from_state(state: dict[str, Any]) -> StallAnalysis:
    stages: dict[str, Any] = {
        name: Spread(**value) if isinstance(value, dict) else value for name, value in state["stages"].items()
    }
    stages["points"] = tuple(stages["points"])
    return StallAnalysis(
        MeasuredStages(**stages),
        Spread(**state["real"]),
        None if state["cached"] is None else Spread(**state["cached"]),
        dict(state["transforms"]),
        tuple(state["notes"]),
        tuple(RankSeconds(**rank) for rank in state["ranks"]),
        tuple(Checked(Setting(**each["setting"]), Spread(**each["step_seconds"])) for each in state["checked"]),
    )
