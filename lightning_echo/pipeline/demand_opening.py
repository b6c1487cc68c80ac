"""How a pipeline that echoes on demand over an index is opened: of examples, or of whole batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from lightning_echo.pipeline.demand import (
    OVERTAKING,
    DemandExamples,
    DemandPipeline,
    DemandRequests,
    Repeated,
    Waiting,
    Words,
    booked_of,
    earlier_of,
    factors_of,
    window_of,
)
from lightning_echo.pipeline.demand_batches import DemandBatches, WaitingForBatch
from lightning_echo.pipeline.pipelines import Layout, Opening, Pipeline, Start, rebuilt_loader
from lightning_echo.pipeline.prefetch import WorkerProcesses
from lightning_echo.pipeline.reads import Pools, ReadAhead
from lightning_echo.pipeline.requests import BatchRequests
from lightning_echo.plan.demand import Dealing, DemandRule, delivered_before
from lightning_echo.plan.journal import Begin, ReplayedDealing
from lightning_echo.plan.memory import make_plan
from lightning_echo.plan.order import Order
from lightning_echo.plan.plan import Plan, Reuse, mix


class ReadByIndex(Protocol):
    """What this needs of a kind of loader: `Indexed`, in ``kinds.py``."""

    loader: Any
    num_workers: int

    @property
    def prefetched_batches(self) -> int: ...

    @property
    def may_run_in_thread(self) -> bool: ...

    @property
    def is_foreseeable(self) -> bool: ...

    def reading(self, opening: Opening) -> ReadAhead | None: ...

    def order(self, layout: Layout, distance: int, seed: int, rank: int) -> Order: ...


def examples_on_demand(kind: ReadByIndex, opening: Opening) -> Pipeline:
    """Starts the pipeline of ``demand.py``."""
    launch, choice, shape, loader = opening.launch, opening.choice, opening.shape, kind.loader
    caching = None if opening.cache is None else opening.cache.caching(None)
    reads_many = choice.make_stages(loader.dataset).load_many is not None
    reading = None if reads_many else kind.reading(opening)
    order = kind.order(opening.layout, 0, launch.seed, opening.rank)
    if launch.state["order"] is not None:
        order.load(launch.state["order"])
    pass_length, workers = opening.layout.pass_length, max(kind.num_workers, 1)
    ahead = reading.window(pass_length // workers) if reading is not None and kind.is_foreseeable else 0
    window = window_of(shape.batch_size, kind.prefetched_batches, workers, ahead)
    saved, held = launch.state.get("demand"), min(opening.shape.buffer_size, pass_length) // workers
    begin = Begin(
        number=launch.begin_at.number if saved is None else saved["number"],
        booked=booked_of(saved, launch.begin_at.position),
        max_factor=launch.factor if saved is None else saved["max_factor"],
        conditions=_conditions_of(kind, opening, held=held, reads_blocks=reads_many),
    )
    repeated = None if launch.repeated is None else Repeated(launch.repeated, begin)
    dealing = (
        Dealing(
            begin.booked,
            pass_length=pass_length,
            block=shape.batch_size,
            workers=workers,
            window=window,
            delivered_before=delivered_before(
                earlier_of(saved), pass_length=pass_length, replicas=opening.layout.replicas, rank=opening.rank
            ),
        )
        if repeated is None
        else ReplayedDealing(
            repeated.stretch, pass_length=pass_length, block=shape.batch_size, window=window, reads_blocks=reads_many
        )
    )
    if launch.journal is not None:
        launch.journal.begin(begin)
    # Without workers, nothing is read while a step runs, except by threads.
    most_factor = 1.0 if not kind.num_workers and reading is None else math.inf
    requests = DemandRequests(
        dealing,
        order,
        workers=workers,
        number=begin.number,
        size_of=shape.size_of,
        factors=factors_of(saved, launch.factor),
        most_factor=most_factor,
        earlier=None if saved is None else saved.get("earlier"),
        journal=launch.journal,
        repeated=repeated,
    )
    words, processes = Words(loader), WorkerProcesses(launch.worker_init_fn)
    rule = DemandRule(opening.key, launch.factor, held)
    examples = DemandExamples(
        loader.dataset,
        choice.make_stages,
        opening.key,
        loader.collate_fn,
        caching,
        reading,
        words=words,
        rule=rule,
        most_overtaking=0 if reading is None else max(min(OVERTAKING * reading.threads, pass_length // 4), shape.batch_size),
    )
    in_thread = kind.num_workers > 0 and kind.may_run_in_thread
    timeout = 0 if in_thread else loader.timeout  # in a thread, it counts from when the training asks
    batches = iter(rebuilt_loader(loader, requests, examples, opening.key, processes, timeout=timeout))
    return DemandPipeline(
        requests,
        batches,
        words,
        processes,
        Waiting(requests, processes, loader.dataset, loader.timeout, opening.say, words),
        in_thread=in_thread,
        # A batch must not be due when it is requested, or its worker never reads. A thread requests it some batches earlier.
        most_lead=max(kind.prefetched_batches - (not in_thread), 0),
        read_at_once=shape.batch_size if reads_many else 1,
        pools=None if reading is None else reading.pools,
    )


def _conditions_of(kind: ReadByIndex, opening: Opening, *, held: int, reads_blocks: bool) -> dict[str, Any]:
    """Returns what must be the same for a replay, by name. ``held``: examples in the memory of a worker."""
    return {
        "seed": opening.launch.seed,
        **opening.layout.state(),
        "rank": opening.rank,
        "workers": kind.num_workers,
        "insertion_point": opening.choice.point.value,
        "examples_held": held,
        "reads_whole_batches": reads_blocks,
    }


def plan_of_reads(opening: Opening) -> Plan:
    """Returns a plan in which each batch is read once, from the first one that was not delivered on demand."""
    plan = make_plan(replace(opening.shape, buffer_size=1, reuse=Reuse.each), 1.0)
    plan.position = plan.number = _begin_of(opening).position
    return plan


def _begin_of(opening: Opening) -> Start:
    """Returns where a run on demand over whole batches begins: its position is the number of those that were delivered fresh."""
    saved = opening.launch.state.get("demand")
    return opening.launch.begin_at if saved is None else Start(saved["frontier"], saved["number"])


def batches_on_demand(
    loader: Any,
    opening: Opening,
    requests: BatchRequests,
    batches: Iterator[Any],
    words: Words,
    workers: WorkerProcesses,
    pools: Pools | None,
) -> Pipeline:
    """Returns the pipeline of ``demand_batches.py``."""
    launch, shape = opening.launch, opening.shape
    saved = launch.state.get("demand")
    most_held = min(shape.buffer_size, shape.batches_per_pass)
    return DemandBatches(
        requests,
        batches,
        words,
        workers,
        WaitingForBatch(requests, workers, loader.dataset, loader.timeout, opening.say, pools=pools),
        DemandRule(mix(shape.seed, opening.rank), launch.factor, most_held),
        begin_at=_begin_of(opening),
        factors=factors_of(saved, launch.factor),
    )
