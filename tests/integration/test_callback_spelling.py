"""One spelling of EchoCallback's options: each a keyword, a factor that may be "auto", and ``echo=`` in place of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from inspect import signature
from typing import Any

import pytest
from collection_runs import Several, SeveralRecorder
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from trainer_runs import Data, Recorder, echoed, fit

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader, FactorSchedule, InsertionPoint, TargetIdle

OPTIONS: dict[str, Any] = {"factor": 2.5, "insertion_point": "after_augmentation", "seed": 7}  # what trainer_runs.echoed says


@dataclass
class Schema:
    """As a program that uses OmegaConf would write it."""

    factor: float = 2.5
    echo: EchoConfig = field(default_factory=EchoConfig)


def given(controller: Any) -> tuple[float, float, float]:
    assert type(controller) is TargetIdle
    return controller.target, controller.min_factor, controller.max_factor


def test_every_option_of_a_config_is_a_keyword_with_the_same_default() -> None:
    keywords = {name: each.default for name, each in signature(EchoCallback).parameters.items()}
    options = {each.name: each.default for each in fields(EchoConfig)}
    assert keywords == {"controller": None, **options, "factor": None, "echo": None, "summary": True, "plot": False}
    beside = EchoCallback(**{**keywords, "echo": EchoConfig(3)})  # a configuration file that LightningCLI saves holds them all
    assert beside.attachment.echo.factor == 3


STRUCTURED: Any = OmegaConf.merge(OmegaConf.structured(Schema), {"echo": {**OPTIONS, "factor": "${factor}"}})


@pytest.mark.parametrize(
    "arguments",
    [OPTIONS, {"echo": EchoConfig(**OPTIONS)}, {"echo": OPTIONS}, {"echo": OmegaConf.create(OPTIONS)}, {"echo": STRUCTURED.echo}],
    ids=["keywords", "config", "dict", "DictConfig", "structured, with an interpolation"],
)
def test_options_may_be_keywords_a_config_or_a_mapping(arguments: Any) -> None:
    assert fit(Data(), callbacks=[EchoCallback(**arguments)]).model.batches == fit(echoed()).model.batches


@pytest.mark.parametrize(
    ("echo", "expected"),
    [
        (
            EchoCallback(factor=2, insertion_point="after_batching", buffer_size=7, epoch_length="full_pass", seed=3),
            {"factor": 2, "insertion_point": "after_batching", "buffer_size": 7, "epoch_length": "full_pass", "seed": 3},
        ),
        (EchoCallback(buffer_size=9), {"factor": 1, "buffer_size": 9, "reuse": "memory"}),
        (EchoCallback(factor=2, reuse="each"), {"factor": 2, "reuse": "each"}),
        (
            EchoCallback(FactorSchedule({0: 3.0}), insertion_point=InsertionPoint.after_batching),
            {"factor": 3, "insertion_point": "after_batching"},
        ),
    ],
)
def test_every_keyword_reaches_the_loader_and_without_a_factor_it_is_one(echo: EchoCallback, expected: dict[str, Any]) -> None:
    loader: Any = fit(Data(), callbacks=[echo], max_epochs=1).trainer.train_dataloader
    found = {name: getattr(loader, name) for name in expected}
    assert {name: getattr(value, "value", value) for name, value in found.items()} == expected


OTHERS = {"insertion_point": "after_read", "buffer_size": 8, "reuse": "each", "epoch_length": "full_pass", "seed": 0}


@pytest.mark.parametrize("echo", [EchoConfig(3), {"factor": 3}, {"labelled": EchoConfig(3)}])
def test_an_option_beside_echo_is_refused_with_both_names(echo: Any) -> None:
    for name, value in {**OTHERS, "factor": "auto", "cache": "8GiB", "share": "sweep"}.items():
        message = rf"options in echo=.*3.* and in {name}={value!r}: give all of them in one of the two"
        with pytest.raises(ValueError, match=message):
            EchoCallback(echo=echo, **{name: value})


@pytest.mark.parametrize("made", [dict, OmegaConf.create], ids=["dict", "DictConfig"])
def test_options_by_name_may_be_mappings_too(made: Any) -> None:
    named = made({"long": made({"factor": 2}), "short": made({"factor": 3, "seed": 1})})
    assert EchoCallback(echo=named).attachment.echo.factors == {"long": 2, "short": 3}
    loaders = EchoDataModule(Several(), loaders=named).train_dataloader()
    assert {name: each.factor for name, each in loaders.items()} == {"long": 2, "short": 3}


@pytest.mark.parametrize("arguments", [{"factor": "auto"}, {"echo": EchoConfig("auto")}, {"echo": {"factor": "auto"}}])
def test_auto_is_target_idle_with_its_defaults_also_beside_an_echo_data_module(arguments: Any) -> None:
    echo = EchoCallback(**arguments)
    assert given(echo.controller) == given(TargetIdle())
    assert fit(echoed(3), callbacks=[echo], max_epochs=1).loader.factor_owner == "EchoDataModule"


def test_auto_for_all_of_several_loaders_is_one_controller() -> None:
    echo = EchoCallback(echo={"long": EchoConfig("auto", seed=1), "short": {"factor": "auto", "seed": 2}})
    assert given(echo.controller) == given(TargetIdle())
    fit(Several(), model=SeveralRecorder(), callbacks=[echo], max_epochs=1)
    assert echo.reports[0].factor == 1


BOTH = r"factor='auto' stands for a controller.* controller=FactorSchedule.*leave one of the two"


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
        ({"echo": {"a": 4}}, TypeError, "echo has no option 'a'"),
        ({"echo": {"a": EchoConfig(), "b": 4}}, TypeError, "must map names of loaders to an EchoConfig each, got 'b': int 4"),
        ({"echo": {"a": {"factr": 4}}}, TypeError, r"echo\['a'\] has no option 'factr'"),
        ({"echo": {"a": EchoConfig(), "b": EchoConfig("auto")}}, ValueError, "'auto' for 'b' alone, .* one factor for all"),
        ({"echo": {0: EchoConfig()}}, TypeError, "got 0: EchoConfig"),
        ({"factor": "TargetIdle"}, TypeError, "real number >= 1 .* or 'auto', got 'TargetIdle'; .* the argument controller"),
        ({"buffer_size": [4]}, TypeError, "buffer_size must be an integer"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_with_the_way_out(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EchoCallback(**arguments)


@pytest.mark.parametrize("options", [{"factor": "auto"}, {"loaders": {"long": EchoConfig("auto"), "short": {"factor": "auto"}}}])
def test_a_data_module_with_auto_is_refused_in_fit_without_a_callback_with_the_line_to_add(options: Any) -> None:
    data, model = EchoDataModule(Several() if "loaders" in options else Data(), **options), Recorder()
    message = r"needs an EchoCallback.*Trainer\(\.\.\., callbacks=\[EchoCallback\(\)\]\), or give the factor as a number"
    with pytest.raises(MisconfigurationException, match=message):
        fit(data, model=model)
    assert model.batches == []


def test_a_data_module_with_auto_is_decided_on_by_a_callback_that_has_no_controller_of_its_own() -> None:
    echo, data = EchoCallback(), EchoDataModule(Data(1, delay=0.02), "auto", insertion_point="after_augmentation", seed=7)
    run = fit(data, callbacks=[echo], max_epochs=3)
    assert data.is_auto
    assert echo.controller is None
    assert echo.reports[0].factor == 1
    assert all(report.reason for report in echo.reports)  # decided on, after each epoch
    assert echo.reports[-1].next_factor == data.factor == run.loader.factor
    other = fit(Data(), callbacks=[echo], max_epochs=1)  # the same callback only measures elsewhere
    assert not isinstance(other.trainer.train_dataloader, EchoLoader)
    assert echo.reports[0].reason == ""


@pytest.mark.parametrize(("factor", "controller", "expected"), [("auto", FactorSchedule({0: 3.0}), 3), (2, None, 2)])
def test_a_data_module_is_decided_on_by_the_controller_there_is(factor: Any, controller: Any, expected: float) -> None:
    data, echo = EchoDataModule(Data(), factor, seed=7), EchoCallback(controller)
    fit(data, callbacks=[echo], max_epochs=1)
    assert data.factor == expected
    assert bool(echo.reports[0].reason) == (controller is not None)
