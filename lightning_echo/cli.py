"""`EchoCLI`: a LightningCLI with one more group of options, ``echo``."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from inspect import signature
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lightning_echo.analysis.command import Analyzes, analyzing
from lightning_echo.callback import EchoCallback
from lightning_echo.config import EchoConfig, read_loaders
from lightning_echo.measuring.control import Controller

__all__ = ["EchoCLI", "EchoOptions"]


@dataclass
class EchoOptions(EchoConfig):
    """Data echoing: every fresh example is used factor times; by default it is only measured what that would gain.

    Args:
        factor: Uses per fresh example, a real number >= 1; 1 is no echoing. 'auto' is decided on from epoch to epoch, by a
            TargetIdle with its defaults.
        insertion_point: Where the echo stage stands: after_read, before_augmentation, after_augmentation, after_batching,
            after_transfer, or auto.
        buffer_size: Most live examples per rank (batches for after_batching and after_transfer). Default: chosen.
        epoch_length: 'fixed', as without echoing, or 'full_pass': as many fresh examples as one pass over the data holds.
        seed: Seed of order, draws and augmentation. Default: that of seed_everything.
        controller: Decides the factor from epoch to epoch, e.g. TargetIdle.
        loaders: Where several loaders are trained on: options of those that are echoed, by name, in place of those above.
        enabled: False switches echoing off, whatever else is said here, and goes on measuring.
    """

    controller: Controller | None = None
    loaders: dict[str, EchoConfig] | None = None
    enabled: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loaders is not None:
            self.loaders = read_loaders("loaders", self.loaders)
            if EchoConfig(**self.as_options()) != EchoConfig():
                raise ValueError("loaders has the options of each loader: leave factor and the other options out beside it")
        self.callback()  # refuses what does not go together

    def callback(self) -> EchoCallback:
        """What these options ask for; with nothing but defaults, a callback that only measures."""
        if not self.enabled:
            return EchoCallback()
        config = EchoConfig(**self.as_options())
        if self.loaders is not None:
            return EchoCallback(self.controller, echo=self.loaders)
        return EchoCallback(self.controller, echo=None if config == EchoConfig() else config)


class EchoCLI(LightningCLI):
    """A LightningCLI that echoes: ``--echo.factor 4`` or ``--echo.factor auto``; and analyzes: ``analyze``.

    The group ``echo`` holds the options of `EchoConfig`, ``controller``, ``loaders`` and ``enabled``. With neither factor nor
    controller an `EchoCallback` only measures, and its advice says whether echoing would pay. ``--echo.enabled false`` does the
    same, whatever the other options say. Where an `EchoCallback` is configured already, in ``trainer.callbacks`` or otherwise, it
    stays the only one, and options in the group are refused. The data may come from a data module or from the model's own
    ``train_dataloader``.

    The subcommand ``analyze`` takes the same configuration as ``fit`` and says where the time of a step goes (`StallAnalyzer`). A
    ``trainer_class`` that is a function, and no class, has no such subcommand.

    Arguments are those of ``LightningCLI``.

    Example:
        >>> from unittest.mock import patch
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> started = ["train.py", "--echo.factor=4", "--trainer.accelerator=cpu", "--trainer.logger=false"]
        >>> with patch("sys.argv", started):  # as from the command line
        ...     cli = EchoCLI(BoringModel, run=False, seed_everything_default=False)
        >>> cli.config.echo.factor, any(isinstance(callback, EchoCallback) for callback in cli.trainer.callbacks)
        (4, True)
    """

    def setup_parser(self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]) -> None:
        """Sets the parser up, with one subcommand more, which LightningCLI looks for in the Trainer's class."""
        users = self.trainer_class
        if isinstance(users, type):
            self.trainer_class = analyzing(users)
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        self.trainer_class = users

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # static in LightningCLI, which asks an instance
        """Those of ``LightningCLI``, and ``analyze``."""
        own = {"analyze": {"model", "datamodule"}} if isinstance(self.trainer_class, type) else {}
        return {**super().subcommands(), **own}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the group beside trainer, model and data, and leaves ``add_arguments_to_parser`` to the user."""
        super().add_core_arguments_to_parser(parser)
        parser.add_class_arguments(EchoOptions, "echo", sub_configs=True)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses, and ends in the parser's message where the options of echoing are impossible."""
        said = sys.argv
        try:
            sys.argv = [said[0], *_in_full(said[1:])]
            super().parse_arguments(parser, _in_full(args) if isinstance(args, list) else args)
        finally:
            sys.argv = said
        try:
            _build(self._chosen(self.config).echo)
        except (TypeError, ValueError) as error:
            parser.error(f"echo: {error}")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer with an `EchoCallback`, unless it has one."""
        config = self._chosen(self.config_init)
        if "callbacks" in config.trainer:  # else Lightning says that the Trainer takes none
            callbacks = _as_list(kwargs.get("callbacks", config.trainer.callbacks))
            groups = [value for value in vars(config).values() if isinstance(value, Callback)]
            if not _echoing([*callbacks, *_as_list(self.trainer_defaults.get("callbacks")), *groups]):
                callbacks.append(config.echo.callback())
            elif config.echo != EchoOptions():
                self.parser.error(
                    "echo: options are given here and in an EchoCallback that is configured already, e.g. in trainer.callbacks: "
                    "give all of them in one of the two"
                )
            kwargs["callbacks"] = callbacks
        if self.config_init.get("subcommand") != "analyze" or not isinstance(self.trainer_class, type):
            return super().instantiate_trainer(**kwargs)
        self.trainer_class = analyzing(self.trainer_class)
        given = copy.deepcopy(_analyzed(config.trainer))
        trainer = super().instantiate_trainer(**kwargs)
        if isinstance(trainer, Analyzes):
            trainer.analyzed_kwargs = given
        return trainer

    def _chosen(self, config: Namespace) -> Namespace:
        """The part of the configuration that belongs to the subcommand, if there are any."""
        subcommand = config.get("subcommand")
        return config[subcommand] if subcommand else config


def _in_full(arguments: list[str]) -> list[str]:
    """The flag ``--verify`` with a value, which jsonargparse wants of every option."""
    following = [*arguments[1:], "-"][: len(arguments)]
    return [
        "--verify=true" if argument == "--verify" and after.startswith("-") else argument
        for argument, after in zip(arguments, following, strict=True)
    ]


def _analyzed(trainer: Namespace) -> dict[str, Any]:
    """What the Trainers of an analysis are made with: plain ones, without what belongs to the training itself."""
    known = set(signature(Trainer.__init__).parameters) - {"callbacks", "logger", "profiler"}
    return {name: value for name, value in vars(trainer).items() if name in known}


def _build(config: Namespace) -> EchoOptions:
    """The options with their controller, built apart from model and data to find bad values before these are made."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(EchoOptions, "echo")
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name before jsonargparse 4.49
    built: EchoOptions = instantiate(Namespace({"echo": config})).echo  # type: ignore[no-untyped-call]
    return built


def _as_list(callbacks: Any) -> list[Callback]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list) else [callbacks]


def _echoing(callbacks: Iterable[Callback]) -> bool:
    return any(isinstance(callback, EchoCallback) for callback in callbacks)
