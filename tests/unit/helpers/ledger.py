"""Independent bookkeeping of what a plan says: sets and dicts, with no arithmetic of the plan's own.

`Ledger` answers `PlannedBatch` after `PlannedBatch` as the workers would, keeps what each of them holds, and checks on the way
what must be true of every plan, whatever its factor and buffer.
"""

from collections import defaultdict

from lightning_echo.plan.plan import PlanShape


def plain_batch_sizes(length, batch_size, drop_last):
    """Sizes of the batches of one epoch of a plain loader."""
    sizes = [min(batch_size, length - start) for start in range(0, length, batch_size)]
    return [size for size in sizes if size == batch_size] if drop_last else sizes


def shape_of(sizes, batch_size, workers, buffer_size, seed=0):
    """The sizes of a plan whose passes have batches of these sizes."""
    return PlanShape(
        batch_size=batch_size,
        last_batch_size=sizes[-1],
        batches_per_pass=len(sizes),
        workers=workers,
        buffer_size=buffer_size,
        seed=seed,
    )


class Ledger:
    """What the workers were asked for and hold, batch by batch.

    Args:
        sizes: Batch sizes of one pass.
        workers: Number of workers; 0 counts as one.
        buffer_size: The bound on live items.
        same_item_after: Positions this far apart are the same item of the data set; None: none are.
    """

    def __init__(self, sizes, workers, buffer_size, same_item_after=None):
        self.sizes, self.workers, self.buffer_size = sizes, max(workers, 1), buffer_size
        self.same_item_after = same_item_after
        self.number = self.delivered = self.fresh = 0
        self.uses = {}  # position -> uses so far
        self.read_in = {}  # position -> batch in which it was fresh
        self.caches = defaultdict(set)  # worker -> positions that it holds
        self.forgotten = set()
        self.history = []  # per batch: size, fresh items, items delivered before it

    @property
    def held(self):
        return set().union(*self.caches.values())

    def enter(self, batch):
        """Answers a batch as its worker would, and checks it."""
        cache = self.caches[self.number % self.workers]
        size = self.sizes[self.number % len(self.sizes)]
        positions = list(batch.positions)
        fresh, echoed = positions[: batch.fresh], positions[batch.fresh :]
        assert batch.number == self.number
        assert len(batch.positions) == len(batch.stays_live) == size, "batches have the plain loader's sizes"
        assert batch.first_fresh == self.fresh
        assert fresh == list(range(self.fresh, self.fresh + batch.fresh)), "no position is left out, none fresh twice"
        for position in batch.forget:
            assert position in cache, "the worker that holds a position, and no other, is told to forget it, once"
            cache.remove(position)
            self.forgotten.add(position)
        assert len(set(batch.positions)) == size, "no position is twice in a batch"
        if self.same_item_after:
            assert len({position % self.same_item_after for position in batch.positions}) == size
        for position in echoed:
            assert position in cache, "an echo is asked of the worker that holds it, so that nothing is read again"
        for position, kept in zip(batch.positions, batch.stays_live, strict=True):
            assert kept in (0, 1)
            self.uses[position] = self.uses.get(position, 0) + 1
            (cache.add if kept else cache.discard)(position)
        self.read_in.update((position, self.number) for position in fresh)
        self.history.append((size, batch.fresh, self.delivered))
        self.number += 1
        self.fresh += batch.fresh
        self.delivered += size
        assert sum(map(len, self.caches.values())) <= self.buffer_size, "the bound on live items holds after each batch"
