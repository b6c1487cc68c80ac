"""A started pipeline hands out what was fetched, and says how far ahead batches may be planned."""

import weakref
from types import SimpleNamespace

from batch_cases import batches_shape
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_echo.pipeline.batches import LiveBatch, PassOver, UseToCome
from lightning_echo.pipeline.kinds import IndexedBatches
from lightning_echo.pipeline.pipelines import IndexPipeline
from lightning_echo.pipeline.prefetch import DEPTH
from lightning_echo.pipeline.requests import BatchedOrder, BatchRequests
from lightning_echo.pipeline.worker import Report
from lightning_echo.plan.each import EachPlan
from lightning_echo.plan.order import SequentialOrder


class Requests:
    """Stands in for requests of any kind."""

    order = SimpleNamespace(exact=False)
    delivered = 0

    def change_factor(self, number, factor):
        self.changed = number, factor

    def state(self, delivered):
        return {"plan": delivered, "order": None}


class Log(list):
    """Stands in for workers and reader: notes in which order they are let go of."""

    def close(self):
        self.append("reader closed")

    def end_others(self):
        self.append("others ended")


def pipeline(batches, requests=None, **options):
    return IndexPipeline(requests or Requests(), batches, Log(), **options)


def test_batches_are_handed_out_with_their_reports_when_requests_have_heard_of_those_delivered():
    def batches():
        for _ in range(3):
            yield requests.delivered, Report(4)
        raise PassOver

    requests = Requests()
    started = pipeline(batches(), requests)
    assert [started.next_batch(delivered) for delivered in (5, 6, 9)] == [(5, Report(4)), (6, Report(4)), (9, Report(4))]
    assert started.state(3) == {"plan": 3, "order": None}
    assert started.exact is False
    started.change_factor(7, 2.5)
    assert requests.changed == (7, 2.5)
    assert started.next_batch(10) is None, "a pass has ended"


def test_a_use_on_the_device_is_made_when_it_is_handed_over_so_that_it_has_the_host_batch_until_one_is_prepared():
    live = LiveBatch([1.0])
    fetched = [(UseToCome(live, is_last), Report(1)) for is_last in (False, False, True)]
    started = pipeline(iter(fetched), on_device=True)
    first, _ = started.next_batch(0)
    second, _ = started.next_batch(1)
    live.prepare(second.host, lambda batch: batch)
    third, report = started.next_batch(2)
    assert [first.host, second.host, third.host] == [[1.0], [1.0], None]
    assert [first.is_last, second.is_last, third.is_last] == [False, False, True]
    assert report == Report(1)


def test_closing_lets_go_of_the_batches_the_workers_and_the_reader():
    class Batches:
        def __iter__(self):
            return self

    batches, log = Batches(), Log()
    reference = weakref.ref(batches)
    started = IndexPipeline(Requests(), batches, log, reader=log)
    del batches
    started.close()
    assert reference() is None
    assert log == ["others ended", "reader closed"]


FACTORS = st.one_of(st.just(1.0), st.floats(1, 9), st.sampled_from([1.5, 2.0, 4.0, 8.0]))


@settings(max_examples=25)
@given(
    factor=FACTORS,
    changes=st.lists(st.tuples(st.integers(0, 120), FACTORS), max_size=4),
    buffer_size=st.integers(1, 20),
    prefetched=st.integers(1, 12),
)
def test_no_more_whole_batches_are_in_flight_than_it_looks_ahead_however_fast_the_workers_are(
    factor, changes, buffer_size, prefetched
):
    """A change that came too late would be refused by the plan: batches are planned as they are asked of torch's loader.

    That asks for ``prefetched`` batches at the start, and for one more whenever it hands one out; the thread fetches `DEPTH`
    ahead of the training, and has begun with the one after.
    """
    shape = batches_shape(50, buffer_size)
    order = BatchedOrder(SequentialOrder(200, 200, 1, 0, 0), 4, 4, 50)
    plan = EachPlan(shape, factor)
    kind = IndexedBatches(DataLoader(range(200), 4, num_workers=1, prefetch_factor=prefetched))
    requests = BatchRequests(plan, order)
    for _ in range(prefetched):
        next(requests)
    fetched, largest = 0, factor
    for delivered in range(1, 200):
        while fetched < delivered + DEPTH + 1:
            if requests.step().is_read:
                next(requests)
            fetched += 1
        assert plan.number <= delivered + kind.lookahead(largest)
        for at, value in changes:
            if at == delivered:
                requests.change_factor(delivered + kind.lookahead(largest), value)
                largest = max(largest, value)
