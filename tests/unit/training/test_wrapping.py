"""What becomes of the loaders that ``train_dataloader`` returns: which are kept, made anew or refused, and with which options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_echo import EchoConfig, EchoLoader
from lightning_echo.training.loaders import Wrapping

POINT = "after_augmentation"
TRAINER = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": 1})


def plain() -> DataLoader[Any]:
    return DataLoader(range(16), 4)  # type: ignore[arg-type]


def echo(factor: float = 2) -> EchoLoader:
    return EchoLoader(plain(), factor, insertion_point=POINT, seed=0)


def wrapping(hint: str | None = None, shard: bool = True) -> Wrapping:
    return Wrapping(EchoConfig(factor=2, insertion_point=POINT), "EchoDataModule", hint, shard)


def test_the_same_echo_loader_twice_is_refused() -> None:
    one = echo()
    with pytest.raises(MisconfigurationException, match=r"returns the same EchoLoader twice.*return one for each"):
        wrapping().wrap({"a": one, "b": one}, {}, None, {})
    other = echo()
    assert wrapping().wrap({"a": one, "b": other}, {}, None, {}) == {"a": one, "b": other}


def test_the_loader_in_use_is_kept_around_the_same_loader() -> None:
    before = echo(5)
    assert wrapping().wrap(before.loader, {"": before}, 3.0, {}) is before
    assert wrapping("nothing").wrap(before, {"": before}, 3.0, {}) is before, "nor is it refused as echoed already"


@pytest.mark.parametrize(("before", "factor", "expected"), [(None, None, 2), (None, 3.0, 3), (5, None, 5), (5, 3.0, 5)])
def test_the_factor_is_that_of_the_loader_before_or_the_one_given_or_that_of_the_options(
    before: float | None, factor: float | None, expected: float
) -> None:
    in_use = {} if before is None else {"": echo(before)}
    assert wrapping().wrap(plain(), in_use, factor, {}).factor == expected


@pytest.mark.parametrize(
    ("trainer", "shard", "batches"), [(TRAINER, True, 2), (TRAINER, False, 4), (None, True, 2), (None, False, 4)]
)
def test_ranks_are_those_that_the_trainer_says_else_those_of_the_processes(
    trainer: Any, shard: bool, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_echo.loader.setting.world", lambda: (2, 1))
    it = wrapping(shard=shard)
    assert len(it.wrap(plain(), {}, None, it.ranks(trainer))) == batches


def test_what_lightning_does_not_divide_is_not_divided() -> None:
    """It has put no sampler there: ``Trainer(use_distributed_sampler=False)``, or the loader has a sampler for each rank."""
    assert wrapping().ranks(TRAINER) == {"num_replicas": 2, "rank": 1}
    assert wrapping().ranks(TRAINER, deals_out=False) == {"num_replicas": 1, "rank": 0}
