"""Hooks on instances: bound in the place of what was there, and taken away without a trace."""

from __future__ import annotations

from typing import Any

from lightning_echo.training.hooks import BoundHooks


class Data:
    """Has a method, and nothing on the instance."""

    def batches(self) -> list[int]:
        return [1]


def test_what_somebody_else_has_put_there_meanwhile_stays() -> None:
    replaced, removed, hooks = Data(), Data(), BoundHooks()
    for data in (replaced, removed):
        hooks.bind(data, "batches", lambda: [2])
    theirs: Any = lambda: [4]  # noqa: E731
    replaced.batches = theirs  # type: ignore[method-assign]
    del vars(removed)["batches"]
    hooks.unbind()
    assert vars(replaced) == {"batches": theirs}
    assert vars(removed) == {}


def test_a_stand_in_that_has_copied_the_hook_of_another_instance_loses_it_too() -> None:
    inner, outer, hooks = Data(), Data(), BoundHooks()
    hooks.bind(inner, "batches", lambda: [2])
    hooks.bind(outer, "batches", lambda: [3])
    vars(outer)["batches"] = inner.batches
    hooks.unbind()
    assert vars(inner) == vars(outer) == {}
