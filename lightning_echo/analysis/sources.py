"""The data of an analysis, its transfers to the device, and short trainings from a loader or from a batch that is ready."""

from __future__ import annotations

import copy
import logging
import re
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice, repeat
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_echo.analysis.measured import Pinning, Spread
from lightning_echo.data.copies import ThrowAwayCopies
from lightning_echo.data.machine import free_memory_bytes
from lightning_echo.datamodule import EchoDataModule
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.training.loaders import leaves_of, with_leaves
from lightning_echo.training.package import classes, is_overridden, package_of

# ---------------------------------------------------------------------- data
# The data for the trainings of an analysis: copies of the user's data, set up once. Any loader can take the place of its own.
#
# The data module's hooks for transferring batches belong to a step, so the data module takes part in every training. Everything
# that an analysis calls, iterates, reads or trains on is a copy (data/copies.py). Two kinds of objects are copied:
#
#     the data module, or the loaders         when the analysis begins
#     the result of ``train_dataloader``      when Lightning asks for it: perhaps only the hook refers to it
#
# All copies together may hold a gibibyte of tensors, arrays and images (at most a fourth of the free memory), and a million
# members of containers. A larger object is shared with the user's data; a note in the analysis names it.

_MOST_MEMBERS = 1_000_000
_MOST_BYTES = 2**30
_FREE_MEMORY_DIVISOR = 4  # a fourth of the free memory
_HOOK = "train_dataloader"


class TrainingData:
    """Copies of a data module or loaders (None: the model's own), for any number of trainings. They are used without echoing.

    ``instances`` are the objects, besides the model, whose hooks Lightning may call.
    """

    def __init__(self, data: Any) -> None:
        free = free_memory_bytes()
        self._copies = ThrowAwayCopies(
            _MOST_MEMBERS, _MOST_BYTES if free is None else min(_MOST_BYTES, free // _FREE_MEMORY_DIVISOR)
        )
        data = data.datamodule if isinstance(data, EchoDataModule) else data
        self._module: pl.LightningDataModule | None = None
        if isinstance(data, classes("LightningDataModule")):
            self._data = self._module = self._copies.of(data, sharing=[data.trainer])
        else:
            self._data = _of_loaders(data, self._copies)
        self.instances = [] if self._module is None else [self._module]

    @property
    def too_large(self) -> list[str]:
        """Classes and attributes that are shared with the user's data, since they are too large to be copied."""
        return self._copies.too_large

    def as_given(self, model: pl.LightningModule) -> Any:
        """Returns the data for the first training, whose hooks prepare it; without given loaders, they come from ``model``."""
        if self._data is None and is_overridden(_HOOK, model):
            self._copy_what_is_returned(model)
        if self._module is not None:
            # The data module is torn down with this object, and not after a training: other trainings use the same data set.
            weakref.finalize(self, type(self._module).teardown, self._module, "fit")
            vars(self._module).update(teardown=nothing)
            self._copy_what_is_returned(self._module)
        return self._data

    def over(self, loader: Any) -> Any:
        """Returns the data with this training loader in place of its own. Nothing is set up again."""
        if self._module is None:
            return loader
        vars(self._module).update(prepare_data=nothing, setup=nothing, train_dataloader=lambda: loader)
        return self._module

    def echoed(self, loader: Any, **options: Any) -> EchoDataModule:
        """Returns the data with this training loader, echoed. The options are those of `EchoDataModule`."""
        if self._module is None:
            return EchoDataModule.from_dataloaders(loader, **options)
        return EchoDataModule(self.over(loader), **options)

    def _copy_what_is_returned(self, instance: Any) -> None:
        ask: Callable[[], Any] = getattr(instance, _HOOK)
        copies = self._copies  # the hook must not refer to self: the finalizer refers to the data module, and so to the hook
        vars(instance)[_HOOK] = lambda: _of_loaders(ask(), copies)


def _of_loaders(loaders: Any, copies: ThrowAwayCopies) -> Any:
    """Returns copies of loaders, in the same collection, without echoing."""
    leaves = leaves_of(loaders)
    plain = {name: leaf.loader if isinstance(leaf, EchoLoader) else leaf for name, leaf in leaves.items()}
    return with_leaves(loaders, {name: copies.of(leaf) for name, leaf in plain.items()})


def nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing, in place of a hook."""


# ---------------------------------------------------------------------- transfers
# The hook ``transfer_batch_to_device`` may be the model's or the data module's, and Lightning decides which one it calls. So both
# are replaced, in copies of the user's objects. The hook returns the batch before ``on_after_batch_transfer``, which is part of a
# step.
#
# On a CUDA device, batches that are not pinned are also copied from pinned memory, so that both times are known. The hook is the
# same, and the copy is not used. The first time does not count: memory is then taken that later batches use again.

_BEFORE, _TRANSFER = "on_before_batch_transfer", "transfer_batch_to_device"


_PINNED_COPIES = 6
_IS_PINNED = "the loader pins its batches already"
_NO_DEVICE = "batches are copied to the device {device!r}, and only copies to 'cuda' are faster from pinned memory"
_NOT_SEEN = "the strategy copies batches in its own way, so that copies from pinned memory could not be measured"


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Transfers:
    """The transfers that were noted.

    Args:
        is_pinned: Whether the loader pins the batches.
        pin: Returns a batch in pinned memory.
        wait: Waits for the work of a device.

    Attributes:
        seconds: Seconds of each transfer, the device's work included.
        batch: The last batch, on the device.
        host: The same before its transfer.
    """

    def __init__(
        self,
        is_pinned: bool = False,
        pin: Callable[[Any], Any] = pin_memory,
        wait: Callable[[torch.device], None] = wait_for,
    ) -> None:
        self.seconds: list[float] = []
        self.batch: Any = None
        self.host: Any = None
        self._is_pinned, self._pin, self._wait = is_pinned, pin, wait
        self._device: torch.device | None = None
        self._pins: list[float] = []
        self._copies: list[float] = []

    def transfer(self, hook: Callable[..., Any], batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Returns what the hook makes of a batch, and notes the time."""
        self.host, self._device = batch, device
        self.batch = self._timed(self.seconds, hook, batch, device, dataloader_idx)
        if not self.no_pinning and len(self._copies) < _PINNED_COPIES:
            pinned = self._timed(self._pins, self._pin, batch)
            self._timed(self._copies, hook, pinned, device, dataloader_idx)
        return self.batch

    @property
    def no_pinning(self) -> str:
        """Why batches cannot be pinned, or need not be; empty if they can."""
        if self._device is None:
            return _NOT_SEEN
        if self._device.type != "cuda":
            return _NO_DEVICE.format(device=self._device.type)
        return _IS_PINNED if self._is_pinned else ""

    @property
    def pinning(self) -> Pinning | None:
        """What pinning takes and brings; None if that was not measured."""
        if not self._copies:
            return None
        return Pinning(*(Spread.of(seconds[1:] or seconds) for seconds in (self._pins, self._copies)))

    def _timed(self, seconds: list[float], call: Callable[..., Any], *args: Any) -> Any:
        assert self._device is not None
        self._wait(self._device)
        begin = time.perf_counter()
        result = call(*args)
        self._wait(self._device)
        seconds.append(time.perf_counter() - begin)
        return result


@contextmanager
def transfers_noted(instances: Iterable[Any], transfers: Transfers) -> Iterator[None]:
    """Notes the transfers that the model and the data module make, until the ``with`` block ends."""
    replaced = list(instances)
    for instance in replaced:
        vars(instance)[_TRANSFER] = _Tap(getattr(instance, _TRANSFER), transfers)
    try:
        yield
    finally:
        for instance in replaced:
            vars(instance).pop(_TRANSFER, None)


@contextmanager
def transfers_skipped(instances: Iterable[Any]) -> Iterator[None]:
    """Skips the transfers, and the hook before them, until the ``with`` block ends: the batches are on the device already."""
    replaced = list(instances)
    for instance in replaced:
        vars(instance).update({_TRANSFER: _same, _BEFORE: _same})
    try:
        yield
    finally:
        for instance in replaced:
            for name in (_TRANSFER, _BEFORE):
                vars(instance).pop(name, None)


def _same(batch: Any, *args: Any, **kwargs: Any) -> Any:
    return batch


class _Tap:
    """Takes the place of an instance's hook. Lightning looks at ``__wrapped__`` to see whose hook it is."""

    def __init__(self, users_hook: Callable[..., Any], transfers: Transfers) -> None:
        self.__wrapped__ = users_hook
        self._transfers = transfers

    def __call__(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return self._transfers.transfer(self.__wrapped__, batch, device, dataloader_idx)


# ---------------------------------------------------------------------- fits
# Short trainings: the time of a step with a batch that is ready, and with batches from a loader.
#
# Each training is a real ``Trainer.fit``, without validation, logging, checkpoints and the user's callbacks: these must not take
# part in a measurement.

WARM_UP_STEPS = 5
# Number of steps between two synchronisations with a device that runs behind the host, or with the clocks of the other ranks.
_SYNCHRONISED_EVERY = 10
_FIXED_OPTIONS: dict[str, Any] = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "fast_dev_run": False,
    "overfit_batches": 0.0,
    "max_epochs": 1,
    "min_epochs": None,
    "max_steps": -1,
    "min_steps": None,
    "max_time": None,
    "limit_val_batches": 0,
    "val_check_interval": 1.0,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": 0,
    "reload_dataloaders_every_n_epochs": 0,
    "profiler": None,
    "barebones": False,
}


class StepClock(pl.Callback):
    """Measures the seconds of each step, after the first ones, and ends the fit after ``most_seconds``, on all ranks together.

    ``skipped`` steps do not count (at least 1), or those of ``most_skipped_seconds`` (default: half the time); at least
    ``fewest`` do. On a device that runs behind the host, the seconds are means of ten steps.
    """

    def __init__(
        self,
        most_seconds: float = float("inf"),
        skipped: int = WARM_UP_STEPS,
        fewest: int = 1,
        most_skipped_seconds: float | None = None,
    ) -> None:
        self._most_seconds, self._skipped, self._fewest = most_seconds, max(1, skipped), fewest
        self._most_skipped_seconds = most_seconds / 2 if most_skipped_seconds is None else most_skipped_seconds
        self._begin = self._last = self._cpu_begin = 0.0
        self._steps = self._noted = 0
        self._counts_from: int | None = None
        self.seconds: list[float] = []
        self.cpu_seconds = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._steps += 1
        if self._counts_from is None:
            wait_for(pl_module.device)
            now = time.perf_counter()
            if self._steps >= self._skipped or now - self._begin > self._most_skipped_seconds:  # warmed up
                self._counts_from = self._noted = self._steps
                self._begin = self._last = now
                self._cpu_begin = time.process_time()
        elif self._steps - self._noted == (_SYNCHRONISED_EVERY if pl_module.device.type == "cuda" else 1):
            self._note(pl_module.device)
        if self._is_over(trainer):
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._counts_from is not None and self._steps > self._noted:
            self._note(pl_module.device)

    def _note(self, device: torch.device) -> None:
        assert self._counts_from is not None
        wait_for(device)
        now, steps = time.perf_counter(), self._steps - self._noted
        self.seconds += [(now - self._last) / steps] * steps
        self.cpu_seconds = (time.process_time() - self._cpu_begin) / (self._steps - self._counts_from)
        self._last, self._noted = now, self._steps

    def _is_over(self, trainer: pl.Trainer) -> bool:
        """Whether the time is up on any rank. All ranks call this at the same steps, and the time of the call does not count."""
        is_over = self._counts_from is not None and self._steps - self._counts_from >= self._fewest
        is_over = is_over and self._last - self._begin > self._most_seconds
        if trainer.world_size == 1:
            return is_over
        if self._steps % _SYNCHRONISED_EVERY:
            return False
        begin = time.perf_counter()
        is_over = trainer.strategy.reduce_boolean_decision(is_over, all=False)
        self._last += time.perf_counter() - begin
        return is_over


class _Lenient(pl.Callback):
    """Lets learning rate schedulers work without the metric that they monitor, since there is no validation."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for scheduler in trainer.lr_scheduler_configs:
            scheduler.strict = False


class PreparedLoader(pl.Callback):
    """Takes the training loader as the Trainer has prepared it; None before the first step. ``was_here``: in this process."""

    def __init__(self) -> None:
        self.was_here = False
        self.loader: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.was_here = True

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.loader = trainer.train_dataloader


class RepeatedBatch:
    """A loader that yields one batch ``steps`` times."""

    def __init__(self, batch: Any, steps: int) -> None:
        self._batch, self._steps = batch, steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        return islice(repeat(self._batch), self._steps)


def fit(model: pl.LightningModule, data: Any, steps: int, callback: pl.Callback, trainer_kwargs: Mapping[str, Any]) -> None:
    """Trains the model for at most ``steps`` steps, with ``callback`` and without the user's callbacks."""
    # The options are copied, since a strategy or a plugin belongs to one Trainer only.
    left_out = {*_FIXED_OPTIONS, "callbacks", "logger"}
    options = {name: copy.deepcopy(value) for name, value in trainer_kwargs.items() if name not in left_out}
    options |= {**_FIXED_OPTIONS, "callbacks": [callback, _Lenient()], "limit_train_batches": steps}
    # A step may write to its logger, unless the user has switched logging off.
    package = package_of(model)
    options["logger"] = package.get("loggers.logger.DummyLogger")() if trainer_kwargs.get("logger", True) else False
    named = {"datamodule": data} if isinstance(data, classes("LightningDataModule")) else {"train_dataloaders": data}
    with quiet(package.name, package.fabric), warnings.catch_warnings():
        for name in (package.name, package.fabric):
            warnings.filterwarnings("ignore", module=rf"{re.escape(name)}\b")
        with _trainer_is_ours():
            trainer = package.get("Trainer")(**options)
        trainer.fit(model, **named)


makes_trainer = False  # a Trainer that is made now is ours: `lightning_echo.run` brings it no callback


@contextmanager
def _trainer_is_ours() -> Iterator[None]:
    global makes_trainer
    makes_trainer = True
    try:
        yield
    finally:
        makes_trainer = False


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silences this package's log and those of ``names`` until the ``with`` block ends: they are about what is only measured."""
    loggers = [logging.getLogger(name) for name in (*names, "lightning_echo")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
