"""A train_dataloader that returns several loaders: each is echoed, Lightning combines them as it would the plain ones."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import pickle
import warnings
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from collection_runs import FACTOR, LENGTHS, SEED, Several, SeveralRecorder, alone, echoed, plain_loader
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from trainer_runs import POINTS, Run, Scans, SetFactor, chunks, first_uses, fit, fresh_stream, trainer

from lightning_echo import EchoConfig, EchoDataModule, EchoLoader

STEPS = {"dict": 6, "list": 6, "tuple": 6, "nested": 6, "min_size": 3, "max_size": 6, "max_size_cycle": 6}
NAMES = {"list": ["0", "1"], "tuple": ["0", "1"], "nested": ["a/0", "b/c/0"]}
POSITION = {"long": 0, "short": 1}
VALIDATION = DataLoader(Scans(6), batch_size=3)


def several(data: Any, **options: Any) -> Run:
    return fit(data, model=options.pop("model", None) or SeveralRecorder(), **options)


def per_epoch(kind: str, length: str) -> int:
    """Batches of one of the loaders in an epoch of the Trainer."""
    own = {"long": 6, "short": 3}[length]
    return {"min_size": 3, "max_size": own}.get(kind, 6)


# ---------------------------------------------------------------------- structure, lengths and modes


@pytest.mark.parametrize("kind", STEPS)
def test_epochs_have_as_many_steps_as_with_the_plain_loaders_and_batches_the_same_structure(kind: str) -> None:
    plain, run = several(Several(kind)).model, several(echoed(kind)).model
    assert run.steps == plain.steps == [STEPS[kind]] * 3
    assert run.containers == plain.containers
    assert run.names == plain.names == NAMES.get(kind, ["long", "short"])
    there = [[part is not None for part in step] for step in plain.batches]
    assert [[part is not None for part in step] for step in run.batches] == there
    assert all(map(all, there)) is (kind != "max_size")
    sizes = [[0 if part is None else len(part[0]) for part in step] for step in run.batches]
    if kind in ("min_size", "max_size_cycle"):  # how the short one's batches fall differs: its passes go on across epochs
        assert {size for step in sizes for size in step} == {4, 2}


@pytest.mark.parametrize("kind", STEPS)
def test_batches_that_are_transferred_together_cannot_be_reused_on_the_device_one_by_one(kind: str) -> None:
    with pytest.raises(MisconfigurationException, match=r"'after_transfer' is impossible for the loader '.+' of a collection"):
        several(echoed(kind, point="after_transfer"))


@pytest.mark.grid
@pytest.mark.parametrize("point", [point for point in POINTS if point != "after_transfer"])  # refused, see above
@pytest.mark.parametrize("kind", STEPS)
def test_each_loader_gives_what_it_would_give_alone_under_the_seed_of_its_name(kind: str, point: str) -> None:
    model = several(echoed(kind, point=point)).model
    for length, position in POSITION.items():
        expected = 3 * per_epoch(kind, length)
        assert len(model.of(position)) == expected
        assert model.of(position) == alone(length, model.names[position], expected, point=point)


@pytest.mark.parametrize("reuse", ["memory", "each"])
@pytest.mark.parametrize("kind", ["dict", "min_size", "max_size"])
def test_counts_of_each_loader_are_those_of_what_came(kind: str, reuse: str) -> None:
    run = several(echoed(kind, reuse=reuse), max_epochs=6)
    leaves = {"long": run.data.loader["long"], "short": run.data.loader["short"]} if kind == "dict" else run.data.loader.iterables
    for length, position in POSITION.items():
        batches = run.model.of(position)
        fresh = sum(map(len, first_uses(batches)))
        counts = leaves[length].counts
        assert (counts.fresh, counts.delivered) == (fresh, sum(len(indices) for indices, _ in batches))
        uses = Counter(noise for _, noises in batches for noise in noises)
        if reuse == "each":
            assert {2, 3} <= set(uses.values()) <= {1, 2, 3}  # 2.5 times; those that are live at the end less often
        else:  # after the first batch, which is all fresh, one in 2.5
            assert abs(counts.delivered - 4 - FACTOR * (fresh - 4)) < FACTOR
        for one in chunks(fresh_stream(batches), LENGTHS[length]):
            assert sorted(one) == list(range(LENGTHS[length]))


def test_with_workers_too_each_loader_gives_what_it_would_give_alone() -> None:
    run = several(echoed("max_size_cycle", workers=1))
    seed = run.data.loader.iterables["short"].seed
    expected = EchoLoader(plain_loader("short", 1), FACTOR, insertion_point="after_augmentation", seed=seed)
    stream = [tuple(batch["index"].tolist()) for _ in range(6) for batch in expected]
    assert [indices for indices, _ in run.model.of(1)] == stream
    expected.close()


def test_lightning_refuses_the_sequential_mode_in_fit_with_its_own_words_echoed_or_not() -> None:
    for data in (Several("sequential"), echoed("sequential")):
        with pytest.raises(ValueError, match=r'does not support the `CombinedLoader.mode="sequential"'):
            several(data)


def test_iterated_by_hand_a_sequential_collection_has_the_plain_length_and_goes_through_one_after_the_other() -> None:
    combined = echoed("sequential").train_dataloader()
    found = [(index, position) for _, index, position in combined]
    assert len(combined) == 6 + 3
    assert found == [(i, 0) for i in range(6)] + [(i, 1) for i in range(3)]


@pytest.mark.parametrize(
    ("kind", "factors", "steps"),
    [
        ("dict", (2, 2), 12),  # 12 and 6
        ("min_size", (2, 2), 6),
        ("max_size", (1.5, 4), 12),  # 9 and 12: the short one is the longer one now
        ("max_size_cycle", (1.5, 4), 12),
        ("min_size", (1.5, 4), 9),
    ],
)
def test_a_full_pass_epoch_is_what_the_lengths_of_the_loaders_make_it(kind: str, factors: Any, steps: int) -> None:
    configs = {
        name: EchoConfig(factor, "after_augmentation", epoch_length="full_pass", seed=SEED)
        for name, factor in zip(LENGTHS, factors, strict=True)
    }
    run = several(echoed(kind, loaders=configs), max_epochs=2)
    assert run.model.steps == [steps, steps]


@pytest.mark.parametrize(("kind", "steps"), [("dict", [6, 18, 9]), ("min_size", [3, 9, 4]), ("max_size", [6, 18, 9])])
def test_a_new_factor_with_full_passes_gives_the_next_epoch_its_length_and_validation_runs(kind: str, steps: list[int]) -> None:
    data = echoed(kind, factor=1, epoch_length="full_pass")
    run = several(data, callbacks=[SetFactor(data, {0: 3, 1: 1.5})])
    assert run.model.steps == steps
    ends = [sum(steps[: n + 1]) for n in range(3)]
    assert run.model.validated_at == ends
    assert data.factor == 1.5
    assert run.data.datamodule.asked["train"] == 1


@pytest.mark.parametrize(("limit", "steps"), [(4, 4), (0.5, 3)])
def test_limited_epochs_have_the_steps_of_the_plain_run_and_leave_no_batch_out(limit: Any, steps: int) -> None:
    plain = several(Several("max_size_cycle"), limit_train_batches=limit).model
    run = several(echoed("max_size_cycle"), limit_train_batches=limit).model
    assert run.steps == plain.steps == [steps] * 3
    for length, position in POSITION.items():
        assert run.of(position) == alone(length, length, 3 * steps)


# ---------------------------------------------------------------------- some of them only


def test_only_those_named_are_echoed_each_with_its_own_options() -> None:
    configs = {"short": EchoConfig(4, "after_augmentation", seed=SEED)}
    run = several(echoed("max_size_cycle", loaders=configs))
    loaders = run.data.loader.iterables
    assert type(loaders["long"]) is DataLoader
    assert loaders["short"].factor == 4
    assert run.model.of(1) == alone("short", "short", 18, factor=4)
    for epoch in chunks(run.model.of(0), 6):
        assert sorted(index for indices, _ in epoch for index in indices) == list(range(22))
    assert run.data.factor == 4


def test_options_by_name_reach_their_loaders() -> None:
    configs = {
        "long": EchoConfig(2, "after_batching", buffer_size=3, seed=1),
        "short": EchoConfig(3, "before_augmentation", epoch_length="full_pass", seed=2),
    }
    found = echoed("min_size", loaders=configs).train_dataloader().iterables
    for name, config in configs.items():
        loader = found[name]
        assert (loader.factor, loader.insertion_point.value, loader.epoch_length) == (
            config.factor,
            config.insertion_point,
            config.epoch_length,
        )
    assert found["long"].buffer_size == 3


def test_nested_loaders_are_named_by_their_path() -> None:
    run = several(echoed("nested", loaders={"b/c/0": EchoConfig(2)}), max_epochs=1)
    assert type(run.data.loader["a"][0]) is DataLoader
    assert isinstance(run.data.loader["b"]["c"][0], EchoLoader)


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    data = echoed("dict", loaders={"shrt": EchoConfig(2)})
    with pytest.raises(MisconfigurationException, match=r"named 'shrt', but .* returns loaders named 'long', 'short'"):
        several(data)


def test_options_by_name_for_a_single_loader_are_refused() -> None:
    data = EchoDataModule.from_dataloaders(plain_loader("long"), VALIDATION, loaders={"long": EchoConfig(2)})
    with pytest.raises(MisconfigurationException, match=r"'long', but train_dataloader returns a single one \(DataLoader\)"):
        several(data)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, "factor is missing"),
        ({"loaders": {}}, ValueError, "loaders is empty"),
        ({"loaders": {"a": 4}}, TypeError, "must map names of loaders to an EchoConfig each, got 'a': int 4"),
        ({"loaders": {0: EchoConfig()}}, TypeError, "got 0: EchoConfig.*positions in a list are the names '0'"),
        ({"loaders": [EchoConfig()]}, TypeError, "must map names"),
        ({"loaders": {"a": EchoConfig()}, "factor": 2}, ValueError, "leave factor and the other options out"),
        ({"loaders": {"a": EchoConfig()}, "seed": 2}, ValueError, "leave factor and the other options out"),
    ],
)
def test_impossible_options_are_refused_when_the_data_module_is_made(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        EchoDataModule(Several(), **options)


def test_what_does_not_fit_a_loader_is_refused_with_its_name() -> None:
    data = echoed("dict", loaders={"short": EchoConfig(2, buffer_size=1)})
    with pytest.raises(ValueError, match="loader 'short': buffer_size=1 is too small"):
        several(data)
    data = EchoDataModule.from_dataloaders({"a": plain_loader("long"), "b": 5}, VALIDATION, factor=2)
    with pytest.raises(TypeError, match="An invalid dataloader was returned"):  # Lightning's own words
        several(data)


# ---------------------------------------------------------------------- seeds


def test_loaders_with_the_same_options_and_data_share_neither_order_nor_noise() -> None:
    class Twins(Several):
        def train_dataloader(self) -> Any:
            return {"a": plain_loader("long"), "b": plain_loader("long")}

    for seed in (SEED, None):
        if seed is None:
            pl.seed_everything(3, verbose=False)
        model = several(EchoDataModule(Twins(), 2, insertion_point="after_augmentation", seed=seed)).model
        orders = [fresh_stream(model.of(position))[:22] for position in (0, 1)]
        noises = [{noise for _, drawn in model.of(position) for noise in drawn} for position in (0, 1)]
        assert sorted(orders[0]) == sorted(orders[1])
        assert orders[0] != orders[1]
        assert not noises[0] & noises[1]


def test_a_seed_of_seed_everything_makes_two_runs_alike() -> None:
    runs = []
    for _ in range(2):
        pl.seed_everything(3, verbose=False)
        runs.append(several(echoed(seed=None), max_epochs=1).model.batches)
    assert runs[0] == runs[1]


def test_the_same_plain_loader_twice_is_echoed_twice() -> None:
    class Same(Several):
        def train_dataloader(self) -> Any:
            loader = plain_loader("long")
            return [loader, loader]

    model = several(EchoDataModule(Same(), FACTOR, insertion_point="after_augmentation", seed=SEED)).model
    for position in (0, 1):
        assert model.of(position) == alone("long", str(position), 18)


# ---------------------------------------------------------------------- factor


def test_a_factor_set_on_the_data_module_is_that_of_all_loaders() -> None:
    data = echoed("dict", loaders={"long": EchoConfig(2, seed=1), "short": EchoConfig(3, seed=1)})
    with pytest.raises(MisconfigurationException, match=r"different echo factors \(long 2, short 3\)"):
        _ = data.factor
    assert "long factor 2, short factor 3" in str(data)
    run = several(data, callbacks=[SetFactor(data, {0: 4})], max_epochs=2)
    assert {name: loader.factor for name, loader in run.data.loader.items()} == {"long": 4, "short": 4}
    assert data.factor == 4


def test_a_factor_that_one_loader_cannot_have_is_set_for_none() -> None:
    data = echoed("dict", loaders={"long": EchoConfig(1, seed=1), "short": EchoConfig(1, buffer_size=2, seed=1)})
    several(data, max_epochs=1)
    with pytest.raises(ValueError, match="buffer_size=2 is too small for factor=4"):
        data.factor = 4
    assert {loader.factor for loader in data.loader.values()} == {1}


def test_a_factor_set_before_fit_is_that_of_all_loaders() -> None:
    data = echoed("dict", loaders={"long": EchoConfig(2, seed=1), "short": EchoConfig(3, seed=1)})
    data.factor = 1.5
    assert data.factor == 1.5
    several(data, max_epochs=1)
    assert [loader.factor for loader in data.loader.values()] == [1.5, 1.5]


# ---------------------------------------------------------------------- loaders that are echoed already, and reloads


def test_an_echo_loader_in_the_collection_is_refused_named_or_not() -> None:
    class Own(Several):
        def train_dataloader(self) -> Any:
            return {"long": plain_loader("long"), "short": EchoLoader(plain_loader("short"), 2)}

    for options in ({"factor": 2}, {"loaders": {"long": EchoConfig(2)}}):
        with pytest.raises(MisconfigurationException, match="returns an EchoLoader as 'short' already"):
            several(EchoDataModule(Own(), **options))  # type: ignore[arg-type]


def test_a_users_reload_goes_on_where_the_loaders_before_stood() -> None:
    run = several(echoed(), reload_dataloaders_every_n_epochs=1)
    assert run.data.datamodule.asked["train"] == 3
    for length, position in POSITION.items():
        assert run.model.of(position) == alone(length, length, 18)
    assert run.data.loader["long"].counts.delivered == 3 * 22


def test_a_reload_that_returns_the_same_loaders_keeps_the_echo_loaders() -> None:
    class Kept(Several):
        loaders: Any = None

        def train_dataloader(self) -> Any:
            self.loaders = self.loaders or super().train_dataloader()
            return dict(self.loaders)

    found = []

    class Look(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            found.append(tuple(map(id, trainer.train_dataloader.values())))  # type: ignore[union-attr]

    several(EchoDataModule(Kept(), 2), reload_dataloaders_every_n_epochs=1, callbacks=[Look()])
    assert len(set(found)) == 1


def test_another_set_of_loaders_begins_anew_where_the_name_is_new_and_says_so() -> None:
    class Changing(Several):
        def train_dataloader(self) -> Any:
            found = super().train_dataloader()
            if self.asked["train"] > 1:
                found["other"] = found.pop("short")
            return found

    workers = []

    class Look(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            workers.append(len(multiprocessing.active_children()))

    data = EchoDataModule(Changing(workers=1), FACTOR, insertion_point="after_augmentation", seed=SEED)
    with pytest.warns(
        UserWarning, match="returned loaders named 'long', 'short' before and returns loaders named 'long', 'other' now"
    ):
        run = several(data, reload_dataloaders_every_n_epochs=1, max_epochs=2, callbacks=[Look()])
    assert workers == [2, 2]  # those of the loader that is gone have ended
    assert run.model.names == ["long", "other"]
    assert run.model.of(0) == alone("long", "long", 12)
    assert run.model.of(1) == alone("short", "short", 6) + alone("short", "other", 6)


@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
def test_overfit_batches_switch_echoing_off() -> None:
    run = several(echoed(), overfit_batches=2, max_epochs=2)
    assert run.model.steps == [2, 2]
    assert run.model.of(0)[:2] != run.model.of(0)[2:]  # the noise differs: nothing is echoed
    assert [indices for indices, _ in run.model.of(0)] == [(0, 1, 2, 3), (4, 5, 6, 7)] * 2
    with pytest.raises(MisconfigurationException, match="no EchoLoader is in use"):
        _ = run.data.loader


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_a_collection_can_be_passed_to_from_dataloaders(kind: str) -> None:
    given = Several(kind).train_dataloader()
    data = EchoDataModule.from_dataloaders(given, VALIDATION, factor=FACTOR, insertion_point="after_augmentation", seed=SEED)
    model = several(data).model
    assert model.of(1) == alone("short", model.names[1], 18)
    assert type(leaf := (given["short"] if kind == "dict" else given[1])) is DataLoader, leaf


def test_a_combined_loader_of_the_user_is_left_as_it_was() -> None:
    combined = CombinedLoader({"long": plain_loader("long"), "short": plain_loader("short")}, "min_size")
    leaves = list(combined.flattened)
    several(EchoDataModule.from_dataloaders(combined, VALIDATION, factor=2), max_epochs=1)
    assert all(now is before for now, before in zip(combined.flattened, leaves, strict=True))


def test_workers_are_gone_after_fit() -> None:
    several(echoed(workers=1), max_epochs=1)
    assert not multiprocessing.active_children()


def test_a_loader_that_is_over_rests_until_the_trainers_next_epoch() -> None:
    model = several(echoed("max_size"), max_epochs=2).model
    assert [step[1] is None for step in model.batches] == ([False] * 3 + [True] * 3) * 2


# ---------------------------------------------------------------------- what else happens to data modules


def test_a_learning_rate_trial_leaves_all_loaders_where_they_were() -> None:
    class Tuned(SeveralRecorder):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 0.05

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    data, model = echoed("max_size"), Tuned()
    run = Run(model, data, trainer())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own, of a trial so short
        Tuner(run.trainer).lr_find(model, datamodule=data, num_training=4, update_attr=False)
    model.batches.clear()
    model.epochs.clear()
    run.trainer.fit(model, datamodule=data)
    assert model.batches == several(echoed("max_size")).model.batches


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))])
def test_a_copy_trains_on_its_own(duplicate: Any) -> None:
    data = echoed("max_size")
    data.train_dataloader()
    other = duplicate(data)
    expected = several(echoed("max_size")).model.batches
    assert several(other).model.batches == expected
    assert several(data).model.batches == expected


def test_what_is_echoed_and_what_not_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        several(echoed("dict", loaders={"short": EchoConfig(2)}))
    said = [
        each.getMessage() for each in caplog.records if "lightning_echo" in each.getMessage() or each.name == "lightning_echo"
    ]
    assert said[0] == "lightning_echo: loaders that are echoed: short; not echoed: long"
    assert [each.split(", factor")[0] for each in said[1:]] == ["short: before_augmentation"]
