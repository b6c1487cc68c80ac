"""The key of an example: its number in the data set that reads it.

A ``Subset`` or ``ConcatDataset`` only passes an index on. Two subsets of a data set may have the same example under different
indices, and different examples under the same index. So the key of an example is made from the data set that reads it and from
the index there::

    ConcatDataset:  index 7 -> data set 1, index 2       keys 0 to 4: data set 0
    Subset there:   index 2 -> index 11                  keys 5 to 24: data set 1        -> key 5 + 11

If a data set is inside twice, both have the same keys. What `StagedDataset.of` returns has its own keys, because two of them may
decode the examples of one data set in two ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_integer
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_echo.splitting.describe import Description, Role, data_sets_inside, describe, pass_on

__all__ = ["Keys", "NoKeysError"]


_PASSES_ON = (Role.subset, Role.concat)


class NoKeysError(TypeError):
    """The examples of a data set cannot be told apart by numbers."""


class Keys:
    """The keys of the examples of a data set.

    Args:
        dataset: A map-style data set.

    Attributes:
        count: Number of keys.
        parts: Name and length of each data set that reads examples, in the order of their keys.

    Raises:
        NoKeysError: A data set that reads examples is a stream, or has no length.

    Example:
        >>> from torch.utils.data import ConcatDataset, Subset
        >>> words, numbers = ["a", "b"], [10, 11, 12]
        >>> keys = Keys(ConcatDataset([words, Subset(numbers, [2, 0])]))
        >>> keys.count, [keys.of(index) for index in range(4)]
        (5, [0, 1, 4, 2])
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._description = dataset, describe(dataset)
        self._indices: tuple[Any, npt.NDArray[np.int64] | None] | None = None  # of a subset, and the same as an array
        self._starts: dict[int, tuple[int, int]] = {}  # number of a data set that reads -> its first key, and its length
        self.count = 0
        self.parts: list[tuple[str, int]] = []
        self._add(dataset, self._description)

    def _add(self, dataset: Any, description: Description) -> None:
        if description.role in _PASSES_ON:
            for part, described in zip(data_sets_inside(dataset, description.role), description.inside, strict=True):
                self._add(part, described)
        elif description.number not in self._starts:
            length = _length_of(dataset, description)
            self._starts[description.number] = self.count, length
            self.count += length
            self.parts.append((_name_of(description), length))

    def of(self, index: Any) -> int | None:
        """Returns the key of an example; None if the index that the reading data set gets is no number, or is out of range.

        An index below 0 has no key, because only that data set knows what it means: not all count from the end.

        Args:
            index: What the data set is asked for.
        """
        dataset, description = self._dataset, self._description
        while description.role in _PASSES_ON:
            number, index = pass_on(dataset, description.role, index)
            dataset, description = data_sets_inside(dataset, description.role)[number], description.inside[number]
        start, length = self._starts[description.number]
        try:
            place = as_integer(index)
        except TypeError:
            return None
        return start + place if 0 <= place < length else None

    def of_many(self, indices: Sequence[Any]) -> npt.NDArray[np.int64]:
        """Returns the keys of several examples, -1 for an example without a key. It is fast if the indices are integers.

        Args:
            indices: What the data set is asked for.

        Example:
            >>> from torch.utils.data import Subset
            >>> Keys(Subset(["a", "b", "c"], [2, 0])).of_many([1, 0, "b"]).tolist()
            [0, 2, -1]
        """
        places = np.asarray(indices) if all(type(index) is int for index in indices) else None
        if places is not None and self._description.role is Role.subset and self._is_within(places):
            inside = self._description.inside[0]
            if inside.role not in _PASSES_ON and (table := self._table()) is not None:
                return self._in_range(table[places], inside)
        if places is not None and len(places) and self._description.role not in _PASSES_ON:
            return self._in_range(places, self._description)
        return np.array([self._of_or_none(index) for index in indices], dtype=np.int64)

    def _is_within(self, places: npt.NDArray[Any]) -> bool:
        return bool(len(places)) and bool(((places >= 0) & (places < len(self._dataset.indices))).all())

    def _table(self) -> npt.NDArray[np.int64] | None:
        """Returns the indices of a subset as an array; None if they are no integers."""
        indices = self._dataset.indices
        if self._indices is None or self._indices[0] is not indices:
            table = np.asarray(indices)
            self._indices = indices, table if table.ndim == 1 and table.dtype.kind in "iu" else None
        return self._indices[1]

    def _in_range(self, places: npt.NDArray[Any], description: Description) -> npt.NDArray[np.int64]:
        start, length = self._starts[description.number]
        return np.where((places >= 0) & (places < length), start + places.astype(np.int64), -1)

    def _of_or_none(self, index: Any) -> int:
        try:
            key = self.of(index)
        except Exception:  # a data set that passes the index on may raise anything. It raises it again when the example is read
            return -1
        return -1 if key is None else key


def _name_of(description: Description) -> str:
    inside = ", ".join(map(_name_of, description.inside))
    return f"{description.name}({inside})" if inside else description.name


def _length_of(dataset: Any, description: Description) -> int:
    if description.is_stream:
        raise NoKeysError(
            f"{description.name} is a stream: its examples have no index, under which they could be found again. Copy it to a "
            "local disk, or echo it"
        )
    try:
        return len(dataset)
    except TypeError as error:
        raise NoKeysError(
            f"{description.name} has no length, so it is not known how many examples it has: add __len__"
        ) from error
