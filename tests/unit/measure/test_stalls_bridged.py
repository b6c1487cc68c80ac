"""`stalls_bridged`: the estimate is compared with the same training without echoes, both in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice, repeat

import pytest

from lightning_echo.measure.summary import EpochReport, stalls_bridged

SIZE = 8  # examples of a batch
AHEAD = 2  # batches that the worker makes ahead of the training


def training(reads: Iterator[float], redone: float, step: float, steps: int, *, echoes: bool) -> list[tuple[int, float, float]]:
    """One worker reads, and makes a batch in ``redone`` seconds. Returns (fresh, seconds of reading, of waiting) of each step.

    On demand, a batch that the training waits for takes no further example if it has one.
    """
    found: list[tuple[int, float, float]] = []
    begun: list[float] = []  # when the steps begin
    worker = asked = 0.0
    for number in range(steps):
        worker = max(worker, begun[number - AHEAD] if number >= AHEAD else 0.0)
        fresh, read = 0, 0.0
        while fresh < SIZE and not (echoes and fresh and number and worker >= asked):
            seconds = next(reads)
            fresh, read, worker = fresh + 1, read + seconds, worker + seconds
        worker += redone
        begun.append(max(asked, worker))
        found.append((fresh, read, begun[-1] - asked))
        asked = begun[-1] + step
    return found


def reports_of(run: list[tuple[int, float, float]], redone: float, step: float, length: int, *, measured: bool):
    for first in range(0, len(run), length):
        epoch = run[first : first + length]
        fresh, read, waited = (sum(column) for column in zip(*epoch, strict=True))
        yield EpochReport(
            first // length,
            len(epoch),
            4.0,
            fresh,
            SIZE * len(epoch) - fresh,
            data_wait_seconds=waited / len(epoch),
            step_seconds=step,
            fresh_batches=fresh / SIZE,
            fresh_batch_seconds=read / fresh * SIZE + redone if measured else None,
        )


def steady() -> Iterator[float]:
    return repeat(0.01)


def heavy_tail() -> Iterator[float]:
    draws = random.Random(3)
    return iter(lambda: 0.01 * draws.lognormvariate(-0.5, 1.0), None)


def stalls() -> Iterator[float]:
    """Every 200th read takes as long as 100 others."""
    return (1.0 if number % 200 == 199 else 0.01 for number in range(10**9))


@pytest.mark.parametrize("source", [steady, heavy_tail, stalls])
# Where the workers' time is not measured, that of making a batch counts as the source's.
@pytest.mark.parametrize(("redone", "measured"), [(0.0, True), (0.01, True), (0.0, False)])
@pytest.mark.parametrize("step", [0.02, 0.05])
@pytest.mark.parametrize("length", [800, 20, 4])
def test_it_is_what_the_same_steps_take_longer_without_echoes(
    source: Callable[[], Iterator[float]], redone: float, step: float, length: int, measured: bool
) -> None:
    steps = 800
    bridging = training(source(), redone, step, steps, echoes=True)
    waiting = training(source(), redone, step, steps, echoes=False)
    longer = sum(waited for *_, waited in waiting) - sum(waited for *_, waited in bridging)
    said = stalls_bridged(list(reports_of(bridging, redone, step, length, measured=measured)))
    assert longer > 10, "the test tests something"
    assert said == pytest.approx(longer, rel=0.1)


@pytest.mark.parametrize("step", [0.1, 0.2])
def test_behind_a_source_that_rests_it_is_nothing(step: float) -> None:
    """A batch takes 0.08 s. Echoes, if there were some, have saved nothing: the source had time for as many fresh examples."""
    run = training(islice(steady(), 10**6), 0.0, step, 100, echoes=False)
    (report,) = reports_of(run, 0.0, step, 100, measured=True)
    some = EpochReport(
        0, 100, 1.3, 600, 200, data_wait_seconds=0.0, step_seconds=step, fresh_batches=75, fresh_batch_seconds=0.08
    )
    assert stalls_bridged([report]) == stalls_bridged([some]) == 0


def test_it_is_at_most_the_time_of_the_fresh_batches_in_whose_place_echoes_came() -> None:
    """Three of 100 batches were echoes. That the steps were quicker than the source beyond these is not a bridged stall."""
    report = EpochReport(
        0, 100, 1.03, 776, 24, data_wait_seconds=0.0, step_seconds=0.02, fresh_batches=97, fresh_batch_seconds=0.1
    )
    assert stalls_bridged([report]) == pytest.approx(3 * 0.1)


def test_while_nothing_has_arrived_it_is_the_time_that_has_passed() -> None:
    report = EpochReport(0, 50, 8.0, 0, 400, data_wait_seconds=0.0, step_seconds=0.02, fresh_batches=0)
    assert stalls_bridged([report]) == pytest.approx(1.0)
