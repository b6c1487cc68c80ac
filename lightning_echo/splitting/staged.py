"""Data sets that say themselves where they can be cut, by having the stages as methods."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from lightning_echo.protecting.objects import is_subset

LoadMany = Callable[[list[Any]], list[Any]]


class StagedDataset(Dataset[Any]):
    """A map-style data set in stages, which says itself where it can be echoed.

    Write ``load`` and ``augment``, for ``before_augmentation``; or ``read``, ``decode`` and ``augment``, for
    ``after_read`` as well: ``load`` is then ``read`` and ``decode``. Or give any data set the same methods: what
    counts is that they are callable (one that does not augment needs no ``augment`` for ``after_read``). What is
    reused (``load``, or ``read``) must not draw random numbers (an echo repeats what it drew), and each later stage
    must need nothing but what the one before it returned (between the stages of one example, those of others run).
    Both are checked before training.

    >>> class Squares(StagedDataset):
    ...     def load(self, index):
    ...         return index * index
    ...     def augment(self, example):
    ...         return example + 0.5
    ...     def __len__(self):
    ...         return 4
    >>> Squares()[3]
    9.5
    >>> class Texts(StagedDataset):
    ...     def read(self, index):
    ...         return b"one two"
    ...     def decode(self, raw):
    ...         return raw.decode().split()
    ...     def augment(self, example):
    ...         return example[::-1]
    ...     def __len__(self):
    ...         return 4
    >>> Texts()[3]
    ['two', 'one']
    """

    def read(self, index: Any) -> Any:
        """Returns the raw item at ``index``, best as ``bytes``: the content of a file, a record. Only ``after_read`` needs it."""
        raise NotImplementedError(f"{type(self).__name__} must implement load(index), or read(index) and decode(raw)")

    def decode(self, raw: Any) -> Any:
        """Returns the example that a raw item holds. It may draw random numbers, at ``after_read``."""
        raise NotImplementedError(f"{type(self).__name__} must implement load(index), or read(index) and decode(raw)")

    def load(self, index: Any) -> Any:
        """Returns the example at ``index`` as far as it is the same each time: read, decoded, resized."""
        return self.decode(self.read(index))

    def augment(self, example: Any) -> Any:
        """Returns what the model's collate function gets for this use of ``example``, which it may edit."""
        raise NotImplementedError(f"{type(self).__name__} must implement augment(example)")

    def __getitem__(self, index: Any) -> Any:
        return self.augment(self.load(index))

    @staticmethod
    def of(dataset: Dataset[Any], augment: Callable[[Any], Any], decode: Callable[[Any], Any] | None = None) -> AugmentedDataset:
        """Returns ``dataset`` with ``augment`` applied to its examples, cut between the two.

        Args:
            dataset: a map-style data set from which the augmentation was taken out, and the decoding too where
                ``decode`` is given.
            augment: what is redone for each use: one example in, one out.
            decode: turns an item of ``dataset``, which is raw then, into an example. ``after_read`` cuts before it.
                Without it, that point is inside ``dataset``, if anywhere.

        Raises:
            TypeError: ``augment`` or ``decode`` is not callable, or ``dataset`` is a stream.

        >>> StagedDataset.of([1, 2, 3], augment=float)[1]
        2.0
        >>> StagedDataset.of([b"1", b"2", b"3"], decode=int, augment=float)[1]
        2.0
        """
        return AugmentedDataset(dataset, augment, decode)


class AugmentedDataset(StagedDataset):
    """What `StagedDataset.of` returns. Other attributes are those of the data set inside, read and set."""

    # Where to find them in __dict__, so that no attribute of the data set is hidden.
    _OWN = ("_inner", "_augment_one", "_decode_one")

    def __init__(self, dataset: Any, augment: Callable[[Any], Any], decode: Callable[[Any], Any] | None = None) -> None:
        if not callable(augment):
            raise TypeError(f"StagedDataset.of: augment must be callable, got {augment!r}")
        if decode is not None and not callable(decode):
            raise TypeError(f"StagedDataset.of: decode must be callable or None, got {decode!r}")
        if isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__getitem__"):
            raise TypeError(f"StagedDataset.of: dataset must be map-style (dataset[index]), got {type(dataset).__name__}")
        self.__dict__.update(_inner=dataset, _augment_one=augment, _decode_one=decode)

    def read(self, index: Any) -> Any:
        return self._inner[index]

    def decode(self, raw: Any) -> Any:
        return raw if self._decode_one is None else self._decode_one(raw)

    def augment(self, example: Any) -> Any:
        return self._augment_one(example)

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        # Defined even where it only loops: forwarded by __getattr__, it would leave out the augmentation.
        read_many = batched(self._inner) or (lambda indices: [self._inner[index] for index in indices])
        return [self._augment_one(self.decode(raw)) for raw in read_many(indices)]

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        # Its own are missing only before it is unpickled; the inner one's special methods do not augment.
        if name in self._OWN or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            self.__dict__[name] = value
        else:
            setattr(self._inner, name, value)


def is_staged(dataset: Any) -> bool:
    """Whether ``dataset`` has the shape of a `StagedDataset`; whether it behaves so, the proof decides.

    The proof calls ``load(0)`` or ``read(0)``, and ``open(0)`` in an unrelated ``load(path)`` would close standard
    input, so that what plainly takes a path is not even tried.
    """
    if isinstance(dataset, StagedDataset):
        return True
    return _is_stage(dataset, "augment") and (_is_stage(dataset, "load") or _has_read_and_decode(dataset))


def is_raw(dataset: Any) -> bool:
    """Whether ``dataset`` has ``read(index)`` and ``decode(raw)``; where it does not augment, it needs no ``augment``.

    A `StagedDataset` that implements ``load`` may use both names for helpers, like any other data set.
    """
    if isinstance(dataset, AugmentedDataset):
        return dataset._decode_one is not None
    if isinstance(dataset, StagedDataset):
        own = [_is_own(getattr(dataset, name), getattr(StagedDataset, name)) for name in ("read", "decode", "load")]
        return own == [True, True, False] or (own == [True, True, True] and _has_read_and_decode(dataset))
    return _has_read_and_decode(dataset) and (not callable(getattr(dataset, "augment", None)) or _is_stage(dataset, "augment"))


def load_of(dataset: Any) -> Callable[[Any], Any]:
    """Returns the ``load`` of a data set that is staged, made of ``read`` and ``decode`` where it has none."""
    if isinstance(dataset, StagedDataset) or _is_stage(dataset, "load"):
        load: Callable[[Any], Any] = dataset.load
        return load
    return lambda index: dataset.decode(dataset.read(index))


def _has_read_and_decode(dataset: Any) -> bool:
    # What decode is called with came from read, so that it may well be named for a file.
    return _is_stage(dataset, "read") and _is_stage(dataset, "decode", may_take_path=True)


def _is_own(method: Any, base: Any) -> bool:
    return getattr(method, "__func__", method) is not base


def _is_stage(dataset: Any, name: str, *, may_take_path: bool = False) -> bool:
    stage = getattr(dataset, name, None)
    return callable(stage) and _takes_one(stage, may_take_path)


_NO_INDEX = re.compile("path|file|fname|dir|folder|root|url|uri")


def _takes_one(stage: Callable[..., Any], may_be_path: bool) -> bool:
    """Whether ``stage`` can be called with one value, which need not be a path."""
    try:
        signature = inspect.signature(stage)
        signature.bind(None)
    except TypeError:
        return False
    except ValueError:  # built in, without a signature
        return True
    first = next(iter(signature.parameters.values()))
    takes_path = _NO_INDEX.search(first.name) or first.annotation in (str, "str", Path, "Path")
    return may_be_path or not takes_path


def batched(dataset: Any) -> LoadMany | None:
    """Returns ``dataset.__getitems__`` where it reads whole batches: that of a ``Subset`` may only loop."""
    innermost = dataset
    while True:
        if is_subset(innermost):
            innermost = innermost.dataset
        elif isinstance(innermost, AugmentedDataset):
            innermost = innermost._inner
        else:
            break
    if not callable(getattr(innermost, "__getitems__", None)):
        return None
    many: LoadMany = dataset.__getitems__
    return many
