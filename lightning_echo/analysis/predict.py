"""What another setting would bring: step time, idle fraction and speed-up, from what was measured of each stage.

    r(x, s)  = x * read_cached + (1 - x) * read / s        reading one example, a share x cached, the storage s times as fast
    host     = max(h(e), cpu(e) / cores)                   h(e): the cost model's host time per batch, read = r(x, s)
    T        = max(host, step / n + copy + hand-over)      the accelerator n times as fast
    T        = host + step / n + copy                      without workers: everything takes turns

DS-Analyzer (Mohan et al. 2021, arXiv 2007.06775, section 3.4) predicts min(F, P, G), with the preparation rate P, the ingestion
rate G and the fetch rate F = 1 / (x / C + (1 - x) / S): its loader fetches ahead of what it prepares. A worker of torch's
``DataLoader`` reads an example and then prepares it, so that here both add up in h. ``cpu(e)`` is what a batch needs of the
processors, the step included: more workers than they can feed change nothing. Beside the training, workers may take longer than
alone (`MeasuredStages.contention`), and longer the more they are where they share a storage or processors (`read_sharing`,
`prepare_sharing`); both are in h. With echoing there is no hand-over in T where an `EchoLoader` takes batches from the workers in
a thread of its own; elsewhere an echo of a batch needs none. After the transfer, an echo needs no copy either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_echo.analysis.measured import MeasuredStages, Spread, check_number
from lightning_echo.insertion import POINTS, InsertionPoint, Needs, earliest
from lightning_echo.measuring.cost import PipelineCosts

__all__ = ["Prediction", "Setting", "contention", "costs_of", "predict"]

_WAITS = 1.1  # times a step with everything ready: a training that waits for its workers
_HELPS = 0.9  # times as long with twice as many workers, at most
_CONTENTION = 0.9, 3.0  # what is shorter or longer has other reasons


@dataclass(frozen=True)
class Setting:
    """What may be asked for.

    Attributes:
        workers: Worker processes; None: as measured.
        factor: Echo factor, >= 1.
        insertion_point: Of the echo; at factor 1 it makes no difference.
        cached_fraction: Share of the data set that lies in memory, in [0, 1].
        storage_speedup: How many times as fast the storage would be.
        step_speedup: How many times as fast the accelerator would be.

    Raises:
        ValueError: An impossible value.
    """

    workers: int | None = None
    factor: float = 1.0
    insertion_point: str = earliest(Needs.batches).value
    cached_fraction: float = 0.0
    storage_speedup: float = 1.0
    step_speedup: float = 1.0

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_number("workers", self.workers, 0)
        check_number("factor", self.factor, 1)
        if self.insertion_point not in POINTS:
            known = ", ".join(repr(point.value) for point in POINTS)
            raise ValueError(f"insertion_point must be one of {known}, got {self.insertion_point!r}")
        check_number("cached_fraction", self.cached_fraction, 0)
        if self.cached_fraction > 1:
            raise ValueError(f"cached_fraction must be a share in [0, 1], got {self.cached_fraction!r}; 1 is all of the data set")
        for name in ("storage_speedup", "step_speedup"):
            check_number(name, getattr(self, name), 0)
            if not getattr(self, name):
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)!r}; 2 is twice as fast")


@dataclass(frozen=True)
class Prediction:
    """What a setting would bring.

    Attributes:
        step_seconds: From step to step.
        idle_fraction: Share of it in which the accelerator waits.
        speedup: Steps per second, relative to the setting that was measured.
        step_seconds_range: Lowest and highest, from the measured spread.
        limit: What the time goes by: ``"step"``, ``"workers"`` (more of them would help), ``"storage"`` or ``"cores"`` (more
            workers would only share it).
    """

    step_seconds: float
    idle_fraction: float
    speedup: float
    step_seconds_range: tuple[float, float]
    limit: str


def predict(stages: MeasuredStages, setting: Setting) -> Prediction:
    """What a setting would bring.

    Raises:
        ValueError: The insertion point is not possible there.

    Example:
        >>> from lightning_echo.analysis.measured import Spread
        >>> seconds = dict.fromkeys(("read_cached", "decode", "augment", "collate", "hand_over", "copy"), Spread.exactly(0.0))
        >>> stages = MeasuredStages(
        ...     read=Spread.exactly(0.01), step=Spread.exactly(0.02), **seconds, read_cpu_share=0.0, prepare_cpu_share=1.0,
        ...     step_cpu_seconds=0.0, batch_size=8, workers=2, takes_ahead=True, cores=4,
        ...     points=("after_augmentation", "after_batching"),
        ... )
        >>> predict(stages, Setting()).idle_fraction, predict(stages, Setting(workers=4)).speedup
        (0.5, 2.0)
    """
    if setting.factor > 1 and setting.insertion_point not in stages.points:
        possible = ", ".join(stages.points)
        raise ValueError(f"insertion_point={setting.insertion_point!r} is not possible here; these are: {possible}")
    seconds, limit = _step_seconds(stages, setting, "median")
    now, _ = _step_seconds(stages, Setting(), "median")
    low, high = (_step_seconds(stages, setting, which)[0] for which in ("low", "high"))
    busy = stages.step.median / setting.step_speedup
    return Prediction(
        seconds, max(0.0, 1 - busy / seconds) if seconds else 0.0, now / seconds if seconds else 1.0, (low, high), limit
    )


def contention(stages: MeasuredStages, step_seconds: float) -> float:
    """How many times as long workers take beside the training as alone.

    Args:
        stages: Measured alone.
        step_seconds: Of a training whose data lies in memory. Unless it waits for the workers, it says nothing about them.
    """
    costs = costs_of(replace(stages, read=Spread.exactly(0.0), read_cached=Spread.exactly(0.0)), Setting())
    host = costs.host_seconds(1)
    if not host or step_seconds < _WAITS * costs.device_seconds:
        return 1.0
    times = (step_seconds if stages.workers else step_seconds - costs.device_seconds) / host
    return times if _CONTENTION[0] <= times <= _CONTENTION[1] else 1.0


def costs_of(stages: MeasuredStages, setting: Setting, which: str = "median") -> PipelineCosts:
    """The cost model's figures of a setting; its ``device_seconds`` are those of the step, the copy and the hand-over."""
    workers = _workers(stages, setting)
    read, decode, augment, collate = _worker_seconds(stages, setting, which)
    point = InsertionPoint(setting.insertion_point)
    copies = 1 / setting.factor if "transfer" in point.properties.reused else 1.0
    device = getattr(stages.step, which) / setting.step_speedup + copies * getattr(stages.copy, which)
    if workers and not (stages.takes_ahead and setting.factor > 1):
        taken = 1 / setting.factor if point.by_batches else 1.0
        device += taken * getattr(stages.hand_over, which)
    return _cut(setting.insertion_point, read, decode, augment, collate, device, workers)


def _step_seconds(stages: MeasuredStages, setting: Setting, which: str) -> tuple[float, str]:
    costs = costs_of(stages, setting, which)
    seconds = costs.step_seconds(setting.factor)
    by_cores = _cores_seconds(stages, setting, which)
    if by_cores > seconds:
        return by_cores, "cores"
    if seconds == costs.device_seconds:
        return seconds, "step"
    more = costs_of(stages, replace(setting, workers=2 * max(costs.workers, 1)), which).step_seconds(setting.factor)
    if more < _HELPS * seconds:
        return seconds, "workers"
    return seconds, "storage" if stages.read_sharing > stages.prepare_sharing else "cores"


def _cores_seconds(stages: MeasuredStages, setting: Setting, which: str) -> float:
    """Of a step if all processors are busy: what waits needs none."""
    alone = replace(stages, contention=1.0, read_sharing=0.0, prepare_sharing=0.0)
    read, decode, augment, collate = _worker_seconds(alone, setting, which)
    own, prepare = stages.read_cpu_share, stages.prepare_cpu_share
    cpu = _cut(setting.insertion_point, read * own, decode * prepare, augment * prepare, collate * prepare, 0.0, 1)
    return (cpu.host_seconds(setting.factor) + stages.step_cpu_seconds / setting.step_speedup) / stages.cores


def _worker_seconds(stages: MeasuredStages, setting: Setting, which: str) -> tuple[float, float, float, float]:
    """Of a batch of fresh examples: reading, decoding, augmentation, collation."""
    cached, size = setting.cached_fraction, stages.batch_size
    more = max(_workers(stages, setting), 1) / max(stages.workers, 1)
    beside = stages.contention * more**stages.prepare_sharing
    from_storage = getattr(stages.read, which) / setting.storage_speedup * more**stages.read_sharing
    read = cached * getattr(stages.read_cached, which) + (1 - cached) * from_storage
    return (
        size * read * (1 + (stages.contention - 1) * stages.read_cpu_share),
        size * getattr(stages.decode, which) * beside,
        size * getattr(stages.augment, which) * beside,
        getattr(stages.collate, which) * beside,
    )


def _workers(stages: MeasuredStages, setting: Setting) -> int:
    return stages.workers if setting.workers is None else setting.workers


def _cut(point: str, read: float, decode: float, augment: float, collate: float, device: float, workers: int) -> PipelineCosts:
    reused = InsertionPoint(point).properties.reused
    seconds = {"read": read, "decode": decode, "augment": augment}
    source = sum((seconds[stage] for stage in seconds if stage in reused), 0.0)
    rest = sum((seconds[stage] for stage in seconds if stage not in reused), 0.0)
    return PipelineCosts(point, source, rest, collate, device, workers)
