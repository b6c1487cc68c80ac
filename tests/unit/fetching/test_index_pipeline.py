"""How a pass is cut and dealt out, compared with torch's own sampler and loader; how far ahead it may be planned."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_echo.fetching.index_pipeline import layout_of, lookahead
from lightning_echo.fetching.prefetch import DEPTH
from lightning_echo.fetching.requests import BatchedOrder, BatchRequests
from lightning_echo.fetching.source import Source
from lightning_echo.planning.order import SequentialOrder
from lightning_echo.planning.plan import EchoPlan
from lightning_echo.planning.shape import PlanShape


class Sized(Dataset):
    def __init__(self, length):
        self.length = length

    def __getitem__(self, index):
        return index

    def __len__(self):
        return self.length


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [1, 5, 6, 7, 12, 13, 43])
def test_the_layout_of_a_pass_is_what_a_loader_with_a_distributed_sampler_delivers(length, drop_last, replicas):
    sampler = DistributedSampler(range(length), num_replicas=replicas, rank=0, shuffle=False)
    sizes = [len(batch) for batch in DataLoader(Sized(length), batch_size=6, sampler=sampler, drop_last=drop_last)]
    plain = DataLoader(Sized(length), batch_size=6, drop_last=drop_last)
    if not len(plain):
        with pytest.raises(ValueError, match="has no batch"):
            Source(plain)
    else:
        layout = layout_of(Source(plain), replicas)
        assert layout.batches_per_pass == len(sizes), "none where the share of a rank is smaller than a batch"
        assert (layout.batch_size, layout.last_batch_size) == (6, sizes[-1] if sizes else 6)
        assert (layout.pass_length, layout.length, layout.replicas) == (sum(sizes), length, replicas)


FACTORS = st.one_of(st.just(1.0), st.floats(1, 9), st.sampled_from([1.5, 2.0, 4.0, 8.0]))


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
    shape = PlanShape(
        batch_size=1, last_batch_size=1, batches_per_pass=50, workers=1, buffer_size=buffer_size, seed=0, distinct=False
    )
    order = BatchedOrder(SequentialOrder(200, 200, 1, 0, 0), 4, 4, 50)
    plan = EchoPlan(shape, factor)
    requests, source = BatchRequests(plan, order), SimpleNamespace(rebuilds=True, num_workers=1, prefetched_batches=prefetched)
    for _ in range(prefetched):
        next(requests)
    fetched, largest = 0, factor
    for delivered in range(1, 200):
        while fetched < delivered + DEPTH + 1:
            if requests.step().read:
                next(requests)
            fetched += 1
        assert plan.number <= delivered + lookahead(source, True, largest)
        for at, value in changes:
            if at == delivered:
                requests.change_factor(delivered + lookahead(source, True, largest), value)
                largest = max(largest, value)


def test_without_echoing_every_batch_in_flight_is_one_that_is_read():
    source = SimpleNamespace(rebuilds=True, num_workers=2, prefetched_batches=4)
    assert lookahead(source, True, 1.0) == 4 + 3 + DEPTH
    assert lookahead(source, True, 1.5) == (4 + 3) * 3 + DEPTH
