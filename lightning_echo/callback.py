"""`EchoCallback`: one line adds echoing to a Trainer, measures it, logs it, and lets a controller decide on the factor.

A thin adapter: `Attachment` puts echoing into the run, `RunMeter` measures, a `Controller` decides, and what is known of an epoch
is an `EpochReport`. Here Lightning's hooks bring them together:

    setup            attach, first factor            on_train_batch_*   clocks, counts every log_every_n_steps
    on_train_start   which loader is in use          on_train_epoch_end measure, decide, log, set the factor
    teardown         detach                          on_fit_end         summary
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info

from lightning_echo.attachment import Attachment
from lightning_echo.checkpoints import adapt_checkpoint
from lightning_echo.config import EchoConfig, Options, given_options, read_options, without_auto
from lightning_echo.datamodule import DecidesFactor, EchoDataModule
from lightning_echo.insertion import InsertionPoint
from lightning_echo.measuring.control import Controller, Decision, Observation
from lightning_echo.measuring.report import EpochReport
from lightning_echo.measuring.summary import advise, summarize
from lightning_echo.measuring.target_idle import TargetIdle
from lightning_echo.monitoring.decider import Decider
from lightning_echo.monitoring.logged import ProgressText, log_hyperparameters, log_metrics, report_of, steps_taken
from lightning_echo.monitoring.meter import RunMeter
from lightning_echo.training.collection import Echoed, echoed_in, parts_of
from lightning_echo.training.refusals import refuse_second_fit
from lightning_echo.training.training_echo import TrainingEcho

__all__ = ["EchoCallback"]


class EchoCallback(DecidesFactor, pl.Callback):
    """Echoes what a Trainer trains on: the loader of a data module, the model's own, or one that is passed to ``fit``; measures,
    logs and decides.

    ================================================== ==================================================================
    ``EchoCallback()``                                 changes nothing: it measures what is there, and the summary says
                                                       whether echoing pays
    ``EchoCallback(factor=4)``                         every fresh example is used four times
    ``EchoCallback(factor="auto")``                    the factor is decided on from epoch to epoch, by ``TargetIdle()``
    ``EchoCallback(TargetIdle(max_factor=8))``         the same with options, or with another `Controller`
    ``EchoCallback(factor=2, controller=controller)``  begins with that factor
    ================================================== ==================================================================

    Logged per epoch through every logger; those marked with * also every ``Trainer(log_every_n_steps)``. What could not be
    measured is left out.

    ============================ ========================================================================================
    ``echo/factor`` *            echo factor in force
    ``echo/fresh_examples`` *    first uses in the run so far, all ranks: an x axis for curves
    ``echo/echoed_examples`` *   further uses in the run so far, all ranks
    ``echo/passes``              passes over the data in the run so far
    ``echo/effective_factor``    uses per fresh example in the epoch
    ``echo/idle_fraction``       share of the epoch's time in which the job waited for input: per step the longest wait of any
                                 rank, summed. Validation is no part of that time, nor is ``echo/first_batch_seconds``
    ``echo/slowest_rank``        the rank whose wait was the longest most often; only with several ranks
    ``echo/data_wait_seconds``   waiting, seconds per step
    ``echo/step_seconds``        all but waiting, seconds per step
    ``echo/upstream_seconds``    host time per fresh batch before the insertion point, seconds, all workers working on it
    ``echo/examples_per_second`` delivered on all ranks, fresh and echoed
    ``echo/recommended_factor``  what the controller measured to be right; without one, what ``TargetIdle()`` would choose
    ``echo/first_batch_seconds`` wait for the first batch of an epoch for which workers had to start, of the rank that waited
                                 longest: of the first epoch; where the loader was closed or made anew meanwhile; of every
                                 epoch where the loader is not echoed and has workers
    ============================ ========================================================================================

    Where a collection of loaders is trained on, these are of those that are echoed, all together: the factor is the harmonic mean
    where they have factors of their own, and there are no passes. Of each there are ``echo/<name>/factor`` *,
    ``echo/<name>/fresh_examples`` *, ``echo/<name>/echoed_examples`` * and ``echo/<name>/passes``. What the pipeline costs is
    said where it can be told which loader is the slowest: all are echoed, by the same factor, all with workers or all without,
    and each step takes a batch of each.

    They are in ``trainer.callback_metrics`` too, those of an epoch from its end on: let ``EarlyStopping`` look there by
    ``check_on_train_epoch_end=True``. The progress bar shows ``echo=2.0x idle 3%``.

    Args:
        controller: Decides the factor from epoch to epoch, of a collection one for all loaders. None: it stays as it is.
        factor: Echo factor, a real number >= 1: uses per fresh example; or ``"auto"``, for a `TargetIdle` with its defaults as
            the controller. None: 1 with a controller or another option; without them the run is left as it is.
        insertion_point: Where the echo stage stands, see `InsertionPoint`.
        buffer_size: Most live examples per rank (batches for ``after_batching`` and ``after_transfer``), see `EchoLoader`.
        epoch_length: ``"fixed"`` or ``"full_pass"``, see `EchoLoader`.
        seed: Seed of order, draws and augmentation. Default: that of ``seed_everything``, else drawn once.
        echo: In place of these options: an `EchoConfig` or a mapping (a dict, OmegaConf's ``DictConfig``) with them, for a single
            loader and for all of a collection; or, by name, one for each loader of a collection that is echoed (see
            `EchoDataModule`). Where neither it nor an option is given, a controller drives an `EchoLoader` or `EchoDataModule`
            that is in the run as it is.
        summary: Whether to print a summary at the end of ``fit``.

    Attributes:
        attachment: What puts echoing into the run; its ``echo`` has the loader in use and its factor.
        reports: An `EpochReport` for each epoch so far.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An option has an impossible value, ``echo`` names no loader, or two arguments say the same thing.

    Example:
        >>> from lightning import Trainer
        >>> callback = EchoCallback(factor=4)
        >>> trainer = Trainer(callbacks=[callback], logger=False, enable_checkpointing=False, accelerator="cpu")
    """

    def __init__(
        self,
        controller: Controller | None = None,
        *,
        factor: int | float | str | None = None,
        insertion_point: InsertionPoint | str = InsertionPoint.auto.value,
        buffer_size: int | None = None,
        epoch_length: str = "fixed",
        seed: int | None = None,
        echo: dict[str, EchoConfig] | EchoConfig | None = None,
        summary: bool = True,
    ) -> None:
        if controller is not None and not isinstance(controller, Controller):
            raise TypeError(
                f"controller must be a Controller such as TargetIdle(), or None, got {controller!r}; a factor is given by "
                "EchoCallback(factor=...)"
            )
        options = given_options(
            factor=factor, insertion_point=insertion_point, buffer_size=buffer_size, epoch_length=epoch_length, seed=seed
        )
        config, is_auto = _config(options, echo)
        if is_auto and controller is not None:
            raise ValueError(
                f"factor='auto' stands for a controller, TargetIdle() with its defaults, and controller={controller!r} is given, "
                "too: leave one of the two out"
            )
        self.controller, self.summary = TargetIdle() if is_auto else controller, summary
        self.attachment = Attachment(config)
        self.reports: list[EpochReport] = []
        self._echoes = config is not None or self.controller is not None
        self._deciding, self._default = self.controller, TargetIdle()  # what decides in this fit; for an EchoDataModule("auto")
        self._trainer: pl.Trainer | None = None  # whose fit is under way
        self._begin_fit()

    def _begin_fit(self) -> None:
        self.reports = []
        self._meter, self._decider = RunMeter(), Decider(self._deciding)
        self._progress = ProgressText()
        self._loader: Echoed | None = None
        self._epoch = self._last_step = 0
        self._last: tuple[Observation, Decision] | None = None  # with what is recommended

    # ------------------------------------------------------------------ beginning and end of a fit

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        _check_alone(trainer)
        if self._trainer is not None:
            refuse_second_fit("EchoCallback", trainer, self._trainer)
        self._trainer = trainer
        is_auto = isinstance(_datamodule(trainer), EchoDataModule) and _datamodule(trainer).is_auto
        self._deciding = self._default if self.controller is None and is_auto else self.controller
        self._begin_fit()
        if not self._echoes and not is_auto:
            return
        self.attachment.attach(trainer, pl_module)
        if self._deciding is not None:
            self._echoed(trainer).check_one_factor()
        factor = None if self._deciding is None else self._deciding.initial_factor()
        if factor is not None:
            self._echoed(trainer).factor = factor

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.attachment.echo.estimate.optimizers_configured(trainer)  # also of an EchoLoader that was passed to fit

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.attachment.check_in_use()
        self._loader = _loaders_in_use(trainer)
        if not trainer.overfit_batches:  # type: ignore[attr-defined]
            self._decider.check(trainer, self._loader)
            largest = None if self._deciding is None else self._deciding.largest_factor()
            if largest is not None:
                self._echoed(trainer).expect_factor(largest)
        self._last_step = steps_taken(trainer)
        self._meter.start(trainer, pl_module, self._loader)
        self._catch_up(trainer, pl_module)
        log_hyperparameters(trainer, self._loader, self._deciding)
        self._progress.show(trainer)
        self._say_progress()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._let_go()
        if self.summary and self._last is not None:
            rank_zero_info(summarize(self.reports, advise(*self._last)))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end_fit(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end_fit(trainer)

    def _end_fit(self, trainer: pl.Trainer) -> None:
        if self._trainer is trainer:  # else it is one that was refused
            self._trainer = None
            self._let_go()
            self.attachment.detach()

    def _let_go(self) -> None:
        """Of what belongs to the Trainer."""
        self._meter.stop()
        self._progress.hide()

    # ------------------------------------------------------------------ an epoch

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.attachment.echo.end_own_reload()
        self._catch_up(trainer, pl_module)
        before, self._loader = self._loader, _loaders_in_use(trainer)
        _follow_anew(before, self._loader)
        self._meter.begin_epoch(self._loader)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._meter.begin_step()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._meter.end_step(self._loader, batch)
        step, every = steps_taken(trainer), trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or step % every or step == self._last_step:
            return
        self._last_step = step
        fresh, echoed = self._meter.count(self._loader)
        counts = {"echo/factor": self._factor, "echo/fresh_examples": fresh, "echo/echoed_examples": echoed}
        log_metrics(trainer, {**counts, **self._meter.of_parts(self._loader)})
        self._say_progress()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._meter.timer.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._meter.timer.resume()
        self._decider.validated |= not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_epoch(trainer, pl_module, trainer.current_epoch)

    def _catch_up(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A run that was saved between an epoch's last step and its end goes on, in Lightning, without that end."""
        if self._meter.is_in_epoch and self._epoch < trainer.current_epoch:
            self._end_epoch(trainer, pl_module, self._epoch)
        self._epoch = trainer.current_epoch

    def _end_epoch(self, trainer: pl.Trainer, pl_module: pl.LightningModule, epoch: int) -> None:
        loader = self._loader
        measures = self._meter.end_epoch(loader)
        observation = self._decider.observe(trainer, pl_module, epoch, 1.0 if loader is None else loader.factor, measures)
        decision = None if loader is None else self._decider.decide(trainer, observation)
        lately = self._decider.lately(observation)
        recommended = self._decider.recommend(loader, lately, decision)
        report = report_of(self._meter, measures, loader, lately, recommended, decision)
        self.reports.append(report)
        self._last = lately, recommended
        log_metrics(trainer, {**report.logged(), **self._meter.of_parts(loader, passes=True)})
        self._say_progress()
        if decision is not None and decision.factor != observation.factor:
            rank_zero_info(f"lightning_echo: factor {observation.factor:g} -> {decision.factor:g} ({decision.message})")
            self._echoed(trainer).factor = decision.factor

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Plain types and tensors. The loader's state is Lightning's to save, which forgets it where the model reads
        ``trainer.estimated_stepping_batches``."""
        return {
            "epoch": self._epoch,
            "attached": self.attachment.has_echoed,  # also if saved when fit is over, or in on_exception
            "wrapped": self.attachment.echo.gives_loader,
            "loader": self.attachment.echo.state_dict(),
            "meter": self._meter.state_dict(self._loader),
            "controller": self._decider.state_dict(),
            "recent": self._decider.recent_state(),
            "reports": [report.state() for report in self.reports],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.attachment.trainer is not None and state_dict["attached"]:  # else one of the runs is not echoed by its callback
            self.attachment.echo.load_state_dict(state_dict["loader"])
        self._epoch = state_dict["epoch"]
        self._meter.load_state_dict(state_dict["meter"])
        self._decider.load_state_dict(state_dict["controller"])
        self._decider.load_recent_state(state_dict.get("recent", {}))  # older checkpoints have none
        self._decider.load_metrics_state(state_dict.get("metrics", {}))
        self.reports = [EpochReport(**report) for report in state_dict["reports"]]

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["callbacks"][self.state_key]["metrics"] = self._decider.metrics_state(trainer)

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("callbacks", {}).get(self.state_key, {})
        echoed_before = saved.get("wrapped", False) or EchoDataModule.__qualname__ in checkpoint
        echoes = self.attachment.trainer is not None or isinstance(_datamodule(trainer), EchoDataModule)
        adapt_checkpoint(checkpoint, _datamodule(trainer), echoed_before=echoed_before, echoes=echoes)

    # ------------------------------------------------------------------ inside

    @property
    def _factor(self) -> float:
        """The factor in force."""
        return 1.0 if self._loader is None else self._loader.factor_in_force

    def _echoed(self, trainer: pl.Trainer) -> EchoDataModule | TrainingEcho:
        """Where the factor is set."""
        datamodule = _datamodule(trainer)
        return datamodule if isinstance(datamodule, EchoDataModule) else self.attachment.echo

    def _say_progress(self) -> None:
        idle = self.reports[-1].idle_fraction if self.reports else None
        self._progress.text = f"{self._factor:.1f}x" + ("" if idle is None else f" idle {idle:.0%}")


def _config(options: dict[str, Any], echo: Any) -> tuple[Options | None, bool]:
    """The options of an `EchoCallback`, None where nothing is said about them, and whether a ``TargetIdle()`` decides.

    Raises:
        TypeError: An option has a wrong type.
        ValueError: Options are given twice, or one has an impossible value.
    """
    if options and echo is not None:
        said = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ValueError(
            f"EchoCallback has options in echo={echo!r} and in {said}: give all of them in one of the two, as in "
            "EchoCallback(factor=4, buffer_size=64)"
        )
    given: Options | None = EchoConfig(**options) if options else read_options("echo", echo)
    if given is None:
        return None, False
    config, is_auto = without_auto("echo", given)
    return (None if is_auto and config == EchoConfig() else config), is_auto


def _datamodule(trainer: Any) -> Any:
    return trainer.datamodule  # untyped: Trainer sets it outside __init__


def _loaders_in_use(trainer: pl.Trainer) -> Echoed | None:
    loaders = trainer.train_dataloader
    return None if loaders is None else echoed_in(loaders)


def _follow_anew(before: Echoed | None, now: Echoed | None) -> None:
    """Lets loaders that a hook of the user's has made anew go on where those of the same names stood."""
    for name, part in parts_of(now).items():
        earlier = parts_of(before).get(name)
        if earlier is not None and earlier is not part and part.is_at_start:
            part.follow(earlier)
            earlier.close()


def _check_alone(trainer: Any) -> None:
    found = [each for each in trainer.callbacks if isinstance(each, EchoCallback)]
    if len(found) > 1:
        raise MisconfigurationException(
            f"the Trainer has {len(found)} EchoCallbacks, of which only one can echo and decide: keep one, and give it "
            "the options and the controller"
        )
