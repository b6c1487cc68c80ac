"""What the plan costs in the main process: time per example, and time and memory before the first batch.

The only benchmark that looks inside: nothing public does the planning alone.
"""

from __future__ import annotations

import pickle
import statistics
import time
import tracemalloc

from report import Table, progress, verdict
from workloads import WORKERS

from lightning_echo.fetching.requests import ExampleRequests
from lightning_echo.planning.each_plan import EachPlan
from lightning_echo.planning.order import ShuffledOrder
from lightning_echo.planning.shape import PlanShape

_LENGTHS = (10**4, 10**8)
_REQUIRED_MICROSECONDS = 3.0


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
    batches = -(-length // batch_size)
    shape = PlanShape(
        batch_size=batch_size,
        last_batch_size=length - (batches - 1) * batch_size,
        batches_per_pass=batches,
        workers=WORKERS,
        buffer_size=2 * batch_size * WORKERS,
        seed=1,
    )
    order = ShuffledOrder(length, shape.pass_length, 1, 0, shape.max_age, seed=2)
    return ExampleRequests(EachPlan(shape, factor), order, whole_calls=False)


def _seconds_per_example(requests: ExampleRequests, batches: int, batch_size: int) -> float:
    """Processor time: nothing here waits, and what other programs take is not the plan's."""
    began = time.thread_time()
    for _ in range(batches):
        requests.delivered = next(requests).number
    return (time.thread_time() - began) / (batches * batch_size)
