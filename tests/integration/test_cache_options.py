"""The options of a cache reach the loader that a Trainer trains on, in every spelling; the batches stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
from callback_cases import Remembering
from collection_runs import Several, SeveralRecorder
from omegaconf import OmegaConf
from trainer_runs import Data, echoed, fit

from lightning_echo import CacheConfig, EchoCallback, EchoConfig, EchoDataModule, EchoLoader, TargetIdle

OPTIONS: dict[str, Any] = {"factor": 2.5, "insertion_point": "after_augmentation", "seed": 7}  # what trainer_runs.echoed says
RAW = CacheConfig("8MiB", hold="raw")


def loader_of(run: Any) -> Any:
    return run.trainer.train_dataloader


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("8MiB", CacheConfig("8MiB")),
        (0.01, CacheConfig(0.01)),
        (RAW, RAW),
        ({"size": "8MiB", "hold": "raw"}, RAW),
        (OmegaConf.create({"size": "8MiB", "hold": "raw"}), RAW),
    ],
    ids=["size", "share", "CacheConfig", "dict", "DictConfig"],
)
@pytest.mark.parametrize("where", ["callback", "echo=", "echo= a dict", "data module"])
@pytest.mark.grid
def test_every_spelling_reaches_the_loader_and_leaves_the_batches_as_they_are(where: str, given: Any, expected: Any) -> None:
    options = {**OPTIONS, "cache": given}
    if where == "data module":
        run = fit(EchoDataModule(Data(), **options), max_epochs=2)
    else:
        echo = {"callback": options, "echo=": {"echo": EchoConfig(**options)}, "echo= a dict": {"echo": options}}[where]
        run = fit(Data(), callbacks=[EchoCallback(**echo)], max_epochs=2)
    assert loader_of(run).cache == expected
    assert loader_of(run).cache_counts.examples > 0
    assert run.model.batches == fit(echoed(), max_epochs=2).model.batches


def test_a_cache_alone_does_not_echo() -> None:
    for data, callbacks in ((EchoDataModule(Data(), 1, cache="8MiB"), []), (Data(), [EchoCallback(cache="8MiB")])):
        run = fit(data, callbacks=callbacks, max_epochs=2)
        loader = loader_of(run)
        assert (type(loader), loader.factor, loader.cache) == (EchoLoader, 1, CacheConfig("8MiB"))
        assert (loader.counts.fresh, loader.counts.echoed) == (44, 0)
        assert (loader.cache_counts.examples, loader.cache_counts.misses, loader.cache_counts.hits) == (22, 22, 22)


def test_a_controller_keeps_the_cache() -> None:
    for callback in (EchoCallback(TargetIdle(), cache=RAW), EchoCallback(factor="auto", cache=RAW)):
        assert loader_of(fit(Data(), callbacks=[callback], max_epochs=2)).cache == RAW


@pytest.mark.parametrize("made", [dict, OmegaConf.create], ids=["dict", "DictConfig"])
def test_each_loader_of_a_collection_has_its_own(made: Any) -> None:
    named = made({"long": {"factor": 2, "cache": {"size": "8MiB", "hold": "raw"}}, "short": {"factor": 2, "cache": "4MiB"}})
    callback, data = EchoCallback(echo=named), EchoDataModule(Several(), loaders=named)
    for run in (
        fit(Several(), model=SeveralRecorder(), callbacks=[callback], max_epochs=1),
        fit(data, model=SeveralRecorder(), max_epochs=1),
    ):
        loaders = loader_of(run)
        assert {name: each.cache for name, each in loaders.items()} == {"long": RAW, "short": CacheConfig("4MiB")}
        assert [loaders[name].cache_counts.size for name in ("long", "short")] == [2**23, 2**22]


def test_hyperparameters_of_the_run_name_size_and_hold() -> None:
    logger = Remembering()
    fit(Data(), callbacks=[EchoCallback(factor=2, cache=RAW)], logger=logger, log_every_n_steps=5, max_epochs=1)
    (params,) = [params["echo"] for params in logger.params if "echo" in params]
    assert params["cache"] == {"size": "8MiB", "hold": "raw"}
