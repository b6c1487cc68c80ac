"""A loader's workers and its queue, millisecond by millisecond: an oracle for what prefetching changes."""

from collections import deque


def ticked(series, workers, prefetch_factor, step, batches):
    """Returns when the training takes each batch. ``series`` are the milliseconds of a worker for batch after batch, cyclic."""
    asked = [deque() for _ in range(workers)]
    busy_until, at_work = [0] * workers, [None] * workers
    made, taken, free_at, number, now = set(), [], 0, 0, 0

    def ask():
        nonlocal number
        asked[number % workers].append(number)
        number += 1

    for _ in range(workers * prefetch_factor):
        ask()
    while len(taken) < batches:
        for _ in range(3):  # what happens at the same time, one after the other: made, taken, begun
            for worker in range(workers):
                if at_work[worker] is not None and busy_until[worker] <= now:
                    made.add(at_work[worker])
                    at_work[worker] = None
                if at_work[worker] is None and asked[worker]:
                    at_work[worker] = asked[worker].popleft()
                    busy_until[worker] = now + series[at_work[worker] % len(series)]
            if free_at <= now and len(taken) in made:
                taken.append(now)
                free_at = now + step
                ask()
        now += 1
    return taken
