"""`EchoConfig`: the options of an `EchoLoader` as a value that configuration files, command lines and OmegaConf can hold."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from lightning_echo.insertion import InsertionPoint
from lightning_echo.loading import options

__all__ = ["EchoConfig"]


@dataclass
class EchoConfig:
    """The options of echoing: plain values only, so that ``OmegaConf.structured(EchoConfig)`` and checkpoints can hold them.

    Not frozen, because OmegaConf would make it read-only. What is changed later is checked where it is used.

    Args:
        factor: Echo factor, a real number >= 1: uses per fresh example. 1 is the plain loader.
        insertion_point: Where the echo stage stands: the name of an `InsertionPoint`.
        buffer_size: Most live examples per rank (batches for ``after_batching`` and ``after_transfer``), see `EchoLoader`.
        epoch_length: ``"fixed"`` or ``"full_pass"``, see `EchoLoader`.
        seed: Seed of order, draws and augmentation. Default: that of ``seed_everything``, else drawn once.

    Raises:
        TypeError: A value has a wrong type.
        ValueError: A value is impossible.

    Example:
        >>> EchoConfig(factor=4)
        EchoConfig(factor=4.0, insertion_point='auto', buffer_size=None, epoch_length='fixed', seed=None)
    """

    factor: float = 1.0
    insertion_point: str = InsertionPoint.auto.value
    buffer_size: int | None = None
    epoch_length: str = "fixed"
    seed: int | None = None

    def __post_init__(self) -> None:
        self.factor = options.check_factor(self.factor)
        self.insertion_point = options.check_point(self.insertion_point).value
        self.buffer_size = options.check_buffer_size(self.buffer_size)
        self.epoch_length = options.check_epoch_length(self.epoch_length)
        self.seed = options.check_seed(self.seed)

    def as_options(self) -> dict[str, Any]:
        """The options by name, without what a subclass adds: ``EchoLoader(loader, **config.as_options())``."""
        return {field.name: getattr(self, field.name) for field in fields(EchoConfig)}
