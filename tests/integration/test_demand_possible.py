"""Where echo on demand is possible: what a loader says is what making it on demand would say."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from collection_runs import plain_loader
from demand_runs import Slow
from torch.utils.data import DataLoader, IterableDataset
from trainer_runs import Scans

from lightning_echo import EchoLoader

pytestmark = pytest.mark.usefixtures("read_here")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(12))


def indexed() -> DataLoader[Any]:
    return plain_loader("long", 1)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "by index": (indexed, {}),
    "without workers": (lambda: plain_loader("long"), {}),
    "a cache": (indexed, {"cache": "1MiB"}),
    "a stream": (lambda: DataLoader(Stream(), 4), {}),
    "batches": (lambda: [torch.arange(4)], {"insertion_point": "after_batching"}),
    "a batch sampler": (lambda: DataLoader(Scans(8), batch_sampler=[[0, 1], [2, 3]]), {}),
    "a point of whole batches": (indexed, {"insertion_point": "after_batching"}),
    "on the device": (indexed, {"insertion_point": "after_transfer"}),
    "each": (indexed, {"reuse": "each"}),
    "full passes": (indexed, {"epoch_length": "full_pass"}),
}


def loader_of(case: str, factor: float | str) -> EchoLoader:
    make, options = CASES[case]
    return EchoLoader(make(), factor, **options)


@pytest.mark.parametrize("case", CASES)
def test_a_loader_says_why_it_cannot_echo_on_demand_as_making_it_so_says(case: str) -> None:
    why = loader_of(case, 1).why_not_on_demand()
    with pytest.raises(ValueError, match="factor='demand' is impossible ") if why else nullcontext() as refused:
        assert loader_of(case, "demand").why_not_on_demand() == ""
    assert not why or f": {why}. " in str(refused.value)


def test_some_of_them_are_possible_and_some_are_not() -> None:
    possible = {case for case in CASES if not loader_of(case, 1).why_not_on_demand()}
    assert {"by index", "without workers", "a cache"} <= possible
    assert possible.isdisjoint({"on the device", "each", "full passes"})


def test_a_loader_that_was_made_with_a_factor_echoes_on_demand_from_its_first_batch_on() -> None:
    made, switched = (EchoLoader(Slow(0).train_dataloader(), factor, seed=7) for factor in ("demand", 1))
    switched.echo_on_demand(8)
    assert (switched.on_demand, switched.factor, repr(switched)) == (made.on_demand, made.factor, repr(made))
    assert switched.state_dict() == made.state_dict()
    next(iter(switched))
    assert switched.state_dict()["demand"] is not None
    with pytest.raises(RuntimeError, match="a run that has begun"):
        switched.echo_on_demand(4)
    switched.close()


WAITS, EMPTY = "a worker does not echo while a read lets it wait", "memory begins empty"


@pytest.mark.parametrize(
    ("case", "options", "is_said"),
    [
        ("by index", {}, True),
        ("by index", {"reads_in_flight": 4}, False),  # threads wait
        ("without workers", {}, False),  # of which more is said
        ("a point of whole batches", {}, False),  # the thread that fetches echoes
    ],
)
def test_that_a_worker_which_waits_for_a_read_does_not_echo_is_said_at_the_start(
    case: str, options: dict[str, Any], is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make, others = CASES[case]
    loader = EchoLoader(make(), "demand", **others, **options)
    with caplog.at_level("INFO", logger="lightning_echo"):
        next(iter(loader))
    loader.close()
    assert (WAITS in caplog.text) is is_said


@pytest.mark.parametrize(("factor", "is_said"), [("demand", True), (2, False)])
def test_that_memory_begins_empty_is_said_where_a_run_is_resumed(
    factor: float | str, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lightning_echo")
    loader, resumed = loader_of("by index", factor), loader_of("by index", factor)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    assert EMPTY not in caplog.text
    resumed.load_state_dict(state)
    next(iter(resumed))
    resumed.close()
    assert (EMPTY in caplog.text) is is_said
