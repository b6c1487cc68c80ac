"""`EchoCallback`: one line adds echoing to a Trainer, measures it, logs it, and lets a controller decide on the factor.

In Lightning's hooks, the callback calls the objects that do the work: `Attachment` puts echoing into the run, `RunMeter`
measures, `Decider` asks a `Controller` (within an epoch: at the steps of `AskingSteps`), and an `EpochReport` holds the results
of an epoch.

In ``setup``, the callback moves to the front of the Trainer's callbacks. All collectives of its hooks therefore come before the
hooks of other callbacks, which may run code on one rank only (`EchoCallback._come_first`). They are:

* in ``on_train_start``: nodes, counts, the buffer's size, the cache, the log directory;
* in ``on_train_epoch_start``: whether a rank starts workers;
* in ``on_train_batch_end``: the counts, every ``log_every_n_steps``; steps and decision, when a controller decides in an epoch;
* in ``on_train_epoch_end``: counts, steps, seconds, caches; with a controller the logged metrics and the decision.

With a cache, a loader itself has one more, at the first batch of an epoch: whether the data has changed. No hook runs there.
Hooks of validation, of saving, of exceptions and of the end of a ``fit`` have none.

====================== ======================================================================================
``setup``              attaches echoing, sets the controller's first factor
``on_train_start``     makes sure that an echoed loader is in use
``on_train_batch_*``   times the steps; logs counts every ``log_every_n_steps``; after some steps decides, sets the factor
``on_train_epoch_end`` measures, decides, logs, sets the factor
``on_fit_end``         prints and logs the summary; after Ctrl-C ``on_exception`` does
``teardown``           writes ``echo_summary.json``, logs the picture of the run, removes echoing
====================== ======================================================================================
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_echo.attachment import Attachment, adapt_checkpoint
from lightning_echo.config import CacheOptions, EchoConfig, ShareOptions, check_callback, given_options
from lightning_echo.data.objects import names_options
from lightning_echo.datamodule import DecidesFactor, EchoDataModule
from lightning_echo.insertion import InsertionPoint
from lightning_echo.measure.advice import advise, advise_on_demand
from lightning_echo.measure.control import Controller, Decision, Moment, Observation
from lightning_echo.measure.summary import EpochReport, FactorUse, RunSummary, RunVerdict, summarize
from lightning_echo.measure.target_idle import TargetIdle
from lightning_echo.pipeline.journal import Replay
from lightning_echo.schema import entry, inside, record, rows, state_of
from lightning_echo.training.counts import AskingSteps, Decider, Examples, metrics_of_parts
from lightning_echo.training.loaders import (
    Echoed,
    delivered_in,
    echoed_in,
    flush_journals,
    go_on_after_reload,
    parts_of,
    since_in,
    write_journals,
)
from lightning_echo.training.logged import (
    ProgressText,
    factor_shown,
    last_step,
    local_time,
    log_directory,
    log_hyperparameters,
    log_metrics,
    log_picture,
    log_text,
    package_versions,
    program_name,
    report_of,
    run_name,
    steps_taken,
    write_summary,
)
from lightning_echo.training.meters import RunMeter
from lightning_echo.training.package import MisconfigurationException, in_both, join
from lightning_echo.training.trainer import rank_zero_info, refuse_second_fit
from lightning_echo.training.training_echo import TrainingEcho

_OF_EXAMPLES = {f"echo/{name}" for name in ("fresh_examples", "echoed_examples", "effective_factor", "examples_per_second")}


@in_both("Callback")
@names_options
class EchoCallback(DecidesFactor, pl.Callback):
    """Echoes the loader that a Trainer trains on; measures, logs and decides.

    The loader may be that of a data module, the model's own, or one that is passed to ``fit``.

    ================================================== ==================================================================
    ``EchoCallback()``                                 changes nothing. It measures the run as it is, and the summary says
                                                       whether echoing pays
    ``EchoCallback(factor=4)``                         every fresh example is used four times on average
    ``EchoCallback(factor="demand")``                  if no fresh example has arrived, the training trains on one from memory
                                                       instead of waiting
    ``EchoCallback(factor="auto")``                    the same where it is possible; otherwise ``TargetIdle()`` decides on the
                                                       factor. The log says which, and why
    ``EchoCallback(TargetIdle(max_factor=8))``         the controller decides on the factor: after 10, 20, 40, ... steps, then
                                                       every 500 steps and from epoch to epoch
    ``EchoCallback(factor=2, controller=controller)``  begins with factor 2; then the controller decides
    ``EchoCallback(share="sweep")``                    all trainings with this name on one machine read their data once
    ``EchoCallback(cache="8GiB")``                     examples that fit into that memory are read once; give a factor as well
                                                       to echo, too
    ================================================== ==================================================================

    These metrics are logged at the end of each epoch, through every logger. The first three are also logged every
    ``Trainer(log_every_n_steps)`` steps. A metric that could not be measured is left out. Details: docs/reference/metrics.md.

    ================================ ============================================================================================
    ``echo/factor``                  echo factor in force; on demand the uses per fresh example in the run so far
    ``echo/fresh_examples``          fresh examples on all ranks in the run so far: a good x axis for curves
    ``echo/echoed_examples``         echoed examples on all ranks in the run so far
    ``echo/passes``                  passes over the data in the run so far
    ``echo/effective_factor``        uses per fresh example in the epoch
    ``echo/idle_fraction``           share of the epoch's time in which the job waited for input, without validation
    ``echo/slowest_rank``            the rank that had the longest wait most often; only with several ranks
    ``echo/data_wait_seconds``       waiting for input, seconds per step
    ``echo/step_seconds``            time without that waiting, seconds per step
    ``echo/upstream_seconds``        time before the insertion point, seconds per batch of fresh examples, all workers together
    ``echo/examples_per_second``     fresh and echoed examples that all ranks got per second
    ``echo/recommended_factor``      the factor that the measurements ask for: of the controller, or of a ``TargetIdle()``
    ``echo/first_batch_seconds``     seconds that the job waited for the first batch of an epoch, if workers had to start for it
    ``echo/stalls_bridged_seconds``  how much longer the run's steps would have taken with fresh examples alone; only on demand
    ``echo/cache_hit_fraction``      share of the epoch's fresh examples that the cache had, all ranks; if there is a cache
    ``echo/cached_examples``         examples that the cache of a node holds; if there is a cache
    ``echo/cache_bytes``             bytes that they take on a node; if there is a cache
    ``echo/cache_received_fraction`` share of the epoch's fresh examples that came from another node; if it is partitioned
    ``echo/exchange_fraction``       share of the epoch's time in which nodes sent and received examples; if it is partitioned
    ``echo/reads_in_flight``         reads under way on a rank, on average; mean over the ranks; if threads read ahead
    ``echo/shared_trainings``        trainings that share the reading, this one included; this and the next three if shared
    ``echo/peer_wait_fraction``      share of the epoch's time in which a batch waited for another, slower training
    ``echo/missed_examples``         examples in the run so far that other trainings had and this one did not
    ``echo/read_again_examples``     examples in the run so far that were read again for this training, as it came late
    ================================ ============================================================================================

    In a collection of loaders, these metrics are of all echoed loaders together. If the factors differ, ``echo/factor`` is their
    harmonic mean, and metrics that then have no meaning are left out. Each loader also has its own metrics, such as
    ``echo/<name>/factor``.

    A run on demand is written down in ``echo_journal_rank0.bin`` (of each rank) in the same directory, batch by batch. `Replay`
    repeats it.

    At the end of ``fit``, also of one that was interrupted, the callback writes `reports` and `decisions` to
    ``echo_summary.json`` in the run's log directory, if the Trainer has a logger that keeps files. `FactorSchedule.from_summary`
    replays such a run.

    The metrics are in ``trainer.callback_metrics``, too. Those of an epoch are there from its end on. Therefore give
    ``EarlyStopping`` the option ``check_on_train_epoch_end=True``. The progress bar shows ``echo=2.0x idle 3%``: the factor (on
    demand the uses per fresh example in this epoch so far), and the idle fraction of this rank in this epoch so far, from its
    tenth step on.

    Args:
        controller: Decides on the factor from epoch to epoch, and within epochs if it asks for that. In a collection, it decides
            on one factor for all loaders. None: the factor stays as it is.
        factor: Echo factor: the uses per fresh example, a real number >= 1. ``"demand"``: if no fresh example has arrived, the
            training trains on one from memory instead of waiting. ``"auto"``: the same where it is possible; otherwise the
            controller is a `TargetIdle` with ``max_factor``. None: the factor is 1 if there is a controller or another option;
            otherwise the run is left as it is. A `Replay` repeats a run on demand to the bit.
        insertion_point: Where the echo stage stands, see `InsertionPoint`.
        buffer_size: The largest number of live examples per rank, or the memory that they may take, see `EchoConfig`.
        reuse: Which examples are used again, ``"memory"`` or ``"each"``, see `EchoConfig`.
        epoch_length: ``"fixed"``: as many steps as without echoing. ``"full_pass"``: as many fresh examples as one pass holds.
        seed: Seed of the order, the draws and the augmentation, see `EchoConfig`.
        cache: A cache that keeps examples, so that they are read once: its size such as ``"8GiB"``, or see `EchoConfig`. Without
            a factor there is only a cache, and no echoing.
        share: The name under which this training shares the reading with others on this machine, or see `EchoConfig`. Without a
            factor the training shares, and does not echo.
        reads_in_flight: How many reads may be under way at once on this rank, for a storage that takes long to answer, see
            `EchoConfig`. Without a factor nothing is echoed, and examples are the same.
        max_factor: On demand: the most uses per fresh example on average, a real number >= 1. The largest factor of ``"auto"``.
            Default: 8.
        echo: All these options as one value. Give either this argument or the options, not both. It has one of these forms:

            * An `EchoConfig`, or a mapping of its options (a dict, OmegaConf's ``DictConfig``). It applies to a single loader,
              or to all loaders of a collection.
            * For a collection: a mapping from the names of the loaders to echo to such options, see `EchoDataModule`.

            If neither ``echo`` nor an option is given, a controller drives the `EchoLoader` or `EchoDataModule` that the run has.
        summary: Whether to print a summary at the end of ``fit``, and to give it to loggers that take texts.
        plot: Whether to log a picture of the run at the end of ``fit``: to TensorBoard, Weights & Biases, MLflow.

    Attributes:
        attachment: Puts echoing into the run. Its ``echo`` has the loader in use and the factor.
        reports: An `EpochReport` for each epoch so far.
        decisions: A `FactorUse` for each factor of the run so far. The first one is the factor that the run began with.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An option has an impossible value, ``echo`` is an empty mapping, or two arguments exclude each other.
        ModuleNotFoundError: ``plot=True``, and matplotlib is not installed.

    Example:
        >>> from lightning import Trainer
        >>> callback = EchoCallback(factor=4)
        >>> trainer = Trainer(callbacks=[callback], logger=False, enable_checkpointing=False, accelerator="cpu")
    """

    def __init__(
        self,
        controller: Controller | None = None,
        *,
        factor: int | float | str | Replay | None = None,
        insertion_point: InsertionPoint | str = InsertionPoint.auto.value,
        buffer_size: int | float | str | None = None,
        reuse: str = "memory",
        epoch_length: str = "fixed",
        seed: int | None = None,
        cache: CacheOptions = None,
        share: ShareOptions = None,
        reads_in_flight: int | str | None = None,
        max_factor: int | float | None = None,
        echo: dict[str, EchoConfig] | EchoConfig | None = None,
        summary: bool = True,
        plot: bool = False,
    ) -> None:
        options = given_options(
            factor=factor,
            insertion_point=insertion_point,
            buffer_size=buffer_size,
            reuse=reuse,
            epoch_length=epoch_length,
            seed=seed,
            cache=cache,
            share=share,
            reads_in_flight=reads_in_flight,
            max_factor=max_factor,
        )
        join()
        config, self._is_auto = check_callback(controller, options, echo, summary, plot)
        self.summary, self.plot = summary, plot
        self.attachment = Attachment(config, is_auto=self._is_auto)
        self.controller = TargetIdle(max_factor=self.attachment.echo.auto_bound) if self._is_auto else controller
        self.reports: list[EpochReport] = []
        self.decisions: list[FactorUse] = []
        self._echoes = config is not None or self.controller is not None
        self._chosen = given_options(**config.as_options()) if isinstance(config, EchoConfig) else {}
        self._default_controller = TargetIdle()  # for an EchoDataModule with factor="auto"
        self._controller_in_force = self.controller  # in this fit
        self._may_rest = False  # in this fit: the controller is that of ``factor="auto"``, for loaders that cannot echo on demand
        self._trainer: pl.Trainer | None = None  # its fit is running
        self._has_failed = False  # perhaps on this rank alone
        self._begin_fit()

    def _begin_fit(self) -> None:
        self.reports, self.decisions = [], []
        self._meter, self._decider = RunMeter(), Decider(self._controller_in_force)
        self._asking = AskingSteps(self._controller_in_force)
        self._log_directory: str | None = None
        self._began = self._name = ""  # when the run began, see `local_time`; and its name
        self._progress = ProgressText(self._progress_text)
        self._loader: Echoed | None = None
        self._epoch = self._last_step = 0
        self._last: tuple[Observation, Decision] | None = None  # the last observation and recommendation

    @property
    def factor(self) -> float:
        """The echo factor that was set last, of all loaders that are echoed; on demand ``max_factor``. Set it at any time.

        `EchoLoader.factor` describes from which batch on it applies, `EchoDataModule.factor` the length of epochs.

        Raises:
            MisconfigurationException: The loaders have different factors: read them from the loaders. Or you set the factor of
                an `EchoCallback` that only measures.
        """
        echo = self._echo_in_use()
        return self._factor_set if echo is None else echo.factor

    @factor.setter
    def factor(self, value: float) -> None:
        if (echo := self._echo_in_use()) is None:
            raise MisconfigurationException(
                "factor cannot be set on an EchoCallback that only measures: give it a factor, EchoCallback(factor=...), or set "
                ".factor on the EchoLoader or EchoDataModule of the run"
            )
        echo.factor = value

    # ------------------------------------------------------------------ beginning and end of a fit

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        join()
        ours = [each for each in trainer.callbacks if isinstance(each, EchoCallback)]  # type: ignore[attr-defined]
        if len(ours) > 1:
            raise MisconfigurationException(
                f"the Trainer has {len(ours)} EchoCallbacks, of which only one can echo and decide: keep one, and give it the "
                "options and the controller"
            )
        if self._trainer is not None:
            refuse_second_fit("EchoCallback", trainer, self._trainer)
        self._trainer, self._has_failed = trainer, False
        self._come_first(trainer)
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        is_auto = isinstance(datamodule, EchoDataModule) and datamodule.is_auto
        if isinstance(datamodule, EchoDataModule):
            datamodule.leave_auto_to_controller(self.controller is not None and not self._is_auto)
            self._default_controller.max_factor = datamodule.auto_bound
        self._may_rest = self._is_auto or (is_auto and self.controller is None)
        self._controller_in_force = self._default_controller if self.controller is None and is_auto else self.controller
        self._begin_fit()
        self._began = local_time()
        self._echo_of(trainer).write_journals_in(log_directory)
        if not self._echoes and not is_auto:
            return
        self.attachment.attach(trainer, pl_module)
        if self._controller_in_force is None:
            return
        self._echo_of(trainer).check_one_factor()
        factor = self._controller_in_force.initial_factor()
        if factor is not None:
            self._echo_of(trainer).factor = factor

    def _come_first(self, trainer: Any) -> None:
        """Moves this callback to the front of the Trainer's callbacks.

        Lightning joins a logged metric over the ranks when it is read. At an epoch's end, a callback may read metrics on rank 0
        alone (progress bars do): rank 0 then waits until the other ranks read them, too. If they wait for rank 0 in a collective
        of ours instead, the training hangs. So ours comes before the hook of any other callback.
        """
        place = next((place for place, each in enumerate(trainer.callbacks) if each is self), 0)
        if place:
            trainer.callbacks.insert(0, trainer.callbacks.pop(place))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.attachment.echo.estimate.optimizers_configured(trainer)  # also of an EchoLoader that was passed to fit

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.attachment.check_in_use()
        self._loader = echoed_in(trainer.train_dataloader)
        if self._may_rest and self._on_demand:
            self._controller_in_force = None
            self._decider.rest()
            self._asking.rest()
        for part in parts_of(self._loader).values():
            part.settle()  # before a controller's factors are checked, and the size is logged
        if not trainer.overfit_batches:  # type: ignore[attr-defined]
            self._decider.check(trainer, self._loader)
            controller = self._controller_in_force
            if controller is not None and (largest := controller.largest_factor()) is not None:
                self._echo_of(trainer).expect_factor(largest)
        self._last_step = steps_taken(trainer)
        self._meter.start(trainer, pl_module, self._loader)
        if not self.decisions:
            self.decisions.append(FactorUse(trainer.fit_loop.total_batch_idx + 1, delivered_in(self._loader), self._factor_set))
        self._catch_up(trainer, pl_module)
        self._asking.start(self._loader)
        self._log_directory, self._name = log_directory(trainer), run_name(trainer)
        write_journals(self._loader, self._log_directory)
        log_hyperparameters(trainer, self._loader, self._controller_in_force)
        self._progress.show(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._meter.stop()
        self._progress.hide()
        self._show_summary(trainer, self.reports, self.verdict)

    def _show_summary(self, trainer: pl.Trainer, reports: list[EpochReport], verdict: RunVerdict | None) -> None:
        if self.summary and verdict is not None:
            summary = summarize(reports, verdict)
            rank_zero_info(summary)
            log_text(trainer, "echo/summary", summary, last_step(trainer))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end_fit(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._has_failed = True
        if isinstance(exception, KeyboardInterrupt) and self._trainer is trainer:
            try:
                self._progress.hide()
                self._show_summary(trainer, *self._interrupted(trainer, pl_module))
            finally:  # also if a logger fails
                self._end_fit(trainer)
        else:
            self._end_fit(trainer)

    def _interrupted(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> tuple[list[EpochReport], RunVerdict | None]:
        """Returns reports and verdict, also on the epoch that was interrupted. Nothing changes: a checkpoint may follow."""
        is_alone = trainer.world_size == 1  # other ranks may not come here
        measures = self._meter.so_far(self._loader) if is_alone and self._meter.has_stepped else None
        if measures is None or measures.whole is None:
            return self.reports, self.verdict
        decider = Decider(None)
        decider.load_recent_state(self._decider.recent_state())
        measured, uses = (measures.judged, measures.costs), self._mean_uses(Examples(measures.fresh, measures.echoed))
        observation = decider.observe(trainer, pl_module, self._epoch, self._factor_set, measured, mean_uses=uses)
        lately = decider.joined_with_recent(observation)
        recommended = decider.recommend(self._loader, lately, None)
        reports = [*self.reports, report_of(self._meter, measures, self._loader, lately, recommended, None, self.reports)]
        return reports, self._verdict_on(reports, (lately, recommended))

    def _end_fit(self, trainer: pl.Trainer) -> None:
        """Ends measuring and echoing. No rank may wait for another rank here, because a single rank may have failed."""
        if self._trainer is not trainer:
            return  # this Trainer was refused
        self._trainer = None
        self._meter.stop()
        self._progress.hide()
        found = None
        if (self.reports or len(self.decisions) > 1) and trainer.is_global_zero:
            self._note_factor()
            which = (program_name(), self._name, self._began)
            found = RunSummary(self.reports, self.decisions, package_versions(trainer), self.verdict, *which)
            write_summary(self._log_directory, found)
        self.attachment.detach()  # first: a journal is whole when its workers have ended
        if found is not None and self.plot:
            if not self._has_failed and trainer.world_size == 1:  # of an `EchoLoader` that the user has, the workers go on
                flush_journals(self._loader)
            log_picture(trainer, found, self._log_directory)

    # ------------------------------------------------------------------ an epoch

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._come_first(trainer)  # another callback may have put itself there
        self.attachment.echo.end_own_reload()
        self._catch_up(trainer, pl_module)
        before, self._loader = self._loader, echoed_in(trainer.train_dataloader)
        go_on_after_reload(before, self._loader)
        for part in parts_of(self._loader).values():
            part.notice_changes()  # before it is measured how long the first batch takes
        self._meter.begin_epoch(self._loader)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._meter.begin_step()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._meter.end_step(self._loader, batch, batch_idx)
        if self._controller_in_force is not None:
            ends_epoch = trainer.is_last_batch or 0 <= trainer.max_steps <= trainer.global_step
            in_epoch, in_run = trainer.fit_loop.batch_idx + 1, trainer.fit_loop.total_batch_idx + 1
            if (moment := self._asking.after_step(in_epoch, in_run, ends_epoch=ends_epoch)) is not None:
                self._decide_within_epoch(trainer, pl_module, moment)
        step, every = steps_taken(trainer), trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or step % every or step == self._last_step:
            return
        self._last_step = step
        totals = self._meter.count(self._loader)
        counts = {"echo/factor": factor_shown(self._loader, totals)}
        counts |= {"echo/fresh_examples": totals.fresh, "echo/echoed_examples": totals.echoed}
        log_metrics(trainer, self._known({**counts, **self._meter.part_metrics(self._loader)}))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._meter.timer.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._meter.timer.resume()
        self._decider.validated |= not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_epoch(trainer, pl_module, trainer.current_epoch)

    def _catch_up(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the epoch before this one if Lightning has not called the hook for its end.

        Lightning skips this hook when it resumes from a checkpoint that was saved between an epoch's last step and its end.
        """
        if self._meter.is_in_epoch and self._epoch < trainer.current_epoch:
            self._end_epoch(trainer, pl_module, self._epoch)
        self._epoch = trainer.current_epoch

    def _end_epoch(self, trainer: pl.Trainer, pl_module: pl.LightningModule, epoch: int) -> None:
        loader = self._loader
        measures = self._meter.end_epoch(loader)
        measured, uses = (measures.judged, measures.costs), self._mean_uses(Examples(measures.fresh, measures.echoed))
        observation = self._decider.observe(trainer, pl_module, epoch, self._factor_set, measured, mean_uses=uses)
        decision = None if loader is None else self._decider.decide(trainer, observation, loader)
        lately = self._decider.joined_with_recent(observation)
        recommended = self._decider.recommend(loader, lately, decision)
        report = report_of(self._meter, measures, loader, lately, recommended, decision, self.reports)
        self.reports.append(report)
        self._last = lately, recommended
        of_parts = {**self._meter.part_metrics(loader, passes=True), **metrics_of_parts(measures.caches)}
        log_metrics(trainer, self._known({**report.logged(), **of_parts}), epoch)
        if decision is not None:
            self._apply(trainer, observation, decision)

    def _known(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns the known metrics. If a batch could not be counted, no number of examples is known."""
        return {name: value for name, value in metrics.items() if not self._meter.has_unknown_sizes or name not in _OF_EXAMPLES}

    def _decide_within_epoch(self, trainer: pl.Trainer, pl_module: pl.LightningModule, moment: Moment) -> None:
        measured = self._meter.end_stretch(self._loader)
        uses = self._mean_uses(self._meter.in_epoch(self._loader)) if self._on_demand else None
        observation = self._decider.observe(
            trainer, pl_module, trainer.current_epoch, self._factor_set, measured, moment, mean_uses=uses
        )
        self._decider.joined_with_recent(observation)
        decision = self._decider.decide(trainer, observation, self._loader)
        assert decision is not None  # there is a controller that wanted to be asked
        self._apply(trainer, observation, decision)

    def _apply(self, trainer: pl.Trainer, observation: Observation, decision: Decision) -> None:
        self._note_factor()
        if decision.factor == observation.factor:
            return
        name = "max_factor" if self._on_demand else "factor"
        rank_zero_info(f"lightning_echo: {name} {observation.factor:g} -> {decision.factor:g} ({decision.message})")
        self._echo_of(trainer).set_factor(decision.factor, decision.since)
        reason, message = decision.reason.value, decision.message
        self.decisions.append(FactorUse(observation.batches, since_in(self._loader), decision.factor, reason, message))

    def _note_factor(self) -> None:
        """Notes a factor that other code than the controller has set."""
        if self._factor_set != self.decisions[-1].factor:
            self.decisions.append(FactorUse(None, since_in(self._loader), self._factor_set, message="not set by the controller"))

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the callback, in plain types and tensors.

        It holds the loader's state, too, because Lightning loses that state if the model reads
        ``trainer.estimated_stepping_batches``.
        """
        return {
            "epoch": self._epoch,
            "began": self._began,
            "attached": self.attachment.has_echoed,  # also when it is saved after the fit, or in on_exception
            "wrapped": self.attachment.echo.gives_loader,
            "loader": self.attachment.echo.state_dict(),
            "meter": self._meter.state_dict(self._loader),
            "controller": self._decider.state_dict(),
            "recent": self._decider.recent_state(),
            "reports": [report.state() for report in self.reports],
            "decisions": [asdict(use) for use in self.decisions],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            EchoStateError: The state is damaged, or the loader cannot continue from it.
        """
        with state_of("EchoCallback"):
            is_attached, loader = entry(state_dict, "attached", bool), entry(state_dict, "loader", dict | None)
            if self.attachment.trainer is not None and is_attached:  # else the callback echoes only one of the two runs
                self.attachment.echo.load_state_dict(loader)
            self._epoch, self._began = entry(state_dict, "epoch", int), entry(state_dict, "began", str)
            with inside("meter"):
                self._meter.load_state_dict(entry(state_dict, "meter", dict))
            with inside("controller"):
                self._decider.load_state_dict(entry(state_dict, "controller", dict))
            with inside("recent"):
                self._decider.load_recent_state(entry(state_dict, "recent", dict))
            self._decider.load_metrics_state(entry(state_dict, "metrics", dict, {}))
            self.reports = rows(state_dict, "reports", partial(record, EpochReport))
            self.decisions = rows(state_dict, "decisions", partial(record, FactorUse))

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._has_failed:  # one rank alone must not read metrics: see _come_first
            checkpoint["callbacks"][self.state_key]["metrics"] = self._decider.metrics_state(trainer)

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        saved = checkpoint.get("callbacks", {}).get(self.state_key, {})
        echoed_before = saved.get("wrapped", False) or EchoDataModule.__qualname__ in checkpoint
        echoes = self.attachment.trainer is not None or isinstance(datamodule, EchoDataModule)
        adapt_checkpoint(checkpoint, datamodule, echoed_before=echoed_before, echoes=echoes)

    # ------------------------------------------------------------------ inside

    @property
    def verdict(self) -> RunVerdict | None:
        """The advice after this run, the reasons, and the line to paste. None before the end of its first epoch."""
        return None if self._last is None else self._verdict_on(self.reports, self._last)

    def _verdict_on(self, reports: list[EpochReport], last: tuple[Observation, Decision]) -> RunVerdict:
        fraction = reports[-1].worker_wait_fraction if reports else None
        waiting = self._meter.waiting(fraction, self._loader)
        if not self._on_demand or not reports:
            return advise(*last, self._meter.cores, self._chosen, waiting)
        parts, controller = parts_of(self._loader).values(), self._controller_in_force
        return advise_on_demand(
            reports,
            last[0],
            self._meter.cores,
            self._chosen,
            waiting,
            can_arrive=all(part.num_workers or part.reads_ahead for part in parts),
            repeats=any(part.repeats for part in parts),
            decided_by=type(controller).__name__ if controller is not None and self.decisions[-1].reason else "",
            reads=next(part.reads for part in parts),
        )

    @property
    def _on_demand(self) -> bool:
        return self._loader is not None and self._loader.on_demand

    def _mean_uses(self, in_epoch: Examples) -> float | None:
        return in_epoch.uses if self._on_demand and in_epoch.fresh else None

    @property
    def _factor(self) -> float:
        return 1.0 if self._loader is None else self._loader.factor_in_force

    @property
    def _factor_set(self) -> float:
        """The factor that was set last; 1 if nothing is echoed."""
        return 1.0 if self._loader is None else self._loader.factor

    def _echo_in_use(self) -> EchoDataModule | TrainingEcho | None:
        """Returns the object on which a factor is set; None if this callback only measures."""
        echo = self.attachment.echo if self._trainer is None else self._echo_of(self._trainer)
        return echo if self._echoes or isinstance(echo, EchoDataModule) else None

    def _echo_of(self, trainer: pl.Trainer) -> EchoDataModule | TrainingEcho:
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        return datamodule if isinstance(datamodule, EchoDataModule) else self.attachment.echo

    def _progress_text(self) -> str:
        idle = self._meter.idle_so_far
        factor = self._meter.own_in_epoch(self._loader).uses if self._on_demand else self._factor
        return f"{factor:.1f}x" + ("" if idle is None else f" idle {idle:.0%}")
