"""A cache on command lines and in configuration files: a size, or options by name, in `EchoCLI` and in a plain LightningCLI."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from trainer_runs import Data, Recorder

from lightning_echo import CacheConfig, EchoCLI

QUIET = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
HIDDEN = {"enable_progress_bar": False, "enable_model_summary": False}
RAW = CacheConfig("8MiB", hold="raw")
SPELLINGS = [
    (["{}=8MiB"], CacheConfig("8MiB")),
    (["{}", "8MiB"], CacheConfig("8MiB")),
    (["{}=0.01"], CacheConfig(0.01)),
    (["{}=8388608"], CacheConfig(2**23)),
    (["{}.size", "8MiB", "{}.hold", "raw"], RAW),
    (["{}.hold=raw", "{}.size=8MiB"], RAW),
    (["{}.size=0.01"], CacheConfig(0.01)),
    (['{}={{"size": "8MiB", "hold": "raw"}}'], RAW),
    (["{}={{size: 8MiB, hold: raw}}"], RAW),
    (["{}=null"], None),
]
NOT_IN_ECHO = SPELLINGS[-3:]  # jsonargparse 4.27 takes a mapping there for the options of a loader; with 4.53, null is a string


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])


def run(*arguments: str, cli: type[LightningCLI] = EchoCLI, data: Any = Data, **options: Any) -> Any:
    defaults: dict[str, Any] = {"save_config_callback": None, "seed_everything_default": False}
    return cli(Recorder, data, args=list(arguments), trainer_defaults={**QUIET, **HIDDEN}, **{**defaults, **options})


def cache_of(cli: Any) -> Any:
    return cli.trainer.train_dataloader.cache


# ---------------------------------------------------------------------- what reaches the loader


CALLBACK = "--trainer.callbacks+=lightning_echo.EchoCallback"
MODULE = ["--data=lightning_echo.EchoDataModule", "--data.datamodule=trainer_runs.Data", "--data.factor=1"]
PLACES: dict[str, tuple[list[str], str, dict[str, Any]]] = {
    "group": (["--echo.factor=2"], "--echo.cache", {}),
    "callback": ([CALLBACK, "--trainer.callbacks.factor=2"], "--trainer.callbacks.cache", {"cli": LightningCLI}),
    "callback in EchoCLI": ([CALLBACK, "--trainer.callbacks.factor=2"], "--trainer.callbacks.cache", {}),
    "echo=": ([CALLBACK, "--trainer.callbacks.echo.factor=2"], "--trainer.callbacks.echo.cache", {"cli": LightningCLI}),
    "data module": (MODULE, "--data.cache", {"cli": LightningCLI, "data": None}),
}


@pytest.mark.grid
@pytest.mark.parametrize(
    ("where", "spelling", "expected"),
    [(where, *each) for where in PLACES for each in SPELLINGS if where != "echo=" or each not in NOT_IN_ECHO],
)
def test_every_place_takes_every_spelling(where: str, spelling: list[str], expected: CacheConfig | None) -> None:
    arguments, prefix, options = PLACES[where]
    assert cache_of(run("fit", *arguments, *(part.format(prefix) for part in spelling), **options)) == expected


def test_a_cache_is_partitioned_by_name_which_one_process_says_to_be_of_no_use() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        cli = run("fit", "--echo.cache.size=8MiB", "--echo.cache.partitioned", "true")
    said = [str(each.message) for each in caught if "partitioned" in str(each.message)]
    assert said == [
        "lightning_echo: cache.partitioned=True changes nothing here, "
        "since there is one process: each node has a cache of its own"
    ]
    assert cache_of(cli) == CacheConfig("8MiB", partitioned=True)


def test_a_cache_alone_needs_no_factor() -> None:
    loader = run("fit", "--echo.cache=8MiB").trainer.train_dataloader
    assert (loader.factor, loader.cache) == (1, CacheConfig("8MiB"))


def test_echoing_switched_off_switches_the_cache_off() -> None:
    assert not hasattr(run("fit", "--echo.cache=8MiB", "--echo.enabled=false").trainer.train_dataloader, "cache")


@pytest.mark.parametrize(("cache", "expected"), [("8MiB", CacheConfig("8MiB")), ({"size": "8MiB", "hold": "raw"}, RAW)])
def test_options_by_name_of_a_loader_take_it(cache: Any, expected: CacheConfig) -> None:
    named = {"long": {"factor": 2, "cache": cache}}
    cli = EchoCLI(
        args=[
            "fit",
            "--data=collection_runs.Several",
            "--model=collection_runs.SeveralRecorder",
            f"--echo.loaders={json.dumps(named)}",
        ],
        trainer_defaults={**QUIET, **HIDDEN},
        save_config_callback=None,
        seed_everything_default=False,
    )
    assert cli.trainer.train_dataloader["long"].cache == expected  # type: ignore[index]


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("cache", ["8MiB", 0.01, 2**23, {"size": "8MiB"}, {"size": "8MiB", "hold": "raw"}, None])
def test_a_file_takes_it_and_the_saved_config_of_the_run_has_it_again(cache: Any, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"echo": {"factor": 2, "cache": cache}}))
    found = []
    for folder, config in (("first", tmp_path / "config.yaml"), ("second", tmp_path / "first" / "config.yaml")):
        root = f"--trainer.default_root_dir={tmp_path / folder}"
        found.append(cache_of(run("fit", f"--config={config}", root, save_config_callback=SaveConfigCallback)))
        assert yaml.safe_load((tmp_path / folder / "config.yaml").read_text())["echo"].get("cache") == cache
    expected = None if cache is None else CacheConfig(**cache) if isinstance(cache, dict) else CacheConfig(cache)
    assert found == [expected, expected]


def test_options_by_name_on_the_command_line_are_saved_and_load_again(tmp_path: Path) -> None:
    options = ["--echo.cache.size=8MiB", "--echo.cache.hold=raw", f"--trainer.default_root_dir={tmp_path}"]
    run("fit", *options, save_config_callback=SaveConfigCallback)
    assert cache_of(run("fit", f"--config={tmp_path / 'config.yaml'}")) == RAW


def test_a_command_line_changes_one_option_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"echo": {"cache": {"size": "8MiB", "hold": "loaded"}}}))
    cli = run("fit", f"--config={tmp_path / 'config.yaml'}", "--echo.cache.hold=raw")
    assert cache_of(cli) == RAW
    assert cache_of(run("fit", f"--config={tmp_path / 'config.yaml'}", "--echo.cache=4MiB")) == CacheConfig("4MiB")


def test_an_interpolation_works_in_omegaconf_mode(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "data:\n  batch_size: 8\necho:\n  cache:\n    size: ${data.batch_size}MiB\n    hold: raw\n"
    )
    cli = run("fit", f"--config={tmp_path / 'config.yaml'}", parser_kwargs={"parser_mode": "omegaconf"})
    assert cache_of(cli) == RAW


def test_it_comes_from_the_environment_where_the_program_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_FIT__ECHO__CACHE", "8MiB")
    assert cache_of(run("fit", parser_kwargs={"default_env": True})) == CacheConfig("8MiB")


class Linked(EchoCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("data.batch_size", "echo.cache", compute_fn=lambda size: f"{size}MiB")


def test_a_link_of_the_users_own_may_set_it() -> None:
    assert cache_of(run("fit", "--data.batch_size=8", cli=Linked)) == CacheConfig("8MiB")


# ---------------------------------------------------------------------- what is refused

BAD: list[tuple[Any, str]] = [
    (0, "cache.size=0 is less than one MiB"),
    (-5, "cache.size=-5 is less than one MiB"),
    (8, 'cache.size=8 is less than one MiB (an integer is a number of bytes): did you mean "8GiB"?'),
    (1.5, "cache.size as a share of the free memory must be between 0 and 1, got 1.5"),
    (float("nan"), "cache.size as a share of the free memory must be between 0 and 1, got nan"),
    ("8 apples", 'cache.size must be a string with a unit such as "8GiB"'),
    ({"hold": "raw"}, 'cache needs a size, such as "8GiB"'),
    ({"size": "8GiB", "hild": "raw"}, "cache has unknown options hild: known are size, hold, path, name, partitioned"),
    ({"size": "8GiB", "hold": "decoded"}, "cache.hold must be one of 'auto', 'raw', 'loaded', 'whole', got 'decoded'"),
    ({"size": "8GiB", "name": "train"}, "cache.name='train' needs a folder on a local disk: give cache.path, too"),
    (
        {"size": "8GiB", "partitioned": True, "path": "/d", "name": "x"},
        "cache.partitioned=True and cache.name='x' exclude each other",
    ),
]


@pytest.mark.grid
@pytest.mark.parametrize("where", ["command line", "by name", "file"])
@pytest.mark.parametrize(("cache", "message"), BAD)
def test_an_impossible_one_ends_in_the_parsers_message(
    where: str, cache: Any, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [f"--echo.cache={cache if isinstance(cache, str) else yaml.safe_dump(cache, default_flow_style=True).strip()}"]
    if where == "by name":
        options = cache if isinstance(cache, dict) else {"size": cache}
        arguments = [f"--echo.cache.{name}={yaml.safe_dump(value).splitlines()[0]}" for name, value in options.items()]
    if where == "file":
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"echo": {"cache": cache}}))
        arguments = [f"--config={tmp_path / 'config.yaml'}"]
    with pytest.raises(SystemExit) as end:
        run("fit", *arguments)
    assert end.value.code == 2
    assert f"error: echo: {message}" in capsys.readouterr().err


def test_a_size_is_not_joined_with_options_that_follow_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("fit", "--echo.cache=8GiB", "--echo.cache.hold=raw")
    assert 'cache needs a size, such as "8GiB"' in capsys.readouterr().err
