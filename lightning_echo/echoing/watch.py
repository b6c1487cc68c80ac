"""What a data set hands to its transforms, compared with what its convention says.

A `Watch` puts placeholders where the transforms were taken out and sees what they are called with, so that a wrong assumption is
found also when a random transform happens to do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_echo.echoing.conventions import NAMES, Convention, SplitRefused, elements_of
from lightning_echo.echoing.cuts import Transform
from lightning_echo.echoing.difference import difference
from lightning_echo.echoing.protect import copy_example
from lightning_echo.echoing.staged import LoadMany
from lightning_echo.echoing.stages import Load

_Arguments = tuple[Any, ...]


def placeholder(*values: Any, **named: Any) -> Any:
    """Stands where a transform was taken out: one value in, the same out; several in, all of them out."""
    return named or (values[0] if len(values) == 1 else values)


def placeholder_for(name: str) -> Transform:
    """Returns what to put in place of the attribute ``name``."""
    return placeholder


# What each attribute gets of a sample. torchvision's data sets call a pair one by one or as one.
_CALLS: dict[Convention, list[dict[str, Callable[[Any], _Arguments]]]] = {
    Convention.transform: [
        {
            "transform": lambda sample: elements_of(sample)[:1],
            "target_transform": lambda sample: elements_of(sample)[1:2],
        },
        {"transforms": elements_of},
    ],
    Convention.transform_joint: [{"transform": elements_of}],
    Convention.transform_whole: [{"transform": lambda sample: (sample,)}],
    Convention.transforms: [{"transforms": lambda sample: elements_of(sample)[:1]}],
    Convention.transforms_joint: [{"transforms": elements_of}],
    Convention.transform_image: [{"transform": lambda sample: _named(sample, "image")}],
    Convention.transform_image_mask: [{"transform": lambda sample: _named(sample, "image", "mask")}],
}


def _named(sample: Any, *names: str) -> _Arguments:
    return tuple(zip(names, elements_of(sample), strict=False))


class Watch:
    """Sees what a data set hands to its transforms, and compares it with what the convention says it does."""

    def __init__(self, convention: Convention) -> None:
        self._convention = convention
        self._calls: dict[str, list[_Arguments]] = {}
        self._keywords: dict[str, str] = {}

    def placeholder_for(self, name: str) -> Transform:
        """Returns what to put in place of the attribute ``name``: it keeps what it is called with."""
        calls = self._calls.setdefault(name, [])

        def keep(*values: Any, **named: Any) -> Any:
            calls.append(copy_example((*values, *named.items())))  # the data set may go on to edit them
            if named and self._convention not in NAMES:
                self._keywords[name] = ", ".join(named)
            return placeholder(*values, **named)

        return keep

    def watched(self, load: Load) -> Load:
        """Returns ``load``, checked."""
        return lambda index: self.watched_many(lambda indices: [load(one) for one in indices])([index])[0]

    def watched_many(self, load_many: LoadMany) -> LoadMany:
        """Returns ``load_many``, checked."""

        def load(indices: list[Any]) -> list[Any]:
            for calls in self._calls.values():
                calls.clear()
            samples = list(load_many(indices))
            ways = [way for way in _CALLS[self._convention] if way.keys() & self._calls.keys()]
            refusals = [self._refusal(samples, way) for way in ways]
            if ways and None not in refusals:
                raise SplitRefused(refusals[0])
            return samples

        return load

    def _refusal(self, samples: list[Any], way: dict[str, Callable[[Any], _Arguments]]) -> str | None:
        for name, keywords in self._keywords.items():
            return f"it calls its {name} by keyword ({keywords})"
        for name, calls in self._calls.items():
            expected = [way[name](sample) for sample in samples] if name in way else []
            if len(calls) != len(expected):
                return f"it calls its {name} {len(calls)} times where {len(expected)} would be expected"
            where = difference(calls, expected)
            if where is not None:
                return (
                    f"without its {name} it does not return what the {name} is called with, as "
                    f"{self._convention.value} would ({where})"
                )
        return None
