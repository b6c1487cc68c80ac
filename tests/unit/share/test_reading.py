"""The reader's order: every pass has each index once, an index comes again late enough, and any reader may begin anywhere."""

from itertools import islice

import pytest
from torch.utils.data import DataLoader

from lightning_echo.pipeline.kinds import Layout, kind_of
from lightning_echo.plan.memory import make_plan
from lightning_echo.plan.plan import PlanShape, Reuse
from lightning_echo.share.pipeline import shared_shape
from lightning_echo.share.reading import chunks, distance_of, order_of
from lightning_echo.share.window import CHUNK

LENGTH, PASSES = 61, 6


def source(**options):
    return kind_of(DataLoader(range(LENGTH), **{"shuffle": True, **options}))


def stream(begin=0, count=PASSES * LENGTH, **options):
    """The indices of so many items from ``begin`` on."""
    found = []
    for chunk in islice(chunks(order_of(source(**options), 7), begin), count // CHUNK + 2):
        found += chunk.indices[chunk.skipped :]
    return found[:count]


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"shuffle": None, "sampler": list(range(LENGTH))}])
def test_each_pass_has_each_index_once_and_two_uses_are_a_third_of_a_pass_apart(options):
    indices = stream(**options)
    last_seen = {}
    for number in range(PASSES):
        assert sorted(indices[number * LENGTH : (number + 1) * LENGTH]) == list(range(LENGTH))
    for item, index in enumerate(indices):
        assert item - last_seen.get(index, -LENGTH) >= LENGTH // 3
        last_seen[index] = item


@pytest.mark.parametrize(("length", "apart"), [(2, 0), (61, 20), (786_431, 262_143), (10**10, 262_144)])
def test_what_lies_between_two_uses_is_a_third_of_a_pass_and_not_more_than_can_be_arranged_in_a_moment(length, apart):
    assert distance_of(length) == apart


@pytest.mark.parametrize(("length", "replicas", "drop_last"), [(61, 1, False), (61, 4, False), (10**9, 3, True)])
def test_a_training_holds_no_example_for_longer_than_the_reader_keeps_two_uses_apart(length, replicas, drop_last):
    here = -(-length // replicas)
    batches = here // 4 if drop_last else -(-here // 4)
    last = 4 if drop_last else here - (batches - 1) * 4
    layout = Layout(length, replicas, 4, last, batches)
    shape = PlanShape(
        batch_size=4, last_batch_size=last, batches_per_pass=batches, workers=2, buffer_size=10**7, seed=0, reuse=Reuse.memory
    )
    found = shared_shape(shape, 0, layout)
    assert 4 <= found.buffer_size <= found.most_distance <= distance_of(length) / replicas


@pytest.mark.parametrize(("batch_size", "distinct"), [(20, True), (21, False)])
def test_batches_larger_than_what_the_reader_keeps_apart_have_exact_counts_and_may_repeat_an_index(batch_size, distinct):
    layout = Layout(60, 1, batch_size, 60 % batch_size or batch_size, -(-60 // batch_size))
    sizes = {"batch_size": batch_size, "last_batch_size": layout.last_batch_size, "batches_per_pass": layout.batches_per_pass}
    found = shared_shape(PlanShape(**sizes, workers=0, buffer_size=40, seed=0), 0, layout)
    assert found.distinct == distinct
    plan = make_plan(found, 2)
    fresh = sum(plan.next_batch().fresh for _ in range(30))
    assert fresh < 0.6 * sum(found.size_of(number) for number in range(30))


def test_a_reader_that_begins_within_a_pass_has_the_same_indices_in_chunks_cut_at_the_same_items():
    whole = stream()
    for begin in (1, 32, 60, 61, 150):
        assert stream(begin, 100) == whole[begin : begin + 100]
    first, second = islice(chunks(order_of(source(), 7), 40), 2)
    assert (first.first, first.skipped, len(first.indices)) == (CHUNK, 40 - CHUNK, CHUNK)
    assert (second.first, second.skipped) == (2 * CHUNK, 0)
