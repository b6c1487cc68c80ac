"""`BoundHooks`: puts hooks on the user's instances for the time of a ``fit``, and leaves the instances as they were."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["BoundHooks"]

_NOTHING = object()


class _Bound(NamedTuple):
    """A hook on an instance.

    Attributes:
        instance: The user's object.
        name: The attribute that the hook stands in.
        hook: The hook.
        before: The attribute that the instance itself had, or `_NOTHING` where it had only that of its class.
    """

    instance: Any
    name: str
    hook: Any
    before: Any


class BoundHooks:
    """Binds hooks on instances, in the place of their own attributes, and gives the instances their own attributes back.

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
        """Takes all hooks away; may be called at any time. An attribute that somebody else has set meanwhile stays.

        A hook counts as ours on every instance: a stand-in copies the hooks of the data module that it stands for.
        """
        ours = {id(bound.hook) for bound in self._bound}
        for instance, name, _, before in self._bound:
            if id(vars(instance).get(name)) not in ours:
                continue
            del vars(instance)[name]
            if before is not _NOTHING:
                vars(instance)[name] = before
        self._bound.clear()
