"""How the ranks of a training exchange values. It also works with a single process."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed

__all__ = ["gathered"]

Value = TypeVar("Value")


def gathered(value: Value) -> list[Value]:
    """Returns the values of all ranks, in the order of the ranks. Without a process group there is one rank.

    All ranks must call this function together.

    Example:
        >>> gathered(3)
        [3]
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    found: list[Value] = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found
