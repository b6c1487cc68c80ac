"""The sizes of a plan are those of the plain loader, and the least buffer just holds the echoes of a batch."""

from fractions import Fraction
from math import floor

import pytest
from ledger import plain_batch_sizes

from lightning_echo.plan.plan import PlanShape, smallest_buffer

# Data set length, batch size, drop_last.
CUTS = [(320, 8, False), (325, 8, False), (325, 8, True), (300, 7, False), (1003, 32, True), (1003, 32, False), (50, 1, False)]


@pytest.mark.parametrize("factor", [1, 1.1, 1.5, 2, 2.37, 3.3, 4, 8, 100])
@pytest.mark.parametrize("batch_size", [1, 2, 7, 10, 32])
def test_the_smallest_buffer_holds_the_echoes_of_a_batch_for_each_worker(batch_size, factor):
    echoes = batch_size - floor(batch_size / Fraction(str(factor)))
    assert [smallest_buffer(batch_size, factor, workers) for workers in (0, 1, 2, 3)] == [echoes, echoes, 2 * echoes, 3 * echoes]


@pytest.mark.parametrize(("length", "batch_size", "drop_last"), CUTS)
def test_batches_have_the_sizes_of_the_plain_loader_pass_after_pass(length, batch_size, drop_last):
    sizes = plain_batch_sizes(length, batch_size, drop_last)
    shape = PlanShape(
        batch_size=batch_size,
        last_batch_size=sizes[-1],
        batches_per_pass=len(sizes),
        workers=2,
        buffer_size=4 * batch_size,
        seed=0,
    )
    assert [shape.size_of(number) for number in range(3 * len(sizes))] == 3 * sizes
    assert shape.pass_length == sum(sizes)


def test_a_short_pass_leaves_the_next_one_freedom_to_be_shuffled():
    """400 examples, four workers with two batches of 32 each: keeping indices a whole pass apart would freeze the order."""
    shape = PlanShape(batch_size=32, last_batch_size=16, batches_per_pass=13, workers=4, buffer_size=256, seed=0)
    assert shape.buffer_size + shape.batch_size <= shape.max_age <= shape.pass_length - 50
