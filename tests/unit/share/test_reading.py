"""The reader's order, in which each pass has each index once; and which item of it stands at which position of a training."""

from itertools import chain, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_echo.pipeline.ahead import AheadOrder
from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.pipeline.pipelines import Layout
from lightning_echo.plan.plan import PlanShape, Reuse
from lightning_echo.share.parts import Dealing, Items, Wanted
from lightning_echo.share.pipeline import item_at, shared_shape, start_at
from lightning_echo.share.reading import distance_of, order_of
from lightning_echo.share.window import CHUNK

LENGTH, PASSES = 61, 6


def source(**options):
    return kind_of(DataLoader(range(LENGTH), **{"shuffle": True, **options}))


def ahead_of(kind):
    order = order_of(kind, 7)
    return AheadOrder(order, order.pass_length, crosses=kind.is_own_order)


def stream(begin=0, count=PASSES * LENGTH, **options):
    """The indices of so many items from ``begin`` on."""
    found = []
    for chunk in islice(dealing_of(begin, **options).chunks_of(0), count // CHUNK + 2):
        found += map(chunk.index_of, chunk.wanted)
    return found[:count]


def dealing_of(begin, ahead=0, order=None, **options):
    """What deals all chunks from an item on, where everything is wanted."""
    return Dealing(order or ahead_of(source(**options)), Wanted(begin), begin, ahead)


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"shuffle": None, "sampler": list(range(LENGTH))}])
def test_each_pass_has_each_index_once_and_two_uses_are_a_third_of_a_pass_apart(options):
    indices = stream(**options)
    last_seen = {}
    for number in range(PASSES):
        assert sorted(indices[number * LENGTH : (number + 1) * LENGTH]) == list(range(LENGTH))
    for item, index in enumerate(indices):
        assert item - last_seen.get(index, -LENGTH) >= LENGTH // 3
        last_seen[index] = item


@pytest.mark.parametrize(("length", "replicas", "drop_last"), [(61, 1, False), (61, 4, False), (10**9, 3, True)])
def test_a_training_holds_no_example_for_longer_than_the_reader_keeps_two_uses_apart(length, replicas, drop_last):
    here = -(-length // replicas)
    batches = here // 4 if drop_last else -(-here // 4)
    last = 4 if drop_last else here - (batches - 1) * 4
    layout = Layout(length, replicas, 4, last, batches)
    shape = PlanShape(
        batch_size=4, last_batch_size=last, batches_per_pass=batches, workers=2, buffer_size=10**7, seed=0, reuse=Reuse.memory
    )
    found = shared_shape(shape, 0, layout, Items())
    assert 4 <= found.buffer_size <= found.most_distance <= distance_of(length) / replicas


def test_a_reader_that_begins_within_a_pass_has_the_same_indices_in_chunks_cut_at_the_same_items():
    whole = stream()
    for begin in (1, 32, 60, 61, 150):
        assert stream(begin, 100) == whole[begin : begin + 100]
    first, second = islice(dealing_of(40).chunks_of(0), 2)
    assert (first.first, first.wanted, len(first.indices)) == (CHUNK, list(range(40, 2 * CHUNK)), CHUNK)
    assert (second.first, second.wanted) == (2 * CHUNK, list(range(2 * CHUNK, 3 * CHUNK)))


OWN_SAMPLER = {"shuffle": None, "sampler": list(range(LENGTH))}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 3), st.sampled_from([{}, OWN_SAMPLER]))
def test_whoever_asks_gets_the_next_chunk_and_all_together_have_each_once_in_their_order(turns, ahead, options):
    dealing = dealing_of(40, ahead, **options)
    workers = [dealing.chunks_of(number) for number in range(4)]
    of_each = {number: [] for number in range(4)}
    for number in turns:
        of_each[number].append(next(workers[number]))
    for number in of_each:
        dealing.ending.add(number)
        of_each[number] += workers[number]  # what it was told, and no more
    for mine in of_each.values():
        assert [chunk.first for chunk in mine] == sorted(chunk.first for chunk in mine)
        told = [index for chunk in mine for index in chunk.ahead]
        asked = [index for chunk in mine for index in chunk.indices]
        assert told == asked[CHUNK:] if ahead and not options else len(told) < max(len(asked), 1)
    done = sorted(chain.from_iterable(of_each.values()), key=lambda chunk: chunk.first)
    assert [chunk.first for chunk in done] == list(range(CHUNK, CHUNK + CHUNK * len(done), CHUNK))
    assert dealing.next_item == max(CHUNK + CHUNK * len(done), 40)
    assert [chunk._replace(ahead=[]) for chunk in done] == list(islice(dealing_of(40, **options).chunks_of(0), len(done)))


def test_a_worker_is_told_its_later_chunks_once_each_and_a_sampler_of_ones_own_is_not_asked_ahead_of_its_pass():
    dealing = dealing_of(0, 2)
    one, other = (dealing.chunks_of(number) for number in range(2))
    first, second = next(one), next(one)
    assert [len(chunk.ahead) for chunk in (first, second)] == [2 * CHUNK, CHUNK]
    assert next(one).indices == first.ahead[CHUNK:]
    assert second.indices == first.ahead[:CHUNK]
    assert len(next(other).ahead) == 2 * CHUNK
    order = ahead_of(source(**OWN_SAMPLER))
    for chunk in islice(dealing_of(0, 2, order).chunks_of(0), 12):
        assert (order.position - 1) // LENGTH == (chunk.first + CHUNK - 1) // LENGTH


def layout_of(length, replicas, batch_size, drop_last):
    """A layout as that of a ``DataLoader`` over so many examples."""
    here = -(-length // replicas)
    batches = here // batch_size if drop_last else -(-here // batch_size)
    last = batch_size if drop_last else here - (batches - 1) * batch_size
    return Layout(length=length, replicas=replicas, batch_size=batch_size, last_batch_size=last, batches_per_pass=batches)


layouts = st.builds(layout_of, st.integers(1, 60), st.integers(1, 4), st.integers(1, 9), st.booleans()).filter(
    lambda layout: layout.batches_per_pass > 0
)


@given(layouts, st.integers(0, 3))
def test_the_ranks_together_have_each_item_of_a_pass_and_fill_up_with_their_last_ones(layout, number):
    first = number * layout.pass_length
    of_ranks = [
        [item_at(layout, rank, first + offset) - number * layout.length for offset in range(layout.pass_length)]
        for rank in range(layout.replicas)
    ]
    slots = sorted(slot for rank in of_ranks for slot in rank)
    delivered = layout.pass_length * layout.replicas
    if delivered <= layout.length:
        assert slots == list(range(delivered))  # the tail is dropped
    else:
        assert set(slots) == set(range(layout.length))
        assert len(slots) - layout.length < layout.replicas
    for rank in of_ranks:
        assert rank == sorted(rank)


@given(layouts, st.integers(0, 300))
def test_a_start_is_at_a_batch_of_its_own_of_which_nothing_is_gone(layout, item):
    start = start_at(layout, item)
    number, offset = divmod(start.position, layout.pass_length)
    assert offset % layout.batch_size == 0
    assert start.number == number * layout.batches_per_pass + offset // layout.batch_size
    assert item_at(layout, 0, start.position) >= item
    if start.number:  # the batch before would begin with what is gone
        before_pass, before_batch = divmod(start.number - 1, layout.batches_per_pass)
        before = before_pass * layout.pass_length + before_batch * layout.batch_size
        assert item_at(layout, 0, before) < item
