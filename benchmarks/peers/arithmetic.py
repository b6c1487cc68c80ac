"""What lists of example ids say: pure functions. A batch is a list of ids."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

Batch = Sequence[int]


def duplicates_per_batch(batches: Sequence[Batch]) -> float:
    """How many examples of a batch are in it more than once, on average.

    Example:
        >>> duplicates_per_batch([[1, 1, 2, 3], [1, 2, 3, 4]])
        1.0
    """
    return statistics.fmean(sum(n for n in Counter(batch).values() if n > 1) for batch in batches)


def steps_between_uses(batches: Sequence[Batch]) -> float | None:
    """Steps from one use of an example to its next, median; 0 within a batch, None where nothing comes twice.

    Example:
        >>> steps_between_uses([[1, 2], [1, 2], [1, 3]])
        1.0
    """
    last: dict[int, int] = {}
    gaps = []
    for step, batch in enumerate(batches):
        for example in batch:
            if example in last:
                gaps.append(step - last[example])
            last[example] = step
    return float(statistics.median(gaps)) if gaps else None


def resumed_at(whole: Sequence[Batch], saved_at: int, resumed: Sequence[Batch]) -> str:
    """How a resumed run went on, against the uninterrupted one: ``"exact"``, or what came instead.

    Args:
        whole: The batches of the uninterrupted run.
        saved_at: Steps that were over when the checkpoint was saved.
        resumed: The batches of the resumed run.

    Example:
        >>> resumed_at([[0], [1], [2]], 1, [[1], [2]]), resumed_at([[0], [1], [2]], 1, [[0], [1]])
        ('exact', 'goes on with step 0, not 1')
    """
    rest = [list(batch) for batch in whole[saved_at:]]
    got = [list(batch) for batch in resumed]
    if got == rest:
        return "exact"
    if not got:
        return "no step follows"
    same = next((i for i, (a, b) in enumerate(zip(got, rest, strict=False)) if a != b), min(len(got), len(rest)))
    if same:
        return f"{same} steps are the same, then others; {len(got)} steps, not {len(rest)}"
    first = next((step for step, batch in enumerate(whole) if list(batch) == got[0]), None)
    return "goes on with other batches" if first is None else f"goes on with step {first}, not {saved_at}"


def coverage(ranks: Iterable[Sequence[Batch]], examples: int) -> float:
    """Share of a data set that all ranks together have seen.

    Example:
        >>> coverage([[[0, 1]], [[1, 2]]], 4)
        0.75
    """
    return len(set().union(*(_examples(batches) for batches in ranks))) / examples


def overlap(one: Sequence[Batch], two: Sequence[Batch]) -> float:
    """Share of what a rank has seen that the other has seen, too; of the rank that has seen less.

    Example:
        >>> overlap([[0, 1]], [[1, 2]])
        0.5
    """
    first, second = _examples(one), _examples(two)
    return len(first & second) / min(len(first), len(second))


def _examples(batches: Sequence[Batch]) -> set[int]:
    return {example for batch in batches for example in batch}
