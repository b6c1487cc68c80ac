"""What the plan costs in the main process: time per example, and time and memory before the first batch.

The only benchmark that looks inside: nothing public does the planning alone.
"""

from __future__ import annotations

import json
import pickle
import statistics
import time
import tracemalloc

from report import Table, progress, verdict
from workloads import WORKERS

from lightning_echo.pipeline.requests import ExampleRequests
from lightning_echo.plan.each import EachPlan
from lightning_echo.plan.memory import MemoryPlan
from lightning_echo.plan.order import ShuffledOrder
from lightning_echo.plan.plan import Plan, PlanShape, Reuse

_LENGTHS = (10**4, 10**8)
_REQUIRED_MICROSECONDS = 3.0
_HELD = (10**3, 10**5, 10**6)  # examples in memory
_REQUIRED_FROM_MEMORY = 2.0  # microseconds


def planning(quick: bool) -> Table:
    """Plan, order and request: what ``DataLoader`` waits for when it asks the workers for one more batch."""
    rounds, batches = (3, 200) if quick else (11, 500)
    cases = [(length, size, e) for length in _LENGTHS for size in (32, 128) for e in (1, 2.37, 4, 8)]
    requests = {case: _requests(*case) for case in cases}
    times: dict[tuple[int, int, float], list[float]] = {case: [] for case in cases}
    progress("planning")
    for _ in range(rounds + 1):
        for case in cases:
            times[case].append(_seconds_per_example(requests[case], batches, case[1]))
    rows = []
    for case in cases:
        middle = statistics.median(times[case][1:]) * 1e6
        sent = len(pickle.dumps(next(requests[case]), protocol=pickle.DEFAULT_PROTOCOL))
        rows.append((*case, middle, sent, _REQUIRED_MICROSECONDS, verdict(middle <= _REQUIRED_MICROSECONDS)))
    text = (
        f"processor time, {WORKERS} workers, shuffled, median of {rounds} runs of {batches} batches; "
        "bytes: the pickled request of a batch"
    )
    columns = ("examples", "batch", "e", "us per example", "bytes", "required", "passed")
    return Table("planning", text, columns, rows)


def planning_memory(quick: bool) -> Table:
    """The plan that draws echoes from all that memory holds, when memory is full."""
    rows = []
    for held in _HELD[:2] if quick else _HELD:
        progress(f"planning from a memory of {held:,} examples")
        plan = MemoryPlan(_shape(_LENGTHS[1], 32, held, Reuse.memory), 4)
        requests = _requests_of(MemoryPlan(plan.shape, 4))
        while plan.live_count < held:
            plan.next_batch()
            requests.delivered = next(requests).number
        alone, asked = [], []
        for _ in range(3 if quick else 11):
            began = time.thread_time()
            for _ in range(500):
                plan.next_batch()
            alone.append((time.thread_time() - began) / 500 / 32)
            asked.append(_seconds_per_example(requests, 500, 32))
        middle, began = statistics.median(alone) * 1e6, time.thread_time()
        state = plan.state()
        taken = (time.thread_time() - began) * 1e3
        found = (middle, statistics.median(asked) * 1e6, len(json.dumps(state)), taken)
        rows.append((held, *found, _REQUIRED_FROM_MEMORY, verdict(middle <= _REQUIRED_FROM_MEMORY)))
    columns = ("held", "plan us per example", "with order and request", "bytes of state", "state ms", "required", "passed")
    text = f"processor time, batch 32, factor 4, {WORKERS} workers; what is required is of the plan alone"
    return Table("planning_memory", text, columns, rows)


def start(quick: bool) -> Table:
    """Nothing is drawn up for the whole data set."""
    progress("start")
    rows = []
    for length in _LENGTHS:
        seconds = []
        for _ in range(5 if quick else 25):
            began = time.thread_time()
            next(_requests(length, 32, 4))
            seconds.append(time.thread_time() - began)
        tracemalloc.start()
        requests = _requests(length, 32, 4)
        next(requests)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        rows.append((length, statistics.median(seconds) * 1e3, peak / 1024))
    return Table(
        "start",
        "processor time of plan, order and first request, batch 32, factor 4: the same for any data set",
        ("examples", "ms before the first batch", "peak KiB"),
        rows,
    )


def _requests(length: int, batch_size: int, factor: float) -> ExampleRequests:
    return _requests_of(EachPlan(_shape(length, batch_size, 2 * batch_size * WORKERS), factor))


def _shape(length: int, batch_size: int, buffer_size: int, reuse: Reuse = Reuse.each) -> PlanShape:
    batches = -(-length // batch_size)
    return PlanShape(
        batch_size=batch_size,
        last_batch_size=length - (batches - 1) * batch_size,
        batches_per_pass=batches,
        workers=WORKERS,
        buffer_size=buffer_size,
        seed=1,
        reuse=reuse,
    )


def _requests_of(plan: Plan) -> ExampleRequests:
    order = ShuffledOrder(plan.shape.pass_length, plan.shape.pass_length, 1, 0, plan.shape.max_age, seed=2)
    return ExampleRequests(plan, order, whole_calls=False)


def _seconds_per_example(requests: ExampleRequests, batches: int, batch_size: int) -> float:
    """Processor time: nothing here waits, and what other programs take is not the plan's."""
    began = time.thread_time()
    for _ in range(batches):
        requests.delivered = next(requests).number
    return (time.thread_time() - began) / (batches * batch_size)
