"""The tree of loaders: what Lightning combines, the names of its leaves, and what of it is echoed, as one."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader
from lightning_echo.training.loaders import EchoLoaders, echoed_in, is_collection, leaves_of, parts_at_leaves, with_leaves

Pair = namedtuple("Pair", "left right")
A, B, C = (DataLoader(range(length)) for length in (1, 2, 3))  # type: ignore[arg-type, var-annotated]

COLLECTIONS: list[tuple[Any, dict[str, Any]]] = [
    ({"a": A, "b": B}, {"a": A, "b": B}),
    ({"b": A, "a": B}, {"b": A, "a": B}),
    ([A, B], {"0": A, "1": B}),
    ((A,), {"0": A}),
    ({1: A}, {"1": A}),
    ({"a": [A, {"x": B}], "b": (C,)}, {"a/0": A, "a/1/x": B, "b/0": C}),
    (Pair(A, [B]), {"left": A, "right/0": B}),
    (OrderedDict(z=A, y=B), {"z": A, "y": B}),
    (defaultdict(list, a=A), {"a": A}),
]


class Batches(list):  # type: ignore[type-arg]
    """Lightning does not look into subclasses."""


SINGLE: list[Any] = [A, Batches([A, B]), range(3), torch.zeros(2, 2), [1, 2, 3], ["a", "b"], [], {}, UserDict(a=A)]


@pytest.mark.parametrize(("loaders", "leaves"), COLLECTIONS)
@pytest.mark.parametrize("mode", [None, "min_size", "max_size"])
def test_leaves_are_named_by_keys_and_positions_in_lightnings_order(loaders: Any, leaves: Any, mode: Any) -> None:
    collection = loaders if mode is None else CombinedLoader(loaders, mode)
    assert is_collection(collection)
    assert list(leaves_of(collection).items()) == list(leaves.items())
    assert CombinedLoader(loaders).flattened == list(leaves.values())


@pytest.mark.parametrize("loader", SINGLE)
def test_a_single_loader_has_the_empty_name(loader: Any) -> None:
    assert not is_collection(loader)
    assert leaves_of(loader) == {"": loader} or torch.equal(leaves_of(loader)[""], loader)
    assert len(CombinedLoader(loader).flattened) == 1
    assert with_leaves(loader, {"": A}) is A


@pytest.mark.parametrize(("loaders", "leaves"), COLLECTIONS)
def test_the_collection_with_other_leaves_is_of_the_same_types_in_the_same_order(loaders: Any, leaves: Any) -> None:
    new = {name: object() for name in leaves}
    found = with_leaves(loaders, new)
    assert list(leaves_of(found).items()) == list(new.items())
    assert type(found) is type(loaders)
    assert list(leaves_of(loaders).values()) == list(leaves.values()), "the one given is left as it was"
    if isinstance(loaders, dict):
        assert list(found) == list(loaders)
        assert getattr(found, "default_factory", None) is getattr(loaders, "default_factory", None)


@pytest.mark.parametrize(("mode", "length"), [("min_size", 1), ("max_size", 3), ("max_size_cycle", 3), ("sequential", 6)])
def test_a_combined_loader_combines_the_new_leaves_as_it_did_the_old_ones(mode: Any, length: int) -> None:
    class Mine(CombinedLoader):
        pass

    given = Mine({"x": range(9), "y": [range(9), range(9)]}, mode)
    found = with_leaves(given, {"x": range(1), "y/0": range(2), "y/1": range(3)})
    assert type(found) is Mine
    assert len(list(found)) == length
    assert given.flattened == [range(9)] * 3


def test_two_leaves_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two loaders of the collection are named 'a/0'.*Use other keys"):
        leaves_of({"a": [A], "a/0": B})


def test_a_batch_is_taken_apart_along_the_loaders_not_further() -> None:
    batch = {"a": [[1, 2], {"x": {"y": 3}}], "b": (None,)}
    loaders = {"a": [A, {"x": B}], "b": (C,)}
    assert parts_at_leaves(loaders, batch) == [[1, 2], {"y": 3}, None]
    assert parts_at_leaves(CombinedLoader(loaders), batch) == [[1, 2], {"y": 3}, None]
    assert parts_at_leaves(A, batch) == [batch]


@pytest.mark.parametrize("batch", [torch.zeros(3), {"a": 1}, {"a": 1, "c": 2}, [1, 2], None])
def test_a_batch_of_another_structure_is_one_part(batch: Any) -> None:
    found = parts_at_leaves({"a": A, "b": B}, batch)
    assert len(found) == 1
    assert found[0] is batch


def plain(workers: int = 0) -> DataLoader[Any]:
    return DataLoader(range(8), 4, num_workers=workers)  # type: ignore[arg-type]


def echo(factor: float = 2, workers: int = 0, point: str = "after_augmentation") -> EchoLoader:
    return EchoLoader(plain(workers), factor, insertion_point=point, seed=0)


def test_what_is_echoed_is_found_by_name() -> None:
    one, two = echo(), echo()
    assert echoed_in(one) is one
    assert echoed_in(plain()) is None
    assert echoed_in({"a": plain()}) is None
    found = echoed_in(CombinedLoader({"a": one, "b": [plain(), two]}))
    assert isinstance(found, EchoLoaders)
    assert dict(found) == {"a": one, "b/1": two}
    assert found.not_echoed == ("b/0",)
    alone = echoed_in([one])
    assert isinstance(alone, EchoLoaders)  # a batch is a list of one batch
    assert dict(alone) == {"0": one}


def test_the_factor_in_force_is_not_the_one_set_last() -> None:
    started = echo(2, workers=1)
    next(iter(started))
    started.factor = 4
    both = EchoLoaders({"a": echo(4), "b": started})
    assert both.factor == 4
    assert both.factor_in_force == pytest.approx(2 / (1 / 4 + 1 / 2))
    assert both.has_one_factor, "that says what was set"
    started.close()


@pytest.mark.parametrize(
    ("loaders", "not_echoed", "fits"),
    [
        ([echo(2, 1), echo(2, 3)], (), True),
        ([echo(2, 1), echo(2, 1, "after_batching")], (), True),  # the slowest of them is one point
        ([echo(2), echo(2)], (), True),
        ([echo(2, 1), echo(3, 1)], (), False),  # different factors
        ([echo(2, 1), echo(2, 0)], (), False),  # workers for one of them only
        ([echo(2), echo(2, 0, "after_batching")], (), False),  # costs that add up must be of one point
        ([echo(2, 1)], ("c",), False),  # a loader that nothing is known of
    ],
)
def test_the_cost_model_judges_only_what_it_can_tell(loaders: Any, not_echoed: Any, fits: bool) -> None:
    assert EchoLoaders(dict(zip("ab", loaders, strict=False)), not_echoed).fits_cost_model is fits
