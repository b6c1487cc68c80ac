"""`EchoCLI`: a LightningCLI with one more group of options, ``echo``; and the callback of ``lightning-echo run``"""

from __future__ import annotations

import copy
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import currentframe, signature, unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import lightning.pytorch as pl
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from torch.utils.data import DataLoader

from lightning_echo.analysis.analyzer import StallAnalyzer
from lightning_echo.analysis.command import Analyzes, analyzing, output_directory, write_new
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.report import in_words
from lightning_echo.analysis.result import to_keep
from lightning_echo.attachment import AskHook
from lightning_echo.callback import EchoCallback
from lightning_echo.config import CacheOptions, EchoOptions
from lightning_echo.doctor.command import examining
from lightning_echo.doctor.looking import in_short
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.measure.control import callback_line
from lightning_echo.share.config import ShareConfig
from lightning_echo.share.sharing import serve
from lightning_echo.training.hooks import BoundHooks, ProcessHook
from lightning_echo.training.loaders import is_collection
from lightning_echo.training.package import MisconfigurationException, classes, in_both, is_overridden, package_of
from lightning_echo.training.trainer import rank_zero_info

_COMMANDS = ("analyze", "share", "doctor")


if TYPE_CHECKING:
    _Body = LightningCLI
else:
    _Body = object


class Echoes(_Body):
    """What an `EchoCLI` adds to the LightningCLI of either package."""

    def setup_parser(self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]) -> None:
        """Sets the parser up with the subcommands. LightningCLI looks for them in the Trainer's class."""
        users_class = self.trainer_class
        if isinstance(users_class, type):
            self.trainer_class = examining(sharing(analyzing(users_class)))
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        self.trainer_class = users_class

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # static in LightningCLI, which asks an instance
        """Returns the subcommands of ``LightningCLI`` and those of this class."""
        names = _COMMANDS if isinstance(self.trainer_class, type) else ()
        own = {name: {"model", "datamodule"} for name in names}
        return {**super().subcommands(), **own}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the group ``echo`` next to trainer, model and data. ``add_arguments_to_parser`` stays free for the user."""
        super().add_core_arguments_to_parser(parser)
        parser.add_class_arguments(EchoOptions, "echo", sub_configs=True)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses the arguments. If the options of echoing are impossible, the program ends with a message of the parser."""
        typed = sys.argv
        try:
            sys.argv = [typed[0], *_with_flag_values(typed[1:])]
            super().parse_arguments(parser, _with_flag_values(args) if isinstance(args, list) else args)
        finally:
            sys.argv = typed
        # The options and their controller are built before model and data, so that bad values are found early.
        options = ArgumentParser(exit_on_error=False)
        options.add_class_arguments(EchoOptions, "echo")
        instantiate = getattr(options, "instantiate", None) or options.instantiate_classes  # the name before jsonargparse 4.49
        try:
            instantiate(Namespace({"echo": self._of_subcommand(self.config).echo}))  # type: ignore[no-untyped-call]
        except (TypeError, ValueError) as error:
            parser.error(f"echo: {error}")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Returns the Trainer, with an `EchoCallback` unless it has one."""
        config = self._of_subcommand(self.config_init)
        if "callbacks" in config.trainer:  # else the Trainer takes no callbacks, and Lightning says so
            callbacks = _as_list(kwargs.get("callbacks", config.trainer.callbacks))
            groups = [value for value in vars(config).values() if isinstance(value, classes("Callback"))]
            configured = [*callbacks, *_as_list(self.trainer_defaults.get("callbacks")), *groups]
            if not any(isinstance(callback, EchoCallback) for callback in configured):
                callbacks.append(EchoCallback(**config.echo.callback_arguments()))
            elif config.echo != EchoOptions():
                self.parser.error(
                    "echo: options are given here and in an EchoCallback that is configured already, e.g. in trainer.callbacks: "
                    "give all of them in one of the two"
                )
            kwargs["callbacks"] = callbacks
        subcommand = self.config_init.get("subcommand")
        if subcommand not in _COMMANDS or not isinstance(self.trainer_class, type):
            return super().instantiate_trainer(**kwargs)
        self.trainer_class = examining(sharing(analyzing(self.trainer_class)))
        # An analysis's plain Trainers have the options of the training, without callbacks, logger and profiler.
        options = signature(package_of(self.trainer_class).get("Trainer").__init__).parameters
        known = set(options) - {"callbacks", "logger", "profiler"}
        given = copy.deepcopy({name: value for name, value in vars(config.trainer).items() if name in known})
        trainer = super().instantiate_trainer(**kwargs)
        if isinstance(trainer, Analyzes):
            trainer.analyzed_kwargs = given
        return trainer

    def _of_subcommand(self, config: Namespace) -> Namespace:
        """Returns the part of a configuration that belongs to the subcommand; all of it if there is no subcommand."""
        subcommand = config.get("subcommand")
        return config[subcommand] if subcommand else config


class EchoCLI(Echoes, LightningCLI):
    """A LightningCLI that echoes: ``--echo.factor 4`` or ``--echo.factor auto``. It has three more subcommands.

    The group ``echo`` holds the options of `EchoConfig`, and ``controller``, ``loaders``, ``enabled``, ``summary`` and ``plot``:

    * Without a factor and without a controller, an `EchoCallback` only measures. Its advice says whether echoing would pay.
    * ``--echo.enabled false`` does the same, whatever the other options are.
    * If an `EchoCallback` is configured already, in ``trainer.callbacks`` or elsewhere, it stays the only one. Options in the
      group are then refused.

    The data may come from a data module or from the model's own ``train_dataloader``.

    The subcommands:

    * ``analyze`` takes the same configuration as ``fit``, and tells where the time of a step goes (`StallAnalyzer`).
    * ``share --name sweep`` reads for the trainings that share that name (`serve`).
    * ``doctor`` looks for what would go wrong, in the data or on this machine.

    They do not exist if ``trainer_class`` is a function instead of a class.

    The arguments are those of ``LightningCLI``. A program that imports ``pytorch_lightning`` takes this class from
    ``lightning_echo.pytorch_lightning``.

    Example:
        >>> from unittest.mock import patch
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> started = ["train.py", "--echo.factor=4", "--trainer.accelerator=cpu", "--trainer.logger=false"]
        >>> with patch("sys.argv", started):  # as from the command line
        ...     cli = EchoCLI(BoringModel, run=False, seed_everything_default=False)
        >>> cli.config.echo.factor, any(isinstance(callback, EchoCallback) for callback in cli.trainer.callbacks)
        (4, True)
    """


def _with_flag_values(arguments: list[str]) -> list[str]:
    """Gives the flags ``--verify`` and doctor's ``--json`` a value, because jsonargparse wants one for every option.

    >>> _with_flag_values(["analyze", "--verify", "--data.size=3"])
    ['analyze', '--verify=true', '--data.size=3']
    >>> _with_flag_values(["doctor", "--json"])
    ['doctor', '--json=true']
    """
    flags = ("--verify", "--json") if "doctor" in arguments else ("--verify",)
    following = [*arguments[1:], "-"][: len(arguments)]
    return [
        f"{argument}=true" if argument in flags and after.startswith("-") else argument
        for argument, after in zip(arguments, following, strict=True)
    ]


def _as_list(callbacks: Any) -> list[Callback]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list) else [callbacks]


# ---------------------------------------------------------------------- share command


class Shares:
    """A Trainer that can read for others."""

    def share(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        name: str = "",
        window: str = "1GiB",
        cache: CacheOptions = None,
        workers: int | str = "sum",
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Reads for the trainings that share a name, and shows these trainings. It ends when it is interrupted (Ctrl-C).

        Args:
            model: The model, whose training loader is read if there is no data module.
            datamodule: The data.
            name: The name that the trainings share.
            window: Memory for examples that are prepared and that not all trainings have taken.
            cache: The cache of the reader, as the trainings give it: its size such as 8GiB, or its options.
            workers: How many workers the reader has: a number; ``"sum"``: as many as the trainings ask for together, and at least
                those of the loader; ``"starter"``: those of the loader.
            ckpt_path: Not used. It is here because a configuration that fit has saved may have it.
            weights_only: Not used, for the same reason.

        Raises:
            ValueError: There is no name, the loader cannot be shared, or the cache is impossible.
            MisconfigurationException: There is no single training loader.
        """
        if not name:
            raise ValueError("name is missing: train.py share --name sweep, as in fit --echo.share sweep")
        source = model if datamodule is None else datamodule
        if datamodule is not None:
            datamodule.prepare_data()
            datamodule.setup("fit")
        loader = source.train_dataloader()
        if is_collection(loader):
            raise MisconfigurationException(
                f"share={name!r} is impossible for several loaders: a reader reads one. Return one from train_dataloader"
            )
        with shown_in_place() as show:
            serve(loader, ShareConfig(name, window=window, workers=workers), cache=cache, show=show)


@contextmanager
def shown_in_place() -> Iterator[Callable[[str], None]]:
    """Gives a function that shows texts. On a terminal with rich, each text replaces the one before; otherwise they follow."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        yield print
        return
    live = import_module("rich.live").Live(auto_refresh=False)
    text = import_module("rich.text").Text
    with live:
        yield lambda shown: live.update(text(shown), refresh=True)


def sharing(trainer_class: type[pl.Trainer]) -> type[pl.Trainer]:
    """Returns a subclass that can read for others. It has the same name, so that configurations and messages do not change."""
    if issubclass(trainer_class, Shares):
        return trainer_class
    names = {name: getattr(trainer_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(trainer_class.__name__, (Shares, trainer_class), names)


# ---------------------------------------------------------------------- run command

_BROUGHT: WeakSet[EchoCallback] = WeakSet()  # by a `RunCallback`, in this process
_trainers = 0  # of this process that have got one


@in_both("Callback")
class RunCallback(pl.Callback):
    """Brings an `EchoCallback` at the beginning of a Trainer's ``fit``, unless the Trainer has one.

    ``given`` has the options that differ from their defaults, as plain values. ``note`` is called with ``"fit"`` when a ``fit``
    begins. ``tune``: the seconds for which the first training of this process is analyzed, and again for which settings are
    tried; None: nothing is tried.

    The entry point that makes it does not know the other callbacks of the Trainer. Lightning adds it to the caller's own list,
    which may belong to a second Trainer, too.
    """

    def __init__(
        self, program: str, given: dict[str, Any], options: EchoOptions, note: Callable[[str], None], tune: float | None = None
    ) -> None:
        self._program, self._given, self._options, self._note, self._tune = program, given, options, note, tune
        self._trial: Trial | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._note("fit")
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if there := [each for each in callbacks if isinstance(each, EchoCallback)]:
            if not any(each in _BROUGHT for each in there):
                rank_zero_info(
                    f"lightning_echo: run: {self._program} has an EchoCallback of its own, so the options of run are left out"
                )
            return
        brought = EchoCallback(**self._options.callback_arguments())
        _BROUGHT.add(brought)
        self._say_number()
        callbacks.insert(0, brought)  # and Lightning comes here once more
        brought.setup(trainer, pl_module, stage)
        if self._tune is not None and _trainers == 1:
            self._trial = Trial(self._options, self._tune, brought)
            self._trial.begin(trainer, pl_module)

    def _say_number(self) -> None:
        global _trainers
        _trainers += 1
        if _trainers > 1:
            tried = "" if self._tune is None else ", and --tune has tried the first one alone"
            rank_zero_info(
                f"lightning_echo: run: this is Trainer number {_trainers} of {self._program} that trains: each has counts and a "
                f"summary of its own{tried}"
            )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        is_first = next(each for each in callbacks if isinstance(each, RunCallback)) is self
        if not is_first or not any(isinstance(each, EchoCallback) and each in _BROUGHT for each in callbacks):
            return
        given, controller = dict(self._given), self._options.controller
        if "controller" in given:
            given["controller"] = controller
        kept = None if self._trial is None else self._trial.kept
        given |= {} if kept is None else kept.options
        names = ["EchoCallback", *([type(controller).__name__] if "controller" in given else [])]
        of_loader = "" if kept is None else "".join(f"\n  DataLoader(..., {line})" for line in kept.lines_of_loader)
        which = "these lines have" if of_loader else "these two lines have"
        rank_zero_info(
            f"lightning_echo: run: {which} the same effect in the program itself:\n"
            f"  from lightning_echo import {', '.join(names)}\n"
            f"  trainer = Trainer(..., callbacks=[{callback_line(given)}]){of_loader}"
        )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._trial is not None:
            self._trial.end()


# ---------------------------------------------------------------------- tune
# ``lightning-echo run --tune``: the first training of a program is analyzed, what is promising is tried in turns with the
# training as it is (`StallAnalyzer`), and the training then uses the setting that has won.
#
# The trial begins when the Trainer hands its training loader to its strategy. There the loader is known, wherever it comes from,
# and no batch was taken. The trial trains copies, and leaves random states as they were. An `EchoCallback` with the options that
# were found then takes the place of the one that only measures; number of workers and the like are set on the loader itself.


_SEVERAL = "it tries a single loader, and this training has a collection of them"
_NO_CACHE = "no cache was tried: it gains nothing before the second pass over the data, which this training does not reach"
_PREFETCHED = 2  # torch's own number of batches for each worker, where a loader has had no workers


class Trial:
    """Tries settings for a training, before its first batch. ``kept``: the setting that it then uses; None: it runs as it is.

    ``options`` are those of run, ``seconds`` those of the analysis and again of the proof. ``measuring`` is the callback of the
    Trainer that gives way to another one.
    """

    def __init__(self, options: EchoOptions, seconds: float, measuring: EchoCallback) -> None:
        self._options, self._seconds, self._measuring = options, seconds, measuring
        self._hooks = BoundHooks()
        self._has_several = False  # a collection of loaders, of which the strategy gets one after the other
        self.kept: TrainingSetting | None = None

    def begin(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Waits for the training loader. Call it in ``setup`` of a ``fit``."""
        if not isinstance(trainer.strategy, classes("strategies.SingleDeviceStrategy")):
            return self._say_nothing_tried(
                f"it tries on one device, and this Trainer has {type(trainer.strategy).__name__}. Start the program with "
                "devices=1 and no strategy, then use the lines that it finds"
            )
        process = trainer.strategy.process_dataloader
        hook = ProcessHook(partial(self._take, process, trainer, pl_module))
        self._hooks.bind(trainer.strategy, "process_dataloader", hook.process_dataloader)
        self._note(_passed_to_fit(trainer))
        for instance in (trainer.datamodule, pl_module):
            if is_overridden("train_dataloader", instance):
                ask = AskHook(instance.train_dataloader, lambda users: self._note(users()), trainer)
                self._hooks.bind(instance, "train_dataloader", ask.train_dataloader)

    def _note(self, loaders: Any) -> Any:
        self._has_several = is_collection(loaders)
        return loaders

    def end(self) -> None:
        """Removes the hook. You may call it at any time."""
        self._hooks.unbind()

    def _take(self, process: Callable[[Any], Any], trainer: Any, pl_module: pl.LightningModule, loader: Any) -> Any:
        """Returns what the strategy makes of a loader. At the training loader, tries settings first."""
        if not trainer.training:
            return process(loader)
        self.end()
        if reason := _SEVERAL if self._has_several else _why_no_trial(trainer, loader):
            self._say_nothing_tried(reason)
        else:
            self.kept = self._find(trainer, pl_module, loader)
        if self.kept is None:
            return process(loader)
        _set_on(loader, self.kept)
        if self.kept.options:
            echoing = EchoCallback(**replace(self._options, **self.kept.options).callback_arguments())
            _BROUGHT.add(echoing)
            trainer.callbacks[trainer.callbacks.index(self._measuring)] = echoing
            echoing.setup(trainer, pl_module, "fit")
        return trainer.strategy.process_dataloader(loader)

    def _find(self, trainer: Any, pl_module: pl.LightningModule, loader: Any) -> TrainingSetting | None:
        """Analyzes and tries. Returns the setting that is proved to be faster, if there is one.

        A cache gains nothing before the second pass. So none is tried, or kept, for a training that does not come so far.
        """
        passes = _passes_of(trainer, loader)
        analyzer = StallAnalyzer(pl_module, loader, trainer_kwargs=_options_of(trainer))
        try:
            found = analyzer.run(seconds=self._seconds)
            tried = found if passes > 1 else replace(found, stages=replace(found.stages, in_cache={}))
            analysis = replace(analyzer.prove(tried, seconds=self._seconds), stages=found.stages)
        except Exception as error:  # the user's code may raise anything where it trains in another Trainer
            self._say_nothing_tried(_why_failed(error))
            return None
        try:
            saved = (
                f"all figures: lightning-echo report {write_new(output_directory(trainer), 'analysis.json', analysis.to_json)}"
            )
        except OSError as error:  # a full disk, say: the training needs no file of ours
            saved = f"the figures are not saved: {error}"
        kept = to_keep([each for each in analysis.proved if _gains_within(passes, each.setting)])
        gains = [
            f"{in_words(each.setting)}: {each.gain:.2f} times as fast (95% interval: {each.low:.2f} to {each.high:.2f})"
            f"{_from_when(each.setting, passes)}"
            for each in analysis.proved
        ]
        caches = any(remedy.setting.hold for remedy in analysis.verdict.remedies)
        untried = [_NO_CACHE] if caches and passes <= 1 else []
        used = "nothing is proved to be faster, so the training runs as it is" if kept is None else "the training uses "
        used += "" if kept is None else in_words(kept.setting)
        told = "\n  ".join(["tried what would help:", analysis.verdict.message, *untried, *gains, used, saved])
        rank_zero_info(f"lightning_echo: run: {told}")
        return None if kept is None else kept.setting

    @staticmethod
    def _say_nothing_tried(reason: str) -> None:
        rank_zero_info(f"lightning_echo: run: --tune has tried nothing, and the training runs as it is: {reason}")


def _why_no_trial(trainer: Any, loader: Any) -> str:
    """Returns why no setting is tried for a loader, in words; empty if it can be tried."""
    if isinstance(loader, EchoLoader):
        return "the program echoes already"
    if trainer.global_step or trainer.current_epoch:
        return "the training is resumed. Give run the options that it has begun with"
    if trainer.fast_dev_run or trainer.overfit_batches:
        return "the Trainer trains on a few batches only"
    datamodule = trainer.datamodule
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    if datamodule is not None and (own := [name for name in hooks if is_overridden(name, datamodule)]):
        return (
            f"the data module has a hook {own[0]}, and a trial has the loader alone. Use StallAnalyzer(model, datamodule), or "
            "the subcommand analyze of an EchoCLI"
        )
    return ""


def _passed_to_fit(trainer: Any) -> Any:
    """Returns the loaders that the program has passed to the ``fit`` that runs; None: none. Lightning tells nobody else."""
    fits, frame = {unwrap(each.fit).__code__ for each in classes("Trainer")}, currentframe()
    while frame is not None:
        if frame.f_code in fits and frame.f_locals.get("self") is trainer:
            return frame.f_locals.get("train_dataloaders")
        frame = frame.f_back
    return None


def _passes_of(trainer: Any, loader: Any) -> float:
    """Returns how often a training at factor 1 takes each example at most; infinity if that is not known."""
    try:
        batches = len(loader)
    except TypeError:  # a stream, which no cache holds
        return math.inf
    limit = trainer.limit_train_batches
    each = int(limit * batches) if isinstance(limit, float) else min(limit, batches)
    epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
    steps = math.inf if trainer.max_steps == -1 else trainer.max_steps * trainer.accumulate_grad_batches
    return float(min(epochs * each, steps) / max(batches, 1))


def _gains_within(passes: float, setting: TrainingSetting) -> bool:
    """Whether a setting gains in a training of so many passes at factor 1: a cache does from its second pass on."""
    return setting.hold is None or passes > setting.factor


def _from_when(setting: TrainingSetting, passes: float) -> str:
    if setting.hold is None:
        return ""
    reaches = "" if _gains_within(passes, setting) else ", which this training does not reach"
    return f" from the second pass on{reaches}"


def _why_failed(error: Exception) -> str:
    """Returns why a trial has failed, in words: a sentence of this package, or an exception of other code and its place."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    is_ours = frame.f_globals.get("__name__", "").startswith("lightning_echo.")
    if is_ours and isinstance(error, (MisconfigurationException, ValueError)):
        return str(error)
    code = frame.f_code
    return (
        f"a trial of it raised {in_short(error)} ({code.co_name}, {Path(code.co_filename).name}, line {line}). A trial trains a "
        "copy of the model in a Trainer of its own, without the data module, the callbacks and the log directory"
    )


def _set_on(loader: DataLoader[Any], setting: TrainingSetting) -> None:
    """Sets on a loader that nobody iterates what a setting changes of it."""
    if setting.workers is not None:
        loader.num_workers = setting.workers
        if setting.workers and loader.prefetch_factor is None:
            loader.prefetch_factor = _PREFETCHED
    if setting.prefetch_factor is not None:
        loader.prefetch_factor = setting.prefetch_factor
    if setting.pin_memory:
        loader.pin_memory = True


def _options_of(trainer: Any) -> dict[str, Any]:
    """Returns the options of a Trainer that a step depends on, as far as a Trainer knows them."""
    on_cuda = isinstance(trainer.accelerator, classes("accelerators.CUDAAccelerator"))
    return {
        "accelerator": trainer.accelerator,
        "devices": trainer.device_ids if on_cuda else trainer.num_devices,
        "precision": trainer.precision,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "logger": bool(trainer.loggers),
    }
