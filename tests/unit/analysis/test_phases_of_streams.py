"""The phases of a stream: it is measured as a whole, for as long as there is time."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_echo.analysis.phases import StepNumber, measure_stream


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(80, 3))


@pytest.mark.parametrize(("workers", "batches"), [(0, 2), (1, 3)])
def test_a_stream_that_is_cut_short_by_its_time_is_not_one_that_has_ended(workers, batches):
    steps, phases = measure_stream(DataLoader(Stream(), 4, num_workers=workers), StepNumber(30, str), 4, 0.0, str)
    assert (steps, len(phases.real)) == (30, batches)


def test_one_that_has_ended_is_too_short():
    with pytest.raises(ValueError, match="steps must be at most 20, the batches of the training loader, got 30"):
        measure_stream(DataLoader(Stream(), 4), StepNumber(30, str), 4, 60.0, str)


def test_if_no_number_of_steps_is_asked_for_there_are_as_many_as_the_stream_has():
    said = []
    steps, phases = measure_stream(DataLoader(Stream(), 4), StepNumber(None, said.append), 4, 60.0, str)
    assert (steps, len(phases.real)) == (20, 20)
    assert said == ["20 steps in each phase: the training loader has no more batches"]


class OwnIteration(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


@pytest.mark.parametrize(
    ("loader", "points"),
    [
        (DataLoader(Stream(), 4), ("after_augmentation", "after_batching", "after_transfer")),
        (DataLoader(Stream(), None), ("after_batching", "after_transfer")),
        (OwnIteration(Stream(), 4), ("after_batching", "after_transfer")),
    ],
    ids=["batches of examples", "opaque examples", "own iteration"],
)
def test_the_points_are_those_that_the_loader_allows(loader, points):
    _, phases = measure_stream(loader, StepNumber(4, str), 4, 60.0, str)
    assert phases.points == points
