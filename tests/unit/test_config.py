"""EchoConfig: the same options as EchoLoader and EchoDataModule, in a form that configuration tools can hold."""

from __future__ import annotations

import inspect
from dataclasses import fields
from importlib import import_module
from typing import Any, get_type_hints

import pytest
from omegaconf import OmegaConf, ValidationError
from omegaconf.errors import ConfigTypeError
from torch.utils.data import DataLoader

from lightning_echo import EchoConfig, EchoDataModule, EchoLoader, InsertionPoint
from lightning_echo.config import read_options

DEFAULTS = {"factor": 1.0, "insertion_point": "auto", "buffer_size": None, "epoch_length": "fixed", "seed": None}
OF_A_CONSTRUCTOR_ALONE = {"loader", "num_replicas", "rank", "datamodule", "shard", "loaders"}  # no options of echoing


def options_of(constructor: Any) -> dict[str, tuple[Any, Any]]:
    """Type and default of each option, in order."""
    types = get_type_hints(constructor.__init__)
    parameters = inspect.signature(constructor).parameters.values()
    return {each.name: (types[each.name], each.default) for each in parameters if each.name not in OF_A_CONSTRUCTOR_ALONE}


@pytest.mark.parametrize("constructor", [EchoLoader, EchoDataModule])
def test_loader_data_module_and_config_have_the_same_options_of_the_same_types_with_the_same_defaults(constructor: Any) -> None:
    of_config, of_constructor = options_of(EchoConfig), options_of(constructor)
    # Who wraps a loader says the factor (or, of several loaders, options by name); a config must be constructible without, and
    # then changes nothing.
    of_loader, of_module = (
        (float, inspect.Parameter.empty),
        (int | float | str | None, None),
    )  # a loader has no controller: no "auto"
    assert of_constructor.pop("factor") == (of_loader if constructor is EchoLoader else of_module)
    assert of_config.pop("factor") == (int | float | str, 1.0)
    # A config holds plain values: the member's name where the constructors take the member too.
    assert of_constructor.pop("insertion_point") == (InsertionPoint | str, "auto")
    assert of_config.pop("insertion_point") == (str, "auto")
    assert list(of_constructor) == list(of_config)
    assert of_constructor == of_config


def test_the_comparison_above_sees_every_option() -> None:
    assert list(options_of(EchoConfig)) == list(DEFAULTS)
    assert {name: default for name, (_, default) in options_of(EchoConfig).items()} == DEFAULTS


def test_omegaconf_takes_it_as_a_structured_config_and_overrides_it_from_a_dot_list() -> None:
    config = OmegaConf.structured(EchoConfig)
    assert OmegaConf.to_container(config) == DEFAULTS
    merged = OmegaConf.merge({"echo": config}, OmegaConf.from_dotlist(["echo.factor=4", "echo.buffer_size=64"]))
    echo = OmegaConf.to_object(merged)["echo"]  # type: ignore[call-overload, index]
    assert echo == EchoConfig(factor=4.0, buffer_size=64)
    assert type(echo) is EchoConfig


def test_an_instance_can_be_structured_and_stays_writable() -> None:
    config = OmegaConf.structured(EchoConfig(factor=3, seed=1))
    config.factor = 4.0
    assert OmegaConf.to_object(config) == EchoConfig(factor=4.0, seed=1)


def test_omegaconf_refuses_an_unknown_option_and_a_wrong_type() -> None:
    config = OmegaConf.structured(EchoConfig)
    with pytest.raises(ValidationError, match="factor"):
        OmegaConf.merge(config, OmegaConf.from_dotlist(["factor=[1]"]))
    with pytest.raises(ValidationError, match="buffer_size"):
        OmegaConf.merge(config, OmegaConf.from_dotlist(["buffer_size=much"]))
    with pytest.raises(ConfigTypeError, match=r"factor must be a real number >= 1 .* or 'auto', got 'much'"):
        OmegaConf.to_object(OmegaConf.merge(config, OmegaConf.from_dotlist(["factor=much"])))
    with pytest.raises(Exception, match="faktor"):
        OmegaConf.merge(config, OmegaConf.from_dotlist(["faktor=2"]))


def test_a_plain_node_with_a_target_makes_one() -> None:
    """What ``hydra.utils.instantiate`` does with such a node."""
    node = OmegaConf.to_container(OmegaConf.create({"_target_": "lightning_echo.EchoConfig", "factor": 4, "seed": 3}))
    assert isinstance(node, dict)
    module, name = str(node.pop("_target_")).rsplit(".", 1)
    assert getattr(import_module(module), name)(**node) == EchoConfig(factor=4.0, seed=3)


def test_its_values_are_plain() -> None:
    config = EchoConfig(factor=2, insertion_point=InsertionPoint.after_batching, buffer_size=8, seed=1)
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    assert {name: type(value) for name, value in values.items()} == {
        "factor": float,
        "insertion_point": str,
        "buffer_size": int,
        "epoch_length": str,
        "seed": int,
    }


def test_its_options_are_those_of_a_loader() -> None:
    config = EchoConfig(factor=2, insertion_point="after_augmentation", buffer_size=32, epoch_length="full_pass", seed=5)
    loader = EchoLoader(DataLoader(range(64), batch_size=8), **config.as_options())  # type: ignore[arg-type]
    assert (loader.factor, loader.insertion_point, loader.buffer_size) == (2, InsertionPoint.after_augmentation, 32)
    assert (loader.epoch_length, loader.seed, len(loader)) == ("full_pass", 5, 16)


def test_every_insertion_point_has_its_name() -> None:
    for point in InsertionPoint:
        assert EchoConfig(insertion_point=point.name).insertion_point == point.value == str(point)
    assert OmegaConf.to_object(OmegaConf.structured(EchoConfig(insertion_point="after_read"))) == EchoConfig(
        insertion_point="after_read"
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"factor": 0.5}, ValueError, "factor must be a finite number >= 1, got 0.5"),
        ({"factor": "2x"}, TypeError, "factor must be a real number"),
        ({"insertion_point": "before"}, ValueError, "insertion_point must be one of 'after_read'"),
        ({"buffer_size": 0}, ValueError, "buffer_size must be at least 1, got 0"),
        ({"epoch_length": "long"}, ValueError, "epoch_length must be 'fixed' or 'full_pass', got 'long'"),
        ({"seed": 1.5}, TypeError, "seed must be an integer"),
    ],
)
def test_bad_values_are_refused_at_once(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EchoConfig(**options)


# ---------------------------------------------------------------------- the options that a user gives


def test_options_by_name_are_read_as_such() -> None:
    assert read_options("echo", {"a": EchoConfig(factor=2)}) == {"a": EchoConfig(factor=2)}
    assert read_options("echo", {"a": {"factor": 2}}) == {"a": EchoConfig(factor=2)}
    with pytest.raises(ValueError, match="echo is empty"):
        read_options("echo", {})
    with pytest.raises(TypeError, match="echo must map names of loaders to an EchoConfig each, got 0: EchoConfig"):
        read_options("echo", {0: EchoConfig(factor=2)})


def test_options_of_all_loaders_are_read_from_a_mapping_too() -> None:
    assert read_options("echo", {"factor": 2}) == EchoConfig(factor=2)
    assert read_options("echo", None) is None
    with pytest.raises(TypeError, match="echo must be an EchoConfig, a dict or DictConfig of its options"):
        read_options("echo", 4)
