"""How a pass is cut and dealt out, compared with torch's own sampler and loader; the sizes of a plan over it."""

import pytest
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_echo.insertion import InsertionPoint
from lightning_echo.pipeline.kinds import Layout, kind_of


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [1, 6, 7, 13, 43])
def test_the_layout_of_a_pass_is_what_a_loader_with_a_distributed_sampler_delivers(length, drop_last, replicas):
    sampler = DistributedSampler(range(length), num_replicas=replicas, rank=0, shuffle=False)
    sizes = [len(batch) for batch in DataLoader(range(length), batch_size=6, sampler=sampler, drop_last=drop_last)]
    plain = DataLoader(range(length), batch_size=6, drop_last=drop_last)
    if not len(plain):
        with pytest.raises(ValueError, match="has no batch"):
            kind_of(plain)
    else:
        layout = kind_of(plain).layout(replicas)
        assert layout.batches_per_pass == len(sizes), "none where the share of a rank is smaller than a batch"
        assert (layout.batch_size, layout.last_batch_size) == (6, sizes[-1] if sizes else 6)
        assert (layout.pass_length, layout.length, layout.replicas) == (sum(sizes), length, replicas)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class SizedStream(Stream):
    def __len__(self):
        return 10


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(range(10), batch_sampler=[[0, 1, 2], [3], [4, 5], [6, 7, 8], [9]]), Layout(5, 2, 1, 1, 3)),
        ([["a"], ["b"], ["c"]], Layout(3, 2, 1, 1, 2)),
        (DataLoader(Stream(), batch_size=4), Layout(0, 1, 4, 4, 0)),
        (DataLoader(SizedStream(), batch_size=4), Layout(3, 1, 4, 4, 3)),
    ],
    ids=["batch sampler", "iterable", "stream", "sized stream"],
)
def test_where_only_batches_are_known_they_are_dealt_out_and_a_stream_is_not(loader, expected):
    assert kind_of(loader).layout(2) == expected


def test_a_plan_over_examples_has_a_buffer_for_each_worker_and_one_over_batches_has_one():
    kind, layout = kind_of(DataLoader(range(43), batch_size=6, num_workers=3)), Layout(43, 1, 6, 1, 8)
    examples = kind.shape(layout, 60, 5)
    assert (examples.batch_size, examples.last_batch_size, examples.batches_per_pass) == (6, 1, 8)
    assert (examples.workers, examples.buffer_size, examples.seed, examples.distinct) == (3, 60, 5, True)
    of_batches = kind.at(InsertionPoint.after_batching)
    batches = of_batches.shape(layout, 16, 5)
    assert (batches.batch_size, batches.last_batch_size, batches.batches_per_pass) == (1, 1, 8)
    assert (batches.workers, batches.buffer_size, batches.seed, batches.distinct) == (1, 16, 5, False)
    unknown = of_batches.shape(Layout(0, 1, 1, 1, 0), 16, 5)
    assert unknown.batches_per_pass == 1
    of_a_worker = [kind_of(DataLoader(Stream(), 4, num_workers=workers)) for workers in (0, 1, 3)]
    shares = [kind.shape(kind.layout(1), 48, 0).buffer_size for kind in of_a_worker]
    assert shares == [48, 48, 16], "the workers of a stream share the buffer out"
