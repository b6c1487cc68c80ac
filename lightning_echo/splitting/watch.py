"""Watching each read of a data set whose transforms were taken out: does it do with them what its convention says?

Where a transform was taken out, a function stands that keeps what it is called with and returns a `Placeholder`. The data set's
own code carries that to where the transform's result would be; the `Watch` finds it there and puts back what the function was
called with::

    image --> self.transform(image) --> placeholder --> (placeholder, label)      the data set's own code
                      |                                         |
                      +--- keeps the image ---> (image, label) <+                 the watch

A proof on two examples says nothing of a third one, so that every read is watched, in the workers too. Seen is

* how often each transform is called, with how many values, and by keyword;
* where its results go: to their places in the sample, and nowhere else (a data set that keeps one for later holds a placeholder);
* whether anybody looks at a result before it is returned: an attribute, ``isinstance``, ``bool``, arithmetic, comparison, a
  function of torch or numpy. A placeholder answers none of it, and remembers that it was asked.

Not seen is what asks the object nothing (``is``, ``type()``, ``id()``, ``callable()``), and an edit of the image after the
transform was called with it. Whether random numbers were drawn, the caller watches (``randomness.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from lightning_echo.insertion import Needs, earliest
from lightning_echo.splitting.chains import Transform
from lightning_echo.splitting.cut import SplitRefused
from lightning_echo.splitting.describe import Convention
from lightning_echo.splitting.staged import LoadMany
from lightning_echo.splitting.stages import Load

__all__ = ["NAMES", "LookedAt", "Placeholder", "Watch", "elements_of", "like"]


class LookedAt(BaseException):
    """Somebody looked at a placeholder.

    It is no ``Exception``, because a data set that tries again after any error would try for ever.
    """


class _Looks:
    """How often placeholders of this process were looked at, and how the last time."""

    count = 0
    how = ""


def _look(how: str) -> NoReturn:
    _Looks.count += 1
    _Looks.how = how
    raise LookedAt(
        f"{how} of the placeholder that stands for a transform's result while lightning_echo loads an example: the data set must "
        f"only return that result. Use {earliest(Needs.examples).option}"
    )


class Placeholder:
    """Stands for what a transform would have returned, and raises `LookedAt` when it is looked at."""

    __slots__ = ("__weakref__",)

    def __getattribute__(self, name: str) -> NoReturn:  # of instances only: also ``__class__``, for which ``isinstance`` asks
        _look(name)

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        _look("__torch_function__")

    def __array_ufunc__(self, *_: Any, **__: Any) -> NoReturn:
        _look("__array_ufunc__")

    @classmethod
    def __array_function__(cls, *_: Any, **__: Any) -> NoReturn:
        _look("__array_function__")


_OPERATIONS = """ abs add aiter and array await bool bytes call ceil complex contains copy delattr delitem dir div divmod enter
    eq float floor floordiv format fspath ge getitem gt hash iadd iand ifloordiv ilshift imatmul imod imul index int invert ior
    ipow irshift isub iter itruediv ixor le len length_hint lshift lt matmul mod mul ne neg next or pos pow radd rand rdivmod
    repr reversed rfloordiv rlshift rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor setattr setitem sizeof
    str sub truediv trunc xor
"""


def _asked(name: str) -> Callable[..., NoReturn]:
    def operation(self: Placeholder, *_: Any, **__: Any) -> NoReturn:
        _look(name)

    return operation


for _operation in _OPERATIONS.split():  # Python looks these up on the class
    setattr(Placeholder, f"__{_operation}__", _asked(f"__{_operation}__"))


class _Call(NamedTuple):
    """One call of a transform: the attribute that holds it, its arguments, what it returned for each, and their keywords."""

    name: str
    values: tuple[Any, ...]
    results: tuple[Placeholder, ...]
    keywords: tuple[str, ...]


# The values that a convention hands over by keyword.
NAMES = {Convention.transform_image: ("image",), Convention.transform_image_mask: ("image", "mask")}

_Way = dict[str, slice | None]

# Where the results of each attribute stand in a sample; None: they are the sample. torchvision's data sets call a pair one by one
# or as one.
_WAYS: dict[Convention, list[_Way]] = {
    Convention.transform: [{"transform": slice(0, 1), "target_transform": slice(1, 2)}, {"transforms": slice(None)}],
    Convention.transform_joint: [{"transform": slice(None)}],
    Convention.transform_whole: [{"transform": None}],
    Convention.transforms: [{"transforms": slice(0, 1)}],
    Convention.transforms_joint: [{"transforms": slice(None)}],
    Convention.transform_image: [{"transform": slice(0, 1)}],
    Convention.transform_image_mask: [{"transform": slice(0, 2)}],
}


class Watch:
    """Watches a data set whose transforms were taken out.

    Args:
        convention: What the data set is to do with them.
        in_order: Whether the image's transform must be called before the target's, since both draw random numbers.
    """

    def __init__(self, convention: Convention, *, in_order: bool = False) -> None:
        self._convention, self._in_order = convention, in_order
        self._keywords = NAMES.get(convention, ())
        self._calls: list[_Call] = []
        self._names: set[str] = set()
        self._places: list[tuple[str, int]] = []

    def stand_in(self, name: str) -> Transform:
        """Returns what to put in place of the transform in the attribute ``name``."""
        self._names.add(name)
        calls, new = self._calls, tuple.__new__  # which is half as long under way as _Call(...)

        def keep(*values: Any, **named: Any) -> Any:
            if len(values) == 1 and not named:  # the usual case
                result = Placeholder()
                calls.append(new(_Call, (name, values, (result,), ())))
                return result
            results = tuple([Placeholder() for _ in (*values, *named)])
            calls.append(_Call(name, (*values, *named.values()), results, tuple(named)))
            return results if values else dict(zip(named, results, strict=True))

        return keep

    def watched(self, load: Load) -> Load:
        """Returns ``load``, which then raises `SplitRefused` where the data set does something else with its transforms."""
        if not self._names:
            return load
        self._places = self._usual_places()

        def watched_load(index: Any) -> Any:
            self._calls.clear()
            looks = _Looks.count
            samples = []
            try:  # noqa: SIM105 - it is counted; `suppress` takes longer than all the rest
                samples.append(load(index))
            except LookedAt:
                pass
            if looks != _Looks.count:
                raise self._refused_look()
            return self._put_back(samples)[0]

        return watched_load

    def watched_many(self, load_many: LoadMany) -> LoadMany:
        """Returns ``load_many``, watched in the same way."""
        if not self._names:
            return load_many

        self._places = self._usual_places()

        def watched_load_many(indices: list[Any]) -> list[Any]:
            self._calls.clear()
            looks = _Looks.count
            samples: list[Any] = []
            try:  # noqa: SIM105
                samples.extend(load_many(indices))
            except LookedAt:
                pass
            if looks != _Looks.count:
                raise self._refused_look()
            return self._put_back(samples)

        return watched_load_many

    # ------------------------------------------------------------------ what was seen

    def _ways(self) -> list[_Way]:
        """The ways in which the convention calls the transforms that were taken out."""
        ways = [{name: place for name, place in way.items() if name in self._names} for way in _WAYS[self._convention]]
        return [way for way in ways if way]

    def _usual_places(self) -> list[tuple[str, int]]:
        """Where the results stand if each transform returns one, by the convention's first way; empty where it does not."""
        way = self._ways()[0]
        places = [(name, place.start) for name, place in way.items() if place in (slice(0, 1), slice(1, 2))]
        return [] if self._keywords or len(places) < len(way) else places

    def _put_back(self, samples: list[Any]) -> list[Any]:
        """Returns samples with what their transforms were called with in the place of the results.

        Args:
            samples: Emptied: a placeholder that is still there afterwards is kept by the data set.
        """
        kept: list[weakref.ref[Placeholder]] = []
        filled = self._filled_as_usual(samples, kept) or self._filled_by_look(samples, kept)
        self._calls.clear()
        samples.clear()
        for result in kept:
            if result() is not None:
                raise SplitRefused(f"it keeps what its {self._what} returns, for a later read or in two places")
        return filled

    def _filled_as_usual(self, samples: list[Any], found: list[weakref.ref[Placeholder]]) -> list[Any]:
        """What `_filled_by_look` does, in a third of the time; empty where one of the samples is not the usual one."""
        calls, places, filled = iter(self._calls), self._places, []
        if not places or len(self._calls) != len(places) * len(samples):
            return []
        for sample in samples:
            if type(sample) is not tuple:
                return []
            elements = list(sample)
            for expected, place in places:
                name, values, results, keywords = next(calls)
                if name is not expected or len(values) != 1 or keywords or place >= len(elements):
                    return []
                if elements[place] is not results[0]:
                    return []
                found.append(weakref.ref(results[0]))
                elements[place] = values[0]
            filled.append(tuple(elements))
        return filled

    def _filled_by_look(self, samples: list[Any], found: list[weakref.ref[Placeholder]]) -> list[Any]:
        """Finds each result by its identity.

        Args:
            samples: With placeholders.
            found: Added to: those that were called for.

        Raises:
            SplitRefused: One of them is not where it should be.
        """
        calls = self._calls
        way = self._way_of(calls, len(samples))
        found += [weakref.ref(result) for call in calls for result in call.results]
        numbers = {id(result): number for number, call in enumerate(calls) for result in call.results}
        return [self._filled(sample, way, calls, numbers) for sample in samples]

    def _way_of(self, calls: list[_Call], samples: int) -> _Way:
        """The way in which the transforms were called, once for each sample."""
        called = {call.name for call in calls}
        ways = self._ways()
        way = next((way for way in ways if called <= way.keys()), ways[0])
        for call in calls:
            if call.keywords not in ((), self._keywords):
                raise SplitRefused(f"it calls its {call.name} by keyword ({', '.join(call.keywords)})")
        for name in sorted(self._names):
            count, expected = sum(call.name == name for call in calls), samples if name in way else 0
            if count != expected:
                raise SplitRefused(f"it calls its {name} {count} times where {expected} would be expected")
        return way

    def _filled(self, sample: Any, way: _Way, calls: list[_Call], numbers: dict[int, int]) -> Any:
        elements = [sample] if type(sample) is Placeholder else list(elements_of(sample))
        before = -1
        for name, place in way.items():
            found = [sample] if place is None else elements[place]
            number = numbers.pop(id(found[0]), -1) if found else -1
            call = calls[number]
            is_as_expected = (
                number >= 0
                and (call.name, call.keywords, len(call.results)) == (name, self._keywords, len(found))
                and all(one is other for one, other in zip(call.results, found, strict=True))
            )
            if not is_as_expected or (place is None and len(call.values) != 1):
                raise self._refused_place(name)
            if number < before and self._in_order:
                raise SplitRefused(f"it calls its {name} before the transform of the image, and both draw random numbers")
            before = number
            if place is None:
                return call.values[0]
            elements[place] = call.values
        if type(sample) is not Placeholder:
            return like(sample, elements)
        if isinstance(elements[0], (tuple, list)):  # the whole sample, which is not what this convention hands over
            raise self._refused_place(next(iter(way)))
        return elements[0]

    # ------------------------------------------------------------------ refusals

    @property
    def _what(self) -> str:
        return " or ".join(sorted(self._names))

    def _refused_look(self) -> SplitRefused:
        return SplitRefused(f"it looks at what its {self._what} returns ({_Looks.how})")

    def _refused_place(self, name: str) -> SplitRefused:
        return SplitRefused(
            f"without its {name} it does not return what the {name} is called with, as {self._convention.value} would"
        )


def elements_of(sample: Any) -> tuple[Any, ...]:
    """Returns what a sample is made of."""
    return tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)


def like(sample: Any, elements: list[Any]) -> Any:
    """Returns ``elements`` as what `elements_of` took them from."""
    if not isinstance(sample, (tuple, list)):
        return elements[0]
    return elements if isinstance(sample, list) else tuple.__new__(type(sample), elements)
