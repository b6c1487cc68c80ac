"""`Decider`: shows the controller the same observation on every rank, and gives all ranks the decision of rank 0.

The controller decides on the factor. Each rank has a controller and asks it, after the ranks have joined their times
(``run_meter.py``) and their logged metrics (`Decider.observe`). Then rank 0 sends its decision to the others (`Decider.decide`),
and on each rank `EchoCallback` sets that factor on its own loader. ``asking.py`` says after which steps this happens.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_echo.loading.loader import EchoLoader
from lightning_echo.measuring.control import (
    Controller,
    Decision,
    Moment,
    Observation,
    Reason,
    load_state_by_kind,
    state_by_kind,
)
from lightning_echo.measuring.cost import PipelineCosts
from lightning_echo.measuring.metrics import JobSteps
from lightning_echo.measuring.recent import RecentSteps
from lightning_echo.measuring.target_idle import recommend
from lightning_echo.saved import entry, inside
from lightning_echo.training.collection import Echoed, EchoLoaders, common_factor, parts_of
from lightning_echo.training.lengths import check_factor_during_training

__all__ = ["Decider"]


class Decider:
    """Asks a controller at the end of each epoch, and within epochs. All ranks must call its methods together.

    Args:
        controller: The controller. None: epochs are observed, but nothing is decided.

    Attributes:
        validated: Whether validation has run in this ``fit``.
    """

    def __init__(self, controller: Controller | None) -> None:
        self._controller = controller
        self._recent = RecentSteps()
        self.validated = False
        self._logged_before: dict[str, Tensor] = {}  # from the checkpoint: a resumed Trainer has forgotten what was logged
        self._logged_last: dict[str, Tensor] = {}  # the tensors of the last epoch: a value that is logged again may be equal

    def check(self, trainer: pl.Trainer, loader: Echoed | None) -> None:
        """Refuses, before training, whatever would end the training with an error later.

        Raises:
            MisconfigurationException: There is no `EchoLoader`, the loaders have different factors, or a learning-rate schedule
                forbids longer epochs.
            ValueError: The buffer cannot hold what the largest factor needs.
        """
        if self._controller is None:
            return
        if loader is None:
            raise MisconfigurationException(
                f"EchoCallback({self._controller!r}) has no EchoLoader to drive: the Trainer has an EchoDataModule, if only of "
                "an earlier fit, and trains on another loader. Pass EchoLoader(loader, 1) to fit, or use another Trainer"
            )
        common_factor({name: part.factor for name, part in parts_of(loader).items()})
        largest = self._controller.largest_factor()
        if largest is not None:
            check_factor_during_training(trainer, loader, largest)

    def observe(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        epoch: int,
        factor: float,
        measured: tuple[JobSteps | None, PipelineCosts | None],
        moment: Moment = Moment.epoch_end,
    ) -> Observation:
        """Returns what is known at a moment. It is the same on all ranks.

        Args:
            trainer: The Trainer.
            pl_module: The model.
            epoch: Number of the epoch.
            factor: The factor that was set last.
            measured: The steps that are judged, and what the pipeline costs.
            moment: When the controller is asked.
        """
        metrics, anew = ({}, frozenset[str]()) if self._controller is None else self._join_logged(trainer, pl_module)
        judged, costs = measured
        return Observation(
            epoch=epoch,
            factor=factor,
            steps=0 if judged is None else judged.steps,
            idle_fraction=None if judged is None else judged.idle_fraction,
            step_seconds=None if judged is None else judged.wait_seconds + judged.step_seconds,
            costs=costs,
            metrics=metrics,
            logged=anew,
            validated=self.validated or not trainer.enable_validation,
            moment=moment,
            batches=trainer.fit_loop.total_batch_idx + 1,
            idle_low=None if judged is None else judged.idle_low,
        )

    def _join_logged(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> tuple[dict[str, float], frozenset[str]]:
        """Returns the means over ranks of the logged metrics, and which of them were logged since the last epoch's end."""
        logged = self._logged(trainer)
        names = trainer.strategy.broadcast(sorted(logged))
        anew = frozenset(trainer.strategy.broadcast([name for name, value in logged.items() if self._is_new(name, value)]))
        self._logged_last.update(logged)
        return _mean_over_ranks(pl_module, names, logged), anew

    def decide(self, trainer: pl.Trainer, observation: Observation, loader: Echoed | None = None) -> Decision | None:
        """Returns the decision of rank 0; None without a controller.

        Args:
            trainer: The Trainer.
            observation: What `observe` returned.
            loader: What is trained on.

        Raises:
            TypeError: The controller did not return a `Decision`.
        """
        if self._controller is None:
            return None
        decision = self._controller.decide(observation)
        if not isinstance(decision, Decision):
            raise TypeError(f"{type(self._controller).__name__}.decide must return a Decision, got {decision!r}")
        decision = _within_surplus(decision, observation.factor, loader)
        said = (decision.factor, decision.reason.value, decision.message, decision.since)
        factor, reason, message, since = trainer.strategy.broadcast(said)
        return Decision(factor, Reason(reason), message, since)

    def joined_with_recent(self, observation: Observation) -> Observation:
        """Returns an observation, joined with those before it if it has few steps. Call it once for each observation."""
        return self._recent.joined(observation)

    def recommend(self, loader: Echoed | None, observation: Observation, decision: Decision | None) -> Decision:
        """Returns the factor that follows from the measurements: the controller's, or what ``TargetIdle()`` would choose.

        Args:
            loader: What was trained on.
            observation: What `joined_with_recent` returned.
            decision: The controller's decision.
        """
        if decision is not None and decision.reason.is_measured:
            return decision
        if not isinstance(loader, EchoLoaders) or loader.has_one_factor:
            return recommend(observation)
        why = "the loaders have different factors, and it is not known which of them the accelerator waits for"
        return Decision(observation.factor, Reason.not_measured, why)

    def metrics_state(self, trainer: pl.Trainer) -> dict[str, tuple[float, bool]]:
        """Returns, for each logged metric, its value and whether it was logged since the last epoch's end.

        A resumed Trainer has lost both. Without a controller nobody needs them, and they are not read.
        """
        if self._controller is None:
            return {}
        return {name: (float(value), self._is_new(name, value)) for name, value in self._logged(trainer).items()}

    def load_metrics_state(self, state: dict[str, tuple[float, bool]]) -> None:
        """Restores what `metrics_state` returned."""
        with inside("metrics"):
            state = {name: entry(state, name, tuple[float, bool]) for name in state}
        self._logged_before = {name: torch.tensor(value) for name, (value, _) in state.items()}
        self._logged_last = {name: self._logged_before[name] for name, (_, is_new) in state.items() if not is_new}

    def state_dict(self) -> dict[str, Any]:
        """Returns the controller's state, in plain types and tensors."""
        return {} if self._controller is None else state_by_kind(self._controller)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. It ignores the state of another class of controller."""
        if self._controller is not None:
            load_state_by_kind(self._controller, state)

    def recent_state(self) -> dict[str, Any]:
        """Returns the epochs that the next one may be joined with, in plain types."""
        return self._recent.state_dict()

    def load_recent_state(self, state: dict[str, Any]) -> None:
        """Restores what `recent_state` returned."""
        self._recent.load_state_dict(state)

    def _logged(self, trainer: pl.Trainer) -> dict[str, Tensor]:
        found = {**self._logged_before, **trainer.callback_metrics}
        return {name: value for name, value in found.items() if not name.startswith("echo/")}

    def _is_new(self, name: str, value: Tensor) -> bool:
        """Whether a metric was logged since the last epoch's end. ``callback_metrics`` also keeps older values."""
        last = self._logged_last.get(name)
        return last is None or last.data_ptr() != value.data_ptr()


def _within_surplus(decision: Decision, factor: float, loader: Echoed | None) -> Decision:
    """Returns a decision that does not make the training slower than others that share its reading. They would wait for it.

    Args:
        decision: The controller's decision.
        factor: The factor that was set last. The training may keep it.
        loader: What is trained on.
    """
    sharing = loader.sharing if isinstance(loader, EchoLoader) else None
    most = None if sharing is None else sharing.most_factor
    if most is None or decision.factor <= max(most, factor) or not decision.reason.is_measured:
        return decision
    why = f"with more than {most:g} this training would be slower than those that share its reading"
    return Decision(max(most, factor), Reason.at_maximum, f"{decision.message}; {why}", decision.since)


def _mean_over_ranks(pl_module: pl.LightningModule, names: list[str], logged: dict[str, Tensor]) -> dict[str, float]:
    if not names:
        return {}
    values = torch.tensor([float(logged.get(name, float("nan"))) for name in names], device=pl_module.device)
    gathered = pl_module.all_gather(values)
    assert isinstance(gathered, Tensor)
    return dict(zip(names, gathered.reshape(-1, len(names)).nanmean(dim=0).tolist(), strict=True))
