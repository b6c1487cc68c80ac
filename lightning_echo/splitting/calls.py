"""What a data set reads in one call of its ``__getitems__``: examples, or a batch that cannot be taken apart.

A plain ``DataLoader`` hands to the collate function whatever ``__getitems__`` returns. Echoing before batching makes batches of
examples from different calls, so it needs examples, and such that fit each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_echo.protecting.memory import nbytes
from lightning_echo.splitting.prove import has_length, read_plainly, seeded, seeded_copy
from lightning_echo.splitting.staged import WholeBatchError, batched, examples_in

__all__ = ["needs_one_call", "whole_batch", "why_not_apart"]

_FEW = 4  # examples that are read to find out


def why_not_apart(dataset: Any, indices: Sequence[Any] | None, collate_fn: Callable[[list[Any]], Any]) -> str:
    """Returns why what a data set reads in one call cannot be taken apart; empty if it can. See the other functions."""
    return whole_batch(dataset, indices)[0] or needs_one_call(dataset, indices, collate_fn)


def whole_batch(dataset: Any, indices: Sequence[Any] | None) -> tuple[str, int]:
    """Returns why what a data set reads in one call is a whole batch, and the bytes of one example in it.

    A list of as many members as a batch has columns is not a list of examples. Therefore two numbers of examples are read.

    Args:
        dataset: The data set. Temporary copies of it are read.
        indices: The indices that may be read; None: all.

    Returns:
        The reason, and the bytes. They are empty and 0 if the data set reads single examples, or returns a list of them.
    """
    if batched(dataset) is None:
        return "", 0
    few = _few(dataset, indices)
    for asked in (few[:1], few if len(few) > 1 else [*few, *few]):
        with seeded():
            read = seeded_copy(dataset).__getitems__(asked)
        try:
            examples_in(read, asked)
        except WholeBatchError as error:
            return str(error), nbytes(read) // len(asked)
    return "", 0


def needs_one_call(dataset: Any, indices: Sequence[Any] | None, collate_fn: Callable[[list[Any]], Any]) -> str:
    """Returns why the examples of a batch must come from one call; empty if they need not.

    A call may pad its examples to the longest of them (a tokenizer in ``set_transform`` of Hugging Face). The collate function
    then fails for examples of different calls alone.

    Args:
        dataset: The data set, which returns lists of examples. Temporary copies of it are read.
        indices: The indices that may be read; None: all.
        collate_fn: The collate function.
    """
    if batched(dataset) is None:
        return ""
    few = _few(dataset, indices)
    apart = [read_plainly(dataset, [index]).examples[0] for index in few]
    error = _error_of(collate_fn, apart)
    if not error or _error_of(collate_fn, read_plainly(dataset, few).examples):  # with both, it is not the calls that matter
        return ""
    return (
        "__getitems__ of the data set returns examples that fit only those of the same call, such as examples that are padded to "
        f"the longest of them: collate_fn fails for examples of different calls ({error})"
    )


def _few(dataset: Any, indices: Sequence[Any] | None) -> list[Any]:
    """Returns a few indices, spread over those that may be read."""
    if indices is None:
        indices = range(len(dataset) if has_length(dataset) else _FEW)
    count = min(_FEW, len(indices))
    return [indices[place * (len(indices) - 1) // max(count - 1, 1)] for place in range(count)]


def _error_of(collate_fn: Callable[[list[Any]], Any], examples: list[Any]) -> str:
    try:
        with seeded():
            collate_fn(examples)
    except Exception as error:  # the user's code may raise anything
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""
