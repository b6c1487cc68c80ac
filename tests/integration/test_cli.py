"""EchoCLI: any LightningCLI program with a group of options for echoing."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from torch.utils.data import DataLoader
from trainer_runs import Data, Recorder, SaveAt, echoed, fit

from lightning_echo import EchoCallback, EchoCLI, EchoConfig, EchoLoader, FactorSchedule, MetricGuard, TargetIdle

QUIET = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
HIDDEN = {"enable_progress_bar": False, "enable_model_summary": False}
ECHO = ["--echo.factor=2.5", "--echo.insertion_point=after_augmentation", "--echo.seed=7"]  # as trainer_runs.echoed
IN_YAML = {"factor": 2.5, "insertion_point": "after_augmentation", "seed": 7}
ONE_EPOCH = "--trainer.max_epochs=1"


class Sized(Data):
    """Data with options for a command line."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__(batch_size=batch_size)


class Model(Recorder):
    """A model with options for a command line; notes which loader it was trained on."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.width = width

    def on_train_end(self) -> None:
        self.loader = self.trainer.train_dataloader


class WithData(Model):
    """Has its data itself."""

    def train_dataloader(self) -> Any:
        return Data().train_dataloader()

    def val_dataloader(self) -> Any:
        return Data().val_dataloader()


@pytest.fixture(autouse=True)
def _a_program_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # what seed_everything leaves is gone afterwards
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """The batches of a training that is echoed without a command line."""
    batches: list[Any] = fit(echoed(), max_epochs=2).model.batches
    return batches


def run(*arguments: str, cli: type[LightningCLI] = EchoCLI, **options: Any) -> Any:
    """A program started with these arguments."""
    defaults: dict[str, Any] = {
        "model_class": Model,
        "datamodule_class": Sized,
        "trainer_defaults": {**QUIET, **HIDDEN},
        "save_config_callback": None,
        "seed_everything_default": False,
    }
    return cli(**{**defaults, "args": list(arguments), **options})


def built(*arguments: str, **options: Any) -> Any:
    """The same, without training."""
    return run(*arguments, run=False, **options)


def refused(*arguments: str, **options: Any) -> int:
    """The status with which a program ends instead of training."""
    with pytest.raises(SystemExit) as end:
        run(*arguments, **options)
    return int(end.value.code or 0)


def echo_callbacks(cli: Any) -> list[EchoCallback]:
    return [callback for callback in cli.trainer.callbacks if isinstance(callback, EchoCallback)]


def controller_of(cli: Any) -> Any:
    (callback,) = echo_callbacks(cli)
    return callback.controller


def options_of(cli: Any) -> Any:
    (callback,) = echo_callbacks(cli)
    return callback.attachment.echo


def write(path: Path, config: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(config))
    return f"--config={path}"


# ---------------------------------------------------------------------- what the options do


def test_a_factor_on_the_command_line_echoes_the_data_module(expected: list[Any]) -> None:
    cli = run("fit", *ECHO)
    assert cli.model.batches == expected
    assert type(cli.trainer.datamodule) is Sized


class OwnTrainer(pl.Trainer):
    """A Trainer of the user's own, with a subcommand."""

    def rehearse(self, model: pl.LightningModule, datamodule: Any = None, epochs: int = 1) -> None:
        """Trains for some epochs."""
        self.fit_loop.max_epochs = epochs
        self.fit(model, datamodule=datamodule)


class Rehearses(EchoCLI):
    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), "rehearse": {"model", "datamodule"}}


def make_trainer(max_epochs: int = 1, callbacks: Any = None) -> pl.Trainer:
    options: dict[str, Any] = {**QUIET, **HIDDEN, "max_epochs": max_epochs, "callbacks": callbacks}
    return pl.Trainer(**options)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        pytest.param(["fit", *ECHO], {"model_class": WithData, "datamodule_class": None}, id="the model's own loader"),
        pytest.param([], {"args": {"subcommand": "fit", "fit": {"echo": IN_YAML}}}, id="arguments as a dictionary"),
        pytest.param(["rehearse", "--epochs=2", *ECHO], {"cli": Rehearses, "trainer_class": OwnTrainer}, id="own subcommand"),
        pytest.param(
            ["fit", "--trainer.max_epochs=2", *ECHO],
            {"trainer_class": make_trainer, "trainer_defaults": {}},
            id="a function makes the Trainer",
        ),
    ],
)
def test_each_way_in_trains_on_the_same_batches(arguments: list[str], options: Any, expected: list[Any]) -> None:
    assert run(*arguments, **options).model.batches == expected


def test_without_subcommands_the_trainer_is_made_with_the_users_callbacks(expected: list[Any], tmp_path: Path) -> None:
    config = write(tmp_path / "config.yaml", {"data": {"batch_size": 4}, "echo": IN_YAML})
    cli = built(config, "--trainer.callbacks=ModelSummary")
    assert len(echo_callbacks(cli)) == 1
    assert sum(isinstance(callback, ModelSummary) for callback in cli.trainer.callbacks) == 1
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert cli.model.batches == expected


def test_every_option_reaches_the_loader() -> None:
    options = ["factor=2", "insertion_point=after_batching", "buffer_size=7", "epoch_length=full_pass", "seed=3"]
    loader = run("fit", *(f"--echo.{option}" for option in options), ONE_EPOCH).model.loader
    assert (loader.factor, str(loader.insertion_point), loader.buffer_size) == (2, "after_batching", 7)
    assert (loader.epoch_length, loader.seed, len(loader)) == ("full_pass", 3, 12)


def test_the_group_has_all_options_of_a_config_and_by_default_nothing_changes() -> None:
    own = {"controller": None, "loaders": None, "enabled": True, "summary": True, "plot": False}
    cli = built()
    assert vars(cli.config.echo) == {**{field.name: field.default for field in fields(EchoConfig)}, **own}
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert controller_of(cli) is None
    assert type(cli.model.loader) is DataLoader


def test_a_controller_is_chosen_by_the_factor_or_by_name_and_may_hold_another_one() -> None:
    cli = run("fit", "--echo.factor=auto", "--echo.buffer_size=9", ONE_EPOCH)
    by_factor = controller_of(cli)
    assert type(cli.model.loader) is EchoLoader
    by_name = controller_of(built("--echo.controller=TargetIdle", "--echo.controller.target=0.1"))
    assert (type(by_factor), type(by_name)) == (TargetIdle, TargetIdle)
    assert [(each.target, each.min_factor, each.max_factor) for each in (by_factor, by_name)] == [(0.05, 1, 8), (0.1, 1, 8)]
    inner = ["--echo.controller.controller=FactorSchedule", "--echo.controller.controller.factors={0: 2.0, 3: 4}"]
    guard = controller_of(built("--echo.controller=MetricGuard", *inner, "--echo.controller.patience=2"))
    assert (type(guard), guard.patience) == (MetricGuard, 2)
    assert (type(guard.controller), guard.controller.factors) == (FactorSchedule, {0: 2.0, 3: 4.0})


# ---------------------------------------------------------------------- the parser


def test_the_group_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused("validate", "--help") == 0
    helped = capsys.readouterr().out
    for name in (*(field.name for field in fields(EchoConfig)), "controller", "enabled"):
        assert f"--echo.{name} " in helped
    assert "Uses per fresh example, a real number >= 1" in helped


def test_what_print_config_shows_is_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert refused("fit", *ECHO, "--echo.controller=TargetIdle", "--print_config") == 0
    printed = capsys.readouterr().out
    echo = yaml.safe_load(printed)["echo"]
    controller = echo.pop("controller")
    assert controller["class_path"].endswith("TargetIdle")
    assert controller["init_args"].items() >= {"target": 0.05, "min_factor": 1.0, "max_factor": 8.0}.items()
    others = {"buffer_size": None, "epoch_length": "fixed", "cache": None, "share": None, "reuse": "memory", "loaders": None}
    others |= {"reads_in_flight": None, "max_factor": None}
    assert echo == {**IN_YAML, **others, "enabled": True, "summary": True, "plot": False}
    (tmp_path / "config.yaml").write_text(printed)
    assert type(controller_of(run("fit", f"--config={tmp_path / 'config.yaml'}", ONE_EPOCH))) is TargetIdle


class NeverBuilt(Model):
    def __init__(self) -> None:
        raise AssertionError("a bad value must be found first")


BAD = [
    ("command line", {"factor": 0.5}, "factor must be a finite number >= 1, got 0.5"),
    ("command line", {"factor": "auto", "controller": "TargetIdle"}, "error: echo: factor='auto' chooses between"),
    ("file", {"buffer_size": 1.5}, "1.5"),
    ("file", {"controller": {"class_path": "TargetIdle", "init_args": {"target": 7}}}, "target must be an idle fraction between"),
    ("file", {"nothing": 1}, "nothing"),
    ("without subcommands", {"factor": "TargetIdle"}, "got 'TargetIdle'; a controller is given by the argument contro"),
]


@pytest.mark.parametrize(("where", "echo", "message"), BAD)
def test_a_bad_value_ends_in_the_parsers_message(
    where: str, echo: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = [f"--echo.{name}={value}" for name, value in echo.items()]
    if where == "file":
        options = [write(tmp_path / "config.yaml", {"echo": echo})]
    has_subcommands = where != "without subcommands"
    assert refused(*["fit"] * has_subcommands, *options, model_class=NeverBuilt, run=has_subcommands) == 2
    said = capsys.readouterr().err
    assert "error: " in said
    assert message in said


def test_options_come_from_one_file_with_interpolation_and_from_the_environment_where_the_program_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("data:\n  batch_size: 8\necho:\n  factor: 2\n  buffer_size: ${data.batch_size}\n")
    config = f"--config={tmp_path / 'config.yaml'}"
    loader = run("fit", config, ONE_EPOCH, parser_kwargs={"parser_mode": "omegaconf"}).model.loader
    assert (loader.factor, loader.buffer_size, loader.loader.batch_size) == (2, 8, 8)
    monkeypatch.setenv("PL_ECHO__FACTOR", "4")
    assert options_of(built(parser_kwargs={"default_env": True})).factor == 4


class Linked(EchoCLI):
    """A program with links of its own."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("data.batch_size", "model.width")
        parser.link_arguments("data.batch_size", "echo.buffer_size", compute_fn=lambda size: 3 * size)


def test_links_of_the_users_own_work(capsys: pytest.CaptureFixture[str]) -> None:
    model = run("fit", "--data.batch_size=5", "--echo.factor=2", ONE_EPOCH, cli=Linked).model
    assert (model.width, model.loader.buffer_size) == (5, 15)
    assert refused("fit", "--data.batch_size=0", cli=Linked) == 2
    assert "buffer_size must be at least 1, got 0" in capsys.readouterr().err


# ---------------------------------------------------------------------- the Trainer


def test_a_trainer_that_takes_no_callbacks_is_left_alone_and_lightning_says_so() -> None:
    def make(max_epochs: int = 1) -> pl.Trainer:
        return make_trainer(max_epochs)

    with pytest.warns(UserWarning, match="does not expose the `callbacks` argument"):
        cli = run("fit", *ECHO, trainer_class=make, trainer_defaults={})
    assert type(cli.model.loader) is DataLoader


def test_validate_works_with_the_config_of_a_run(tmp_path: Path) -> None:
    cli = run("validate", write(tmp_path / "config.yaml", {"echo": {"factor": 4.0, "controller": "TargetIdle"}}))
    assert cli.model.validated_at == [0]
    assert cli.datamodule.asked == {"val": 1}


class Grouped(EchoCLI):
    """Has a group of its own for the callback."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_lightning_class_args(EchoCallback, "own")


CONFIGURED = {"class_path": "lightning_echo.EchoCallback", "init_args": {"echo": {"factor": 3.0}}}


@pytest.mark.parametrize(
    ("config", "options", "said_twice"),
    [
        ({"trainer": {"callbacks": [CONFIGURED]}}, {}, "--echo.factor=2"),
        ({"trainer": {"callbacks": CONFIGURED}}, {}, "--echo.enabled=false"),
        ({}, {"trainer_defaults": {**QUIET, "callbacks": EchoCallback(echo=EchoConfig(3.0))}}, "--echo.factor=2"),
        ({"own": CONFIGURED["init_args"]}, {"cli": Grouped}, "--echo.enabled=false"),
    ],
    ids=["in a list", "by itself", "in the defaults", "in a group"],
)
def test_a_callback_that_is_configured_stays_the_only_one(
    config: dict[str, Any], options: Any, said_twice: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = write(tmp_path / "config.yaml", config)
    assert options_of(built(file, **options)).factor == 3
    assert refused(file, said_twice, run=False, **options) == 2
    assert "give all of them in one of the two" in capsys.readouterr().err


# ---------------------------------------------------------------------- the saved config


def test_the_saved_config_of_a_run_reproduces_it(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_config_callback": SaveConfigCallback, "seed_everything_default": 5}
    options = ["--echo.controller=FactorSchedule", "--echo.controller.factors={0: 2, 1: 3.5}"]
    first = run("fit", *options, f"--trainer.default_root_dir={tmp_path}", **saving)
    saved = tmp_path / "config.yaml"
    assert "factor" in yaml.safe_load(saved.read_text())["echo"]
    again = run("fit", f"--config={saved}", f"--trainer.default_root_dir={tmp_path / 'again'}", **saving)
    assert again.model.batches == first.model.batches
    assert again.model.loader.counts == first.model.loader.counts
    assert yaml.safe_load((tmp_path / "again" / "config.yaml").read_text())["echo"] == yaml.safe_load(saved.read_text())["echo"]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")  # of the plain loader
def test_a_checkpoint_resumes_exactly_with_echoing_and_also_with_echoing_switched_off(
    expected: list[Any], tmp_path: Path
) -> None:
    save = SaveAt(tmp_path, [8])
    run("fit", *ECHO, trainer_defaults={**QUIET, **HIDDEN, "callbacks": save})
    for enabled, kind in ((True, EchoLoader), (False, DataLoader)):
        model = run("fit", *ECHO, f"--echo.enabled={str(enabled).lower()}", f"--ckpt_path={save.path(8)}").model
        assert len(model.batches) == len(expected) - 8
        assert (model.batches == expected[8:]) is enabled
        assert type(model.loader) is kind
