"""A cache in every place and spelling (constructors, command lines, files) reaches the loader that a Trainer trains on."""

import sys

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from omegaconf import OmegaConf
from trainer_runs import Data, Recorder, echoed, fit

from lightning_echo import CacheConfig, EchoCallback, EchoCLI, EchoConfig, EchoDataModule, EchoLoader
from lightning_echo.cache.kept import read_cache_config

OPTIONS = {"factor": 2.5, "insertion_point": "after_augmentation", "seed": 7}  # what trainer_runs.echoed says
RAW = CacheConfig("8MiB", hold="raw")
AS_DICT = {"size": "8MiB", "hold": "raw"}


def test_each_place_reaches_the_loader_and_leaves_the_batches_as_they_are():
    expected = fit(echoed(), max_epochs=2).model.batches
    for data, callbacks in (
        (Data(), [EchoCallback(**OPTIONS, cache=OmegaConf.create(AS_DICT))]),
        (Data(), [EchoCallback(echo=EchoConfig(**OPTIONS, cache=RAW))]),
        (Data(), [EchoCallback(echo={**OPTIONS, "cache": AS_DICT})]),
        (EchoDataModule(Data(), **OPTIONS, cache=AS_DICT), []),
    ):
        run = fit(data, callbacks=callbacks, max_epochs=2)
        loader = run.trainer.train_dataloader
        assert loader.cache == RAW
        assert loader.cache_counts.examples > 0
        assert run.model.batches == expected


def test_a_cache_alone_does_not_echo():
    for data, callbacks in ((EchoDataModule(Data(), 1, cache="8MiB"), []), (Data(), [EchoCallback(cache="8MiB")])):
        loader = fit(data, callbacks=callbacks, max_epochs=2).trainer.train_dataloader
        assert (type(loader), loader.factor, loader.cache) == (EchoLoader, 1, CacheConfig("8MiB"))
        assert (loader.counts.fresh, loader.counts.echoed) == (44, 0)
        assert (loader.cache_counts.examples, loader.cache_counts.misses, loader.cache_counts.hits) == (22, 22, 22)


QUIET = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
HIDDEN = {"enable_progress_bar": False, "enable_model_summary": False, "limit_train_batches": 1, "limit_val_batches": 0}


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program"])


def made(*arguments, cli=EchoCLI, data=Data, **options):
    """A program without subcommands, whose parser is made in a quarter of the time."""
    defaults = {"save_config_callback": None, "seed_everything_default": False, "run": False}
    return cli(Recorder, data, args=list(arguments), trainer_defaults={**QUIET, **HIDDEN}, **{**defaults, **options})


def run(*arguments, **options):
    cli = made(*arguments, **options)
    if options.get("run") is None:
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return cli.trainer.train_dataloader


SPELLINGS = [
    (["{}=8MiB"], CacheConfig("8MiB")),
    (["{}", "8MiB"], CacheConfig("8MiB")),
    (["{}=0.01"], CacheConfig(0.01)),
    (["{}=8388608"], CacheConfig(2**23)),
    (["{}.size", "8MiB", "{}.hold", "raw"], RAW),
    (["{}.hold=raw", "{}.size=8MiB"], RAW),
    (["{}.size=8MiB", "{}.partitioned", "true"], CacheConfig("8MiB", partitioned=True)),
    (['{}={{"size": "8MiB", "hold": "raw"}}'], RAW),
    (["{}={{size: 8MiB, hold: raw}}"], RAW),
    (["{}=null"], None),
]
NOT_IN_ECHO = SPELLINGS[-3:]  # jsonargparse 4.27 takes a mapping there for the options of a loader; with 4.53, null is a string
CALLBACK = ["--trainer.callbacks+=lightning_echo.EchoCallback"]
MODULE = ["--data=lightning_echo.EchoDataModule", "--data.datamodule=trainer_runs.Data", "--data.factor=1"]


def of_callback(built):
    return built.trainer.callbacks[0].attachment.echo


PLACES = {  # by command line: what comes before, the option, and where it is then
    "EchoCLI": ({}, [([], "--echo", None), (CALLBACK, "--trainer.callbacks", of_callback)]),
    "LightningCLI": (
        {"cli": LightningCLI},
        [(CALLBACK, "--trainer.callbacks", of_callback), (CALLBACK, "--trainer.callbacks.echo", of_callback)],
    ),
    "a data module": ({"cli": LightningCLI, "data": None}, [(MODULE, "--data", lambda built: built.data._echo)]),
}


def cache_of(parser, arguments, where=None):
    built = parser.instantiate_classes(parser.parse_args(arguments))
    return read_cache_config(built.echo.cache if where is None else where(built)._wrapping.configs[""].cache)


@pytest.mark.parametrize("command_line", PLACES)
def test_every_place_takes_every_spelling_on_the_command_line(command_line):
    options, places = PLACES[command_line]
    parser = made(*(MODULE if "data" in options else []), **options).parser
    for before, prefix, where in places:
        for arguments, expected in SPELLINGS:
            if prefix.endswith("callbacks.echo") and (arguments, expected) in NOT_IN_ECHO:
                continue
            asked = [*before, f"{prefix}.factor=2", *(part.format(f"{prefix}.cache") for part in arguments)]
            assert cache_of(parser, asked, where) == expected, asked


def test_on_the_command_line_a_cache_needs_no_factor_and_is_off_with_echoing():
    loader = run("--echo.cache=8MiB")
    assert (loader.factor, loader.cache) == (1, CacheConfig("8MiB"))
    assert not hasattr(run("--echo.cache=8MiB", "--echo.enabled=false"), "cache")


def test_a_file_takes_it_the_saved_config_has_it_again_and_a_command_line_changes_an_option(tmp_path):
    given, saved = tmp_path / "config.yaml", tmp_path / "saved" / "config.yaml"
    given.write_text(yaml.safe_dump({"echo": {"factor": 2, "cache": AS_DICT}}))
    root = f"--trainer.default_root_dir={saved.parent}"
    assert run(f"--config={given}", root, save_config_callback=SaveConfigCallback).cache == RAW
    assert yaml.safe_load(saved.read_text())["echo"]["cache"] == AS_DICT
    assert run(f"--config={saved}", "--echo.cache.hold=loaded").cache == CacheConfig("8MiB", "loaded")
    parser = made().parser
    for cache in ("8MiB", 0.01, 2**23, None):
        given.write_text(yaml.safe_dump({"echo": {"factor": 2, "cache": cache}}))
        config = parser.parse_args([f"--config={given}"])
        assert yaml.safe_load(parser.dump(config))["echo"].get("cache") == cache
        assert cache_of(parser, [f"--config={given}"]) == (cache and CacheConfig(cache))
        assert cache_of(parser, [f"--config={given}", "--echo.cache=4MiB"]) == CacheConfig("4MiB")


class Linked(EchoCLI):
    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.batch_size", "echo.cache", compute_fn=lambda size: f"{size}MiB")


def test_an_interpolation_a_link_and_the_environment_may_set_it(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(
        "data:\n  batch_size: 8\necho:\n  cache:\n    size: ${data.batch_size}MiB\n    hold: raw\n"
    )
    assert run(f"--config={tmp_path / 'config.yaml'}", parser_kwargs={"parser_mode": "omegaconf"}).cache == RAW
    assert run("--data.batch_size=8", cli=Linked).cache == CacheConfig("8MiB")
    monkeypatch.setenv("PL_FIT__ECHO__CACHE", "8MiB")
    assert run("fit", run=True, parser_kwargs={"default_env": True}).cache == CacheConfig("8MiB")


BAD = [  # the checks of all values: tests/unit/cache/test_cache_config.py
    (["--echo.cache=8"], 'cache.size=8 is less than one MiB (an integer is a number of bytes): did you mean "8GiB"?'),
    (["--echo.cache.size=8GiB", "--echo.cache.hild=raw"], "cache has unknown options hild: known are size, hold, path, name,"),
    (["--config={}"], 'cache needs a size, such as "8GiB"'),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=["command line", "by name", "file"])
def test_an_impossible_one_ends_in_the_parsers_message(arguments, message, capsys, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"echo": {"cache": {"hold": "raw"}}}))
    with pytest.raises(SystemExit) as end:
        run(*(argument.format(tmp_path / "config.yaml") for argument in arguments))
    assert end.value.code == 2
    assert f"error: echo: {message}" in capsys.readouterr().err
