"""The proof that a split is right: what the data set returns and what the two stages return are the same.

A data set goes through four steps, in this order. `find_split` runs them. No step uses the next one:

* ``describe(dataset)`` looks at the data set once: the data sets inside it, how it passes indices on to them, the conventions
  that each may follow, and the names of their transforms. It returns a value that can be printed and sent.
* ``cut(description, raw=...)`` cuts that value at an insertion point: what is reused and what is redone of each data set inside.
* ``make(cut, dataset)`` makes the functions, `Stages`: once for a temporary copy, for the proof, and once in each worker. In the
  worker the data set is described again, because a ``worker_init_fn`` may have changed it, and cut in the way that was proved.
* ``prove(dataset, make, ...)`` compares what the stages return with what the data set returns.

While training runs, `check.py` watches each read. An example that does not fit the split is read whole for each use.

>>> from functools import partial
>>> import torch
>>> from lightning_echo.split.describe import cut, describe
>>> from lightning_echo.split.make import make
>>> from lightning_echo.split.prove import prove, read_plainly
>>> class Ones(torch.utils.data.Dataset):
...     transform = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout())
...     def __getitem__(self, index):
...         return self.transform(torch.ones(3)), index
>>> description = describe(Ones())
>>> print(description)
0: Ones reads (transform: Identity | Dropout; transform(image) and target_transform(target); transform(*sample); ...)
>>> where = cut(description, raw=False)
>>> print(where)
Ones: reuse [load, Identity], redo [Dropout]
>>> stages = make(where, Ones())
>>> stages.load(7)
(tensor([1., 1., 1.]), 7)
>>> min(prove(Ones(), partial(make, where), read_plainly(Ones(), [0, 7]))) > 0  # bytes of an example; SplitRefused if it is wrong
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.utils.data import get_worker_info

from lightning_echo.data.copies import copy_example, nbytes, throw_away_copy
from lightning_echo.data.difference import difference
from lightning_echo.data.randomness import (
    RandomStates,
    places_of_generators,
    preserved_random_states,
    random_states,
    seed_all,
    seeders,
)
from lightning_echo.split.describe import (
    Convention,
    Cut,
    Description,
    ReadRefused,
    Role,
    SplitRefused,
    candidates,
    cut,
    data_sets_inside,
    describe,
    leaves,
    pass_on,
    pruned,
)
from lightning_echo.split.make import make
from lightning_echo.split.staged import (
    AugmentedDataset,
    ExampleSize,
    Stages,
    WholeBatchError,
    batched,
    decoded,
    examples_in,
    read_batch,
    size_of,
    size_of_examples,
    sizes_joined,
)

# ---------------------------------------------------------------------- prove
# The fourth step. A batch of two examples is read as the plain loader reads it, and in stages: loaded twice from one copy, the
# second time under other seeds, and then augmented under the seeds of the plain read. This shows that
#
# * both are equal, and drew the same random numbers, so that nothing random is left out or done twice;
# * loading draws no random numbers, neither from the three global generators nor from a generator of the data set, even if that
#   is made at the first read, and it makes none from a seed of the process;
# * augmenting needs only a copy of the loaded example, since both examples are loaded before the first one is augmented.
#
# Everything runs on temporary copies, and the global random states are put back.

_SEED = 1907_05550


# --- the examples to read ------------------------------------------------------------------------------------------


def indices_to_read(description: Description, dataset: Any, indices: Sequence[Any] | None) -> dict[int, tuple[Any, Any]]:
    """Returns, for each leaf by its number, the first and the last index that lead to it. A leaf without an index is left out.

    The description ends at the leaves. The data set is not read, and few indices are looked at. They are in order; None: all.
    """
    indices = _ends(description, dataset) if indices is None else indices
    count = len(leaves(description))
    first: dict[int, Any] = {}
    last: dict[int, Any] = {}
    for found, order in ((first, indices), (last, reversed(indices))):
        for index in order:
            found.setdefault(_leaf_at(description, dataset, index), index)
            if len(found) == count:
                break
    return {leaf: (index, last[leaf]) for leaf, index in first.items()}


def _ends(description: Description, dataset: Any) -> Sequence[Any]:
    """Returns some indices, in order. For each leaf, the first and the last index that lead to it are among them."""
    inside = list(zip(description.inside, data_sets_inside(dataset, description.role), strict=False))
    if inside and description.role is Role.named_cut:
        return _ends(*inside[0])
    if inside and description.role is Role.concat:
        starts = zip(inside, [0, *dataset.cumulative_sizes], strict=False)
        return [start + index for (part, held), start in starts for index in _ends(part, held)]
    if not has_length(dataset):
        return [0]
    every = range(len(dataset))
    if len(leaves(description)) > 1:
        found = indices_to_read(description, dataset, every)
        return sorted({index for pair in found.values() for index in pair})
    return [*every[:1], *every[-1:]]


def has_length(dataset: Any) -> bool:
    """Returns whether ``len(dataset)`` works. A named cut has the length of the data set inside it."""
    while isinstance(dataset, AugmentedDataset):
        dataset = dataset._inner
    return hasattr(type(dataset), "__len__")


def _leaf_at(description: Description, dataset: Any, index: Any) -> int:
    while description.inside:
        place, index = pass_on(dataset, description.role, index)
        dataset = data_sets_inside(dataset, description.role)[place]
        description = description.inside[place]
    return description.number


# --- plain reads ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainRead:
    """The indices that a data set was read at, its examples, and the global random states afterwards."""

    indices: list[Any]
    examples: list[Any]
    states: RandomStates


def read_plainly(dataset: Any, indices: list[Any]) -> PlainRead:
    """Reads examples as the plain loader does, from a temporary copy. Exceptions of the data set are not caught."""
    with seeded():
        copied = seeded_copy(dataset)
        return PlainRead(indices, read_batch(copied, indices), random_states())


def holds_iteration(dataset: Any) -> bool:
    """Returns whether a data set holds a running iteration: a generator, or one of a loader. Its index then decides nothing.

    Such a data set (TorchIO's ``Queue``) cannot be copied to be tried: the copy would take examples away from it.
    """
    held = getattr(dataset, "__dict__", {}).values()
    modules = [type(each).__module__ for each in held if isinstance(each, Iterator)]
    return any(module.startswith(("torch.utils.data", "builtins")) for module in modules)


def ignores_index(dataset: Any, one: Any, other: Any) -> bool:
    """Returns whether a data set ignores its index, and returns what comes next (TorchIO's ``Queue``).

    After a first read, ``one`` and ``other`` are read from the same state of the data set and under the same seeds. The data set
    ignores its index if both reads return the same example, and the first read returned another one.
    """
    try:
        with seeded():
            begun = seeded_copy(dataset)
            first = read_batch(begun, [one])
        if holds_iteration(begun):
            return True
        again = read_plainly(begun, [one]).examples
        return difference(first, again) is not None and difference(again, read_plainly(begun, [other]).examples) is None
    except Exception:  # the data set may raise anything here: the examples that are needed were read before
        return False


# --- the proof -----------------------------------------------------------------------------------------------------


def prove(dataset: Any, make: Callable[[Any], Stages], plain: PlainRead, *, again: bool = True) -> ExampleSize:
    """Checks that stages return what the data set returns by itself, and returns the size of the reused examples.

    Raises `SplitRefused` if the stages return something else, or if one cannot run without the other. ``again``: begin again if a
    second plain read differs from the first, as that of a data set that finds an example on disk from then on (MONAI's
    ``PersistentDataset``).
    """
    with seeded():
        throw_away = seeded_copy(dataset)
        stages = make(throw_away)
        for example in _load(stages, plain.indices, throw_away):
            decoded(example)  # which closes its file
        with preserved_random_states(), _worker_seed(_SEED + 1):
            seed_all(_SEED + 1)  # once more under other seeds, from the same copy, which may have made a generator by now
            loaded = _load(stages, plain.indices, throw_away)
        size = size_of(*loaded)
        augmented = []
        for index, example in zip(plain.indices, loaded, strict=True):
            with _only_in_stages(f"{stages.redoing} {_named([index])}"):
                augmented.append(stages.augment(index, copy_example(example)))
        where = _where_different(plain, augmented)
    if where is None:
        return size
    second = read_plainly(dataset, plain.indices)
    where_again = difference(plain.examples, second.examples)
    if where_again is None:
        raise SplitRefused(where)
    if again:
        return prove(dataset, make, second, again=False)
    raise SplitRefused(
        f"{_named(plain.indices)} came out differently when read again under the same seeds ({where_again}), so that no split "
        "can be proved; it may draw from a generator that cannot be copied"
    )


def prove_single_loads(dataset: Any, make: Callable[[Any], Stages], indices: Sequence[Any]) -> None:
    """Checks that a data set that reads whole batches returns the same examples one by one. It might pad them to the longest."""
    with seeded():
        if (load_many := make(seeded_copy(dataset)).load_many) is None:
            return
        together = copy_example(list(load_many(list(indices))))
        for index, example in zip(indices, together, strict=True):
            if (where := difference(example, load_many([index])[0])) is not None:
                raise SplitRefused(
                    f"its __getitems__ returns {_named([index])} otherwise when it is asked for other examples, too ({where}), "
                    "so that what one batch needs cannot be held for another"
                )


def check_deterministic(dataset: Any, indices: Sequence[Any]) -> ExampleSize:
    """Checks that a data set returns the same example each time, whatever the random states are. Returns the size."""
    reads, has_drawn = [], False
    for number in range(2):
        with preserved_random_states(), _worker_seed(_SEED + number):
            seed_all(_SEED + number)
            copied = throw_away_copy(dataset)
            for place, seed in enumerate(seeders(copied).values()):
                seed(_SEED + 100 * number + place)
            read_batch(copied, list(indices))
            places = places_of_generators(copied)
            before = [place.state() for place in places]
            reads.append(read_batch(copied, list(indices)))
            has_drawn = has_drawn or difference(before, [place.state() for place in places]) is not None
    for index, first, second in zip(indices, *reads, strict=True):
        if (where := difference(first, second)) is not None:
            raise SplitRefused(f"{_named([index])} is another example when it is read again ({where})")
    if has_drawn:
        raise SplitRefused(f"reading {_named(indices)} draws random numbers from a generator that the data set holds")
    return size_of(*reads[0])


def _load(stages: Stages, indices: list[Any], dataset: Any) -> list[Any]:
    places = places_of_generators(dataset, *stages.sources)
    before, private = random_states(), [place.state() for place in places]
    with _only_in_stages(f"loading {_named(indices)}"):
        loaded = [stages.load(index) for index in indices] if stages.load_many is None else stages.load_many(indices)
    what = f"what would be reused ({', '.join(stages.reused)}) draws random numbers"
    if drew := _moved(before):
        raise SplitRefused(f"{what} from {' and '.join(drew)}")
    if difference(private, [place.state() for place in places]):
        raise SplitRefused(f"{what} from a generator that the data set holds")
    try:
        return examples_in(loaded, indices)
    except WholeBatchError as error:
        raise SplitRefused(str(error)) from error


def _where_different(plain: PlainRead, augmented: list[Any]) -> str | None:
    """Returns where the examples differ, or which global generators are not in the states that the plain read left."""
    for index, left, right in zip(plain.indices, plain.examples, augmented, strict=True):
        if (where := difference(left, right)) is not None:
            return f"{_named([index])} is not what its stages return under the same seeds ({where})"
    drew = _moved(plain.states)
    return f"it does not draw the same random numbers ({', '.join(drew)}) by itself and in stages" if drew else None


@contextmanager
def _only_in_stages(doing: str) -> Iterator[None]:
    """Turns exceptions into a refusal, since the data set itself has raised none."""
    try:
        yield
    except SplitRefused:
        raise
    except Exception as error:
        raise SplitRefused(f"{doing} in stages raised {type(error).__name__}: {error}") from error


def _named(indices: Sequence[Any]) -> str:
    return " and ".join(f"dataset[{index}]" for index in indices)


# --- seeds and random states ---------------------------------------------------------------------------------------


@contextmanager
def seeded() -> Iterator[None]:
    """Seeds the global generators, and puts their states back afterwards."""
    with preserved_random_states():
        seed_all(_SEED)
        yield


@contextmanager
def _worker_seed(seed: int) -> Iterator[None]:
    """Gives the worker of this process another seed (``get_worker_info().seed``), if it is a worker."""
    info = get_worker_info()
    if info is None:
        yield
        return
    before = info.seed
    object.__setattr__(info, "seed", seed)  # torch's own class lets nobody set it, by setattr
    try:
        yield
    finally:
        object.__setattr__(info, "seed", before)


def seeded_copy(dataset: Any) -> Any:
    """Returns a temporary copy. Generators of its transforms are seeded, unless the original shares them."""
    throw_away = throw_away_copy(dataset)
    shared = seeders(dataset).keys()
    for number, (identity, seed) in enumerate(seeders(throw_away).items()):
        if identity not in shared:
            seed(_SEED + number)
    return throw_away


def _moved(states: RandomStates) -> list[str]:
    """Returns the names of the global generators that are not in the given states."""
    pairs = zip(RandomStates._fields, states, random_states(), strict=True)
    return [name for name, before, now in pairs if difference(before, now)]


# ---------------------------------------------------------------------- calls
# A plain ``DataLoader`` hands to the collate function whatever one call of ``__getitems__`` returns: examples, or a batch that
# cannot be taken apart. Echoing before batching makes batches of examples from different calls, so it needs examples, and such
# that fit each other.

_FEW = 4  # examples that are read to find out


def why_not_apart(dataset: Any, indices: Sequence[Any] | None, collate_fn: Callable[[list[Any]], Any]) -> str:
    """Returns why the result of one call cannot be taken apart; empty if it can. See `whole_batch` and `needs_one_call`."""
    return whole_batch(dataset, indices)[0] or needs_one_call(dataset, indices, collate_fn)


def whole_batch(dataset: Any, indices: Sequence[Any] | None) -> tuple[str, int]:
    """Returns why one call of a data set reads a whole batch, and the bytes of one example in it; empty and 0 if it does not.

    A list of as many members as a batch has columns is not a list of examples. Therefore two numbers of examples are read.
    """
    if batched(dataset) is None:
        return "", 0
    few = _few(dataset, indices)
    for asked in (few[:1], few if len(few) > 1 else [*few, *few]):
        with seeded():
            read = seeded_copy(dataset).__getitems__(asked)
        try:
            examples_in(read, asked)
        except WholeBatchError as error:
            return str(error), nbytes(read) // len(asked)
    return "", 0


def needs_one_call(dataset: Any, indices: Sequence[Any] | None, collate_fn: Callable[[list[Any]], Any]) -> str:
    """Returns why the examples of a batch must come from one call; empty if they need not.

    A call may pad its examples to the longest of them (a tokenizer in ``set_transform`` of Hugging Face). The collate function
    then fails for examples of different calls alone.
    """
    if batched(dataset) is None:
        return ""
    few = _few(dataset, indices)
    apart = [read_plainly(dataset, [index]).examples[0] for index in few]
    error = _error_of(collate_fn, apart)
    if not error or _error_of(collate_fn, read_plainly(dataset, few).examples):  # with both, it is not the calls that matter
        return ""
    return (
        "__getitems__ of the data set returns examples that fit only those of the same call, such as examples that are padded to "
        f"the longest of them: collate_fn fails for examples of different calls ({error})"
    )


def _few(dataset: Any, indices: Sequence[Any] | None) -> list[Any]:
    if indices is None:
        indices = range(len(dataset) if has_length(dataset) else _FEW)
    count = min(_FEW, len(indices))
    return [indices[place * (len(indices) - 1) // max(count - 1, 1)] for place in range(count)]


def _error_of(collate_fn: Callable[[list[Any]], Any], examples: list[Any]) -> str:
    try:
        with seeded():
            collate_fn(examples)
    except Exception as error:  # the user's code may raise anything
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


# ---------------------------------------------------------------------- splits
# The four steps in a row. This happens at two times, because workers must not inherit what a proof has touched:
#
# * Before training, in a process that ends afterwards (``data/elsewhere.py``), `find_split` tries the conventions that the data
#   set may follow, with two examples of each leaf. It returns the first one that proves right, as a `Split`, which is a plain
#   value.
# * In each worker, at its first read, `make_stages` makes the stages of the data set as it is then (a ``worker_init_fn`` may have
#   changed it). It takes the conventions from the `Split`, and reads nothing.


@dataclass(frozen=True)
class Split:
    """Where a data set is split. It consists of plain values, so that it can be sent to workers."""

    reused: tuple[str, ...]  # human-readable names of the reused stages, e.g. ("load", "Resize")
    redone: tuple[str, ...]  # those that run for each use; empty if everything is reused
    example_bytes: int  # estimated memory of one reused example (or raw item): the largest of those that were read
    conventions: tuple[Convention, ...]  # of the leaves, in the order in which they are met
    raw: bool = False  # whether it is split after reading, and not before its augmentation
    packed_bytes: int = 0  # the room for one example in a cache: their mean, packed (see `nbytes`)

    def __str__(self) -> str:
        return f"reuse [{', '.join(self.reused)}], redo [{', '.join(self.redone)}]"


def make_stages(dataset: Any, conventions: Sequence[Convention] | None = None, *, raw: bool = False) -> Stages:
    """Returns the stages of ``dataset`` as it is, without reading an example. Default: the likeliest conventions, unproved."""
    with _refused(raw):
        return make(cut(describe(dataset), conventions or (), raw=raw), dataset)


def make_decoding(dataset: Any, raw: Split, loaded: Split) -> Stages:
    """Returns stages between two splits: ``load`` reads, and ``augment`` turns the raw item into what ``loaded`` loads."""
    description = describe(dataset)
    return make(cut(description, raw.conventions, raw=True), dataset, until=cut(description, loaded.conventions, raw=False))


def prove_decoding(dataset: Any, raw: Split, loaded: Split, indices: Sequence[Any] | None = None) -> None:
    """Checks, on the examples on which splits are proved, that `make_decoding` gives what ``loaded`` loads, without a draw."""
    description = describe(dataset)
    to_read = {
        index
        for is_raw in (True, False)
        for pair in indices_to_read(pruned(description, is_raw), dataset, indices).values()
        for index in pair
    }
    for index in sorted(to_read):
        with seeded():
            expected = make_stages(seeded_copy(dataset), loaded.conventions).load(index)
            before = random_states()
            with _only_in_stages(f"reading and decoding {_named([index])}"):
                stages = make_decoding(seeded_copy(dataset), raw, loaded)
                decoded_example = stages.augment(index, stages.load(index))
            if drew := _moved(before):
                raise SplitRefused(f"decoding draws random numbers from {' and '.join(drew)}")
            if (where := difference(expected, decoded_example)) is not None:
                raise SplitRefused(f"{_named([index])} is loaded otherwise than it is read and decoded ({where})")


def find_split(dataset: Any, indices: Sequence[Any] | None = None, *, raw: bool = False) -> Split:
    """Returns where ``dataset`` can be split, proved on examples. The data set is not changed.

    Raises `SplitRefused` if nothing shows where to split, or no way to split is right, and whatever the data set itself raises.
    ``indices`` are those that can be read, if they are not ``range(len(dataset))``. For each leaf, the proof takes the first and
    the last index that lead to it.

    >>> from lightning_echo.split.staged import StagedDataset
    >>> find_split(StagedDataset.of([1.0, 2.0], augment=lambda example: -example))
    ... # doctest: +NORMALIZE_WHITESPACE +ELLIPSIS
    Split(reused=('load',), redone=('augment',), example_bytes=24, conventions=(...), raw=False, packed_bytes=24)
    """
    with _refused(raw):
        description = pruned(describe(dataset), raw)
        possible = {leaf.number: candidates(leaf, raw) for leaf in leaves(description)}
        chosen = {number: conventions[0] for number, conventions in possible.items()}
        to_read = indices_to_read(description, dataset, indices)
        sizes = []
        for number, conventions in possible.items():
            if number not in to_read:  # no index leads there, so no worker will read it
                continue
            tries = (
                (convention, cut(description, tuple({**chosen, number: convention}.values()), raw=raw))
                for convention in conventions
            )
            chosen[number], sizes_of_leaf = _first_proved(dataset, tries, to_read[number])
            sizes.append(sizes_of_leaf)
        if not sizes:
            raise SplitRefused("it holds no example to prove a split on")
        stages = make(cut(description, tuple(chosen.values()), raw=raw), dataset)
        size = sizes_joined(sizes)
        return Split(stages.reused, stages.redone, size.largest, tuple(chosen.values()), raw, size.packed)


def weighed(dataset: Any, split: Split, indices: Sequence[Any] | None = None) -> Split:
    """Returns the same split with sizes of examples spread over the data. A proof knows only the first and the last."""
    size = size_of_examples(dataset, partial(make_stages, conventions=split.conventions, raw=split.raw), indices)
    if size is None:
        return split
    return replace(split, example_bytes=max(split.example_bytes, size.largest), packed_bytes=size.packed)


@contextmanager
def _refused(raw: bool) -> Iterator[None]:
    """Turns the refusal of a split after reading into a `ReadRefused`, whose message has the hint for that case."""
    try:
        yield
    except SplitRefused as refused:
        if not raw:
            raise
        raise ReadRefused(refused.reason) from refused.__cause__


def _first_proved(
    dataset: Any, tries: Iterator[tuple[Convention, Cut]], indices: Sequence[Any]
) -> tuple[Convention, ExampleSize]:
    """Returns the first convention whose cut proves right, and the result of `prove`."""
    plain = read_plainly(dataset, list(dict.fromkeys(indices)))
    if all(example is None for example in plain.examples):
        raise SplitRefused(f"it returns None for {' and '.join(f'dataset[{index}]' for index in plain.indices)}")
    refusals: dict[Convention, SplitRefused] = {}
    for convention, where in tries:
        try:
            return convention, prove(dataset, partial(make, where), plain)
        except SplitRefused as refusal:
            refusals[convention] = refusal
    first, *others = refusals
    if first in (Convention.protocol, Convention.read) and others:
        # The methods may have another purpose. Then the second reason is the one that helps.
        both = [f"by {convention.value}: {refusals[convention].reason}" for convention in (first, others[0])]
        raise SplitRefused("; ".join(both)) from refusals[first]
    raise refusals[first]
