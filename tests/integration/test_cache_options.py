"""A cache in every place and spelling (constructors, command lines, files) reaches the loader that a Trainer trains on."""

import sys

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from omegaconf import OmegaConf
from trainer_runs import Data, Killed, Recorder, SaveAt, echoed, fit

from lightning_echo import CacheConfig, EchoCallback, EchoCLI, EchoConfig, EchoDataModule, EchoLoader

OPTIONS = {"factor": 2.5, "insertion_point": "after_augmentation", "seed": 7}  # what trainer_runs.echoed says
RAW = CacheConfig("8MiB", hold="raw")
AS_DICT = {"size": "8MiB", "hold": "raw"}


def loader_of(run):
    return run.trainer.train_dataloader


@pytest.mark.parametrize(
    ("where", "given"),
    [
        ("callback", OmegaConf.create(AS_DICT)),
        ("echo=", RAW),
        ("echo= a dict", AS_DICT),
        ("data module", AS_DICT),
    ],
)
def test_each_place_reaches_the_loader_and_leaves_the_batches_as_they_are(where, given):
    options = {**OPTIONS, "cache": given}
    if where == "data module":
        run = fit(EchoDataModule(Data(), **options), max_epochs=2)
    else:
        echo = {"callback": options, "echo=": {"echo": EchoConfig(**options)}, "echo= a dict": {"echo": options}}[where]
        run = fit(Data(), callbacks=[EchoCallback(**echo)], max_epochs=2)
    assert loader_of(run).cache == RAW
    assert loader_of(run).cache_counts.examples > 0
    assert run.model.batches == fit(echoed(), max_epochs=2).model.batches


def test_a_cache_alone_does_not_echo():
    for data, callbacks in ((EchoDataModule(Data(), 1, cache="8MiB"), []), (Data(), [EchoCallback(cache="8MiB")])):
        loader = loader_of(fit(data, callbacks=callbacks, max_epochs=2))
        assert (type(loader), loader.factor, loader.cache) == (EchoLoader, 1, CacheConfig("8MiB"))
        assert (loader.counts.fresh, loader.counts.echoed) == (44, 0)
        assert (loader.cache_counts.examples, loader.cache_counts.misses, loader.cache_counts.hits) == (22, 22, 22)


def test_a_run_that_was_saved_with_a_cache_goes_on_without_one_and_the_reverse(tmp_path, one_thread):
    whole = fit(EchoDataModule(Data(), **OPTIONS), max_epochs=4).model
    for cache, other in ((RAW, None), (None, RAW)):
        save = SaveAt(tmp_path, [9], dies=True)
        with pytest.raises(Killed):
            fit(EchoDataModule(Data(), **OPTIONS, cache=cache), max_epochs=4, callbacks=[save])
        resumed = fit(EchoDataModule(Data(), **OPTIONS, cache=other), max_epochs=4, ckpt_path=save.path(9)).model
        assert resumed.batches == whole.batches[9:]
        assert resumed.weights == whole.weights


QUIET = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
HIDDEN = {"enable_progress_bar": False, "enable_model_summary": False, "limit_train_batches": 1, "limit_val_batches": 0}
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
def _no_arguments_of_pytest(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program"])


def run(*arguments, cli=EchoCLI, model=Recorder, data=Data, **options):
    defaults = {"save_config_callback": None, "seed_everything_default": False}
    return cli(model, data, args=["fit", *arguments], trainer_defaults={**QUIET, **HIDDEN}, **{**defaults, **options})


def cache_of(cli):
    return cli.trainer.train_dataloader.cache


CALLBACK = "--trainer.callbacks+=lightning_echo.EchoCallback"
MODULE = ["--data=lightning_echo.EchoDataModule", "--data.datamodule=trainer_runs.Data", "--data.factor=1"]
PLACES = {
    "group": (["--echo.factor=2"], "--echo.cache", {}),
    "callback": ([CALLBACK, "--trainer.callbacks.factor=2"], "--trainer.callbacks.cache", {"cli": LightningCLI}),
    "callback in EchoCLI": ([CALLBACK, "--trainer.callbacks.factor=2"], "--trainer.callbacks.cache", {}),
    "echo=": ([CALLBACK, "--trainer.callbacks.echo.factor=2"], "--trainer.callbacks.echo.cache", {"cli": LightningCLI}),
    "data module": (MODULE, "--data.cache", {"cli": LightningCLI, "data": None}),
}


@pytest.mark.grid
@pytest.mark.parametrize("spelling", SPELLINGS, ids=[" ".join(row[0]) for row in SPELLINGS])
@pytest.mark.parametrize("where", PLACES)
def test_every_place_takes_every_spelling_on_the_command_line(where, spelling):
    if where == "echo=" and spelling in NOT_IN_ECHO:
        spelling = SPELLINGS[0]
    arguments, prefix, options = PLACES[where]
    assert cache_of(run(*arguments, *(part.format(prefix) for part in spelling[0]), **options)) == spelling[1]


def test_on_the_command_line_a_cache_needs_no_factor_and_is_off_with_echoing():
    loader = run("--echo.cache=8MiB").trainer.train_dataloader
    assert (loader.factor, loader.cache) == (1, CacheConfig("8MiB"))
    assert not hasattr(run("--echo.cache=8MiB", "--echo.enabled=false").trainer.train_dataloader, "cache")
    with pytest.warns(UserWarning, match=r"cache.partitioned=True changes nothing here, since there is one process: each node"):
        cli = run("--echo.cache.size=8MiB", "--echo.cache.partitioned", "true")
    assert cache_of(cli) == CacheConfig("8MiB", partitioned=True)


@pytest.mark.parametrize("cache", ["8MiB", 0.01, 2**23, AS_DICT, None], ids=str)
def test_a_file_takes_it_the_saved_config_has_it_again_and_a_command_line_changes_an_option(cache, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"echo": {"factor": 2, "cache": cache}}))
    found = []
    for folder, config in (("first", tmp_path / "config.yaml"), ("second", tmp_path / "first" / "config.yaml")):
        root = f"--trainer.default_root_dir={tmp_path / folder}"
        found.append(cache_of(run(f"--config={config}", root, save_config_callback=SaveConfigCallback)))
        assert yaml.safe_load((tmp_path / folder / "config.yaml").read_text())["echo"].get("cache") == cache
    expected = None if cache is None else CacheConfig(**cache) if isinstance(cache, dict) else CacheConfig(cache)
    assert found == [expected, expected]
    changed = "--echo.cache.hold=loaded" if cache == AS_DICT else "--echo.cache=4MiB"
    assert cache_of(run(f"--config={tmp_path / 'config.yaml'}", changed)) == (
        CacheConfig("8MiB", "loaded") if cache == AS_DICT else CacheConfig("4MiB")
    )


class Linked(EchoCLI):
    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.batch_size", "echo.cache", compute_fn=lambda size: f"{size}MiB")


def test_an_interpolation_a_link_and_the_environment_may_set_it(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(
        "data:\n  batch_size: 8\necho:\n  cache:\n    size: ${data.batch_size}MiB\n    hold: raw\n"
    )
    assert cache_of(run(f"--config={tmp_path / 'config.yaml'}", parser_kwargs={"parser_mode": "omegaconf"})) == RAW
    assert cache_of(run("--data.batch_size=8", cli=Linked)) == CacheConfig("8MiB")
    monkeypatch.setenv("PL_FIT__ECHO__CACHE", "8MiB")
    assert cache_of(run(parser_kwargs={"default_env": True})) == CacheConfig("8MiB")


BAD = [
    (0, "cache.size=0 is less than one MiB"),
    (8, 'cache.size=8 is less than one MiB (an integer is a number of bytes): did you mean "8GiB"?'),
    (1.5, "cache.size as a share of the free memory must be between 0 and 1, got 1.5"),
    ("8 apples", 'cache.size must be a string with a unit such as "8GiB"'),
    ({"hold": "raw"}, 'cache needs a size, such as "8GiB"'),
    ({"size": "8GiB", "hild": "raw"}, "cache has unknown options hild: known are size, hold, path, name, partitioned"),
    ({"size": "8GiB", "hold": "decoded"}, "cache.hold must be one of 'auto', 'raw', 'loaded', 'whole', got 'decoded'"),
]


@pytest.mark.grid
@pytest.mark.parametrize("where", ["command line", "by name", "file"])
@pytest.mark.parametrize(("cache", "message"), BAD)
def test_an_impossible_one_ends_in_the_parsers_message(where, cache, message, capsys, tmp_path):
    arguments = [f"--echo.cache={cache if isinstance(cache, str) else yaml.safe_dump(cache, default_flow_style=True).strip()}"]
    if where == "by name":
        options = cache if isinstance(cache, dict) else {"size": cache}
        arguments = [f"--echo.cache.{name}={yaml.safe_dump(value).splitlines()[0]}" for name, value in options.items()]
    if where == "file":
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"echo": {"cache": cache}}))
        arguments = [f"--config={tmp_path / 'config.yaml'}"]
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    assert end.value.code == 2
    assert f"error: echo: {message}" in capsys.readouterr().err
