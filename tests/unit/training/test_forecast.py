"""What a run amounts to, from what it trains on and how far the Trainer goes."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from lightning_echo import EchoLoader
from lightning_echo.training.forecast import forecast
from lightning_echo.training.several import EchoLoaders


def echoed(factor: float = 4.0, **options: Any) -> EchoLoader:
    """16 batches in a pass."""
    data: Any = list(range(64))
    return EchoLoader(DataLoader(data, 4), factor, insertion_point="after_augmentation", **options)


def trainer(max_epochs: int | None = 8, limit_train_batches: int | float = 1.0) -> Any:
    return SimpleNamespace(max_epochs=max_epochs, limit_train_batches=limit_train_batches)


@pytest.mark.parametrize(
    ("options", "told", "expected"),
    [
        ({}, {}, "8 epochs x 16 steps = 2 passes over the data at factor 4"),
        ({"factor": 1.0}, {}, "8 epochs x 16 steps = 8 passes over the data at factor 1"),
        ({}, {"max_epochs": 4}, "4 epochs x 16 steps = 1 pass over the data at factor 4"),
        ({"epoch_length": "full_pass"}, {}, "8 epochs x 64 steps = 8 passes over the data at factor 4"),
        ({}, {"limit_train_batches": 4}, "8 epochs x 4 steps = 0.5 passes over the data at factor 4"),
        ({}, {"limit_train_batches": 100}, "8 epochs x 16 steps = 2 passes over the data at factor 4"),
        ({}, {"limit_train_batches": 0.5}, "8 epochs x 8 steps = 1 pass over the data at factor 4"),
        ({"factor": 2.5}, {"max_epochs": 1000}, "1,000 epochs x 16 steps = 400 passes over the data at factor 2.5"),
    ],
)
def test_passes_are_the_steps_over_those_of_a_pass_and_the_factor(options: Any, told: Any, expected: str) -> None:
    said = forecast(trainer(**told), echoed(**options))
    assert said.split(", ")[0].startswith(expected.split(", ")[0])
    assert said.startswith(expected)


@pytest.mark.parametrize(("epochs", "factor", "workers"), [(2, 4.0, 0), (8, 4.0, 2), (3, 2.5, 1), (4, 2.0, 0)])
def test_a_short_run_is_told_how_far_it_really_comes(epochs: int, factor: float, workers: int) -> None:
    def make() -> EchoLoader:
        plain = DataLoader(list(range(256)), 4, shuffle=True, num_workers=workers)  # type: ignore[arg-type]
        return EchoLoader(plain, factor, insertion_point="after_augmentation", seed=3)

    loader = make()
    for _ in range(epochs):
        deque(loader, maxlen=0)
    loader.close()
    said = forecast(trainer(max_epochs=epochs), make())
    assert said.endswith(f", {loader.counts.fresh / 256:.3g} with the fresh examples that fill the buffer first")
    assert forecast(trainer(max_epochs=epochs), loader) == said.rpartition(", ")[0], "a run that goes on has filled it"


@pytest.mark.parametrize(("epochs", "factor"), [(400, 4.0), (8, 1.0)])
def test_where_it_makes_no_difference_nothing_is_said_of_it(epochs: int, factor: float) -> None:
    assert "fill the buffer" not in forecast(trainer(max_epochs=epochs), echoed(factor))


@pytest.mark.parametrize("told", [{"max_epochs": None}, {"max_epochs": -1}, {"limit_train_batches": 0}])
def test_nothing_is_said_of_a_run_without_an_end_or_without_steps(told: Any) -> None:
    assert forecast(trainer(**told), echoed()) == ""


def test_without_a_length_passes_end_epochs() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(8))

    loader = EchoLoader(DataLoader(Stream(), 4), 3)
    assert forecast(trainer(), loader) == "epochs end where passes over the data end, of as many steps x factor 3"


def test_of_several_loaders_their_names_are_said() -> None:
    loaders = {"scans": echoed(), "text": echoed()}
    assert forecast(trainer(), EchoLoaders(loaders)) == "loaders that are echoed: scans, text"
    assert forecast(trainer(), EchoLoaders(loaders, ("rest",))) == "loaders that are echoed: scans, text; left as they are: rest"
