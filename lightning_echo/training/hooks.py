"""`BoundHooks`: puts hooks on the user's instances during a ``fit``, and leaves the instances as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["BoundHooks", "ProcessHook"]

_NOTHING = object()


class _Bound(NamedTuple):
    """A hook on an instance.

    Attributes:
        instance: The user's object.
        name: The attribute that holds the hook.
        hook: The hook.
        before: The attribute that the instance itself had. `_NOTHING` if it had only that of its class.
    """

    instance: Any
    name: str
    hook: Any
    before: Any


class BoundHooks:
    """Binds hooks on instances, in place of their own attributes, and later gives back these attributes.

    Example:
        >>> class Data:
        ...     def batches(self):
        ...         return [1, 2]
        >>> data, hooks = Data(), BoundHooks()
        >>> hooks.bind(data, "batches", lambda: [3])
        >>> data.batches()
        [3]
        >>> hooks.unbind()
        >>> data.batches()
        [1, 2]
    """

    def __init__(self) -> None:
        self._bound: list[_Bound] = []

    @property
    def are_bound(self) -> bool:
        """Whether any hook is bound."""
        return bool(self._bound)

    def bind(self, instance: Any, name: str, hook: Any) -> None:
        """Puts a hook on an instance, as its attribute ``name``."""
        self._bound.append(_Bound(instance, name, hook, vars(instance).get(name, _NOTHING)))
        vars(instance)[name] = hook

    def unbind(self) -> None:
        """Takes all hooks away. You may call it at any time. If other code has set the attribute in the meantime, it stays.

        A hook counts as ours on every instance, because a stand-in copies the hooks of the data module that it stands for.
        """
        ours = {id(bound.hook) for bound in self._bound}
        for instance, name, _, before in self._bound:
            if id(vars(instance).get(name)) not in ours:
                continue
            del vars(instance)[name]
            if before is not _NOTHING:
                vars(instance)[name] = before
        self._bound.clear()


class ProcessHook:
    """Stands in place of a strategy's ``process_dataloader``. The hook of a copy of the strategy changes nothing.

    Args:
        process: The strategy's own hook.
        answer: A function that returns what the strategy gets in place of a loader. None: loaders stay as they are.
    """

    def __init__(self, process: Callable[[Any], Any], answer: Callable[[Any], Any] | None = None) -> None:
        self._process, self._answer = process, answer

    def process_dataloader(self, dataloader: Any) -> Any:
        return self._process(dataloader if self._answer is None else self._answer(dataloader))

    def __reduce__(self) -> tuple[type[ProcessHook], tuple[Callable[[Any], Any]]]:
        return ProcessHook, (self._process,)
