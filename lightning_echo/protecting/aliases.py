"""Batches that are used several times without a copy of their tensors.

Each use of such a batch has its own containers: if a key is popped from one use, the next use still has it. In place of each
tensor it has an alias, which shares memory and version counter with the tensor. So an in-place edit of the alias can be seen on
the tensor (`LentBatch.is_edited`). Changes that write no memory (``requires_grad_()``, ``.grad``, ``.data = ...``,
``unsqueeze_``) affect only the alias. Everything else is copied as in ``protect.py``, which also rebuilds the containers.

Tensors are searched in built-in containers and in attributes. A tensor that a class keeps elsewhere is copied, too.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_echo.protecting.objects import attributes_of
from lightning_echo.protecting.protect import IMMUTABLE, copy_attributes, copy_example

__all__ = ["LentBatch", "rebuild", "separate", "tensors_in"]


class LentBatch:
    """A batch that is used several times, and that knows whether it was edited in place since it was made.

    Args:
        batch: Anything that a collate function or a transfer returns. No other code may hold it.

    Example:
        >>> lent = LentBatch({"x": torch.zeros(2)})
        >>> use = lent.hand_out()
        >>> lent.is_edited(), use.pop("x").add_(1), lent.is_edited(), list(lent.hand_out())
        (False, tensor([1., 1.]), True, ['x'])
    """

    __slots__ = ("_attributed", "_tensors", "_watched", "batch")

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self._tensors = tensors_in(batch)
        self._attributed = [tensor for tensor in self._tensors if tensor.__dict__]
        with torch._C.DisableTorchFunctionSubclass():  # a subclass would be asked for each attribute, at ten times the cost
            # An inference tensor has no version, and it cannot be edited during training.
            self._watched = [(tensor, tensor._version) for tensor in self._tensors if not tensor.is_inference()]

    @property
    def nbytes(self) -> int:
        """Memory of its tensors, in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)

    def is_edited(self) -> bool:
        """Returns whether the version counter of a tensor has moved."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(tensor._version != version for tensor, version in self._watched)

    def hand_out(self) -> Any:
        """Returns the batch with new containers, and with aliases in place of tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            memo = {id(tensor): _alias(tensor) for tensor in self._tensors}
        for tensor in self._attributed:
            memo[id(tensor)].__dict__.update(copy_attributes(tensor, memo))
        return copy_example(self.batch, memo)


def rebuild(batch: Any) -> Any:
    """Returns the same tensors in new containers, because the ``to`` of some classes changes its own container.

    >>> x = torch.zeros(2)
    >>> batch = {"x": x}
    >>> rebuilt = rebuild(batch)
    >>> rebuilt is batch, rebuilt["x"] is x
    (False, True)
    """
    return copy_example(batch, {id(tensor): tensor for tensor in tensors_in(batch)})


def separate(batch: Any, other: LentBatch) -> Any:
    """Returns the batch with a copy in place of each tensor that shares memory with a tensor of another batch.

    >>> shared, own = torch.zeros(2), torch.zeros(2)
    >>> batch = separate([shared, own], LentBatch([shared]))
    >>> batch[0] is shared, batch[1] is own
    (False, True)
    """
    tensors, taken = tensors_in(batch), {_memory(tensor) for tensor in other._tensors}
    apart = {id(tensor): tensor for tensor in tensors if _memory(tensor) not in taken}
    return batch if len(apart) == len(tensors) else copy_example(batch, apart)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors of a batch, each once."""
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # keeps the parts alive, since the id of an object that is gone may be used again
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, IMMUTABLE) or id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif isinstance(part, dict):
            left.extend(dict.values(part))
        elif isinstance(part, list | tuple | set | frozenset):
            left.extend(part)
        left.extend(attributes_of(part).values())
    return found


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an alias. Call it while ``__torch_function__`` is disabled, since subclasses may unwrap their results there."""
    alias = tensor.detach()
    if type(alias) is not type(tensor):
        alias = alias.as_subclass(type(tensor))
    return alias.requires_grad_() if tensor.requires_grad else alias


def _memory(tensor: torch.Tensor) -> Any:
    """Returns a value that is equal for tensors that share memory: the address of the storage.

    A sparse or nested tensor has no address. For these the value is the device, since all such tensors on it may share memory.
    """
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return tensor.device
