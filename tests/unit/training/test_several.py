"""Several echo loaders as one: what adds up, what is a mean, and what has no meaning for all of them."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader
from lightning_echo.training.several import EchoLoaders, common_factor, echoed_in, parts_of


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
    assert found.beside == ("b/0",)
    alone = echoed_in([one])
    assert isinstance(alone, EchoLoaders)  # a batch is a list of one batch
    assert dict(alone) == {"0": one}


def test_parts_have_names_but_of_a_single_loader() -> None:
    one = echo()
    assert parts_of(None) == {}
    assert parts_of(one) == {"": one}
    assert dict(parts_of(EchoLoaders({"a": one}))) == {"a": one}


def test_counts_add_up() -> None:
    one, two = echo(2), echo(4)
    list(one), list(two), list(two)
    together = EchoLoaders({"a": one, "b": two})
    assert together.counts == one.counts + two.counts
    assert together.counts.delivered == 24
    assert together.passes is None


def test_the_factor_is_the_common_one_else_the_harmonic_mean() -> None:
    assert EchoLoaders({"a": echo(3), "b": echo(3)}).factor == 3
    both = EchoLoaders({"a": echo(2), "b": echo(4)})
    assert both.factor == both.factor_in_force == pytest.approx(2 / (1 / 2 + 1 / 4))
    assert not both.is_equal


def test_the_factor_in_force_is_not_the_one_set_last() -> None:
    started = echo(2, workers=1)
    next(iter(started))
    started.factor = 4
    both = EchoLoaders({"a": echo(4), "b": started})
    assert both.factor == 4
    assert both.factor_in_force == pytest.approx(2 / (1 / 4 + 1 / 2))
    assert both.is_equal, "that says what was set"
    started.close()


@pytest.mark.parametrize(
    ("loaders", "beside", "is_one"),
    [
        ([echo(2, 1), echo(2, 3)], (), True),
        ([echo(2, 1), echo(2, 1, "after_batching")], (), True),  # the slowest of them is one point
        ([echo(2), echo(2)], (), True),
        ([echo(2, 1), echo(3, 1)], (), False),  # factors of their own
        ([echo(2, 1), echo(2, 0)], (), False),  # workers for one of them only
        ([echo(2), echo(2, 0, "after_batching")], (), False),  # costs that add up must be of one point
        ([echo(2, 1)], ("c",), False),  # a loader beside that nothing is known of
    ],
)
def test_the_cost_model_judges_only_what_it_can_tell(loaders: Any, beside: Any, is_one: bool) -> None:
    assert EchoLoaders(dict(zip("ab", loaders, strict=False)), beside).is_one is is_one


def test_a_common_factor_is_needed_where_one_is_decided_on() -> None:
    assert common_factor({"a": 2.0, "b": 2.0}) == 2
    with pytest.raises(MisconfigurationException, match=r"factors of their own \(a 2, b 3.5\).*give all of them the same factor"):
        common_factor({"a": 2.0, "b": 3.5})
