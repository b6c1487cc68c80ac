"""Callbacks of the tests of `EchoCallback`, and a logger that remembers."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loggers import Logger
from trainer_runs import Data, Recorder, Run, trainer

from lightning_echo import Controller, EchoCallback, EchoConfig, FactorSchedule, MetricGuard
from lightning_echo.measure.control import Decision, Observation, Reason

STEPS = 6  # of an epoch of Data: 22 examples in batches of 4
PER_EPOCH = {
    *("factor", "fresh_examples", "echoed_examples", "passes", "effective_factor", "idle_fraction", "slowest_rank"),
    *("data_wait_seconds", "step_seconds", "upstream_seconds", "examples_per_second", "recommended_factor"),
    "first_batch_seconds",
}


def echo(factor: float = 2, *, controller: Controller | None = None, **options: Any) -> EchoCallback:
    config = EchoConfig(factor, **{"insertion_point": "after_augmentation", "seed": 7, **options})
    return EchoCallback(controller, echo=config)


class Remembering(Logger):
    """Remembers every call."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[int | None, dict[str, float]]] = []
        self.params: list[Any] = []

    name = "remembering"
    version = 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if any(key.startswith("echo/") for key in metrics):
            self.metrics.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.params.append(params)


class Recording(Controller):
    """Keeps the factor, and what it was shown."""

    def __init__(self, factors: dict[int, float] | None = None) -> None:
        self.factors, self.seen = factors or {}, []  # type: ignore[var-annotated]

    def decide(self, observation: Observation) -> Decision:
        self.seen.append(observation)
        return Decision(self.factors.get(observation.epoch, observation.factor), Reason.custom, "told to")


def factors(callback: EchoCallback) -> list[float]:
    return [report.factor for report in callback.reports]


WAYS = ("data module", "model's own", "passed")  # in which a loader comes to a Trainer whose callback echoes it


class OwnLoaders(Recorder):
    """A model that has its data itself."""

    def __init__(self, data: Data, **options: Any) -> None:
        super().__init__(**options)
        self.data = data

    def train_dataloader(self) -> Any:
        return self.data.train_dataloader()

    def val_dataloader(self) -> Any:
        return self.data.val_dataloader()


def fit_by(
    way: str, *callbacks: Any, runner: Any = None, model: Any = None, ckpt_path: Any = None, data: Any = None, **options: Any
) -> Run:
    """Trains on a `Data`, which comes to the Trainer in one of the `WAYS`; its options by name, the rest are the Trainer's."""
    of_data = {name: options.pop(name) for name in ("workers", "length") if name in options}
    data, of_model = data or Data(**of_data), {"reads_stepping": options.pop("reads_stepping", False)}
    model = model or (OwnLoaders(data, **of_model) if way == "model's own" else Recorder(**of_model))
    run = Run(model, data, runner or trainer(callbacks=list(callbacks), **options))
    if way == "passed":
        run.trainer.fit(run.model, data.train_dataloader(), data.val_dataloader(), ckpt_path=ckpt_path)
    else:
        run.trainer.fit(run.model, datamodule=data if way == "data module" else None, ckpt_path=ckpt_path)
    return run


class Falling(Recorder):
    """Its val_loss falls and rises as it is told."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", [5.0, 4.0, 6.0, 7.0, 3.0, 2.0, 1.0, 9.0, 9.0, 9.0][self.current_epoch])


def guarded() -> EchoCallback:
    schedule = FactorSchedule({0: 4, 2: 3, 5: 4})
    return echo(4, controller=MetricGuard(schedule, patience=2))
