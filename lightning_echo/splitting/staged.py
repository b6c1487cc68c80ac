"""Data sets that have the stages as methods, so that the methods show where they can be cut.

`StagedDataset` is the public base class. Any data set with the same methods counts as well.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from lightning_echo.insertion import Needs, earliest
from lightning_echo.protecting.objects import is_subset

__all__ = [
    "AugmentedDataset",
    "LoadMany",
    "StagedDataset",
    "WholeBatchError",
    "batched",
    "examples_in",
    "is_raw",
    "is_staged",
    "load_of",
    "read_batch",
]

LoadMany = Callable[[list[Any]], list[Any]]


class StagedDataset(Dataset[Any]):
    """A map-style data set with a method for each stage, so that the methods show where it can be cut.

    Write one of the two:

    * ``load`` and ``augment``, for ``before_augmentation``;
    * ``read``, ``decode`` and ``augment``, for ``after_read`` as well: ``load`` is then ``read`` and ``decode``.

    A data set of another class may have the same methods instead: they only need to be callable. For ``after_read`` it needs no
    ``augment`` if it does not augment.

    The stages must keep two rules, and both are checked before training:

    * The stages that are reused (``load``, or ``read``) must not draw random numbers, because an echo would repeat them.
    * Each later stage must use only what the stage before it returned, because the stages of other examples run in between.

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
        """Returns the raw item at ``index``, if possible as ``bytes``: the content of a file, a record.

        Only ``after_read`` needs this method.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement load(index), or read(index) and decode(raw)")

    def decode(self, raw: Any) -> Any:
        """Returns the example that a raw item holds. At ``after_read``, this method may draw random numbers."""
        raise NotImplementedError(f"{type(self).__name__} must implement load(index), or read(index) and decode(raw)")

    def load(self, index: Any) -> Any:
        """Returns the example at ``index`` after all stages that give the same each time: read, decoded, resized."""
        return self.decode(self.read(index))

    def augment(self, example: Any) -> Any:
        """Returns what the collate function gets for this use of ``example``. This method may edit ``example`` in place."""
        raise NotImplementedError(f"{type(self).__name__} must implement augment(example)")

    def __getitem__(self, index: Any) -> Any:
        return self.augment(self.load(index))

    @staticmethod
    def of(dataset: Dataset[Any], augment: Callable[[Any], Any], decode: Callable[[Any], Any] | None = None) -> AugmentedDataset:
        """Returns ``dataset`` with ``augment`` applied to its examples, cut between the two.

        Args:
            dataset: A map-style data set that does not augment. If ``decode`` is given, it does not decode either.
            augment: A function that gets an example and returns an augmented one. It runs for each use.
            decode: A function that gets a raw item and returns an example. The items of ``dataset`` are then raw items, and
                ``after_read`` cuts before ``decode``. None: ``after_read`` cuts inside ``dataset``, if that can be cut.

        Raises:
            TypeError: ``augment`` or ``decode`` is not callable, or ``dataset`` is a stream.

        >>> StagedDataset.of([1, 2, 3], augment=float)[1]
        2.0
        >>> StagedDataset.of([b"1", b"2", b"3"], decode=int, augment=float)[1]
        2.0
        """
        return AugmentedDataset(dataset, augment, decode)


class AugmentedDataset(StagedDataset):
    """What `StagedDataset.of` returns: a named cut. Other attributes are read from the data set inside, and set there."""

    # The only attributes of its own. Their names must not hide an attribute of the data set inside.
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
        # Always defined: the __getitems__ of the data set inside would leave out the augmentation.
        many = getattr(self._inner, "__getitems__", None)
        raws = many(indices) if callable(many) else None
        if not isinstance(raws, list) or len(raws) != len(indices):  # a whole batch, such as a tuple of columns
            raws = [self._inner[index] for index in indices]
        return [self._augment_one(self.decode(raw)) for raw in raws]

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        # Its own attributes are missing only while it is being unpickled. Special methods of the data set inside do not augment.
        if name in self._OWN or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            self.__dict__[name] = value
        else:
            setattr(self._inner, name, value)


def is_staged(dataset: Any) -> bool:
    """Returns whether ``dataset`` has the methods of a `StagedDataset`. The proof finds out whether they do what they should.

    A method that takes a path does not count. The proof calls ``load(0)`` or ``read(0)``, and an unrelated ``load(path)`` might
    then call ``open(0)``, which closes the standard input.
    """
    if isinstance(dataset, StagedDataset):
        return True
    return _is_stage(dataset, "augment") and (_is_stage(dataset, "load") or _has_read_and_decode(dataset))


def is_raw(dataset: Any) -> bool:
    """Returns whether ``dataset`` has ``read(index)`` and ``decode(raw)``. If it does not augment, it needs no ``augment``.

    A `StagedDataset` that implements ``load`` may use both names for something else, like any other data set.
    """
    if isinstance(dataset, AugmentedDataset):
        return dataset._decode_one is not None
    if isinstance(dataset, StagedDataset):
        reads, decodes, loads = (_overrides(dataset, name) for name in ("read", "decode", "load"))
        return reads and decodes and (not loads or _has_read_and_decode(dataset))
    return _has_read_and_decode(dataset) and (not callable(getattr(dataset, "augment", None)) or _is_stage(dataset, "augment"))


def load_of(dataset: Any) -> Callable[[Any], Any]:
    """Returns the ``load`` of a staged data set. If the data set has none, ``load`` is made of ``read`` and ``decode``."""
    if isinstance(dataset, StagedDataset) or _is_stage(dataset, "load"):
        load: Callable[[Any], Any] = dataset.load
        return load
    return lambda index: dataset.decode(dataset.read(index))


def _has_read_and_decode(dataset: Any) -> bool:
    # decode gets what read returned, so its parameter may have a name such as "file".
    return _is_stage(dataset, "read") and _is_stage(dataset, "decode", may_take_path=True)


def _overrides(dataset: StagedDataset, name: str) -> bool:
    method = getattr(dataset, name)
    return getattr(method, "__func__", method) is not getattr(StagedDataset, name)


def _is_stage(dataset: Any, name: str, *, may_take_path: bool = False) -> bool:
    stage = getattr(dataset, name, None)
    return callable(stage) and _takes_one(stage, may_take_path)


_NO_INDEX = re.compile("path|file|fname|dir|folder|root|url|uri")


def _takes_one(stage: Callable[..., Any], may_take_path: bool) -> bool:
    """Returns whether ``stage`` can be called with one value; unless ``may_take_path``, the value must not be a path."""
    try:
        signature = inspect.signature(stage)
        signature.bind(None)
    except TypeError:
        return False
    except ValueError:  # built in, without a signature
        return True
    first = next(iter(signature.parameters.values()))
    takes_path = _NO_INDEX.search(first.name) or first.annotation in (str, "str", Path, "Path")
    return may_take_path or not takes_path


def batched(dataset: Any) -> LoadMany | None:
    """Returns ``dataset.__getitems__`` if it reads a whole batch in one call, otherwise None.

    A ``Subset`` and a named cut always have that method. But it is only a loop if the data set inside does not have it.
    """
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


def read_batch(dataset: Any, indices: list[Any]) -> list[Any]:
    """Reads examples in the way in which a plain ``DataLoader`` reads those of a batch, and returns them.

    Raises:
        WholeBatchError: The data set returns a whole batch in place of a list of examples.
    """
    many = getattr(dataset, "__getitems__", None)
    return examples_in(many(indices), indices) if callable(many) else [dataset[index] for index in indices]


class WholeBatchError(ValueError):
    """A ``__getitems__`` returned something else than a list of one example for each index: a whole batch."""


def examples_in(read: Any, indices: Sequence[Any]) -> list[Any]:
    """Returns the examples that a ``__getitems__`` returned, as a list.

    Args:
        read: What it returned. A plain ``DataLoader`` hands that to the collate function, whatever it is.
        indices: What it was asked for.

    Raises:
        WholeBatchError: That is not a list or tuple of as many examples, for instance a ``TensorDict``, or a dict of columns.

    >>> examples_in(("a", "b"), [5, 7])
    ['a', 'b']
    """
    is_list = isinstance(read, list | tuple)
    if is_list and len(read) == len(indices):
        return list(read)
    what = f"{len(read)} examples" if is_list else f"a {type(read).__name__}"
    asked = f"{len(indices)} {'index' if len(indices) == 1 else 'indices'}"
    raise WholeBatchError(
        f"__getitems__ of the data set returned {what} for {asked}, and not a list of one example for each: a whole batch can be "
        f"echoed only as a batch ({earliest(Needs.batches).option}), and neither cached nor shared"
    )
