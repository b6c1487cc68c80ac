"""EchoCLI: any LightningCLI program with a group of options for echoing."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from torch.utils.data import DataLoader
from trainer_runs import Data, Recorder, SaveAt, echoed, fit

from lightning_echo import EchoCallback, EchoCLI, EchoConfig, EchoLoader, FactorSchedule, MetricGuard, TargetIdle

QUIET = {"max_epochs": 3, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
HIDDEN = {"enable_progress_bar": False, "enable_model_summary": False}
ECHO = ["--echo.factor=2.5", "--echo.insertion_point=after_augmentation", "--echo.seed=7"]  # as trainer_runs.echoed


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


def echo_callbacks(cli: Any) -> list[EchoCallback]:
    return [callback for callback in cli.trainer.callbacks if isinstance(callback, EchoCallback)]


def controller_of(cli: Any) -> Any:
    (callback,) = echo_callbacks(cli)
    return callback.controller


def write(path: Path, config: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(config))
    return str(path)


def loader_of(cli: Any) -> Any:
    return cli.model.loader


# ---------------------------------------------------------------------- what the options do


def test_a_factor_on_the_command_line_echoes_the_data_module() -> None:
    cli = run("fit", *ECHO)
    assert cli.model.batches == fit(echoed()).model.batches
    assert type(cli.trainer.datamodule) is Sized


def test_a_factor_in_a_yaml_file_echoes_the_data_module(tmp_path: Path) -> None:
    config = {"data": {"batch_size": 4}, "echo": {"factor": 2.5, "insertion_point": "after_augmentation", "seed": 7}}
    cli = run("fit", "--config", write(tmp_path / "config.yaml", config))
    assert cli.model.batches == fit(echoed()).model.batches


def test_a_models_own_loader_is_echoed_too() -> None:
    cli = run("fit", *ECHO, model_class=WithData, datamodule_class=None)
    assert cli.model.batches == fit(echoed()).model.batches


def test_every_option_reaches_the_loader() -> None:
    options = [
        "--echo.factor=2",
        "--echo.insertion_point=after_batching",
        "--echo.buffer_size=7",
        "--echo.epoch_length=full_pass",
    ]
    loader = loader_of(run("fit", *options, "--echo.seed=3"))
    assert (loader.factor, str(loader.insertion_point), loader.buffer_size) == (2, "after_batching", 7)
    assert (loader.epoch_length, loader.seed, len(loader)) == ("full_pass", 3, 12)


def test_a_point_that_auto_never_takes_is_taken_by_name() -> None:
    cli = run("fit", "--echo.factor=2.5", "--echo.insertion_point=after_read", "--echo.seed=7")
    assert str(loader_of(cli).insertion_point) == "after_read"
    assert cli.model.batches == fit(echoed(point="after_read")).model.batches


def test_the_group_has_all_options_of_a_config() -> None:
    cli = built()
    expected = {field.name: field.default for field in fields(EchoConfig)}
    assert vars(cli.config.echo) == {
        **expected,
        "controller": None,
        "loaders": None,
        "enabled": True,
        "summary": True,
        "plot": False,
    }


@pytest.mark.parametrize("prefix", ["--echo.controller.init_args.", "--echo.controller."])
def test_a_controller_is_chosen_by_name_with_its_options(prefix: str) -> None:
    cli = run("fit", "--echo.controller=TargetIdle", f"{prefix}target=0.1", f"{prefix}max_factor=6", "--trainer.max_epochs=1")
    controller = controller_of(cli)
    assert type(controller) is TargetIdle
    assert (controller.target, controller.min_factor, controller.max_factor) == (0.1, 1.0, 6.0)
    assert type(loader_of(cli)) is EchoLoader


def test_a_factor_may_be_left_to_target_idle() -> None:
    cli = run("fit", "--echo.factor=auto", "--echo.buffer_size=9", "--trainer.max_epochs=1")
    controller = controller_of(cli)
    assert type(controller) is TargetIdle
    assert (controller.target, controller.min_factor, controller.max_factor) == (0.05, 1.0, 8.0)
    assert loader_of(cli).buffer_size == 9


def test_controllers_can_be_nested_and_hold_a_schedule() -> None:
    inner = ["--echo.controller.controller=FactorSchedule", "--echo.controller.controller.factors={0: 2.0, 3: 4}"]
    controller = controller_of(built("--echo.controller=MetricGuard", *inner, "--echo.controller.patience=2"))
    assert type(controller) is MetricGuard
    assert controller.patience == 2
    assert type(controller.controller) is FactorSchedule
    assert controller.controller.factors == {0: 2.0, 3: 4.0}


def test_by_default_there_is_a_callback_that_changes_nothing() -> None:
    cli = run("fit")
    assert controller_of(cli) is None
    assert type(loader_of(cli)) is DataLoader


@pytest.mark.parametrize("controller", [[], ["--echo.controller=TargetIdle"]])
def test_echoing_is_switched_off_whatever_else_is_said(controller: list[str]) -> None:
    cli = run("fit", *ECHO, *controller, "--echo.enabled=false")
    assert controller_of(cli) is None
    assert type(loader_of(cli)) is DataLoader


def test_an_echo_data_module_may_be_the_data() -> None:
    options = ["--data=lightning_echo.EchoDataModule", "--data.datamodule=test_cli.Sized", "--data.factor=2.5"]
    cli = run("fit", *options, "--data.insertion_point=after_augmentation", "--data.seed=7", datamodule_class=None)
    assert cli.model.batches == fit(echoed()).model.batches


# ---------------------------------------------------------------------- the parser


@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
def test_the_group_is_in_the_help_of_every_subcommand(subcommand: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run(subcommand, "--help")
    assert end.value.code == 0
    helped = capsys.readouterr().out
    for field in fields(EchoConfig):
        assert f"--echo.{field.name} " in helped
    assert "--echo.controller " in helped
    assert "--echo.enabled " in helped
    assert "Uses per fresh example, a real number >= 1" in helped


def test_what_print_config_shows_is_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        run("fit", *ECHO, "--echo.controller=TargetIdle", "--print_config")
    assert end.value.code == 0
    printed = capsys.readouterr().out
    echo = yaml.safe_load(printed)["echo"]
    controller = echo.pop("controller")
    assert controller["class_path"].endswith("TargetIdle")
    steps = {"first_after_steps": 50, "every_n_steps": None}
    assert controller["init_args"] == {"target": 0.05, "min_factor": 1.0, "max_factor": 8.0, **steps}
    expected = {"factor": 2.5, "insertion_point": "after_augmentation", "buffer_size": None, "epoch_length": "fixed", "seed": 7}
    expected |= {"cache": None, "share": None, "reuse": "memory"}
    assert echo == {**expected, "loaders": None, "enabled": True, "summary": True, "plot": False}
    (tmp_path / "config.yaml").write_text(printed)
    (callback,) = echo_callbacks(run("fit", f"--config={tmp_path / 'config.yaml'}", "--trainer.max_epochs=1"))
    assert type(callback.controller) is TargetIdle


BAD = [
    ("factor", 0.5, "factor must be a finite number >= 1, got 0.5"),
    ("factor", "much", "much"),
    ("factor", "TargetIdle", "or 'auto', got 'TargetIdle'; a controller is given by the argument controller"),
    ("insertion_point", "before", "insertion_point must be one of 'after_read'"),
    ("buffer_size", 0, "buffer_size must be at least 1, got 0"),
    ("buffer_size", 1.5, "1.5"),
    ("epoch_length", "long", "epoch_length must be 'fixed' or 'full_pass', got 'long'"),
    ("controller", "Nobody", "Nobody"),
    ("controller", {"class_path": "TargetIdle", "init_args": {"target": 7}}, "target must be an idle fraction between 0 and 1"),
    ("controller", {"class_path": "FactorSchedule", "init_args": {"factors": {-1: 2.0}}}, "factors must have epochs from 0 on"),
    ("nothing", 1, "nothing"),
]


class NeverBuilt(Model):
    def __init__(self) -> None:
        raise AssertionError("a bad value must be found first")


def test_auto_beside_a_controller_ends_in_the_parsers_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run("fit", "--echo.factor=auto", "--echo.controller=TargetIdle", model_class=NeverBuilt)
    assert end.value.code == 2
    assert "error: echo: factor='auto' stands for a controller" in capsys.readouterr().err


@pytest.mark.grid
@pytest.mark.parametrize("where", ["command line", "file", "without subcommands"])
@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_a_bad_value_ends_in_the_parsers_message(
    where: str, name: str, value: Any, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    option = f"--echo.{name}={value if isinstance(value, str) else json.dumps(value)}"
    from_file = f"--config={write(tmp_path / 'config.yaml', {'echo': {name: value}})}"
    arguments = {"command line": ["fit", option], "file": ["fit", from_file], "without subcommands": [option]}[where]
    with pytest.raises(SystemExit) as end:
        run(*arguments, model_class=NeverBuilt, run=where != "without subcommands")
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "error: " in said
    assert message in said


def test_interpolation_within_one_file_works_in_omegaconf_mode(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data:\n  batch_size: 8\necho:\n  factor: 2\n  buffer_size: ${data.batch_size}\n")
    arguments = ["fit", f"--config={tmp_path / 'config.yaml'}"]
    loader = loader_of(run(*arguments, parser_kwargs={"parser_mode": "omegaconf"}))
    assert (loader.factor, loader.buffer_size, loader.loader.batch_size) == (2, 8, 8)


def test_options_come_from_the_environment_where_the_program_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_FIT__ECHO__FACTOR", "4")
    assert loader_of(run("fit", parser_kwargs={"default_env": True})).factor == 4


class Linked(EchoCLI):
    """A program with links of its own."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("data.batch_size", "model.width")
        parser.link_arguments("data.batch_size", "echo.buffer_size", compute_fn=lambda size: 3 * size)


class LinkedWhenBuilt(EchoCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("data.batch_size", "echo.buffer_size", apply_on="instantiate")


def test_links_of_the_users_own_work() -> None:
    cli = run("fit", "--data.batch_size=5", "--echo.factor=2", cli=Linked)
    assert cli.model.width == 5
    assert loader_of(cli).buffer_size == 15
    cli = run("fit", "--data.batch_size=5", "--echo.factor=2", cli=LinkedWhenBuilt)
    assert loader_of(cli).buffer_size == 5


def test_a_linked_value_that_is_impossible_ends_in_the_parsers_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run("fit", "--data.batch_size=0", cli=Linked)
    assert end.value.code == 2
    assert "buffer_size must be at least 1, got 0" in capsys.readouterr().err


# ---------------------------------------------------------------------- the Trainer


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


def test_a_trainer_class_and_a_subcommand_of_the_users_own_work() -> None:
    cli = run("rehearse", "--epochs=2", *ECHO, cli=Rehearses, trainer_class=OwnTrainer)
    assert type(cli.trainer) is OwnTrainer
    assert cli.model.batches == fit(echoed(), max_epochs=2).model.batches


def test_a_function_that_makes_the_trainer_works() -> None:
    cli = run("fit", "--trainer.max_epochs=2", *ECHO, trainer_class=make_trainer, trainer_defaults={})
    assert cli.model.batches == fit(echoed(), max_epochs=2).model.batches


def make_trainer_without_callbacks(max_epochs: int = 1) -> pl.Trainer:
    return make_trainer(max_epochs)


def test_a_trainer_that_takes_no_callbacks_is_left_alone_and_lightning_says_so() -> None:
    with pytest.warns(UserWarning, match="does not expose the `callbacks` argument"):
        cli = run("fit", *ECHO, trainer_class=make_trainer_without_callbacks, trainer_defaults={})
    assert type(loader_of(cli)) is DataLoader


@pytest.mark.parametrize("subcommand", ["validate", "test"])
def test_subcommands_that_do_not_train_work_with_the_config_of_a_run(subcommand: str, tmp_path: Path) -> None:
    class Tests(Sized):
        def test_dataloader(self) -> Any:
            return self.val_dataloader()

    class Tested(Model):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.validation_step(batch, batch_idx)

    config = write(tmp_path / "config.yaml", {"echo": {"factor": 4.0, "controller": "TargetIdle"}})
    cli = run(subcommand, f"--config={config}", model_class=Tested, datamodule_class=Tests)
    assert cli.model.validated_at == [0]
    assert cli.datamodule.asked == {"val": 1}


def test_without_subcommands_the_trainer_is_made_and_can_be_used() -> None:
    cli = built(*ECHO)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert cli.model.batches == fit(echoed()).model.batches


def test_arguments_may_be_given_as_a_dictionary() -> None:
    config = {"echo": {"factor": 2.5, "insertion_point": "after_augmentation", "seed": 7}}
    cli = run(args={"subcommand": "fit", "fit": config})
    assert cli.model.batches == fit(echoed()).model.batches


class Grouped(EchoCLI):
    """Has a group of its own for the callback."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_lightning_class_args(EchoCallback, "own")


@pytest.mark.parametrize("where", ["in a list", "by itself", "in the defaults", "in a group"])
def test_a_callback_that_is_configured_stays_the_only_one(where: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    echo = {"factor": 3.0}
    configured = {"class_path": "lightning_echo.EchoCallback", "init_args": {"echo": echo}}
    callbacks: Any = {"in a list": [configured], "by itself": configured}.get(where)
    config: dict[str, Any] = {"trainer": {"callbacks": callbacks, "max_epochs": 1}}
    options: dict[str, Any] = {}
    if where == "in the defaults":
        defaults = {**QUIET, **HIDDEN, "callbacks": EchoCallback(echo=EchoConfig(3.0))}
        options["trainer_defaults"] = defaults
    if where == "in a group":
        options["cli"] = Grouped
        config["own"] = {"echo": echo}
    cli = run("fit", "--config", write(tmp_path / "config.yaml", config), **options)
    assert len(echo_callbacks(cli)) == 1
    assert loader_of(cli).factor == 3
    for said_twice in ("--echo.factor=2", "--echo.enabled=false"):
        with pytest.raises(SystemExit) as end:
            run("fit", "--config", str(tmp_path / "config.yaml"), said_twice, **options)
        assert end.value.code == 2
        assert "give all of them in one of the two" in capsys.readouterr().err


def test_other_callbacks_are_kept() -> None:
    monitor = "--trainer.callbacks=LearningRateMonitor"
    cli = built(monitor, *ECHO)
    assert len(echo_callbacks(cli)) == 1
    assert sum(isinstance(callback, LearningRateMonitor) for callback in cli.trainer.callbacks) == 1


# ---------------------------------------------------------------------- the saved config


@pytest.mark.parametrize(
    "options",
    [ECHO, ["--echo.controller=FactorSchedule", "--echo.controller.factors={0: 2, 1: 3.5}"], ["--echo.enabled=false", *ECHO]],
    ids=["factor", "schedule", "off"],
)
def test_the_saved_config_of_a_run_reproduces_it(options: list[str], tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_config_callback": SaveConfigCallback, "seed_everything_default": 5}
    first = run("fit", *options, f"--trainer.default_root_dir={tmp_path}", **saving)
    saved = tmp_path / "config.yaml"
    assert "factor" in yaml.safe_load(saved.read_text())["echo"]
    again = run("fit", f"--config={saved}", f"--trainer.default_root_dir={tmp_path / 'again'}", **saving)
    assert again.model.batches == first.model.batches
    assert getattr(loader_of(again), "counts", None) == getattr(loader_of(first), "counts", None)
    assert yaml.safe_load((tmp_path / "again" / "config.yaml").read_text())["echo"] == yaml.safe_load(saved.read_text())["echo"]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")  # of the plain loader
@pytest.mark.parametrize("enabled", [True, False])
def test_a_checkpoint_resumes_exactly_with_echoing_and_also_with_echoing_switched_off(enabled: bool, tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [8])
    whole = run("fit", *ECHO, trainer_defaults={**QUIET, **HIDDEN, "callbacks": save})
    resumed = run("fit", *ECHO, f"--echo.enabled={str(enabled).lower()}", f"--ckpt_path={save.path(8)}")
    assert len(resumed.model.batches) == len(whole.model.batches) - 8
    assert (resumed.model.batches == whole.model.batches[8:]) is enabled
    assert type(loader_of(resumed)) is (EchoLoader if enabled else DataLoader)
