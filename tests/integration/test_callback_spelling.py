"""One spelling of EchoCallback's options: each a keyword, a factor that may be "auto", and ``echo=`` in place of all of them."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from typing import Any

import pytest
from collection_runs import Several, SeveralRecorder
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from trainer_runs import Data, Recorder, echoed, fit

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader, FactorSchedule, TargetIdle

OPTIONS: dict[str, Any] = {"factor": 2.5, "insertion_point": "after_augmentation", "seed": 7}  # what trainer_runs.echoed says


def given(controller: Any) -> tuple[float, float, float]:
    assert type(controller) is TargetIdle
    return controller.target, controller.min_factor, controller.max_factor


def test_every_option_of_a_config_is_a_keyword_with_the_same_default() -> None:
    keywords = {name: each.default for name, each in signature(EchoCallback).parameters.items()}
    options = {each.name: each.default for each in fields(EchoConfig)}
    assert keywords == {"controller": None, **options, "factor": None, "echo": None, "summary": True, "plot": False}
    beside = EchoCallback(**{**keywords, "echo": EchoConfig(3)})  # a configuration file that LightningCLI saves holds them all
    assert beside.attachment.echo.factor == 3


@pytest.mark.parametrize(
    "echo", [EchoConfig(**OPTIONS), OPTIONS, OmegaConf.create(OPTIONS)], ids=["config", "dict", "DictConfig"]
)
def test_options_may_be_a_config_or_a_mapping(echo: Any) -> None:
    assert fit(Data(), callbacks=[EchoCallback(echo=echo)]).model.batches == fit(echoed()).model.batches


def test_every_keyword_reaches_the_loader_and_without_a_factor_it_is_one() -> None:
    options = {"factor": 2, "insertion_point": "after_batching", "buffer_size": 7, "epoch_length": "full_pass", "seed": 3}
    for echo, expected in (
        (EchoCallback(**options), {**options, "reuse": "memory"}),
        (EchoCallback(buffer_size=9, reuse="each"), {"factor": 1, "buffer_size": 9, "reuse": "each"}),
    ):
        loader: Any = fit(Data(), callbacks=[echo], max_epochs=1).trainer.train_dataloader
        found = {name: getattr(loader, name) for name in expected}
        assert {name: getattr(value, "value", value) for name, value in found.items()} == expected


@pytest.mark.parametrize("echo", [{"factor": 3}, {"labelled": EchoConfig(3)}])
@pytest.mark.parametrize("option", [{"factor": "auto"}, {"insertion_point": "after_read"}, {"seed": 0}, {"share": "sweep"}])
def test_an_option_beside_echo_is_refused_with_both_names(echo: Any, option: dict[str, Any]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=rf"options in echo=.*3.* and in {name}={value!r}: give all of them in one of the two"):
        EchoCallback(echo=echo, **option)


def test_options_by_name_may_be_mappings_too() -> None:
    named: Any = OmegaConf.create({"long": {"factor": 2}, "short": {"factor": 3, "seed": 1}})
    assert EchoCallback(echo=named).attachment.echo.factors == {"long": 2, "short": 3}
    loaders = EchoDataModule(Several(), loaders=named).train_dataloader()
    assert {name: each.factor for name, each in loaders.items()} == {"long": 2, "short": 3}


@pytest.mark.parametrize(
    "arguments",
    [
        {"factor": "auto", "reuse": "each"},
        {"echo": {"long": EchoConfig("auto", seed=1, reuse="each"), "short": {"factor": "auto", "seed": 2}}},
    ],
)
def test_auto_where_on_demand_is_impossible_is_target_idle_with_its_defaults_also_for_several_loaders(
    arguments: Any,
) -> None:
    echo = EchoCallback(**arguments)
    assert given(echo.controller) == given(TargetIdle())
    fit(Several(), model=SeveralRecorder(), callbacks=[echo], max_epochs=1)
    assert echo.reports[0].factor == 1


BOTH = r"factor='auto' chooses between echo on demand and TargetIdle.* controller=FactorSchedule.*leave one of the two"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"controller": 4}, TypeError, r"controller must be a Controller such as TargetIdle\(\).*got 4; .*EchoCallback\(factor="),
        ({"controller": TargetIdle}, TypeError, r"got the class TargetIdle: pass an instance, TargetIdle\(\.\.\.\)"),
        ({"controller": FactorSchedule({0: 2.0}), "factor": "auto"}, ValueError, BOTH),
        ({"controller": FactorSchedule({0: 2.0}), "echo": {"a": EchoConfig("auto")}}, ValueError, BOTH),
        ({"echo": [EchoConfig()]}, TypeError, "echo must be an EchoConfig, a dict or DictConfig of its options, a dict of these"),
        ({"echo": {"fator": 4}}, TypeError, "echo has no option 'fator': its options are factor, insertion_point, buffer_size"),
        ({"echo": {}}, ValueError, "echo is empty"),
        ({"echo": {"a": EchoConfig(), "b": 4}}, TypeError, "must map names of loaders to an EchoConfig each, got 'b': int 4"),
        ({"echo": {"a": {"factr": 4}}}, TypeError, r"echo\['a'\] has no option 'factr'"),
        ({"echo": {"a": EchoConfig(), "b": EchoConfig("auto")}}, ValueError, "'auto' for 'b' alone, .* one factor for all"),
        ({"factor": "TargetIdle"}, TypeError, "real number >= 1 .* or 'auto', got 'TargetIdle'; .* the argument controller"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_with_a_hint(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EchoCallback(**arguments)


@pytest.mark.parametrize("options", [{"factor": "auto"}, {"loaders": {"long": EchoConfig("auto"), "short": {"factor": "auto"}}}])
def test_a_data_module_with_auto_is_refused_in_fit_without_a_callback_with_the_line_to_add(options: Any) -> None:
    data, model = EchoDataModule(Several() if "loaders" in options else Data(), **options), Recorder()
    message = r"needs an EchoCallback.*\(\.\.\., callbacks=\[EchoCallback\(\)\]\), or give the factor as a number, or 'demand'"
    with pytest.raises(MisconfigurationException, match=message):
        fit(data, model=model)
    assert model.batches == []


def test_a_data_module_with_auto_is_decided_on_by_a_callback_that_has_no_controller_of_its_own() -> None:
    options: Any = {"insertion_point": "after_augmentation", "seed": 7, "reuse": "each"}
    echo, data = EchoCallback(), EchoDataModule(Data(1, delay=0.02), "auto", **options)
    run = fit(data, callbacks=[echo], max_epochs=3)
    assert data.is_auto
    assert echo.controller is None
    assert echo.reports[0].factor == 1
    assert all(report.reason for report in echo.reports)  # decided on, after each epoch
    assert echo.reports[-1].next_factor == data.factor == run.loader.factor
    other = fit(Data(), callbacks=[echo], max_epochs=1)  # the same callback only measures elsewhere
    assert not isinstance(other.trainer.train_dataloader, EchoLoader)
    assert echo.reports[0].reason == ""
