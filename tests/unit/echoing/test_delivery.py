"""Counts and progress are those of the batch in use, also where the next one is fetched before it is done with."""

import pickle

import pytest

from lightning_echo.echoing.counts import EchoCounts
from lightning_echo.echoing.delivery import Delivery
from lightning_echo.echoing.epochs import Progress


def item(number, fresh=1, echoed=2):
    return number, (fresh, echoed, 0, 0.5, 0.0, 0.0)


class Source:
    """Fetches numbered batches; each third time a pass is over."""

    def __init__(self):
        self.fetched = 0

    def __call__(self):
        self.fetched += 1
        return None if self.fetched % 4 == 0 else item(self.fetched)


def begun(ahead=None):
    delivery, source = Delivery(), Source()
    delivery.fetches_ahead = ahead
    delivery.begin_epoch(-1, keeps_length=False)
    return delivery, source


def test_whoever_uses_what_it_fetches_counts_it_at_once():
    delivery, source = begun()
    assert [delivery.fetch(source) for _ in range(3)] == [1, 2, 3]
    assert (delivery.counts, delivery.last, delivery.batches) == (EchoCounts(3, 6), EchoCounts(1, 2), 3)
    assert (delivery.seconds.source, delivery.is_ahead) == (1.5, False)


def test_a_batch_that_is_fetched_ahead_does_not_count_until_the_next_is_fetched():
    delivery, source = begun(lambda: True)
    assert delivery.fetch(source) == 1
    assert (delivery.is_ahead, delivery.counts, delivery.batches) == (True, EchoCounts(), 0)
    assert delivery.fetch(source) == 2
    assert (delivery.counts, delivery.last, delivery.batches) == (EchoCounts(1, 2), EchoCounts(1, 2), 1)
    assert delivery.in_use.progress == {"epoch": 0, "epoch_batches": -1, "in_epoch": 1, "delivered": 1}


def test_at_the_end_of_an_epoch_everything_is_in_use():
    delivery, source = begun(lambda: True)
    for _ in range(3):
        delivery.fetch(source)
    delivery.end_pass()
    assert delivery.passes_over == 0
    with pytest.raises(StopIteration):
        delivery.fetch(source)
    assert (delivery.is_ahead, delivery.counts, delivery.batches, delivery.passes_over) == (False, EchoCounts(3, 6), 3, 1)
    assert delivery.in_use.progress == {"epoch": 0, "epoch_batches": 3, "in_epoch": 3, "delivered": 3}


@pytest.mark.parametrize(("used", "epoch"), [(0, 0), (1, 1)])
def test_what_was_fetched_and_not_used_is_the_first_of_the_next_iteration(used, epoch):
    """Before anything was used the epoch had not begun: Lightning makes an iterator twice where it reloads."""
    delivery, source = begun(lambda: True)
    for _ in range(used + 1):
        last = delivery.fetch(source)
    delivery.begin_epoch(-1, keeps_length=False)
    assert (delivery.progress.epoch, delivery.progress.in_epoch, delivery.batches) == (epoch, 0, used)
    assert delivery.fetch(source) == last
    assert source.fetched == used + 1
    delivery.fetch(source)
    assert (delivery.batches, delivery.counts) == (used + 1, EchoCounts(used + 1, 2 * used + 2))
    assert delivery.seconds.source == 0.5 * source.fetched


def test_where_it_is_not_ahead_after_all_nothing_is_delivered_twice():
    delivery, source = begun(lambda: False)
    delivery.fetch(source)
    delivery.begin_epoch(-1, keeps_length=False)
    assert (delivery.fetch(source), delivery.batches, delivery.progress.epoch) == (2, 2, 1)


def test_going_elsewhere_forgets_what_was_fetched():
    delivery, source = begun(lambda: True)
    delivery.fetch(source)
    delivery.begin_at(Progress(delivered=7), EchoCounts(5, 5), 2)
    assert (delivery.batches, delivery.counts, delivery.last, delivery.passes_over) == (7, EchoCounts(5, 5), EchoCounts(), 2)
    assert not delivery.is_ahead


def test_another_process_gets_what_was_fetched_and_nothing_that_waits():
    delivery, source = begun(lambda: True)
    delivery.fetch(source)
    copied = pickle.loads(pickle.dumps(delivery))
    assert (copied.counts, copied.batches, copied.fetches_ahead, copied.is_ahead) == (EchoCounts(1, 2), 1, None, False)
