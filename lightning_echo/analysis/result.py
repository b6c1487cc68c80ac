"""`StallAnalysis`: the result of an analysis, as a value that can be saved and compared; and the gains that were proved."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning_echo.analysis.measured import MeasuredStages, ProcessorTime, Spread, check_at_least
from lightning_echo.analysis.predict import Prediction, TrainingSetting, costs_of, predict
from lightning_echo.analysis.verdict import Verdict, judge
from lightning_echo.data.machine import Load
from lightning_echo.measure.target_idle import LARGE_FACTOR
from lightning_echo.schema import FieldError, record

# ---------------------------------------------------------------------- proof
# A prediction is proved by training: the setting and the training as it is take turns, block by block. A machine that gets slower
# is then slower for both. What counts is the ratio of two neighbouring blocks. The interval is that of a prediction: 95% of such
# comparisons have a gain in it if they are made again, with as many blocks. That of a mean alone would be 1.4 times as narrow.

_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""The 97.5% quantiles of Student's t with 1, 2, 3 ... degrees of freedom."""

MOST_BLOCKS = len(_QUANTILES) + 1


@dataclass(frozen=True)
class ProvedGain:
    """The gain of a setting, as it was measured in turns with the training as it is.

    Attributes:
        setting: The setting that was tried.
        gain: Steps per second with it, divided by those of the training as it is: the geometric mean over pairs of blocks.
        low: Lower end of the interval that has the gain of the same comparison, made again, with a probability of 95%; `high`:
            its upper end.
        blocks: Number of pairs.

    Example:
        >>> proved = ProvedGain.of(TrainingSetting(workers=4), present=[0.2, 0.22, 0.18], tried=[0.1, 0.1, 0.1])
        >>> round(proved.gain, 2), round(proved.low, 2), round(proved.high, 2)
        (1.99, 1.4, 2.84)
    """

    setting: TrainingSetting
    gain: float
    low: float
    high: float
    blocks: int

    @classmethod
    def of(cls, setting: TrainingSetting, present: Sequence[float], tried: Sequence[float]) -> ProvedGain:
        """Returns the gain from the seconds of a step in each block.

        Args:
            setting: The setting that was tried.
            present: Seconds of a step in the blocks of the training as it is, shape (blocks,), 2 blocks or more.
            tried: The same in the blocks beside them, with the setting.
        """
        ratios = [math.log(before / after) for before, after in zip(present, tried, strict=True)]
        mean, count = statistics.fmean(ratios), len(ratios)
        around = _QUANTILES[min(count, MOST_BLOCKS) - 2] * statistics.stdev(ratios) * math.sqrt(2 / count)
        return cls(setting, math.exp(mean), math.exp(mean - around), math.exp(mean + around), count)


def promising(verdict: Verdict) -> tuple[TrainingSetting, ...]:
    """Returns the settings that are worth a proof, at most two: all remedies, and all but the last one or echoing.

    A larger factor than `LARGE_FACTOR` makes steps faster, and seldom pays in learning. So that one is tried in its place.
    """
    found = [remedy for remedy in verdict.remedies if not remedy.setting.cluster_workers]  # which cost other machines to try
    if not found:
        return ()
    without_echo = [remedy.setting for remedy in found if remedy.name != "echo"]
    fewer = without_echo[-1:] if found[-1].name == "echo" else without_echo[-2:-1]
    last = found[-1].setting
    return (replace(last, factor=min(last.factor, LARGE_FACTOR)), *fewer)


def to_keep(proved: Sequence[ProvedGain]) -> ProvedGain | None:
    """Returns the setting to keep, of those that were proved in turn; None: none is faster than the training as it is.

    It is the fastest one, or one with less of a change (later in ``proved``) if their intervals overlap.
    """
    faster = [each for each in proved if each.low > 1]
    if not faster:
        return None
    best = max(faster, key=lambda each: each.gain)
    return next(each for each in reversed(faster) if each.high >= best.low)


# ---------------------------------------------------------------------- analysis
# A value that can be saved and compared, and that makes predictions.

_VERSION = 4
_REST = "decode and augment, without these transforms"
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


class Cost(NamedTuple):
    """The seconds of a stage or a transform, per example: wall time and processor time. None: that is not known."""

    name: str
    seconds: float
    cpu_seconds: float | None


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
        proved: The gains of settings that took turns with the training as it is.
        stage_cpu: Processor time per example of each stage of the loader, by name, and its time without waiting for a
            processor. Empty if that is not known, as for a stream.
        transform_cpu: The same of each transform.
        load: Who had the cores during the analysis; None if it is not known. Its ``sentence`` is among the notes.

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
        (0.75, 0.5, 'echo')
    """

    stages: MeasuredStages
    real: Spread
    cached: Spread | None
    transforms: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    ranks: tuple[RankSeconds, ...] = ()
    checked: tuple[CheckedSetting, ...] = ()
    proved: tuple[ProvedGain, ...] = ()
    stage_cpu: Mapping[str, ProcessorTime] = field(default_factory=dict)
    transform_cpu: Mapping[str, ProcessorTime] = field(default_factory=dict)
    load: Load | None = None

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
        shared = [each.stages.free_shared_bytes for each in analyses if each.stages.free_shared_bytes is not None]
        # All machines are asked for a cache of the same size, and for queues of the same length.
        stages = replace(analyses[slowest].stages, free_bytes=min(free, default=None), ranks=len(ranks))
        stages = replace(stages, free_shared_bytes=min(shared, default=None))
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
    def is_loaded(self) -> bool:
        """Whether other programs, or a quota, took so much of the cores that the figures are worth little."""
        return self.load is not None and self.load.is_notable

    @property
    def costliest(self) -> tuple[Cost, ...]:
        """The three stages or transforms that take a worker longest, with their seconds per example, longest first.

        If `is_loaded`, the time for which they waited for a processor does not count in the order: it is chance. The loader of a
        stream counts as one stage.
        """
        stages, transforms = self.stages, dict(self.transforms)
        if self.cached is None:
            return (Cost("the loader as a whole", stages.decode.median, None),)
        rest = max(0.0, stages.decode.median + stages.augment.median - sum(transforms.values()))
        each = {"decode": stages.decode.median, "augment": stages.augment.median}
        if transforms:
            each = {**transforms, _REST: rest}
        costs = {"read": stages.read.median, **each, "collate": stages.collate.median / stages.batch_size}
        cpu = self._processor_times

        def weight(name: str) -> float:
            return cpu[name].undelayed_seconds if self.is_loaded and name in cpu else costs[name]

        ordered = [name for name in sorted(costs, key=weight, reverse=True) if weight(name) > 0]
        return tuple(Cost(name, costs[name], cpu[name].cpu_seconds if name in cpu else None) for name in ordered[:3])

    @property
    def _processor_times(self) -> dict[str, ProcessorTime]:
        """The processor times by the names of `costliest`."""
        if not self.transforms or not self.stage_cpu:
            return dict(self.stage_cpu)
        rest = self.stage_cpu["decode"].plus(self.stage_cpu["augment"])
        for each in self.transform_cpu.values():
            rest = rest.without(each)
        outside = {name: self.stage_cpu[name] for name in ("read", "collate")}
        return {**self.transform_cpu, _REST: rest, **outside}

    @property
    def verdict(self) -> Verdict:
        """The verdict: the advice, and its reasons."""
        return judge(self.stages, self.step_seconds, self.transforms)

    def predict(self, **setting: Any) -> Prediction:
        """Predicts the step time, the idle fraction and the speed-up of another setting.

        For workers on other machines (``cluster_workers``), what a storage that all machines share can deliver is not known.

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

    def with_proof(self, proved: Sequence[ProvedGain]) -> StallAnalysis:
        """Returns the analysis with more gains that were proved."""
        return replace(self, proved=(*self.proved, *proved))

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
            "options": verdict.options,
            "remedies": remedies,
            "cluster_workers": 0 if verdict.elsewhere is None else verdict.elsewhere.cluster_workers * self.stages.ranks,
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
