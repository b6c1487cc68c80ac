"""`EpochReport`: what is known of an epoch at its end. It is logged, saved in checkpoints, and used by the summary."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["LOGGED", "EpochReport"]

LOGGED = (
    "factor",
    "fresh_examples",
    "echoed_examples",
    "passes",
    "effective_factor",
    "idle_fraction",
    "slowest_rank",
    "data_wait_seconds",
    "step_seconds",
    "upstream_seconds",
    "examples_per_second",
    "recommended_factor",
    "first_batch_seconds",
    "cache_hit_fraction",
    "cached_examples",
    "cache_bytes",
    "cache_received_fraction",
    "exchange_fraction",
    "shared_trainings",
    "peer_wait_fraction",
    "missed_examples",
)


@dataclass(frozen=True)
class EpochReport:
    """One epoch of a job. A value that could not be measured is None.

    Attributes:
        epoch: Number of the epoch, from 0.
        steps: Number of its steps that were measured.
        factor: Echo factor in force at its end.
        fresh_examples: Fresh examples on all ranks in the run so far.
        echoed_examples: Echoed examples on all ranks in the run so far.
        passes: Passes over the data in the run so far.
        effective_factor: Uses per fresh example in this epoch.
        idle_fraction: Share of the epoch's time in which the job waited for input, 0 to 1.
        slowest_rank: The rank that the others waited for most often; None if there is only one rank.
        slowest_node: The node of that rank; None if there is only one node.
        data_wait_seconds: Seconds of waiting per step.
        step_seconds: Seconds per step without the waiting.
        upstream_seconds: Seconds of the host for a batch of fresh examples, before the insertion point.
        examples_per_second: Fresh and echoed examples per second that all ranks got.
        recommended_factor: The factor that follows from the measurements.
        first_batch_seconds: Seconds that the job waited for the epoch's first batch, if workers had to start for it. The longest
            wait of any rank counts.
        cache_hit_fraction: Share of the epoch's fresh examples that the cache had, 0 to 1; None without a cache.
        cached_examples: Examples that the cache of a node holds; None without a cache.
        cache_bytes: Bytes that they take on a node; None without a cache.
        cache_received_fraction: Share of the epoch's fresh examples that came from another node, 0 to 1; None if the cache is not
            partitioned.
        exchange_fraction: Share of the epoch's time in which a node sent and received examples, for the node with the largest
            share; None if the cache is not partitioned.
        cache_hold: What the cache holds of an example; empty without a cache.
        cache_is_full: Whether nothing is added to the cache any more.
        shared_trainings: Trainings that share the reading, this one among them. This field and the next three are None if the
            training does not share.
        peer_wait_fraction: Share of the epoch's time in which a batch waited for another training, 0 to 1.
        missed_examples: Examples in the run so far that other trainings had and this one did not.
        saved_cpu_seconds: Processor seconds that sharing has saved this training in the run so far: the seconds that reading its
            examples took, without this training's own share of them.
        slowest_training: The training that this one waited for longest in the run so far; empty if it waited for none.
        speedup: Estimated steps per second, relative to factor 1.
        next_factor: The factor that the controller has decided on.
        reason: The controller's reason, for programs: a value of `Reason`, or empty without a controller.
        message: The controller's reason, for people.

    Example:
        >>> EpochReport(epoch=0, steps=10, factor=2.0, fresh_examples=8, echoed_examples=8, idle_fraction=0.25).logged()
        {'echo/factor': 2.0, 'echo/fresh_examples': 8.0, 'echo/echoed_examples': 8.0, 'echo/idle_fraction': 0.25}
    """

    epoch: int
    steps: int
    factor: float
    fresh_examples: int
    echoed_examples: int
    passes: float | None = None
    effective_factor: float | None = None
    idle_fraction: float | None = None
    slowest_rank: int | None = None
    slowest_node: int | None = None
    data_wait_seconds: float | None = None
    step_seconds: float | None = None
    upstream_seconds: float | None = None
    examples_per_second: float | None = None
    recommended_factor: float | None = None
    first_batch_seconds: float | None = None
    cache_hit_fraction: float | None = None
    cached_examples: int | None = None
    cache_bytes: int | None = None
    cache_received_fraction: float | None = None
    exchange_fraction: float | None = None
    cache_hold: str = ""
    cache_is_full: bool = False
    shared_trainings: int | None = None
    peer_wait_fraction: float | None = None
    missed_examples: int | None = None
    saved_cpu_seconds: float | None = None
    slowest_training: str = ""
    speedup: float | None = None
    next_factor: float | None = None
    reason: str = ""
    message: str = ""

    def logged(self) -> dict[str, float]:
        """Returns what goes to loggers, under ``echo/...``, without the values that could not be measured."""
        values = {name: getattr(self, name) for name in LOGGED}
        return {f"echo/{name}": float(value) for name, value in values.items() if value is not None}

    def state(self) -> dict[str, Any]:
        """Returns all fields, in plain types."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
