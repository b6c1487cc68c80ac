"""`StallAnalysis`: the result of an analysis. It is a value that can be saved and compared, and that makes predictions."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_echo.analysis.predict import MeasuredStages, Prediction, Spread, TrainingSetting, check_at_least, costs_of, predict
from lightning_echo.analysis.verdict import Verdict, judge
from lightning_echo.schema import FieldError, record

_VERSION = 2
_NOTABLY = 1.1  # a rank is notably slow if it takes this many times as long as the median of the others


@dataclass(frozen=True)
class CheckedSetting:
    """A setting that was tried, and the measured seconds from step to step."""

    setting: TrainingSetting
    step_seconds: Spread


@dataclass(frozen=True)
class RankSeconds:
    """The seconds of one rank of a distributed job: its loader alone, per batch, and the real run, from step to step."""

    host_seconds: float
    step_seconds: float

    def __post_init__(self) -> None:
        for name in ("host_seconds", "step_seconds"):
            check_at_least(name, getattr(self, name), 0)


@dataclass(frozen=True)
class StallAnalysis:
    """Where the time of a training's steps goes, by the differential method (Mohan et al. 2021, arXiv 2007.06775, section 3.2).

    A step of the real run takes longer than the step alone. The difference is the stall time. The part that remains when the data
    is in memory is the prep stall. The rest is the fetch stall.

    Attributes:
        stages: The times of each stage by itself. With several ranks, they are those of the slowest rank, for which the job
            waits.
        real: Seconds from step to step in the real run, while the data is not in memory.
        cached: Seconds from step to step with the data in memory; None if the data could not be put into memory.
        transforms: Seconds per example of each transform, by name.
        notes: Shortcomings of the measurement, with reasons.
        ranks: The seconds of each rank; empty if there is one rank.
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
    checked: tuple[CheckedSetting, ...] = ()

    def __post_init__(self) -> None:
        if not self.real.median > 0:
            raise ValueError(f"real must take time, got {self.real!r}")
        for name, seconds in self.transforms.items():
            check_at_least(name, seconds, 0)

    @classmethod
    def of_ranks(cls, analyses: Sequence[StallAnalysis]) -> StallAnalysis:
        """Returns the analysis of the rank with the slowest loader, since each step waits for all ranks.

        Args:
            analyses: The analysis of each rank, in the order of the ranks.
        """
        if len(analyses) == 1:
            return analyses[0]
        # The measured contention includes the time in which ranks wait for each other.
        alone = [replace(each.stages, contention=1.0) for each in analyses]
        host = [costs_of(stages, TrainingSetting()).host_seconds(1) for stages in alone]
        ranks = tuple(RankSeconds(seconds, each.step_seconds) for seconds, each in zip(host, analyses, strict=True))
        slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].host_seconds)
        free = [each.stages.free_bytes for each in analyses if each.stages.free_bytes is not None]
        # All machines are asked for a cache of the same size.
        stages = replace(analyses[slowest].stages, free_bytes=min(free, default=None))
        return replace(analyses[slowest], stages=stages, ranks=ranks)

    @property
    def slow_rank(self) -> int | None:
        """The rank whose loader takes over 1.1 times as long as the median of the others; None if there is no such rank."""
        if not self.ranks:
            return None
        host = [rank.host_seconds for rank in self.ranks]
        slowest = host.index(max(host))
        others = host[:slowest] + host[slowest + 1 :]
        return slowest if host[slowest] > _NOTABLY * statistics.median(others) else None

    @property
    def step_seconds(self) -> float:
        """Median time from step to step in the real run, in seconds."""
        return self.real.median

    @property
    def ingestion_seconds(self) -> float:
        """Median time of a step whose batch is ready on the device, in seconds. No training is faster than that."""
        return self.stages.step.median

    @property
    def idle_fraction(self) -> float:
        """Share of the real run in which the accelerator waits, the copying of batches included. From 0 to 1."""
        return max(0.0, 1 - self.ingestion_seconds / self.step_seconds)

    @property
    def copy_fraction(self) -> float:
        """Share of the real run that the copying of batches to the device takes. From 0 to 1."""
        return min(self.stages.copy.median / self.step_seconds, self.idle_fraction)

    @property
    def fetch_stall_fraction(self) -> float | None:
        """Share of the real run in which the accelerator waits for reading; None if the data could not be put into memory."""
        if self.cached is None:
            return None
        stall = max(0.0, self.step_seconds - max(self.cached.median, self.ingestion_seconds)) / self.step_seconds
        return min(stall, self.idle_fraction - self.copy_fraction)

    @property
    def prep_stall_fraction(self) -> float | None:
        """Share of the real run in which the accelerator waits for preparation: decoding, augmentation, collation and hand-over.

        None if the data could not be put into memory.
        """
        fetch = self.fetch_stall_fraction
        return None if fetch is None else self.idle_fraction - self.copy_fraction - fetch

    @property
    def ingestion_rate(self) -> float:
        """Largest number of examples per second that the accelerator takes: DS-Analyzer's G."""
        return self.stages.batch_size / self.ingestion_seconds

    @property
    def preparation_rate(self) -> float:
        """Largest number of examples per second that the workers prepare, if nothing has to be read: DS-Analyzer's P."""
        stages = self.stages
        per_batch = stages.batch_size * (stages.decode.median + stages.augment.median) + stages.collate.median
        return _rate(stages.batch_size * max(stages.workers, 1), per_batch)

    @property
    def fetch_rate(self) -> float | None:
        """Largest number of examples per second that the workers read from the storage: DS-Analyzer's F.

        None if reading could not be measured.
        """
        return None if self.cached is None else _rate(max(self.stages.workers, 1), self.stages.read.median)

    @property
    def costliest(self) -> tuple[tuple[str, float], ...]:
        """The three stages or transforms that take a worker longest, with their seconds per example, longest first.

        The loader of a stream counts as one stage.
        """
        stages, transforms = self.stages, dict(self.transforms)
        if self.cached is None:
            return (("the loader as a whole", stages.decode.median),)
        rest = max(0.0, stages.decode.median + stages.augment.median - sum(transforms.values()))
        each = {"decode": stages.decode.median, "augment": stages.augment.median}
        if transforms:
            each = {**transforms, "decode and augment, without these transforms": rest}
        costs = {"read": stages.read.median, **each, "collate": stages.collate.median / stages.batch_size}
        ordered = sorted(costs.items(), key=lambda item: -item[1])
        return tuple(item for item in ordered[:3] if item[1] > 0)

    @property
    def verdict(self) -> Verdict:
        """The verdict: the advice, and its reasons."""
        return judge(self.stages, self.step_seconds, self.transforms)

    def predict(self, **setting: Any) -> Prediction:
        """Predicts the step time, the idle fraction and the speed-up of another setting.

        Args:
            **setting: Options of `TrainingSetting`.

        Raises:
            TypeError: An option is unknown.
            ValueError: An option has an impossible value, or the setting is not possible for this data set.
        """
        return predict(self.stages, TrainingSetting(**setting))

    def with_check(self, checked: CheckedSetting) -> StallAnalysis:
        """Returns the analysis with one more setting that was tried."""
        return replace(self, checked=(*self.checked, checked))

    def to_json(self, path: str | Path) -> None:
        """Writes the analysis to a JSON file, with the version of the format and with the advice for other programs.

        Args:
            path: Path of the file. A file that is there already is overwritten.

        Raises:
            OSError: The file cannot be written.
        """
        verdict, remedies = self.verdict, []
        for remedy in verdict.remedies:
            predicted = predict(self.stages, remedy.setting)
            remedies.append(
                {
                    "name": remedy.name,
                    "is_enough": remedy.is_enough,
                    "setting": asdict(remedy.setting),
                    "step_seconds": predicted.step_seconds,
                    "idle_fraction": predicted.idle_fraction,
                }
            )
        advice = {
            "kind": verdict.kind.value,
            "message": verdict.message,
            "options": verdict.setting.options,
            "remedies": remedies,
        }
        state = {"lightning_echo_analysis": _VERSION, **asdict(self), "advice": advice}
        Path(path).write_text(json.dumps(state, indent=2) + "\n")

    @classmethod
    def from_json(cls, path: str | Path) -> StallAnalysis:
        """Reads an analysis that `to_json` has written.

        Args:
            path: Path of the file.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file is not an analysis, is damaged, or has a newer version of the format.
        """
        try:
            state = json.loads(Path(path).read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not an analysis: it is not JSON ({error})") from None
        version = state.pop("lightning_echo_analysis", None) if isinstance(state, dict) else None
        if not isinstance(version, int):
            raise ValueError(
                f"{path} is not an analysis: write one with StallAnalysis.to_json (lightning_echo_analysis must be the version "
                f"of the format, got {version!r})"
            )
        if version != _VERSION:
            raise ValueError(
                f"{path} has version {version} of the format, and only version {_VERSION} is known: update lightning_echo, or "
                "analyze again"
            )
        try:
            return record(cls, {name: value for name, value in state.items() if name != "advice"})  # which follows from the rest
        except FieldError as error:
            raise ValueError(f"{path} is damaged: {error}. Write another one with StallAnalysis.to_json") from None


def _rate(examples: float, seconds: float) -> float:
    return examples / seconds if seconds else math.inf
