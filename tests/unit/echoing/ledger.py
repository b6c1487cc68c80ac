"""Independent bookkeeping of what a plan says: plain sets and dicts, no arithmetic of the plan's own.

`Ledger` reads `PlannedBatch` after `PlannedBatch` as the workers would, keeps what each of them holds, and checks on the way
what must be true of every plan, whatever its factor and buffer.
"""

from collections import defaultdict
from fractions import Fraction
from math import ceil, floor


def plain_batch_sizes(length, batch_size, drop_last):
    """Sizes of the batches of one epoch of a plain loader."""
    sizes = [min(batch_size, length - start) for start in range(0, length, batch_size)]
    return [size for size in sizes if size == batch_size] if drop_last else sizes


class Ledger:
    """What the workers hold and have used, batch by batch.

    Args:
        sizes: Batch sizes of one pass.
        workers: Number of workers; 0 counts as one.
        buffer_size: The bound on live items.
        apart: Positions that stand for the same item of the data set when equal modulo this; None: none do.
    """

    def __init__(self, sizes, workers, buffer_size, apart=None):
        self.sizes, self.workers, self.buffer_size, self.apart = sizes, max(workers, 1), buffer_size, apart
        self.number = self.delivered = self.fresh = 0
        self.uses = {}  # position -> uses so far
        self.worker_of = {}  # position -> worker that read it
        self.caches = defaultdict(set)  # worker -> positions it holds
        self.dropped = set()  # positions named in `forget`
        self.fresh_counts = []

    @property
    def held(self):
        return set().union(*self.caches.values())

    def enter(self, batch):
        """Answers a batch as its worker would, and checks it."""
        worker, cache = self.number % self.workers, self.caches[self.number % self.workers]
        size = self.sizes[self.number % len(self.sizes)]
        assert batch.number == self.number
        assert len(batch.positions) == len(batch.kept) == size
        assert batch.first_fresh == self.fresh
        assert 0 <= batch.fresh <= size
        for position in batch.forget:
            assert position in cache, "only the worker that holds a position is told to forget it, and only once"
            cache.remove(position)
            self.dropped.add(position)
        fresh, echoed = batch.positions[: batch.fresh], batch.positions[batch.fresh :]
        assert fresh == list(range(self.fresh, self.fresh + batch.fresh)), (
            "fresh positions come in order, none left out"
        )
        assert len(set(batch.positions)) == size, "no position twice in a batch"
        if self.apart:
            assert len({position % self.apart for position in batch.positions}) == size
        for position in echoed:
            assert position in cache, "an echo is asked of the worker that holds it, so that nothing is read again"
        for position, kept in zip(batch.positions, batch.kept, strict=True):
            self.uses[position] = self.uses.get(position, 0) + 1
            self.worker_of[position] = worker
            assert kept in (0, 1)
            if kept:
                cache.add(position)
            else:
                cache.discard(position)
        self.number += 1
        self.fresh += batch.fresh
        self.delivered += size
        self.fresh_counts.append(batch.fresh)
        assert sum(self.uses.values()) == self.delivered  # fresh + echoed
        assert len(self.held) <= self.buffer_size, "the bound on live items holds after every batch"
