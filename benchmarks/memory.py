"""How many examples are kept at most: the objects that the data set returned are counted while they are alive."""

from __future__ import annotations

from report import Table, progress, verdict
from workloads import BATCH_SIZE, WORKERS, Counted, CountedBatches, loader

from lightning_echo import EchoLoader, InsertionPoint

_TEXT = (
    "most objects of the data set (after_batching: batches) kept for later uses; per worker the largest count of the run, summed "
    "over the workers (after_batching: 0 workers, counted after each step)"
)


def memory(quick: bool) -> Table:
    batches = 200 if quick else 2000
    rows = []
    for factor in (1.5, 2.37, 4, 8):
        progress(f"live memory, factor {factor:g}")
        for point, sizes in (
            (InsertionPoint.after_augmentation, (None, WORKERS * BATCH_SIZE)),
            (InsertionPoint.after_batching, (None, 2)),
        ):
            for size in sizes:
                count = _batches_kept if point is InsertionPoint.after_batching else _examples_kept
                most, allowed = count(factor, size, batches)
                rows.append((point.value, factor, allowed, most, verdict(most <= allowed)))
    return Table("memory", _TEXT, ("point", "e", "buffer_size", "most kept", "passed"), rows)


def _examples_kept(factor: float, buffer_size: int | None, batches: int) -> tuple[int, int]:
    dataset = Counted()
    plain = loader(dataset, collate_fn=dataset.collate)
    echo = EchoLoader(plain, factor, insertion_point="after_augmentation", buffer_size=buffer_size, seed=0)
    most = [0] * WORKERS
    for number, batch in zip(range(batches), echo, strict=False):
        worker = number % WORKERS
        most[worker] = max(most[worker], int(batch[0]))
    echo.close()
    return sum(most), echo.buffer_size


def _batches_kept(factor: float, buffer_size: int | None, batches: int) -> tuple[int, int]:
    collate = CountedBatches()
    plain = loader(Counted(), workers=0, collate_fn=lambda examples: collate([example.value for example in examples]))
    echo = EchoLoader(plain, factor, insertion_point="after_batching", buffer_size=buffer_size, seed=0)
    most, epoch = 0, iter(echo)
    for _ in range(batches):
        next(epoch)  # not kept here: what stays alive is kept by the loader
        most = max(most, len(collate.alive))
    echo.close()
    return most, echo.buffer_size
