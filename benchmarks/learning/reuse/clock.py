"""The time of a run behind a source that is R times too slow, replayed from the fresh examples of its batches: pure functions.

A learning run need not be slow to say how long it would take. Reading begins at once and never stops. A step takes d, and does
not end before its fresh examples are read:

    read += R * d * fresh / B
    t = max(t + d, read)

Left out: the first batch's way through workers and queues, jitter, and a reader that waits for room in its queues.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["cached_reads", "pack_counts", "replayed_time", "unpack_counts"]

LONGEST_PATTERN = 64  # batches: more than the 32 after which a share of 1/32 repeats itself


def replayed_time(fresh: Iterable[float], batch_size: int, ratio: float, step: float = 1.0) -> float:
    """When the last of these batches has been trained on.

    Args:
        fresh: Examples that each batch reads.
        batch_size: Examples in a batch (B).
        ratio: Time to read a batch of fresh examples, in steps (R).
        step: Time of a step (d).

    Example:
        A batch is read in 4 steps; the echoes of three batches are not read.

        >>> replayed_time([8, 0, 0, 0, 8], batch_size=8, ratio=4)
        8.0
        >>> replayed_time([8, 0, 0, 0, 0, 0, 8], batch_size=8, ratio=4)
        10.0
    """
    read = now = 0.0
    for count in fresh:
        read += ratio * step * count / batch_size
        now = max(now + step, read)
    return now


def cached_reads(fresh: Iterable[int], pass_length: int, cached: int) -> Iterator[float]:
    """What is left to read of each batch where a cache keeps the first ``cached`` examples of the first pass.

    From the second pass on the share that is cached is spread evenly over the batches, as in a random order on average.

    Args:
        fresh: Fresh examples of each batch.
        pass_length: Examples in a pass.
        cached: Examples that the cache has room for.

    Example:
        >>> list(cached_reads([4, 4, 4, 4], pass_length=8, cached=6))
        [4.0, 4.0, 1.0, 1.0]
    """
    used = 0
    for count in fresh:
        new = min(max(pass_length - used, 0), count)
        used += count
        yield new + (count - new) * (1 - min(cached / pass_length, 1))


def pack_counts(counts: Sequence[int]) -> str:
    """Counts as a short text: patterns, and how often each follows upon itself.

    Example:
        >>> pack_counts([8, 8, 0, 1, 0, 1, 0, 1, 3])
        '8*2 0,1*3 3*1'
    """
    parts, start = [], 0
    while start < len(counts):
        repeats = {size: _repeats(counts, start, size) for size in range(1, min(LONGEST_PATTERN, len(counts) - start) + 1)}
        # the pattern that lasts longest, the shortest of those; a count alone where none comes twice
        size = max(repeats, key=lambda one: (one * repeats[one] if repeats[one] > 1 else 1, -one))
        parts.append(f"{','.join(map(str, counts[start : start + size]))}*{repeats[size]}")
        start += size * repeats[size]
    return " ".join(parts)


def unpack_counts(text: str) -> list[int]:
    """The counts of which `pack_counts` made a text.

    Raises:
        ValueError: A part of the text is not a pattern and how often it follows upon itself.

    Example:
        >>> unpack_counts("8*2 0,1*3")
        [8, 8, 0, 1, 0, 1, 0, 1]
    """
    counts: list[int] = []
    for part in text.split():
        if not re.fullmatch(r"\d+(,\d+)*\*\d+", part):
            raise ValueError(f"counts must be patterns such as 0,1*300, got {part!r} in {text[:80]!r}: delete that row")
        pattern, _, repeats = part.partition("*")
        counts += [int(count) for count in pattern.split(",")] * int(repeats)
    return counts


def _repeats(counts: Sequence[int], start: int, size: int) -> int:
    """How often the next ``size`` counts follow upon each other."""
    pattern, repeats = counts[start : start + size], 1
    while counts[start + repeats * size : start + (repeats + 1) * size] == pattern:
        repeats += 1
    return repeats
