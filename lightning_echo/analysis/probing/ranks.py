"""What the processes of a training tell each other; with one process, itself."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed

__all__ = ["gathered"]

Value = TypeVar("Value")


def gathered(value: Value) -> list[Value]:
    """What each rank has said, in their order. All ranks call it; where there is no process group, there is one rank.

    Example:
        >>> gathered(3)
        [3]
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    found: list[Value] = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found
