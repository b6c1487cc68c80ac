"""EchoConfig: the same options as EchoLoader and EchoDataModule, in a form that configuration tools can hold."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from omegaconf import OmegaConf, ValidationError
from omegaconf.errors import ConfigKeyError, ConfigTypeError
from torch.utils.data import DataLoader

from lightning_echo import CacheConfig, EchoCallback, EchoConfig, EchoDataModule, EchoLoader, InsertionPoint, Replay, ShareConfig
from lightning_echo.config import read_options

DEFAULTS = {
    **{"factor": 1.0, "insertion_point": "auto", "buffer_size": None, "reuse": "memory", "epoch_length": "fixed"},
    **{"seed": None, "cache": None, "share": None, "reads_in_flight": None, "max_factor": None},
}
OF_A_CONSTRUCTOR_ALONE = {"loader", "num_replicas", "rank", "datamodule", "shard", "loaders", "journal"}  # no options of echoing


def options_of(constructor: Any) -> dict[str, tuple[Any, Any]]:
    """Type and default of each option, in order."""
    types = get_type_hints(constructor.__init__)
    parameters = inspect.signature(constructor).parameters.values()
    return {each.name: (types[each.name], each.default) for each in parameters if each.name not in OF_A_CONSTRUCTOR_ALONE}


@pytest.mark.parametrize(
    ("constructor", "factor"),
    [(EchoLoader, (float | str | Replay, inspect.Parameter.empty)), (EchoDataModule, (int | float | str | Replay | None, None))],
)
def test_loader_data_module_and_config_have_the_same_options_types_and_defaults(constructor: Any, factor: Any) -> None:
    of_config, of_constructor = options_of(EchoConfig), options_of(constructor)
    assert {name: default for name, (_, default) in of_config.items()} == DEFAULTS
    assert list(of_constructor) == list(of_config) == list(DEFAULTS)
    # Who wraps a loader says the factor; a config without one changes nothing.
    assert (of_constructor.pop("factor"), of_config.pop("factor")) == (factor, (int | float | str, 1.0))
    # A config holds plain values: the member's name where the constructors take the member too.
    assert of_constructor.pop("insertion_point") == (InsertionPoint | str, "auto")
    assert of_config.pop("insertion_point") == (str, "auto")
    assert of_constructor == of_config


HELD: list[tuple[str, Any, Any]] = [
    ("factor", 2, 2.0),
    ("insertion_point", InsertionPoint.after_batching, "after_batching"),
    ("buffer_size", 8, 8),
    ("cache", "8GiB", "8GiB"),
    ("cache", 2**30, 2**30),
    ("cache", CacheConfig("8GiB"), "8GiB"),
    ("cache", {"size": "8GiB", "hold": "auto", "path": None, "name": None, "partitioned": False, "ignore": []}, "8GiB"),
    ("cache", {"hold": "raw", "size": 0.5}, {"size": 0.5, "hold": "raw"}),
    ("cache", OmegaConf.create({"size": "8GiB", "hold": "loaded"}), {"size": "8GiB", "hold": "loaded"}),
    ("cache", CacheConfig("8GiB", path=Path("/local")), {"size": "8GiB", "path": "/local"}),  # type: ignore[arg-type]
    ("cache", CacheConfig("8GiB", partitioned=True), {"size": "8GiB", "partitioned": True}),
    ("cache", OmegaConf.create({"size": "8GiB", "ignore": ["run"]}), {"size": "8GiB", "ignore": ("run",)}),
    ("share", ShareConfig("sweep", wait_for=3, window="2GiB"), {"name": "sweep", "wait_for": 3, "window": "2GiB"}),
    ("share", OmegaConf.create({"name": "sweep", "restart": False}), {"name": "sweep", "restart": False}),
    ("reads_in_flight", 32, 32),
    ("reads_in_flight", "auto", "auto"),
]


@pytest.mark.parametrize(("option", "given", "held"), HELD)
def test_an_option_in_any_form_is_the_same_plain_value_that_can_be_copied(option: str, given: Any, held: Any) -> None:
    config = EchoConfig(**{option: given})
    assert (getattr(config, option), type(getattr(config, option))) == (held, type(held))
    assert config == EchoConfig(**{option: held}) == copy.deepcopy(config) == pickle.loads(pickle.dumps(config))
    assert config != EchoConfig()
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(EchoConfig), {option: held})) == config


# ---------------------------------------------------------------------- OmegaConf


def test_omegaconf_takes_it_as_a_structured_config_and_overrides_it_from_a_dot_list() -> None:
    config = OmegaConf.structured(EchoConfig)
    assert OmegaConf.to_container(config) == DEFAULTS
    merged = OmegaConf.merge({"echo": config}, OmegaConf.from_dotlist(["echo.factor=4", "echo.buffer_size=64"]))
    assert OmegaConf.to_object(merged)["echo"] == EchoConfig(factor=4.0, buffer_size=64)  # type: ignore[call-overload, index]
    of_instance = OmegaConf.structured(EchoConfig(factor=3, seed=1))
    of_instance.factor = 4.0
    assert OmegaConf.to_object(of_instance) == EchoConfig(factor=4.0, seed=1)


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ("factor=[1]", ValidationError, "factor"),
        ("buffer_size=[1]", ValidationError, "buffer_size"),
        ("buffer_size=much", ValueError, r"buffer_size must be an integer .*, a string with a unit .*, got 'much'"),
        ("factor=much", ConfigTypeError, r"factor must be a real number >= 1 .* or 'auto', got 'much'"),
        ("faktor=2", ConfigKeyError, "faktor"),
    ],
)
def test_omegaconf_refuses_an_unknown_option_and_a_wrong_type(said: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(EchoConfig), OmegaConf.from_dotlist([said])))


FIRST: list[Any] = [None, "1GiB", {"size": 0.1, "hold": "loaded"}]
RAW = {"size": "8GiB", "hold": "raw"}


@pytest.mark.parametrize(
    ("given", "held"),
    [
        (OmegaConf.create("cache: 8GiB"), "8GiB"),
        (OmegaConf.create("cache: 1073741824"), 2**30),
        (OmegaConf.create("cache: {size: 8GiB, hold: raw}"), RAW),
        (OmegaConf.create("cache:"), None),
        (OmegaConf.from_dotlist(["cache=0.5"]), 0.5),
        (OmegaConf.from_dotlist(["cache=null"]), None),
        (OmegaConf.from_dotlist(["cache.size=8GiB", "cache.hold=raw"]), RAW),
        (OmegaConf.from_dotlist(["cache={size: 8GiB, hold: raw}"]), RAW),
    ],
    ids=str,
)
@pytest.mark.parametrize("first", FIRST, ids=str)
def test_a_structured_config_takes_a_cache_from_yaml_and_from_a_command_line(first: Any, given: Any, held: Any) -> None:
    merged = OmegaConf.merge(OmegaConf.structured(EchoConfig(cache=first)), given)
    assert OmegaConf.to_object(merged) == EchoConfig(cache=held)
    assert OmegaConf.to_object(OmegaConf.create(OmegaConf.to_yaml(merged))) == OmegaConf.to_container(merged)


# ---------------------------------------------------------------------- what is refused


BAD_CACHES: list[tuple[Any, str]] = [
    (-5, r"cache\.size=-5 is less than one MiB"),
    (8, r'cache\.size=8 is less than one MiB .*did you mean "8GiB"\?'),
    (math.nan, r"cache\.size as a share of the free memory must be between 0 and 1, got nan"),
    (1.5, r"cache\.size as a share of the free memory must be between 0 and 1, got 1\.5"),
    ("8 apples", r'cache\.size must be a string with a unit such as "8GiB".*, got \'8 apples\''),
    ("0GiB", r"cache\.size='0GiB' is less than one MiB"),
    ({"hold": "raw"}, "cache needs a size"),
    ({"sise": "8GiB"}, "cache has unknown options sise: known are size, hold, path, name, partitioned, ignore"),
    ({"size": "8GiB", "hold": "decoded"}, r"cache\.hold must be one of 'auto', 'raw', 'loaded', 'whole', got 'decoded'"),
    ({"size": "8GiB", "name": "train"}, r"cache\.name='train' needs a folder on a local disk: give cache\.path, too"),
    (
        {"size": "8GiB", "partitioned": True, "path": "/d", "name": "train"},
        r"cache\.partitioned=True and cache\.name='train' exclude each other",
    ),
]


@pytest.mark.parametrize(("cache", "message"), BAD_CACHES)
def test_an_impossible_cache_is_refused_with_the_name_of_the_option_however_it_is_given(cache: Any, message: str) -> None:
    merged = OmegaConf.merge(OmegaConf.structured(EchoConfig), {"cache": cache})
    for give in (
        lambda: EchoConfig(cache=cache),
        lambda: EchoDataModule.from_dataloaders([], factor=1, cache=cache),
        lambda: EchoLoader(DataLoader(range(8)), 1, cache=cache),  # type: ignore[arg-type]
        lambda: OmegaConf.to_object(merged),
        lambda: read_options("echo", {"labelled": {"factor": 2, "cache": cache}}),
    ):
        with pytest.raises(ValueError, match=message):
            give()


# ---------------------------------------------------------------------- the options that a user gives


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({"factor": 2}, EchoConfig(2)),
        ({"a": {"factor": 2}}, {"a": EchoConfig(2)}),
        ({"a": EchoConfig(2)}, {"a": EchoConfig(2)}),
        ({"cache": "8GiB"}, EchoConfig(cache="8GiB")),
        ({"factor": 2, "cache": {"size": "8GiB", "hold": "raw"}}, EchoConfig(2, cache={"size": "8GiB", "hold": "raw"})),
        # A loader may be named like an option.
        ({"cache": EchoConfig(2)}, {"cache": EchoConfig(2)}),
        ({"cache": {"factor": 2}}, {"cache": EchoConfig(2)}),
        ({"cache": {"seed": 1}, "data": {}}, {"cache": EchoConfig(seed=1), "data": EchoConfig()}),
        ({"share": {"factor": 2}}, {"share": EchoConfig(2)}),
        ({"share": {"name": "sweep"}}, EchoConfig(share="sweep")),
        ({"factor": 2, "cache": {"size": "8GiB"}, "share": {"name": "a"}}, EchoConfig(2, cache="8GiB", share="a")),
    ],
    ids=str,
)
@pytest.mark.parametrize("made", [lambda given: given, OmegaConf.create], ids=["dict", "DictConfig"])
def test_options_of_all_loaders_or_by_name_are_told_from_those_of_a_loader_named_cache(
    made: Any, given: Any, expected: Any
) -> None:
    holds_objects = any(isinstance(value, EchoConfig | CacheConfig) for value in (given or {}).values())
    assert read_options("echo", given if holds_objects or given is None else made(given)) == expected


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, "echo is empty"),
        ({0: EchoConfig(2)}, TypeError, "echo must map names of loaders to an EchoConfig each, got 0: EchoConfig"),
        (4, TypeError, "echo must be an EchoConfig, a dict or DictConfig of its options"),
        ({"cache": {"sise": "8GiB"}}, ValueError, "cache has unknown options sise: known are size"),
        ({"cache": {}}, ValueError, "cache needs a size"),
        ({"factor": 2, "cache": {"seed": 1}}, ValueError, "cache has unknown options seed"),  # beside an option, it is one
    ],
)
def test_options_that_are_none_are_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_options("echo", given)


@pytest.mark.parametrize(
    ("cls", "typo", "meant"),
    [
        (EchoCallback, "factr", "did you mean factor?"),
        (EchoDataModule, "insertion_pont", "did you mean insertion_point?"),
        (EchoLoader, "xyz", r"EchoLoader has no option xyz\. It has loader, factor"),
    ],
)
def test_a_mistyped_option_is_refused_with_those_that_there_are(cls: type, typo: str, meant: str) -> None:
    with pytest.raises(TypeError, match=meant) as refused:
        cls(**{typo: 1})
    assert str(refused.value).endswith(f"It has {', '.join(inspect.signature(cls).parameters)}")
