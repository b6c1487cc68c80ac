"""A train_dataloader that returns several loaders: each is echoed, Lightning combines them as it would the plain ones."""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import pytest
from collection_runs import FACTOR, SEED, Several, SeveralRecorder, alone, echoed, plain_loader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from trainer_runs import POINTS, Run, Scans, SetFactor, chunks, fit, fresh_stream

from lightning_echo import EchoConfig, EchoDataModule, EchoLoader

pytestmark = pytest.mark.usefixtures("read_here")
STEPS = {"dict": 6, "list": 6, "tuple": 6, "nested": 6, "min_size": 3, "max_size": 6, "max_size_cycle": 6}
NAMES = {"list": ["0", "1"], "tuple": ["0", "1"], "nested": ["a/0", "b/c/0"]}
POSITION = {"long": 0, "short": 1}
VALIDATION = DataLoader(Scans(6), batch_size=3)


def several(data: Any, **options: Any) -> Run:
    return fit(data, model=SeveralRecorder(), **options)


def per_epoch(kind: str, length: str) -> int:
    """Batches of one of the loaders in an epoch of the Trainer."""
    own = {"long": 6, "short": 3}[length]
    return {"min_size": 3, "max_size": own}.get(kind, 6)


# `after_transfer` is refused in a collection.
CASES = list(zip(STEPS, itertools.cycle(point for point in POINTS if point != "after_transfer"), strict=False))


@pytest.mark.parametrize(("kind", "point"), CASES)
def test_steps_and_structure_are_those_of_the_plain_loaders_and_each_gives_what_it_gives_alone(kind: str, point: str) -> None:
    plain, model = several(Several(kind), max_epochs=2).model, several(echoed(kind, point=point), max_epochs=2).model
    assert model.steps == plain.steps == [STEPS[kind]] * 2
    assert model.containers == plain.containers
    assert model.names == plain.names == NAMES.get(kind, ["long", "short"])
    there = [[part is not None for part in step] for step in plain.batches]
    assert [[part is not None for part in step] for step in model.batches] == there
    assert all(map(all, there)) is (kind != "max_size")
    for length, position in POSITION.items():
        expected = 2 * per_epoch(kind, length)
        assert len(model.of(position)) == expected
        assert model.of(position) == alone(length, model.names[position], expected, point=point), "with the seed of its name"


def test_iterated_by_hand_a_sequential_collection_has_the_plain_length_and_goes_through_one_after_the_other() -> None:
    combined = echoed("sequential").train_dataloader()
    found = [(index, position) for _, index, position in combined]
    assert len(combined) == 6 + 3
    assert found == [(i, 0) for i in range(6)] + [(i, 1) for i in range(3)]


def test_a_new_factor_with_full_passes_gives_the_next_epoch_its_length_and_validation_runs() -> None:
    data, steps = echoed("min_size", factor=1, epoch_length="full_pass"), [3, 9, 4]
    run = several(data, callbacks=[SetFactor(data, {0: 3, 1: 1.5})])
    assert run.model.steps == steps
    assert run.model.validated_at == [sum(steps[: n + 1]) for n in range(3)]
    assert data.factor == 1.5
    assert run.data.datamodule.asked["train"] == 1


def test_only_those_named_are_echoed_each_with_its_own_options() -> None:
    run = several(echoed("max_size_cycle", loaders={"short": EchoConfig(4, "after_augmentation", seed=SEED)}))
    loaders = run.data.loader.iterables
    assert type(loaders["long"]) is DataLoader
    assert loaders["short"].factor == run.data.factor == 4
    assert run.model.of(1) == alone("short", "short", 18, factor=4)
    for epoch in chunks(run.model.of(0), 6):
        assert sorted(index for indices, _ in epoch for index in indices) == list(range(22))


class Own(Several):
    """One of its loaders is echoed by the user."""

    def train_dataloader(self) -> Any:
        return {"long": plain_loader("long"), "short": EchoLoader(plain_loader("short"), 2)}


SINGLE = {"train_dataloaders": plain_loader("long"), "val_dataloaders": VALIDATION}
ECHOED = "returns an EchoLoader as 'short' already"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: echoed(loaders={"shrt": EchoConfig(2)}), r"named 'shrt', but .* returns loaders named 'long', 'short'"),
        (
            lambda: EchoDataModule.from_dataloaders(**SINGLE, loaders={"long": EchoConfig(2)}),
            r"'long', but train_dataloader returns a single one \(DataLoader\)",
        ),
        (lambda: EchoDataModule(Own(), 2), ECHOED),
        (lambda: EchoDataModule(Own(), loaders={"long": EchoConfig(2)}), ECHOED),
        (lambda: echoed(loaders={"short": EchoConfig(2, buffer_size=1)}), "loader 'short': buffer_size=1 is too small"),
        (lambda: echoed("list", point="after_transfer"), "'after_transfer' is impossible for the loader '0' of a collection"),
    ],
    ids=["unknown name", "name of a single one", "echoed already", "echoed beside those named", "buffer", "after_transfer"],
)
def test_what_does_not_fit_the_loaders_is_refused_with_their_names(make: Any, message: str) -> None:
    with pytest.raises((MisconfigurationException, ValueError), match=message):
        several(make())


@pytest.mark.parametrize(("seed", "are_same"), [(SEED, True), (None, False)])
def test_loaders_over_the_same_data_share_neither_order_nor_noise(seed: int | None, are_same: bool) -> None:
    class Twins(Several):
        def train_dataloader(self) -> Any:
            loader = plain_loader("long")
            return {"a": loader, "b": loader if are_same else plain_loader("long")}

    pl.seed_everything(3, verbose=False)
    model = several(EchoDataModule(Twins(), 2, insertion_point="after_augmentation", seed=seed)).model
    orders = [fresh_stream(model.of(position))[:22] for position in (0, 1)]
    noises = [{noise for _, drawn in model.of(position) for noise in drawn} for position in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    assert not noises[0] & noises[1]


def test_a_factor_set_on_the_data_module_is_that_of_all_loaders() -> None:
    data = echoed(loaders={"long": EchoConfig(2, seed=1), "short": EchoConfig(3, seed=1)})
    with pytest.raises(MisconfigurationException, match=r"different echo factors \(long 2, short 3\)"):
        _ = data.factor
    run = several(data, callbacks=[SetFactor(data, {0: 4})], max_epochs=2)
    assert {name: loader.factor for name, loader in run.data.loader.items()} == {"long": 4, "short": 4}
    assert data.factor == 4


def test_a_factor_that_one_loader_cannot_have_is_set_for_none() -> None:
    data = echoed(loaders={"long": EchoConfig(1, seed=1), "short": EchoConfig(1, buffer_size=2, seed=1)})
    data.train_dataloader()
    with pytest.raises(ValueError, match="buffer_size=2 is too small for factor=4"):
        data.factor = 4
    assert {loader.factor for loader in data.loader.values()} == {1}


def test_a_users_reload_goes_on_where_the_loaders_before_stood() -> None:
    run = several(echoed(), reload_dataloaders_every_n_epochs=1)
    assert run.data.datamodule.asked["train"] == 3
    for length, position in POSITION.items():
        assert run.model.of(position) == alone(length, length, 18)
    assert run.data.loader["long"].counts.delivered == 3 * 22


def test_a_reload_that_returns_the_same_loaders_keeps_the_echo_loaders() -> None:
    given, found = Several().train_dataloader(), []
    data = EchoDataModule.from_dataloaders(given, VALIDATION, factor=2)

    class Look(pl.Callback):
        def on_train_epoch_start(self, runner: Any, pl_module: Any) -> None:
            found.append(tuple(map(id, runner.train_dataloader.values())))

    several(data, reload_dataloaders_every_n_epochs=1, callbacks=[Look()])
    assert len(found) == 3
    assert len(set(found)) == 1
    assert all(type(each) is DataLoader for each in given.values()), "what was given is left as it was"


def test_a_collection_can_be_passed_to_from_dataloaders() -> None:
    given = Several("list").train_dataloader()
    data = EchoDataModule.from_dataloaders(given, VALIDATION, factor=FACTOR, insertion_point="after_augmentation", seed=SEED)
    model = several(data).model
    assert model.of(1) == alone("short", model.names[1], 18)
