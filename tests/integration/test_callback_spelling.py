"""One spelling of EchoCallback's options: each a keyword, a factor that may be "auto", and ``echo=`` in place of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from inspect import signature
from typing import Any

import pytest
from collection_runs import Several, SeveralRecorder
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from trainer_runs import Data, Recorder, echoed, fit, trainer

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader, FactorSchedule, InsertionPoint, TargetIdle

OPTIONS: dict[str, Any] = {"factor": 2.5, "insertion_point": "after_augmentation", "seed": 7}  # what trainer_runs.echoed says


@dataclass
class Schema:
    """As a program that uses OmegaConf would write it."""

    factor: float = 2.5
    echo: EchoConfig = field(default_factory=EchoConfig)


def loader_of(run: Any) -> Any:
    return run.trainer.train_dataloader


def given(controller: Any) -> tuple[float, float, float]:
    assert type(controller) is TargetIdle
    return controller.target, controller.min_factor, controller.max_factor


# ---------------------------------------------------------------------- options by keyword


def test_every_option_of_a_config_is_a_keyword_with_the_same_default() -> None:
    keywords = {name: each.default for name, each in signature(EchoCallback).parameters.items()}
    options = {each.name: each.default for each in fields(EchoConfig)}
    assert keywords == {"controller": None, **options, "factor": None, "echo": None, "summary": True, "plot": False}


def test_options_by_keyword_echo_as_a_config_does() -> None:
    run = fit(Data(), callbacks=[EchoCallback(**OPTIONS)])
    assert run.model.batches == fit(Data(), callbacks=[EchoCallback(echo=EchoConfig(**OPTIONS))]).model.batches
    assert run.model.batches == fit(echoed()).model.batches


def test_every_keyword_reaches_the_loader() -> None:
    echo = EchoCallback(factor=2, insertion_point="after_batching", buffer_size=7, epoch_length="full_pass", seed=3)
    loader = loader_of(fit(Data(), callbacks=[echo], max_epochs=1))
    assert (loader.factor, str(loader.insertion_point), loader.buffer_size) == (2, "after_batching", 7)
    assert (loader.epoch_length, loader.seed, len(loader)) == ("full_pass", 3, 12)


def test_without_a_factor_options_are_those_to_begin_with_from_factor_one() -> None:
    run = fit(Data(), callbacks=[EchoCallback(buffer_size=9)], max_epochs=1)
    assert (loader_of(run).factor, loader_of(run).buffer_size, loader_of(run).reuse) == (1, 9, "memory")
    run = fit(Data(), callbacks=[EchoCallback(factor=2, reuse="each")], max_epochs=1)
    assert loader_of(run).reuse == "each"
    run = fit(Data(), callbacks=[EchoCallback(FactorSchedule({0: 3.0}), insertion_point=InsertionPoint.after_batching)])
    assert (loader_of(run).factor, str(loader_of(run).insertion_point)) == (3, "after_batching")


@pytest.mark.parametrize("echo", [EchoConfig(3), {"factor": 3}, {"labelled": EchoConfig(3)}])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("factor", 4),
        ("factor", "auto"),
        ("insertion_point", "after_read"),
        ("buffer_size", 8),
        ("reuse", "each"),
        ("epoch_length", "full_pass"),
        ("seed", 0),
        ("cache", "8GiB"),
        ("share", "sweep"),
    ],
)
def test_an_option_beside_echo_is_refused_with_both_names(echo: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"options in echo=.*3.* and in {name}={value!r}: give all of them in one of the two"):
        EchoCallback(echo=echo, **{name: value})


def test_defaults_beside_echo_are_as_if_they_were_left_out() -> None:
    """A configuration file that LightningCLI saves holds all of them."""
    defaults = {name: each.default for name, each in signature(EchoCallback).parameters.items()}
    echo = EchoCallback(**{**defaults, "echo": EchoConfig(3)})  # type: ignore[arg-type]
    assert echo.attachment.echo.factor == 3


# ---------------------------------------------------------------------- echo=


def omegaconf(**options: Any) -> DictConfig:
    merged = OmegaConf.merge(OmegaConf.structured(Schema), {"echo": {**options, "factor": "${factor}"}})
    assert isinstance(merged, DictConfig)
    return merged


@pytest.mark.parametrize(
    "echo",
    [OPTIONS, OmegaConf.create(OPTIONS), omegaconf(insertion_point="after_augmentation", seed=7).echo],
    ids=["dict", "DictConfig", "structured, with an interpolation"],
)
def test_echo_may_be_a_mapping_of_options(echo: Any) -> None:
    run = fit(Data(), callbacks=[EchoCallback(echo=echo)])
    assert run.model.batches == fit(echoed()).model.batches


@pytest.mark.parametrize("made", [dict, OmegaConf.create], ids=["dict", "DictConfig"])
def test_options_by_name_may_be_mappings_too(made: Any) -> None:
    named = made({"long": made({"factor": 2}), "short": made({"factor": 3, "seed": 1})})
    assert EchoCallback(echo=named).attachment.echo.factors == {"long": 2, "short": 3}
    loaders = EchoDataModule(Several(), loaders=named).train_dataloader()
    assert {name: each.factor for name, each in loaders.items()} == {"long": 2, "short": 3}


@pytest.mark.parametrize("factor", ["auto", 4, 4.5])
def test_a_structured_config_holds_factors_of_all_types(factor: Any) -> None:
    config = OmegaConf.merge(OmegaConf.structured(EchoConfig), OmegaConf.from_dotlist([f"factor={factor}"]))
    assert OmegaConf.to_object(config) == EchoConfig(factor)


# ---------------------------------------------------------------------- factor="auto"


@pytest.mark.parametrize(
    "echo",
    [EchoCallback(factor="auto"), EchoCallback(echo=EchoConfig("auto")), EchoCallback(echo={"factor": "auto"})],
    ids=["keyword", "config", "dict"],
)
def test_auto_is_target_idle_with_its_defaults(echo: EchoCallback) -> None:
    assert given(echo.controller) == given(TargetIdle())
    data = echoed(3, epoch_length="fixed")  # driven as it is, like by EchoCallback(TargetIdle())
    run = fit(data, callbacks=[echo], max_epochs=1)
    assert run.loader.factor_owner == "EchoDataModule"


def test_a_controller_may_be_given_by_position_and_by_name() -> None:
    for echo in (EchoCallback(TargetIdle(max_factor=6)), EchoCallback(controller=TargetIdle(max_factor=6))):
        assert given(echo.controller) == (0.05, 1, 6)


def test_auto_begins_at_factor_one_with_the_other_options() -> None:
    echo = EchoCallback(factor="auto", buffer_size=9, seed=3)
    run = fit(Data(), callbacks=[echo], max_epochs=1)
    assert echo.reports[0].factor == 1
    assert (loader_of(run).buffer_size, loader_of(run).seed) == (9, 3)


def test_auto_for_all_of_several_loaders_is_one_controller() -> None:
    echo = EchoCallback(echo={"long": EchoConfig("auto", seed=1), "short": {"factor": "auto", "seed": 2}})
    assert given(echo.controller) == given(TargetIdle())
    fit(Several(), model=SeveralRecorder(), callbacks=[echo], max_epochs=1)
    assert echo.reports[0].factor == 1


@pytest.mark.parametrize("auto", [{"factor": "auto"}, {"echo": EchoConfig("auto")}, {"echo": {"a": EchoConfig("auto")}}])
def test_auto_beside_a_controller_is_refused_with_the_way_out(auto: Any) -> None:
    with pytest.raises(
        ValueError, match=r"factor='auto' stands for a controller.* controller=FactorSchedule.*leave one of the two"
    ):
        EchoCallback(FactorSchedule({0: 2.0}), **auto)


# ---------------------------------------------------------------------- EchoDataModule(factor="auto")


@pytest.mark.parametrize("options", [{"factor": "auto"}, {"loaders": {"long": EchoConfig("auto"), "short": {"factor": "auto"}}}])
def test_a_data_module_with_auto_is_refused_in_fit_without_a_callback_with_the_line_to_add(options: Any) -> None:
    data = EchoDataModule(Several() if "loaders" in options else Data(), **options)
    model = Recorder()
    message = r"needs an EchoCallback.*Trainer\(\.\.\., callbacks=\[EchoCallback\(\)\]\), or give the factor as a number"
    with pytest.raises(MisconfigurationException, match=message):
        fit(data, model=model)
    assert model.batches == []
    assert data.datamodule.asked == {}  # type: ignore[attr-defined]


def test_a_data_module_with_auto_is_decided_on_by_a_callback_that_has_no_controller_of_its_own() -> None:
    echo, data = EchoCallback(), EchoDataModule(Data(1, delay=0.02), "auto", insertion_point="after_augmentation", seed=7)
    run = fit(data, callbacks=[echo], max_epochs=4)
    assert data.is_auto
    assert echo.controller is None
    assert echo.reports[0].factor == 1
    assert all(report.reason for report in echo.reports)  # decided on, after each epoch
    assert echo.reports[-1].next_factor == data.factor == run.loader.factor
    other = fit(Data(), callbacks=[echo], max_epochs=1)  # the same callback only measures elsewhere
    assert not isinstance(other.trainer.train_dataloader, EchoLoader)
    assert echo.reports[0].reason == ""


def test_a_data_module_with_auto_is_decided_on_by_the_controller_there_is() -> None:
    data = EchoDataModule(Data(), "auto", seed=7)
    fit(data, callbacks=[EchoCallback(FactorSchedule({0: 3.0}))], max_epochs=1)
    assert data.factor == 3


def test_a_data_module_with_a_number_is_left_to_a_callback_that_measures() -> None:
    echo, data = EchoCallback(), echoed(2)
    fit(data, callbacks=[echo])
    assert [report.reason for report in echo.reports] == ["", "", ""]
    assert data.factor == 2


def test_a_data_module_with_auto_evaluates_without_a_callback() -> None:
    data = EchoDataModule(Data(), "auto")
    trainer().validate(Recorder(), datamodule=data, verbose=False)
    assert data.datamodule.asked == {"val": 1}  # type: ignore[attr-defined]
