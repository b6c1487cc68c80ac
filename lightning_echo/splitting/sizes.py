"""What an example weighs, estimated from a few that are spread over the data: the first and the last may be unlike the others.

A size is a figure. It never ends a training: an example that cannot be read is left out, and the training will meet it or not.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any, NamedTuple

from lightning_echo.protecting.copies import throw_away_copy
from lightning_echo.protecting.memory import nbytes
from lightning_echo.protecting.randomness import preserved_random_states
from lightning_echo.splitting.decoding import decoded
from lightning_echo.splitting.stages import Stages

__all__ = ["ExampleSize", "sample_places", "size_of", "size_of_examples", "sizes_joined"]

_SAMPLES = 8
_MOST_SECONDS = 0.5  # no example is read after that: a slow source, or one that hangs, must not make the start slow


class ExampleSize(NamedTuple):
    """What examples weigh, in bytes.

    Attributes:
        largest: Memory of the largest one while it is live.
        packed: Mean of all, packed (see `nbytes`).
    """

    largest: int
    packed: int


def sample_places(count: int) -> list[int]:
    """Returns the places of up to eight samples among ``count`` examples, from the first to the last one.

    Example:
        >>> sample_places(15), sample_places(3)
        ([0, 2, 4, 6, 8, 10, 12, 14], [0, 1, 2])
    """
    if count <= _SAMPLES:
        return list(range(count))
    return [place * (count - 1) // (_SAMPLES - 1) for place in range(_SAMPLES)]


def size_of_examples(dataset: Any, make: Callable[[Any], Stages], indices: Sequence[Any] | None = None) -> ExampleSize | None:
    """Reads up to eight examples from a temporary copy of a data set, for half a second; None if none can be read.

    Args:
        dataset: A map-style data set. One without a length is not read.
        make: Makes the stages of the copy, whose ``load`` returns what is weighed.
        indices: The indices that can be read; None: all.
    """
    sizes: list[ExampleSize] = []
    with suppress(Exception), preserved_random_states(), _at_most(_MOST_SECONDS):  # whatever the data set raises
        indices = range(len(dataset)) if indices is None else indices
        stages = make(throw_away_copy(dataset))
        places, started = sample_places(len(indices)), perf_counter()
        for place in (*places[::3], *places[1::3], *places[2::3]):  # those that are read are spread, too
            if perf_counter() - started > _MOST_SECONDS:
                break
            with suppress(Exception):
                sizes.append(size_of(_loaded(stages, indices[place])))
    return sizes_joined(sizes) if sizes else None


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in a read that takes longer, unless the program has a timer of its own, or this is not the main thread.

    Sizes are weighed in a process that ends afterwards, so that nothing is lost with the read.
    """
    may_set = threading.current_thread() is threading.main_thread() and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    if not may_set:
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise TimeoutError(f"the read takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def size_of(*examples: Any) -> ExampleSize:
    """Returns what examples weigh. There is at least one."""
    return sizes_joined(ExampleSize(nbytes(each), nbytes(each, is_packed=True)) for each in examples)


def sizes_joined(sizes: Iterable[ExampleSize]) -> ExampleSize:
    """Returns the largest of all, and the mean of the means."""
    largest, packed = zip(*sizes, strict=True)
    return ExampleSize(max(largest), sum(packed) // len(packed))


def _loaded(stages: Stages, index: Any) -> Any:
    return decoded(stages.load(index) if stages.load_many is None else stages.load_many([index])[0])
