"""Which item stands at which position: every example once, the same for all ranks, wherever a training enters."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_echo.pipeline.kinds import Layout
from lightning_echo.share.pipeline import SharedOrder, item_at, start_at


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


@given(layouts, st.integers(0, 100), st.lists(st.integers(0, 20), max_size=5))
def test_items_are_taken_in_order_from_where_it_was_told_to_go(layout, position, counts):
    order = SharedOrder(layout, 0, 0, "a")
    order.seek(position)
    taken = [item for count in counts for item in order.take(count)]
    assert taken == [item_at(layout, 0, position + offset) for offset in range(sum(counts))]
    assert order.position == position + sum(counts)
