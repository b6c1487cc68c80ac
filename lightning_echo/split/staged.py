"""The stages of a data set: ``load``, whose result is reused, and ``augment``, which is redone for each use."""

from __future__ import annotations

import inspect
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from torch.utils.data import Dataset, IterableDataset

from lightning_echo.data.copies import nbytes, throw_away_copy
from lightning_echo.data.objects import image_class, is_subset
from lightning_echo.data.randomness import preserved_random_states
from lightning_echo.insertion import Needs, earliest

# ---------------------------------------------------------------------- stages
# The insertion point decides what is in each stage: at ``after_read``, ``load`` only reads, and ``augment`` first decodes.
# However a data set was cut, a worker runs the same small value.

Load = Callable[[Any], Any]
Augment = Callable[[Any, Any], Any]


@dataclass(slots=True, eq=False, repr=False)
class Stages:
    """The functions that a worker runs for one data set, looked up once, not for every example.

    Attributes:
        load: Gets an index and returns an example. The result is reused.
        augment: Gets an index and an example, and returns the input of the collate function. It runs for each use. The index only
            shows from which data set inside a ``ConcatDataset`` the example came.
        load_many: Gets indices and returns the examples in one call, if the innermost data set has a ``__getitems__`` of its own;
            otherwise None. If it is set, fresh examples are loaded by it and not by ``load``.
        reused: Human-readable names of the parts of ``load``, e.g. ``("load", "Resize")`` or ``("read",)``.
        redone: Those of ``augment``, e.g. ``("RandomResizedCrop", "RandomHorizontalFlip")``; may be empty.
        augment_routes: Whether ``augment`` uses the index.
        sources: The copies of data sets that ``load`` reads in place of the data sets themselves.
    """

    load: Load
    augment: Augment
    _: KW_ONLY
    reused: tuple[str, ...]
    redone: tuple[str, ...]
    load_many: LoadMany | None = None
    augment_routes: bool = False
    sources: tuple[Any, ...] = ()

    def load_through(self, through: Callable[[Load], Load]) -> None:
        """Replaces the function behind ``load`` by ``through`` of it."""
        self.load = through(self.load)

    @property
    def redoing(self) -> str:
        """The work of ``augment``, for messages."""
        return "decoding and augmenting" if "decode" in self.redone else "augmenting"

    def __repr__(self) -> str:
        return f"reuse [{', '.join(self.reused)}], redo [{', '.join(self.redone)}]"


def unchanged(index: Any, example: Any) -> Any:
    """Returns ``example``: the ``augment`` of stages that redo nothing."""
    return example


def uncut_stages(dataset: Any) -> Stages:
    """Returns the stages of a data set that is not cut (``after_augmentation``): everything is reused."""
    return Stages(dataset.__getitem__, unchanged, reused=("load", "augment"), redone=(), load_many=batched(dataset))


# ---------------------------------------------------------------------- decoding
# Pillow decodes a file when its pixels are first used: by a transform, or by the copy that is made for an echo. Before that, an
# echo would reuse an open file. And decoding, which happens once per fresh example, would be counted as work for each use.

_FEW = 16  # only so many members of an example are searched: many members are values, not images


def add_decoding(stages: Stages) -> None:
    """Changes stages so that ``load`` also decodes images that the data set has only opened."""
    load, load_many = stages.load, stages.load_many
    stages.load = lambda index: decoded(load(index))
    if load_many is None:
        return

    def load_decoded(indices: list[Any]) -> list[Any]:
        examples = load_many(indices)
        if isinstance(examples, list | tuple):  # if not, it is a whole batch
            for example in examples:
                decoded(example)
        return examples

    stages.load_many = load_decoded


def decoded(example: Any) -> Any:
    """Returns the same example with its images decoded: the example itself, or members of a sequence or dictionary."""
    image = image_class()
    if image is None:
        return example
    if isinstance(example, image):
        example.load()
    elif isinstance(example, (tuple, list, dict)):
        for member in islice(example.values() if isinstance(example, dict) else example, _FEW):
            if isinstance(member, image):
                member.load()
    return example


# ---------------------------------------------------------------------- staged
# The public base class. Any data set with the same methods counts as well.

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

    Set ``reads_concurrently = True`` in your class if threads may run ``read`` for several examples at the same time (or
    ``load``, if there is no ``read``). Then ``reads_in_flight="auto"`` may do so, see `EchoConfig`. Each thread needs connections
    and open files of its own: keep them in a ``threading.local``.

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

    reads_concurrently = False

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
    """The named cut that `StagedDataset.of` returns. Other attributes are read from the data set inside, and set there."""

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


def inside_named_cut(dataset: Any) -> Any:
    """Returns the data set inside a named cut; None for another data set."""
    return dataset._inner if type(dataset) is AugmentedDataset else None


def named_cut_over(dataset: Any, like: AugmentedDataset) -> AugmentedDataset:
    """Returns a named cut around another data set, with the functions of ``like``."""
    return AugmentedDataset(dataset, like._augment_one, like._decode_one)


def is_staged(dataset: Any) -> bool:
    """Returns whether ``dataset`` has the methods of a `StagedDataset`. The proof checks that they do what they should.

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
        methods = ((name, getattr(dataset, name)) for name in ("read", "decode", "load"))
        reads, decodes, loads = (getattr(own, "__func__", own) is not getattr(StagedDataset, name) for name, own in methods)
        return reads and decodes and (not loads or _has_read_and_decode(dataset))
    return _has_read_and_decode(dataset) and (not callable(getattr(dataset, "augment", None)) or _is_stage(dataset, "augment"))


def load_of(dataset: Any) -> Callable[[Any], Any]:
    """Returns the ``load`` of a staged data set, or one made of ``read`` and ``decode``."""
    if isinstance(dataset, StagedDataset) or _is_stage(dataset, "load"):
        load: Callable[[Any], Any] = dataset.load
        return load
    return lambda index: dataset.decode(dataset.read(index))


_NO_INDEX = re.compile("path|file|fname|dir|folder|root|url|uri")


def _has_read_and_decode(dataset: Any) -> bool:
    # decode gets what read returned, so its parameter may have a name such as "file".
    return _is_stage(dataset, "read") and _is_stage(dataset, "decode", may_take_path=True)


def _is_stage(dataset: Any, name: str, *, may_take_path: bool = False) -> bool:
    """Returns whether a method can be called with one value; unless ``may_take_path``, the value must not be a path."""
    stage = getattr(dataset, name, None)
    if not callable(stage):
        return False
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
    """Reads examples as a plain ``DataLoader`` reads those of a batch. Raises `WholeBatchError` for a whole batch."""
    many = getattr(dataset, "__getitems__", None)
    return examples_in(many(indices), indices) if callable(many) else [dataset[index] for index in indices]


class WholeBatchError(ValueError):
    """A ``__getitems__`` returned something else than a list of one example for each index: a whole batch."""


def examples_in(read: Any, indices: Sequence[Any]) -> list[Any]:
    """Returns the result of a ``__getitems__`` as a list of examples.

    Raises `WholeBatchError` if it is not a list or tuple of as many examples as ``indices``: a ``TensorDict``, a dict of columns.
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


# ---------------------------------------------------------------------- sizes
# Sizes are estimated from a few examples that are spread over the data: the first and the last may be unlike the others. A size
# never ends a training: an example that cannot be read is left out, and the training will meet it or not.

_SAMPLES = 8
_MOST_SECONDS = 0.5  # no example is read after that: a slow source, or one that hangs, must not make the start slow


class ExampleSize(NamedTuple):
    """Sizes of examples, in bytes: memory of the largest one while it is live, and the mean, packed (see `nbytes`)."""

    largest: int
    packed: int


def sample_places(count: int) -> list[int]:
    """Returns the places of up to eight samples among ``count`` examples, from the first to the last one."""
    if count <= _SAMPLES:
        return list(range(count))
    return [place * (count - 1) // (_SAMPLES - 1) for place in range(_SAMPLES)]


def size_of_examples(dataset: Any, make: Callable[[Any], Stages], indices: Sequence[Any] | None = None) -> ExampleSize | None:
    """Reads up to eight examples from a temporary copy of a data set, for half a second; None if none can be read.

    A data set without a length is not read. ``make`` makes the stages of the copy, whose ``load`` returns the measured example.
    """
    sizes: list[ExampleSize] = []
    ends = perf_counter() + _MOST_SECONDS  # before the timer: what it cuts is caught below, and it rings once
    with suppress(Exception), preserved_random_states(), _at_most(_MOST_SECONDS):  # whatever the data set raises
        indices = range(len(dataset)) if indices is None else indices
        stages = make(throw_away_copy(dataset))
        places = sample_places(len(indices))
        for place in (*places[::3], *places[1::3], *places[2::3]):  # those that are read are spread, too
            if perf_counter() >= ends:
                break
            with suppress(Exception):
                index = indices[place]
                loaded = stages.load(index) if stages.load_many is None else stages.load_many([index])[0]
                sizes.append(size_of(decoded(loaded)))
    return sizes_joined(sizes) if sizes else None


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in a read that takes longer, unless the program has a timer of its own, or this is not the main thread.

    Sizes are estimated in a process that ends afterwards, so that nothing is lost with the read.
    """
    may_set = threading.current_thread() is threading.main_thread() and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    if not may_set:
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise TimeoutError(f"the read takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def size_of(*examples: Any) -> ExampleSize:
    return sizes_joined(ExampleSize(nbytes(each), nbytes(each, is_packed=True)) for each in examples)


def sizes_joined(sizes: Iterable[ExampleSize]) -> ExampleSize:
    """Returns the largest of all, and the mean of the means."""
    largest, packed = zip(*sizes, strict=True)
    return ExampleSize(max(largest), sum(packed) // len(packed))
