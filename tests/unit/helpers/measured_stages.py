"""A pipeline as it might be measured: a batch of 8, two workers, a step of 20 ms."""

from dataclasses import replace

from lightning_echo.analysis.measured import CachedExample, MeasuredStages, ReadsInFlight, Spread

MS = 1e-3
STAGES = MeasuredStages(
    read=Spread.exactly(10 * MS),
    read_cached=Spread.exactly(1 * MS),
    decode=Spread.exactly(4 * MS),
    augment=Spread.exactly(2 * MS),
    collate=Spread.exactly(8 * MS),
    hand_over=Spread.exactly(1 * MS),
    copy=Spread.exactly(1 * MS),
    step=Spread.exactly(20 * MS),
    read_cpu_share=0.0,
    prepare_cpu_share=0.0,
    step_cpu_seconds=0.0,
    batch_size=8,
    workers=2,
    takes_ahead=True,
    cores=4,
    points=("after_read", "before_augmentation", "after_augmentation", "after_batching", "after_transfer"),
)
# The same, and what a cache costs is known, too: with a twentieth to spare, 10,000 raw items take 1.05 GB, as loaded examples
# 6.3 GB. No memory is free.
CACHED = replace(
    STAGES,
    in_cache={hold: CachedExample(size, Spread.exactly(0.0)) for hold, size in (("raw", 100_000), ("loaded", 600_000))},
    examples=10_000,
    free_bytes=0,
)


def ahead(*reads, cpu=0.0, **changes):
    """What is measured of reads ahead: pairs of the reads under way and their milliseconds per example."""
    levels = tuple(ReadsInFlight(number, Spread.exactly(milliseconds * MS), cpu * MS) for number, milliseconds in reads)
    return {"in_flight": levels, "read_ahead": "reading", **changes}


LATENCY = ahead(
    (2, 5.0), (16, 0.625), (64, 0.5)
)  # the reads of `STAGES`: 10 ms, 5 with two workers; 32 MB/s if an item has 16 kB

# Two of 33 batches take 160 ms of a worker, the others 10: 19.1 on average, half as long as two workers have for a step of 20.
RARE_MILLISECONDS = [10] * 7 + [160] + [10] * 8 + [160] + [10] * 16
_NOTHING = dict.fromkeys(("read_cached", "decode", "augment", "collate", "hand_over", "copy"), Spread.exactly(0.0))


def uneven(times=1.0, **changes):
    """What is measured of a source whose batches take unequally long, ``times`` as long as the above."""
    seconds = tuple(times * each * MS for each in RARE_MILLISECONDS)
    read = Spread.exactly(sum(seconds) / len(seconds) / STAGES.batch_size)
    return {**_NOTHING, "read": read, "batch_seconds": seconds, "batch_bytes": 2**20, **changes}
