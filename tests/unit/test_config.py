"""EchoConfig: the same options as EchoLoader and EchoDataModule, in a form that configuration tools can hold."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from omegaconf import OmegaConf, ValidationError
from omegaconf.errors import ConfigTypeError
from torch.utils.data import DataLoader

from lightning_echo import (
    CacheConfig,
    EchoCallback,
    EchoConfig,
    EchoDataModule,
    EchoLoader,
    InsertionPoint,
    ShareConfig,
    StagedDataset,
)
from lightning_echo.config import read_options

DEFAULTS = {
    **{"factor": 1.0, "insertion_point": "auto", "buffer_size": None, "reuse": "memory"},
    **{"epoch_length": "fixed", "seed": None, "cache": None, "share": None},
}
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


@pytest.mark.parametrize(("said", "held"), [("64", 64), ("4GiB", "4GiB"), ("0.25", 0.25), ("null", None), ("1.5 GiB", "1.5 GiB")])
def test_omegaconf_takes_a_buffer_size_in_each_form_and_over_each_other_one(said: str, held: Any) -> None:
    for default in (None, 8, "1GiB", 0.5):
        config = OmegaConf.structured(EchoConfig(buffer_size=default))
        for given in (OmegaConf.from_dotlist([f"buffer_size={said}"]), OmegaConf.create(f"buffer_size: {said}")):
            size = OmegaConf.to_object(OmegaConf.merge(config, given)).buffer_size
            assert (size, type(size)) == (held, type(held))


def test_an_instance_can_be_structured_and_stays_writable() -> None:
    config = OmegaConf.structured(EchoConfig(factor=3, seed=1))
    config.factor = 4.0
    assert OmegaConf.to_object(config) == EchoConfig(factor=4.0, seed=1)


def test_omegaconf_refuses_an_unknown_option_and_a_wrong_type() -> None:
    config = OmegaConf.structured(EchoConfig)
    with pytest.raises(ValidationError, match="factor"):
        OmegaConf.merge(config, OmegaConf.from_dotlist(["factor=[1]"]))
    with pytest.raises(ValidationError, match="buffer_size"):
        OmegaConf.merge(config, OmegaConf.from_dotlist(["buffer_size=[1]"]))
    with pytest.raises(ValueError, match=r"buffer_size must be an integer .*, a string with a unit .*, got 'much'"):
        OmegaConf.to_object(OmegaConf.merge(config, OmegaConf.from_dotlist(["buffer_size=much"])))
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
    config = EchoConfig(
        factor=2,
        insertion_point=InsertionPoint.after_batching,
        buffer_size=8,
        seed=1,
        cache=CacheConfig("8GiB"),
        share=ShareConfig("a"),
    )
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    assert {name: type(value) for name, value in values.items()} == {
        "factor": float,
        "insertion_point": str,
        "buffer_size": int,
        "reuse": str,
        "epoch_length": str,
        "seed": int,
        "cache": str,
        "share": str,
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
        ({"reuse": "all"}, ValueError, "reuse must be 'each' .* or 'memory' .*, got 'all'"),
        ({"buffer_size": 1.5}, ValueError, "buffer_size must be between 0 and 1 if it is a share of the free memory, got 1.5"),
        ({"buffer_size": "4 apples"}, ValueError, "buffer_size must be an integer"),
        ({"epoch_length": "long"}, ValueError, "epoch_length must be 'fixed' or 'full_pass', got 'long'"),
        ({"seed": 1.5}, TypeError, "seed must be an integer"),
        ({"cache": True}, TypeError, r"cache\.size must be a string with a unit .*, got True"),
    ],
)
def test_bad_values_are_refused_at_once(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EchoConfig(**options)


# ---------------------------------------------------------------------- a cache


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ("8GiB", "8GiB"),
        (0.5, 0.5),
        (2**30, 2**30),
        (CacheConfig("8GiB"), "8GiB"),
        ({"size": "8GiB"}, "8GiB"),
        ({"size": "8GiB", "hold": "auto", "path": None, "name": None, "partitioned": False, "ignore": []}, "8GiB"),
        (CacheConfig("8GiB", hold="raw"), {"size": "8GiB", "hold": "raw"}),
        ({"hold": "raw", "size": 0.5}, {"size": 0.5, "hold": "raw"}),
        (OmegaConf.create({"size": "8GiB", "hold": "loaded"}), {"size": "8GiB", "hold": "loaded"}),
        (CacheConfig("8GiB", path=Path("/local")), {"size": "8GiB", "path": "/local"}),  # type: ignore[arg-type]
        (CacheConfig("8GiB", partitioned=True), {"size": "8GiB", "partitioned": True}),
        (OmegaConf.create({"size": "8GiB", "ignore": ["run"]}), {"size": "8GiB", "ignore": ("run",)}),
        (None, None),
    ],
)
def test_a_cache_in_any_form_is_the_same_plain_value_that_can_be_copied(given: Any, held: Any) -> None:
    config = EchoConfig(cache=given)
    assert (config.cache, type(config.cache)) == (held, type(held))
    assert config == EchoConfig(cache=held) == copy.deepcopy(config) == pickle.loads(pickle.dumps(config))


@pytest.mark.parametrize("cache", [CacheConfig("8MiB"), CacheConfig(0.01, hold="raw"), CacheConfig(2**23, hold="loaded")])
def test_a_loader_takes_the_cache_of_a_config(cache: CacheConfig) -> None:
    data = StagedDataset.of(list(range(64)), augment=float, decode=int)  # type: ignore[arg-type]
    loader = EchoLoader(DataLoader(data, batch_size=8), **EchoConfig(cache=cache).as_options())
    assert (loader.factor, loader.cache) == (1, cache)
    assert EchoLoader(DataLoader(data, batch_size=8), **EchoConfig().as_options()).cache is None


def test_two_caches_differ_where_an_option_does() -> None:
    assert EchoConfig(cache="8GiB") != EchoConfig() != EchoConfig(cache=0.5)
    assert EchoConfig(cache="8GiB") != EchoConfig(cache={"size": "8GiB", "hold": "raw"})


@pytest.mark.parametrize(
    ("written", "held"),
    [
        ("cache: 8GiB", "8GiB"),
        ("cache: 0.5", 0.5),
        ("cache: 1073741824", 2**30),
        ("cache: {size: 8GiB, hold: raw}", {"size": "8GiB", "hold": "raw"}),
        ("cache:", None),
    ],
)
@pytest.mark.parametrize("first", [EchoConfig(), EchoConfig(cache="1GiB"), EchoConfig(cache=CacheConfig(0.1, hold="loaded"))])
def test_a_structured_config_takes_a_cache_from_yaml(first: EchoConfig, written: str, held: Any) -> None:
    schema = OmegaConf.structured(EchoConfig if first == EchoConfig() else first)
    merged = OmegaConf.merge(schema, OmegaConf.create(written))
    kept = {"hold": "loaded"} if isinstance(first.cache, dict) and isinstance(held, dict) else {}  # a mapping is merged
    assert OmegaConf.to_object(merged) == EchoConfig(cache={**kept, **held} if isinstance(held, dict) else held)
    assert OmegaConf.to_object(OmegaConf.create(OmegaConf.to_yaml(merged))) == OmegaConf.to_container(merged)


@pytest.mark.parametrize(
    ("dots", "held"),
    [
        (["cache=8GiB"], "8GiB"),
        (["cache=0.5"], 0.5),
        (["cache=null"], None),
        (["cache.size=8GiB", "cache.hold=raw"], {"size": "8GiB", "hold": "raw"}),
        (["cache={size: 8GiB, hold: raw}"], {"size": "8GiB", "hold": "raw"}),
    ],
)
@pytest.mark.parametrize("first", [EchoConfig(), EchoConfig(cache="1GiB"), EchoConfig(cache={"size": 0.1, "hold": "loaded"})])
def test_a_structured_config_takes_a_cache_from_a_command_line(first: EchoConfig, dots: list[str], held: Any) -> None:
    merged = OmegaConf.merge(OmegaConf.structured(first), OmegaConf.from_dotlist(dots))
    assert OmegaConf.to_object(merged) == EchoConfig(cache=held)


@dataclass
class Schema:
    """As a program that uses OmegaConf would write it."""

    memory: str = "2GiB"
    echo: EchoConfig = field(default_factory=lambda: EchoConfig(4, cache="1GiB"))


def test_a_cache_inside_a_users_schema_takes_interpolations() -> None:
    given = {"echo": {"cache": {"size": "${memory}", "hold": "raw"}}}
    merged = OmegaConf.merge(OmegaConf.structured(Schema), given, OmegaConf.from_dotlist(["memory=3GiB"]))
    assert merged.echo.cache.size == "3GiB"
    cache = {"size": "3GiB", "hold": "raw"}
    assert OmegaConf.to_object(merged) == Schema("3GiB", EchoConfig(4, cache=cache))
    assert read_options("echo", merged.echo) == EchoConfig(4, cache=cache)
    assert EchoConfig(cache=OmegaConf.structured(CacheConfig("1GiB", hold="loaded"))).cache == {"size": "1GiB", "hold": "loaded"}


BAD_CACHES: list[tuple[Any, str]] = [
    (0, r"cache\.size=0 is less than one MiB"),
    (-5, r"cache\.size=-5 is less than one MiB"),
    (8, r'cache\.size=8 is less than one MiB .*did you mean "8GiB"\?'),
    (math.nan, r"cache\.size as a share of the free memory must be between 0 and 1, got nan"),
    (1.5, r"cache\.size as a share of the free memory must be between 0 and 1, got 1\.5"),
    (-0.5, r"cache\.size as a share of the free memory must be between 0 and 1, got -0\.5"),
    ("8 apples", r'cache\.size must be a string with a unit such as "8GiB".*, got \'8 apples\''),
    ("0GiB", r"cache\.size='0GiB' is less than one MiB"),
    ({"hold": "raw"}, "cache needs a size"),
    ({"sise": "8GiB"}, "cache has unknown options sise: known are size, hold, path, name, partitioned, ignore"),
    ({"size": "8 apples"}, r"cache\.size must be a string with a unit"),
    ({"size": "8GiB", "hold": "decoded"}, r"cache\.hold must be one of 'auto', 'raw', 'loaded', 'whole', got 'decoded'"),
    ({"size": "8GiB", "name": "train"}, r"cache\.name='train' needs a folder on a local disk: give cache\.path, too"),
    (
        {"size": "8GiB", "partitioned": True, "path": "/d", "name": "train"},
        r"cache\.partitioned=True and cache\.name='train' exclude each other",
    ),
]


@pytest.mark.parametrize(("cache", "message"), BAD_CACHES)
def test_an_impossible_cache_is_refused_with_the_name_of_the_option_however_it_is_given(cache: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EchoConfig(cache=cache)
    with pytest.raises(ValueError, match=message):
        EchoDataModule.from_dataloaders([], factor=1, cache=cache)
    with pytest.raises(ValueError, match=message):
        EchoLoader(DataLoader(range(8)), 1, cache=cache)  # type: ignore[arg-type]
    merged = OmegaConf.merge(OmegaConf.structured(EchoConfig), {"cache": cache})
    with pytest.raises(ValueError, match=message):
        OmegaConf.to_object(merged)
    with pytest.raises(ValueError, match=message):
        read_options("echo", {"labelled": {"factor": 2, "cache": cache}})


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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"cache": "8GiB"}, EchoConfig(cache="8GiB")),
        ({"cache": CacheConfig("8GiB")}, EchoConfig(cache="8GiB")),
        ({"cache": {"size": "8GiB"}}, EchoConfig(cache="8GiB")),
        ({"factor": 2, "cache": {"size": "8GiB", "hold": "raw"}}, EchoConfig(2, cache={"size": "8GiB", "hold": "raw"})),
        ({"cache": EchoConfig(2)}, {"cache": EchoConfig(2)}),
        ({"cache": {"factor": 2}}, {"cache": EchoConfig(2)}),
        ({"cache": {"cache": "8GiB"}}, {"cache": EchoConfig(cache="8GiB")}),
        ({"cache": {"seed": 1}, "data": {}}, {"cache": EchoConfig(seed=1), "data": EchoConfig()}),
    ],
)
@pytest.mark.parametrize("made", [dict, OmegaConf.create])
def test_the_options_of_a_cache_are_told_from_those_of_a_loader_that_is_named_cache(made: Any, given: Any, expected: Any) -> None:
    if made is dict or not any(isinstance(value, EchoConfig | CacheConfig) for value in given.values()):
        assert read_options("echo", made(given)) == expected


def test_a_misspelt_option_of_a_cache_is_no_name_of_a_loader() -> None:
    with pytest.raises(ValueError, match="cache has unknown options sise: known are size"):
        read_options("echo", {"cache": {"sise": "8GiB"}})
    with pytest.raises(ValueError, match="cache needs a size"):
        read_options("echo", {"cache": {}})
    with pytest.raises(ValueError, match="cache has unknown options seed: known are size"):  # beside an option, it is one
        read_options("echo", {"factor": 2, "cache": {"seed": 1}})


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ("sweep", "sweep"),
        (ShareConfig("sweep"), "sweep"),
        ({"name": "sweep", "behind": "skip"}, {"name": "sweep", "behind": "skip"}),
        (ShareConfig("sweep", wait_for=3, window="2GiB"), {"name": "sweep", "wait_for": 3, "window": "2GiB"}),
        (OmegaConf.create({"name": "sweep", "restart": False}), {"name": "sweep", "restart": False}),
    ],
)
def test_share_is_held_as_its_name_or_the_options_that_are_not_defaults(given: Any, held: Any) -> None:
    assert EchoConfig(share=given).share == held
    merged = OmegaConf.merge(OmegaConf.structured(EchoConfig), {"share": held})
    assert OmegaConf.to_object(merged) == EchoConfig(share=held)


def test_a_loader_may_be_named_share_too() -> None:
    assert read_options("echo", {"share": {"factor": 2}}) == {"share": EchoConfig(2)}
    assert read_options("echo", {"share": {"name": "sweep"}}) == EchoConfig(share="sweep")
    assert read_options("echo", {"factor": 2, "cache": {"size": "8GiB"}, "share": {"name": "sweep"}}) == EchoConfig(
        2, cache="8GiB", share="sweep"
    )


@pytest.mark.parametrize(
    ("cls", "typo", "meant"),
    [
        (EchoCallback, "factr", "did you mean factor?"),
        (EchoDataModule, "insertion_pont", "did you mean insertion_point?"),
        (EchoLoader, "buffersize", "did you mean buffer_size?"),
        (EchoLoader, "xyz", r"EchoLoader has no option xyz\. It has loader, factor"),
    ],
)
def test_a_mistyped_option_is_refused_with_those_that_there_are(cls: type, typo: str, meant: str) -> None:
    with pytest.raises(TypeError, match=meant) as refused:
        cls(**{typo: 1})
    known = [name for name in inspect.signature(cls).parameters if name != "self"]
    assert known
    assert str(refused.value).endswith(f"It has {', '.join(known)}")


def test_a_subclass_may_have_options_of_its_own() -> None:
    class Own(EchoCallback):
        def __init__(self, own: int = 0, **options: Any) -> None:
            super().__init__(**options)
            self.own = own

    assert (Own(own=3, factor=2).own, Own(own=3, factor=2).factor) == (3, 2)
    with pytest.raises(TypeError, match=r"EchoCallback has no option onw\. It has controller"):
        Own(onw=3)
