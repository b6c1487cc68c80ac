"""The checks while a training reads: an example that does not fit its split is noticed, and is never echoed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple, NoReturn

from lightning_echo.data.copies import copy_example
from lightning_echo.data.difference import Overlaps, difference
from lightning_echo.data.randomness import DrawingTrap, places_of_generators, preserved_random_states
from lightning_echo.insertion import Needs, earliest
from lightning_echo.split.describe import Convention, SplitRefused, Transform
from lightning_echo.split.staged import Load, LoadMany, Stages, read_batch

# ---------------------------------------------------------------------- read check
# A data set whose transforms were taken out: each read checks whether it uses them as its convention demands.
#
# To load an example without its transforms, a copy of the data set gets a *recorder* in place of each transform. A recorder
# records the values that it is called with and returns a `Placeholder`. The data set's own code puts the placeholder where the
# transform's result would be. `ReadCheck` finds it there and puts back the values that the recorder was called with::
#
#     image --> self.transform(image) --> placeholder --> (placeholder, label)      the data set's own code
#                       |                                         |
#                       +----- records the image -> (image, label) <+               the check
#
# A proof on two examples shows nothing about a third one. So every read is checked, in the workers too. The check sees
#
# * how often each transform is called, with how many values, and with which keywords;
# * where its results go: to their places in the sample, and nowhere else (a data set that keeps a result holds a placeholder);
# * whether the data set uses a result before it returns it: an attribute, ``isinstance``, ``bool``, arithmetic, comparison, a
#   function of torch or numpy. A placeholder raises an error for all of these, and notes that it was used.
#
# The check does not see operations that do not call the object (``is``, ``type()``, ``id()``, ``callable()``), and not an edit of
# the image after the transform was called with it. The caller checks with `DrawingTrap` whether random numbers are drawn.
#
# A *sample* is what a data set returns for an index: a tuple or list of values, or one value.

# --- placeholders --------------------------------------------------------------------------------------------------


class LookedAt(BaseException):
    """A placeholder was used. It is not an ``Exception``: a data set that retries after each ``Exception`` would try forever."""


class _Looks(threading.local):
    """How placeholders of this thread were looked at, since its last read began."""

    def __init__(self) -> None:
        self.how: list[str] = []


_looks = _Looks()


def _look(how: str) -> NoReturn:
    _looks.how.append(how)
    raise LookedAt(
        f"{how} of the placeholder that stands for a transform's result while lightning_echo loads an example: the data set must "
        f"only return that result. Use {earliest(Needs.examples).option}"
    )


class Placeholder:
    """Stands for the result of a transform, and raises `LookedAt` if it is used."""

    __slots__ = ("__weakref__",)

    def __getattribute__(self, name: str) -> NoReturn:  # also for __class__, which isinstance asks for
        _look(name)

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        _look("__torch_function__")


# Python looks these up on the class, and does not call __getattribute__ for them.
_OPERATIONS = """ abs add aiter and array array_function array_ufunc await bool bytes call ceil complex contains copy delattr
    delitem dir div divmod enter eq float floor floordiv format fspath ge getitem gt hash iadd iand ifloordiv ilshift imatmul
    imod imul index int invert ior ipow irshift isub iter itruediv ixor le len length_hint lshift lt matmul mod mul ne neg next
    or pos pow radd rand rdivmod repr reversed rfloordiv rlshift rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv
    rxor setattr setitem sizeof str sub truediv trunc xor
"""


for _name in _OPERATIONS.split():
    setattr(Placeholder, f"__{_name}__", lambda self, *_, _how=f"__{_name}__", **__: _look(_how))


# --- conventions ---------------------------------------------------------------------------------------------------

# Which transforms are called for a sample, and where in the sample their results are; None: the result is the whole sample.
_Pattern = dict[str, slice | None]

_FIRST, _SECOND, _BOTH, _ALL = slice(0, 1), slice(1, 2), slice(0, 2), slice(None)

# torchvision's data sets call a pair of transforms one by one, or as one.
_PATTERNS: dict[Convention, list[_Pattern]] = {
    Convention.transform: [{"transform": _FIRST, "target_transform": _SECOND}, {"transforms": _ALL}],
    Convention.transform_joint: [{"transform": _ALL}],
    Convention.transform_whole: [{"transform": None}],
    Convention.transforms: [{"transforms": _FIRST}],
    Convention.transforms_joint: [{"transforms": _ALL}],
    Convention.transform_image: [{"transform": _FIRST}],
    Convention.transform_image_mask: [{"transform": _BOTH}],
}


# --- the check -----------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """One call of a recorder, with the arguments (keyword arguments last) and the placeholders that it returned, one for each."""

    name: str
    values: tuple[Any, ...]
    results: tuple[Placeholder, ...]
    keywords: tuple[str, ...]


class ReadCheck:
    """Checks each read of a data set whose transforms were taken out of the attributes with these public names.

    ``in_order``: the image's transform must be called before the target's, because both draw random numbers.
    """

    def __init__(self, convention: Convention, names: Collection[str], *, in_order: bool = False) -> None:
        self._convention, self._names, self._in_order = convention, sorted(names), in_order
        self._keywords = convention.keywords
        patterns = [{name: where for name, where in pattern.items() if name in names} for pattern in _PATTERNS[convention]]
        self._patterns = [pattern for pattern in patterns if pattern] or [{}]
        # The transforms with the places of their results, if each is called with one value; empty otherwise.
        places = [(name, where.start) for name, where in self._patterns[0].items() if where in (_FIRST, _SECOND)]
        self._usual = [] if self._keywords or len(places) < len(self._patterns[0]) else places
        self._calls: list[_Call] = []  # of the present read

    def recorder(self, name: str) -> Transform:
        calls, new = self._calls, tuple.__new__  # makes a _Call in half the time of _Call(...)

        def record(*values: Any, **named: Any) -> Any:
            if len(values) == 1 and not named:  # the usual case
                result = Placeholder()
                calls.append(new(_Call, (name, values, (result,), ())))
                return result
            results = tuple([Placeholder() for _ in (*values, *named)])
            calls.append(_Call(name, (*values, *named.values()), results, tuple(named)))
            return results if values else dict(zip(named, results, strict=True))

        return record

    def checked(self, load: Load) -> Load:
        """Returns ``load`` with the check. It raises `SplitRefused` if the data set uses its transforms in another way."""
        if not self._names:
            return load
        calls, looks, filled = self._calls, _looks, self._filled

        def checked_load(index: Any) -> Any:
            calls.clear()
            looks.how.clear()
            try:
                samples = [load(index)]
            except LookedAt:  # it is in _looks, together with those that the data set has caught
                samples = []
            return filled(samples)[0]

        return checked_load

    def checked_many(self, load_many: LoadMany) -> LoadMany:
        if not self._names:
            return load_many
        calls, looks, filled = self._calls, _looks, self._filled

        def checked_load_many(indices: list[Any]) -> list[Any]:
            calls.clear()
            looks.how.clear()
            try:
                samples = list(load_many(indices))
            except LookedAt:
                samples = []
            return filled(samples)

        return checked_load_many

    def _filled(self, samples: list[Any]) -> list[Any]:
        """Returns samples in which each placeholder is replaced by the value with which the transform was called.

        It raises `SplitRefused`, and empties ``samples``: a placeholder that still exists afterwards is kept by the data set.
        """
        if how := _looks.how:
            raise SplitRefused(f"it looks at what its {' or '.join(self._names)} returns ({how[-1]})")
        for sample in samples:
            if sample is None:
                return self._filled_around_none(samples)
            del sample  # a placeholder must not be kept
        results: list[weakref.ref[Placeholder]] = []
        filled = self._filled_as_usual(samples, results) or self._filled_by_search(samples, results)
        self._calls.clear()
        samples.clear()
        for result in results:
            if result() is not None:
                raise SplitRefused(f"it keeps what its {' or '.join(self._names)} returns, for a later read or in two places")
        return filled

    def _filled_around_none(self, samples: list[Any]) -> list[Any]:
        """Does the same if a data set returns None, and calls no transform, for an example that it cannot read."""
        are_there = [sample is not None for sample in samples]
        samples[:] = [sample for sample in samples if sample is not None]
        filled = iter(self._filled(samples) if samples or self._calls else [])
        return [next(filled) if is_there else None for is_there in are_there]

    def _filled_as_usual(self, samples: list[Any], found: list[weakref.ref[Placeholder]]) -> list[Any]:
        """Does what `_filled_by_search` does, in a third of the time. Returns an empty list if a sample is not a usual one."""
        usual, filled = self._usual, []
        if not usual or len(self._calls) != len(usual) * len(samples):
            return []
        calls = iter(self._calls)
        for sample in samples:
            if type(sample) is not tuple:
                return []
            elements = list(sample)
            for expected, place in usual:
                name, values, results, keywords = next(calls)
                if name is not expected or len(values) != 1 or keywords or place >= len(elements):
                    return []
                if elements[place] is not results[0]:
                    return []
                found.append(weakref.ref(results[0]))
                elements[place] = values[0]
            filled.append(tuple(elements))
        return filled

    def _filled_by_search(self, samples: list[Any], found: list[weakref.ref[Placeholder]]) -> list[Any]:
        """Finds each result by its identity, and returns the samples with the values in place. Adds the results to ``found``."""
        found += [weakref.ref(result) for call in self._calls for result in call.results]
        pattern = self._pattern_of(len(samples))
        numbers = {id(call.results[0]): number for number, call in enumerate(self._calls) if call.results}
        return [self._filled_one(sample, pattern, numbers) for sample in samples]

    def _pattern_of(self, samples: int) -> _Pattern:
        """Returns the pattern that the calls follow, once for each sample."""
        called = {call.name for call in self._calls}
        pattern = next((pattern for pattern in self._patterns if called <= pattern.keys()), self._patterns[0])
        for call in self._calls:
            if call.keywords not in ((), self._keywords):
                raise SplitRefused(f"it calls its {call.name} by keyword ({', '.join(call.keywords)})")
        for name in self._names:
            count, expected = sum(call.name == name for call in self._calls), samples if name in pattern else 0
            if count != expected:
                raise SplitRefused(f"it calls its {name} {count} times where {expected} would be expected")
        return pattern

    def _filled_one(self, sample: Any, pattern: _Pattern, numbers: dict[int, int]) -> Any:
        is_one_result = type(sample) is Placeholder
        elements = [sample] if is_one_result else list(elements_of(sample))
        last = -1
        for name, where in pattern.items():
            number = self._number_of(name, [sample] if where is None else elements[where], numbers)
            if number < last and self._in_order:
                raise SplitRefused(f"it calls its {name} before the transform of the image, and both draw random numbers")
            last = number
            values = self._calls[number].values
            if where is None:
                return values[0]
            elements[where] = values
        if not is_one_result:
            return like(sample, elements)
        if isinstance(elements[0], (tuple, list)):  # a whole sample, although by the convention it is one value
            raise self._refused_place(next(iter(pattern)))
        return elements[0]

    def _number_of(self, name: str, results: list[Any], numbers: dict[int, int]) -> int:
        """Returns the number of the call of ``name`` that returned exactly these results.

        The call is removed from ``numbers`` (by the identity of its first result), because its results belong to one sample only.
        """
        number = numbers.pop(id(results[0]), None) if results else None
        if number is not None:
            call = self._calls[number]
            # By identity, because comparing placeholders would be a use of them.
            are_the_same = list(map(id, call.results)) == list(map(id, results))
            if call.name == name and call.keywords == self._keywords and are_the_same:
                return number
        raise self._refused_place(name)

    def _refused_place(self, name: str) -> SplitRefused:
        return SplitRefused(f"it does not return the result of its {name} where {self._convention.value} would")


# --- samples -------------------------------------------------------------------------------------------------------


def elements_of(sample: Any) -> tuple[Any, ...]:
    return tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)


def like(sample: Any, elements: list[Any]) -> Any:
    """Returns a sample of ``elements``, of the same type as the ``sample`` that `elements_of` took them from."""
    if not isinstance(sample, (tuple, list)):
        return elements[0]
    return elements if isinstance(sample, list) else tuple.__new__(type(sample), elements)


# ---------------------------------------------------------------------- fallback
# A split was proved on two examples. While training runs, every read is watched for four things:
#
# * The data set uses its transforms in another way than its convention (`WatchedStages`).
# * Loading draws random numbers.
# * Loading fails, but the data set itself does not.
# * An example is loaded into the memory of another one of its batch (``data/difference.py``). The batch is then loaded again,
#   and from then on each example is copied when it is loaded.
#
# If one of the first three happens, the data set itself reads that example whole for each use. So no transform is left out,
# applied twice or frozen. Each use then takes the time of a read, so the user gets a message. If more than a third of the
# examples are like that, the split is not worth keeping (`SplitFails`): the training continues at a later insertion point. If the
# user asked for this insertion point, it ends at the first such example. An error that does not come again, such as that of a
# slow disk, does not count.
#
# Random numbers are watched over all reads of a batch together, because watching each read takes longer. If some were drawn, the
# examples of that batch are read again one by one, and so are those of all batches that follow.

_LARGEST_MISFIT_SHARE = 1 / 3  # of the examples read
_ENOUGH_READS = 128  # with fewer reads, that share means nothing


class _Whole(Enum):  # an enum member, since it stays itself when it is copied or pickled
    read_for_each_use = 1


WHOLE = _Whole.read_for_each_use
"""Stands for an example that is read whole for each use."""


class SplitFails(RuntimeError):
    """Too many examples do not fit the split. The message has their number, and why the last one does not fit.

    ``reason`` is the message in one line: torch adds the traceback of the worker to an error from there.
    """

    @property
    def reason(self) -> str:
        return str(self).rpartition(f"{type(self).__name__}: ")[2].partition("\n")[0]


class WatchedStages(Stages):
    """The stages of a data set that was split. Every read is watched.

    Reads are watched for random numbers only between `begin` and `end`: an example that is not kept may draw them.

    Args:
        stages: The stages to watch. Their ``load`` raises `SplitRefused` for an example that does not fit.
        refusal: Raised for the first example that does not fit. None: such examples are read whole.
        may_fail: Whether `SplitFails` is raised if too many examples are read whole.

    Attributes:
        note: A message for the user about examples that are read whole, or empty.
        reads: Number of examples that were read. Too many of them must not be misfits. A cache also counts the examples it held.
    """

    __slots__ = (
        "_checks_each",
        "_copied",
        "_copies",
        "_dataset",
        "_generators",
        "_is_checking",
        "_is_overlapping",
        "_load_one",
        "_look_at",
        "_misfits",
        "_overlaps",
        "_stages",
        "_trap",
        "may_fail",
        "note",
        "reads",
        "refusal",
    )

    def __init__(self, stages: Stages, dataset: Any, *, refusal: type[SplitRefused] | None, may_fail: bool = False) -> None:
        super().__init__(
            self._load,
            self._augment,
            reused=stages.reused,
            redone=stages.redone,
            load_many=None if stages.load_many is None else self._load_many,
            augment_routes=stages.augment_routes,
        )
        self._stages, self._dataset, self.refusal, self.may_fail = stages, dataset, refusal, may_fail
        self._trap, self._generators, self._look_at = DrawingTrap(), 0, 1
        self._set_trap()
        many = stages.load_many
        self._load_one: Load = stages.load if many is None else lambda index: many([index])[0]
        self._checks_each = False  # whether random states are compared after each example, and not after each batch
        self._is_checking = False  # whether a batch is being loaded whose random states are compared
        self._overlaps, self._is_overlapping = Overlaps(), False
        self._copies = False  # whether each example is copied when it is loaded
        self._copied: list[tuple[Any, Any, Any]] = []  # index, example and copy, of the first batch that is copied
        self.reads = self._misfits = 0
        self.note = ""

    def _set_trap(self) -> bool:
        """Watches all generators that the data set has by now. Returns whether there are more of them than before."""
        before, places = self._generators, places_of_generators(self._dataset, *self._stages.sources)
        self._generators = len(places)
        if self._generators > before:
            self._trap = DrawingTrap([place.state for place in places])
        return self._generators > before

    def load_through(self, through: Callable[[Load], Load]) -> None:
        self._load_one = through(self._load_one)

    def begin(self) -> None:
        """Call this before the examples of a batch are loaded, if some of them are kept."""
        self._is_checking = True
        self._overlaps.clear()
        if not self._checks_each:
            self._trap.set()

    def must_repeat(self) -> bool:
        """Returns whether to load all examples of the batch again, one by one. Call it once after `begin`.

        The reason is that random numbers were drawn, or that two examples are in the same memory. A generator may have been made
        by one of the reads. It is looked for at the 1st, 10th, 100th ... read.
        """
        has_new = False
        while self.reads >= self._look_at:
            self._look_at *= 10
            has_new = self._set_trap() or has_new
        is_due = has_new or (self._is_overlapping and not self._copies)
        self._copies = self._copies or self._is_overlapping
        if self._checks_each or not (has_new or self._trap.drawn_from()):
            return is_due
        self._checks_each = True
        return True

    def end(self) -> None:
        """Call this when all examples of the batch are loaded, and then seed the global generators."""
        self._is_checking = False
        self._overlaps.clear()
        if self._copied:
            self._tell_if_overwritten(self._copied)
            self._copied, self._is_overlapping = [], False

    def _load(self, index: Any) -> Any:
        self.reads += 1
        load, reason = self._checked if self._is_checking and self._checks_each else self._load_one, ""
        cause: Exception | None = None  # a read that fails now and then may be to blame, and not the split
        for _ in range(2):  # an error that does not come again is not the split's
            try:
                return self._apart(index, load(index))
            except SplitRefused as refused:
                reason = refused.reason
                break
            except Exception as error:  # the data set may raise anything. If it also fails without the split, that is raised
                with preserved_random_states():
                    read_batch(self._dataset, [index])
                reason, cause = f"loading it in stages raised {type(error).__name__}: {error}", error
        self._misfits += 1
        if self.refusal is not None:
            raise self.refusal(f"example {index!r}: {reason}") from cause
        if self.may_fail and self.reads >= _ENOUGH_READS and self._misfits > _LARGEST_MISFIT_SHARE * self.reads:
            raise SplitFails(
                f"{self._misfits} of the {self.reads} examples that this process has read do not fit (the last one, {index!r}: "
                f"{reason})"
            )
        if self._misfits == 1:
            self.note = (
                f"example {index!r} does not fit the split of the data set: {reason}. This example and each one like it is read "
                f"whole for each use, which takes the time of a read each time. Use {earliest(Needs.examples).option} if there "
                "are many"
            )
        return WHOLE

    def _load_many(self, indices: list[Any]) -> list[Any]:
        assert self._stages.load_many is not None
        overwritten: Sequence[Any] = ()
        if not (self._is_checking and self._checks_each) and not self._copies:
            try:
                loaded = self._stages.load_many(indices)
                self.reads += len(indices)
                overlaps = Overlaps()
                if not isinstance(loaded, (list, tuple)) or not any(map(overlaps.add, indices, loaded)):
                    return loaded
                self._copies, overwritten = True, loaded
            except SplitRefused:  # at least one of them does not fit: it is found below
                pass
            except Exception:  # as in _load
                with preserved_random_states():
                    read_batch(self._dataset, indices)
        one_by_one = [self._load(index) for index in indices]
        self._tell_if_overwritten(zip(indices, overwritten, one_by_one, strict=False))
        return one_by_one

    def _apart(self, index: Any, example: Any) -> Any:
        """Returns an example as it was loaded, or a copy of it if the data set is known to use memory twice."""
        if self._copies:
            copied = copy_example(example)
            if self._is_overlapping:
                self._copied.append((index, example, copied))
            return copied
        if self._is_checking and not self._is_overlapping:
            self._is_overlapping = self._overlaps.add(index, example)
        return example

    def _tell_if_overwritten(self, copied: Iterable[tuple[Any, Any, Any]]) -> None:
        """Notes that the data set reuses its memory, if that is so. Examples may also share memory that never changes.

        ``copied`` has the index, the example as it is, and a copy of it as it was.
        """
        for index, example, copy in copied:
            if difference(copy, example, takes_apart=True) is not None:
                name = type(self._dataset).__name__
                self.note = self.note or (
                    f"example {index!r} is overwritten when a later one of its batch is loaded, since {name} uses its memory "
                    "again: from now on, each example is copied when it is loaded"
                )
                return

    def _checked(self, index: Any) -> Any:
        """Loads one example, and raises `SplitRefused` if that draws random numbers."""
        self._trap.set()
        example = self._load_one(index)
        if who := self._trap.drawn_from():
            raise SplitRefused(f"loading it draws random numbers from {who}")
        return example

    def _augment(self, index: Any, example: Any) -> Any:
        return read_batch(self._dataset, [index])[0] if example is WHOLE else self._stages.augment(index, example)
