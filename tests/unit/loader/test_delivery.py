"""Counts and progress are those of the batch in use, also where the next one is fetched before it is done with."""

import contextlib

import pytest

from lightning_echo.loader.epochs import BatchesUsed, Delivery, Progress
from lightning_echo.loader.state import EchoCounts
from lightning_echo.pipeline.worker import Report


def item(number, fresh=1, echoed=2):
    return number, Report(fresh, echoed, 0, 0.5, 0.0, 0.0)


class Source:
    """Fetches numbered batches; each third time a pass is over."""

    def __init__(self):
        self.fetched = 0

    def __call__(self, delivered):
        self.fetched += 1
        return None if self.fetched % 4 == 0 else item(self.fetched)


class Trainer:
    """Asks for a batch ahead, as Lightning does: 0 before its epoch begins, then one more whenever it takes one."""

    def __init__(self, delivery, source):
        self.delivery, self.source, self.in_run, self.in_epoch, self.waiting = delivery, source, 0, 0, []
        delivery.batches_used = lambda: BatchesUsed(self.in_run, self.in_epoch)

    def begin(self):
        self.in_epoch = 0
        self.delivery.begin_epoch(-1, keeps_length=False)
        self.waiting = [self.delivery.fetch(self.source)]

    def take(self):
        """Takes a batch into use, and asks for the next one; whether there was one."""
        batch = self.waiting.pop()
        with contextlib.suppress(StopIteration):
            self.waiting.append(self.delivery.fetch(self.source))
        self.in_run, self.in_epoch = self.in_run + 1, self.in_epoch + 1
        return batch


def training():
    delivery = Delivery()
    trainer = Trainer(delivery, Source())
    trainer.begin()
    return delivery, trainer


def test_a_batch_that_is_fetched_ahead_does_not_count_until_it_is_taken():
    delivery, trainer = training()
    assert (delivery.is_ahead, delivery.counts, delivery.batches) == (True, EchoCounts(), 0)
    assert trainer.take() == 1
    assert (delivery.is_ahead, delivery.counts, delivery.last, delivery.batches) == (True, EchoCounts(1, 2), EchoCounts(1, 2), 1)
    assert trainer.take() == 2
    assert (delivery.is_ahead, delivery.counts, delivery.batches) == (True, EchoCounts(2, 4), 2)
    assert delivery.in_use.progress == Progress(epoch=0, epoch_batches=-1, in_epoch=2, delivered=2)


def test_of_several_loaders_each_knows_by_what_was_taken_whether_its_last_batch_was():
    """The second one ends; the first one was asked before that, the third one was not."""
    deliveries = [Delivery() for _ in range(3)]
    taken = [0, 0]
    for delivery in deliveries:
        delivery.batches_used = lambda: BatchesUsed(*taken)
        delivery.begin_epoch(-1, keeps_length=False)
        delivery.fetch(lambda delivered: item(0))
    taken = [1, 1]
    for delivery in deliveries:
        delivery.fetch(lambda delivered: item(1))
    taken = [2, 2]
    deliveries[0].fetch(lambda delivered: item(2))
    with pytest.raises(StopIteration):
        deliveries[1].fetch(lambda delivered: None)
    taken = [3, 3]
    assert [delivery.batches for delivery in deliveries] == [2, 2, 2]
    assert [delivery.is_ahead for delivery in deliveries] == [True, False, False]


@pytest.mark.parametrize(("used", "epoch"), [(0, 0), (1, 1), (2, 1)])
def test_what_was_fetched_and_not_used_is_the_first_of_the_next_iteration(used, epoch):
    """Before anything was used the epoch had not begun: Lightning makes an iterator twice where it reloads."""
    delivery, trainer = training()
    for _ in range(used):
        trainer.take()
    trainer.begin()
    assert trainer.source.fetched == used + 1
    assert (delivery.progress.epoch, delivery.batches, delivery.counts) == (epoch, used, EchoCounts(used, 2 * used))
    assert trainer.take() == used + 1
    assert (delivery.batches, delivery.counts) == (used + 1, EchoCounts(used + 1, 2 * used + 2))
    assert delivery.seconds.source == 0.5 * (used + 1 if used == 2 else used + 2)


def test_the_lookups_of_a_batch_are_counted_once_also_if_it_is_used_in_a_later_iteration():
    delivery, counted = Delivery(), []
    delivery.add_lookups = lambda hits, misses, received, waited: counted.append((hits, misses))
    reports = iter([Report(2, hits=2), Report(2, misses=2), Report(0, 2), Report(3, hits=1, misses=2)])
    trainer = Trainer(delivery, lambda delivered: ("batch", next(reports)))
    trainer.begin()
    trainer.take()
    trainer.begin()  # the second batch was fetched, and not used
    assert counted == [(2, 0), (0, 2)]
    trainer.take()
    trainer.take()
    assert counted == [(2, 0), (0, 2), (1, 2)]


@pytest.mark.parametrize("length", [1, 3])
def test_one_of_several_loaders_that_begins_again_within_an_epoch_repeats_nothing(length):
    """Its end is told by its length, so that nothing was fetched in vain; one batch long, it ends before a batch is taken."""
    delivery, taken = Delivery(), [0, 0]
    delivery.batches_used = lambda: BatchesUsed(*taken)
    found = []
    for step in range(9):
        if step % length == 0:
            delivery.begin_epoch(length, keeps_length=False)
        found.append(delivery.fetch(lambda delivered: item(len(found))))
        taken = [step, step]
    assert found == list(range(9))
    assert (delivery.progress.epoch, delivery.progress.delivered) == (9 // length - 1, 9)


def test_a_pass_that_ended_before_a_batch_was_fetched_ahead_is_over_when_that_batch_is_in_use():
    delivery, trainer = training()

    items = [None, item(2)]
    fetch, delivery.fetch = delivery.fetch, lambda source: fetch(source, lambda: True)
    trainer.source = lambda delivered: items.pop(0)
    assert (trainer.take(), delivery.ended_passes) == (1, 0)
    trainer.source = lambda delivered: item(3)
    assert (trainer.take(), delivery.ended_passes) == (2, 1)
