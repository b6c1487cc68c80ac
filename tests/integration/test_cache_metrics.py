"""What is logged of a cache, against what the data set itself was asked for."""

from __future__ import annotations

import logging
import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from callback_cases import Remembering
from idle_runs import Sleeper, fit
from torch.utils.data import DataLoader

from lightning_echo import EchoCallback, EchoLoader, StagedDataset
from lightning_echo.cache.kept import CacheConfig

LENGTH, BATCH, EXAMPLE_BYTES, BUDGET = 128, 8, 2**14, 2**20
FITS = range(BUDGET // (EXAMPLE_BYTES + 2**10), BUDGET // EXAMPLE_BYTES)  # examples: each takes a little more than its tensor
METRICS = ("cache_hit_fraction", "cached_examples", "cache_bytes")


class Counted(StagedDataset):
    """Examples of 16 KiB; remembers what was read."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length, self.reads = length, [0]

    def __len__(self) -> int:
        return self.length

    def load(self, index: Any) -> Any:
        self.reads[0] += 1
        return torch.full((EXAMPLE_BYTES // 4,), float(index))

    def augment(self, example: Any) -> Any:
        return example[:1]


class ReadsOfEpochs(pl.Callback):
    """How many examples were read in each epoch."""

    def __init__(self, dataset: Counted) -> None:
        self.dataset, self.reads = dataset, list[int]()

    def on_train_epoch_start(self, *args: Any) -> None:
        self.before = self.dataset.reads[0]

    def on_train_epoch_end(self, *args: Any) -> None:
        self.reads.append(self.dataset.reads[0] - self.before)


def loader_of(dataset: Any, factor: float = 1, *, workers: int = 0, size: int | None = BUDGET, **options: Any) -> EchoLoader:
    cache = None if size is None else CacheConfig(size)
    plain = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers)
    return EchoLoader(plain, factor, insertion_point="before_augmentation", seed=3, cache=cache, **options)


class Model(Sleeper):
    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch["large"] if isinstance(batch, dict) else batch)


def train(loader: Any, *callbacks: Any, epochs: int = 4, **options: Any) -> EchoCallback:
    echo = EchoCallback(summary=False)
    fit(Model(0.0, loader), *callbacks, echo=echo, max_epochs=epochs, log_every_n_steps=0, **options)
    return echo


def test_hits_of_an_epoch_are_the_fresh_examples_that_were_not_read() -> None:
    dataset, logger = Counted(), Remembering()
    reads = ReadsOfEpochs(dataset)
    train(loader_of(dataset), reads, logger=logger)
    epochs = [values for _, values in logger.metrics]
    held = epochs[0]["echo/cached_examples"]
    assert held in FITS
    assert [values["echo/cache_hit_fraction"] * LENGTH for values in epochs] == [0, held, held, held]
    for values, read in zip(epochs, reads.reads, strict=True):
        hits = values["echo/cache_hit_fraction"] * LENGTH
        assert LENGTH - hits <= read <= LENGTH - hits + 2, "a few hits are read again, to see whether the data set is as it was"
        assert values["echo/cached_examples"] == held
        assert held * EXAMPLE_BYTES < values["echo/cache_bytes"] <= BUDGET


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_used_again_is_neither_hit_nor_miss(workers: int) -> None:
    """At factor 2 a pass takes two epochs: in the first pass nothing is held, in later ones as much as in any other."""
    loader, logger = loader_of(Counted(), 2, workers=workers), Remembering()
    echo = train(loader, logger=logger, epochs=9)
    loader.close()
    fresh = [report.fresh_examples for report in echo.reports]
    hits = [
        (report.cache_hit_fraction or 0.0) * (now - before)
        for report, now, before in zip(echo.reports, fresh, [0, *fresh], strict=False)
    ]
    held = echo.reports[-1].cached_examples
    assert held in FITS
    passes = (fresh[-1] - LENGTH) / LENGTH  # after the first one
    assert sum(hits[:1]) == 0
    assert int(passes) * held <= round(sum(hits)) <= (int(passes) + 1) * held
    counts = loader.cache_counts
    assert counts is not None
    assert (counts.hits, counts.hits + counts.misses) == (pytest.approx(sum(hits)), fresh[-1])


class MadeAnew(Sleeper):
    """Its loader is made anew for each epoch; from epoch ``changes_at`` on over other data."""

    def __init__(self, changes_at: int = 10**9) -> None:
        super().__init__(0.0)
        self.changes_at = changes_at

    def train_dataloader(self) -> Any:
        dataset = Counted() if self.current_epoch < self.changes_at else Counted(LENGTH + BATCH)
        return DataLoader(dataset, BATCH, shuffle=True)


@pytest.mark.filterwarnings("ignore:.*the data set has changed")
def test_hits_are_those_of_the_epoch_also_where_the_loader_is_made_anew_or_has_other_data() -> None:
    for model, hit_epochs in ((MadeAnew(), [1, 2, 3, 4]), (MadeAnew(changes_at=3), [1, 2, 4])):
        echo = EchoCallback(insertion_point="before_augmentation", seed=3, cache=BUDGET, summary=False)
        fit(model, echo=echo, max_epochs=5, reload_dataloaders_every_n_epochs=1, log_every_n_steps=0)
        for report in echo.reports:
            assert report.cached_examples in FITS
            length = LENGTH if report.epoch < model.changes_at else LENGTH + BATCH
            hits = (report.cache_hit_fraction or 0.0) * length
            assert hits == pytest.approx(report.cached_examples if report.epoch in hit_epochs else 0)


def test_without_a_cache_nothing_is_logged_of_one() -> None:
    logger = Remembering()
    echo = train(loader_of(Counted(), size=None), logger=logger, epochs=2)
    assert not [key for _, values in logger.metrics for key in values if "cache" in key]
    assert [report.cached_examples for report in echo.reports] == [None, None]


def test_each_of_several_loaders_has_its_own_figures_and_all_are_joined() -> None:
    """The small data set is held as a whole from the second epoch on, of the large one less than a half; one has no cache."""
    loaders = {"large": loader_of(Counted()), "small": loader_of(Counted(LENGTH // 4)), "none": loader_of(Counted(), size=None)}
    logger = Remembering()
    train(loaders, logger=logger, limit_train_batches=LENGTH // 4 // BATCH, epochs=6)
    last = logger.metrics[-1][1]
    assert last["echo/small/cache_hit_fraction"] == 1
    assert last["echo/small/cached_examples"] == LENGTH // 4
    assert last["echo/large/cached_examples"] in FITS
    for name in METRICS[1:]:
        assert last[f"echo/{name}"] == last[f"echo/small/{name}"] + last[f"echo/large/{name}"]
    mean = (1 + last["echo/large/cache_hit_fraction"]) / 2
    assert last["echo/cache_hit_fraction"] == pytest.approx(mean), "both deliver as much"
    assert not [key for key in last if key.startswith("echo/none/cache")]


def test_the_summary_says_what_is_held_and_what_it_was_good_for(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(Counted())
    with caplog.at_level(logging.INFO, logger="lightning_echo"):
        fit(Sleeper(0.0, loader), echo=EchoCallback(), max_epochs=2)
    counts = loader.cache_counts
    assert counts is not None
    (summary,) = [record.getMessage() for record in caplog.records if "fresh and" in record.getMessage()]
    (said,) = re.findall("the cache holds.*? came from it", " ".join(summary.split()))
    assert counts.bytes < BUDGET
    held = f"{counts.examples} loaded examples in {counts.bytes / 2**20:.3g} MiB"
    share = f"{100 * counts.examples / LENGTH:.0f}%"
    assert said == f"the cache holds {held}, nothing more fits; {share} of the last epoch's fresh examples came from it"
