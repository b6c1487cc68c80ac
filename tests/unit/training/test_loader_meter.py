"""What workers cost: of each loader as it is measured, of several as far as the cost model can tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from spent import spent

from lightning_echo.insertion import InsertionPoint
from lightning_echo.loader.state import EchoCounts
from lightning_echo.measure.control import PipelineCosts
from lightning_echo.pipeline.worker import StageSeconds
from lightning_echo.training.loaders import EchoLoaders
from lightning_echo.training.meters import LoaderMeter, SecondsPerBatch, costs_of

DEVICE = 0.01


def loader(factor: float = 2.0, workers: int = 2, point: str = "after_augmentation") -> Any:
    """In the place of an `EchoLoader`."""
    return SimpleNamespace(
        factor=factor,
        num_workers=workers,
        insertion_point=InsertionPoint(point),
        delivered_batches=0,
        is_running=False,
        settled_at=0,
        counts=EchoCounts(),
        seconds=StageSeconds(),
        reads_ahead=False,
    )


def deliver(one: Any, batches: int, *, fresh: int = 4, size: int = 8, stages: Any = (0.4, 0.2, 0.1)) -> None:
    for _ in range(batches):
        one.delivered_batches, one.is_running = one.delivered_batches + 1, True
        one.counts += EchoCounts(fresh, size - fresh)
        one.seconds = spent(one.seconds, fresh, stages)


def test_the_first_batches_of_workers_count_neither_as_cost_nor_as_judged() -> None:
    one = loader(workers=2)
    meter = LoaderMeter(one)
    for stages in [(9.0, 9.0, 9.0)] * 2 + [(0.4, 0.2, 0.1)] * 3:
        deliver(one, 1, stages=stages)
        meter.end_step(one)
    assert meter.measure(one).seconds[1:] == pytest.approx((0.2, 0.1))
    assert meter.judged_batches(one) == 3
    one.settled_at = 4
    assert meter.judged_batches(one) == 1
    assert meter.batches(one) == 5


def test_workers_that_start_again_for_an_epoch_have_first_batches_again() -> None:
    """As after a reload that makes a new loader, or where somebody has closed it."""
    one = loader(workers=2)
    meter = LoaderMeter(one)
    deliver(one, 4)
    one.is_running = False
    meter.begin_epoch(one)
    for stages in [(9.0, 9.0, 9.0)] * 2 + [(0.4, 0.2, 0.1)] * 3:
        deliver(one, 1, stages=stages)
        meter.end_step(one)
    assert meter.measure(one).seconds[1:] == pytest.approx((0.2, 0.1))
    assert (meter.batches(one), meter.judged_batches(one)) == (5, 3)
    meter.begin_epoch(one)  # they live on
    deliver(one, 3)
    assert meter.judged_batches(one) == 6


@pytest.mark.parametrize(("workers", "judged"), [(0, 5), (2, 3)])
def test_batches_that_are_left_out_where_workers_start_again_are_not_taken_for_delivered(workers: int, judged: int) -> None:
    """As where the data set has grown: the pass under way ends, and batches are numbered from the next one on."""
    one = loader(workers=workers)
    meter = LoaderMeter(one)
    deliver(one, 4)
    meter.end_step(one)
    one.is_running = False
    meter.begin_epoch(one)
    one.delivered_batches += 30
    for _ in range(5):
        deliver(one, 1)
        meter.end_step(one)
    assert meter.measure(one).seconds == pytest.approx((0.4 / 4 * 8, 0.2, 0.1))
    assert (meter.batches(one), meter.judged_batches(one)) == (5, judged)


def costs(parts: dict[str, Any], seconds: Any, *, in_step: bool = True, beside: Any = ()) -> PipelineCosts | None:
    """What is made of seconds of source, rest and collate: by name of a loader, one triple for each rank."""
    of_ranks = {name: [SecondsPerBatch(*each) for each in ranks] for name, ranks in seconds.items()}
    return costs_of(EchoLoaders(parts, beside), of_ranks, DEVICE, in_step=in_step)


def test_with_workers_the_costs_are_those_of_the_slowest_loader_on_the_slowest_rank() -> None:
    parts = {"a": loader(workers=4), "b": loader(workers=1, point="after_batching")}
    # per batch at factor 2: a (0.8 / 2 + 0.1) / 4 = 0.125 and (0.4 / 2 + 0.1) / 4; b 0.2 / 2 and 0.4 / 2 on rank 1
    stages = {"a": [(0.8, 0.1, 0.0), (0.4, 0.1, 0.0)], "b": [(0.2, 0.0, 0.0), (0.3, 0.0, 0.1)]}
    assert costs(parts, stages) == PipelineCosts("after_batching", 0.3, 0.0, 0.1, DEVICE, 1)
    stages["b"] = [(0.1, 0.0, 0.0)] * 2
    assert costs(parts, stages) == PipelineCosts("after_augmentation", 0.8, 0.1, 0.0, DEVICE, 4)


def test_without_workers_loaders_take_turns_and_their_costs_add_up() -> None:
    parts = {"a": loader(workers=0), "b": loader(workers=0)}
    found = costs(parts, {"a": [(0.8, 0.1, 0.05)], "b": [(0.2, 0.3, 0.15)]})
    assert found is not None
    assert (found.insertion_point, found.workers) == ("after_augmentation", 0)
    assert (found.source_seconds, found.rest_seconds, found.collate_seconds) == pytest.approx((1.0, 0.4, 0.2))


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        ({"a": loader(2), "b": loader(3)}, {}),
        ({"a": loader(), "b": loader(workers=0)}, {}),
        ({"a": loader(), "b": loader()}, {"in_step": False}),
        ({"a": loader(), "b": loader()}, {"beside": ("c",)}),
    ],
)
def test_where_it_cannot_be_told_nothing_is_said(parts: Any, options: Any) -> None:
    stages = {"a": [(0.8, 0.1, 0.0)], "b": [(0.2, 0.0, 0.0)]}
    assert costs(parts, stages, **options) is None
