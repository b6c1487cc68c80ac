"""`EchoConfig`: the options of an `EchoLoader` as a value that configuration files, command lines and OmegaConf can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_echo.insertion import InsertionPoint
from lightning_echo.loading import options

__all__ = ["AUTO_FACTOR", "EchoConfig", "config_of", "given_options"]

AUTO_FACTOR = "auto"  # the factor that a controller decides on


@dataclass
class EchoConfig:
    """The options of echoing: plain values only, so that ``OmegaConf.structured(EchoConfig)`` and checkpoints can hold them.

    Not frozen, because OmegaConf would make it read-only. What is changed later is checked where it is used.

    Args:
        factor: Echo factor, a real number >= 1: uses per fresh example. 1 is the plain loader. ``"auto"``: an `EchoCallback`
            decides on it by a `TargetIdle` with its defaults, from 1 on.
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

    factor: int | float | str = 1.0  # OmegaConf refuses an integer where a union does not name it
    insertion_point: str = InsertionPoint.auto.value
    buffer_size: int | None = None
    epoch_length: str = "fixed"
    seed: int | None = None

    def __post_init__(self) -> None:
        self.factor = _check_factor(self.factor)
        self.insertion_point = options.check_point(self.insertion_point).value
        self.buffer_size = options.check_buffer_size(self.buffer_size)
        self.epoch_length = options.check_epoch_length(self.epoch_length)
        self.seed = options.check_seed(self.seed)

    def as_options(self) -> dict[str, Any]:
        """The options by name, without what a subclass adds: ``EchoLoader(loader, **config.as_options())``."""
        return {field.name: getattr(self, field.name) for field in fields(EchoConfig)}


def config_of(argument: str, value: EchoConfig | Mapping[str, Any]) -> EchoConfig:
    """Options as an `EchoConfig`, that were given as one or as a mapping of their names (a dict, OmegaConf's ``DictConfig``).

    Args:
        argument: What they were given as, for error messages.
        value: The options.

    Raises:
        TypeError: There is no option of such a name, or a value has a wrong type.
        ValueError: A value is impossible.

    Example:
        >>> config_of("echo", {"factor": 2, "buffer_size": 8}).buffer_size
        8
    """
    if isinstance(value, EchoConfig):
        return value
    known = [field.name for field in fields(EchoConfig)]
    if unknown := [str(name) for name in value if name not in known]:
        raise TypeError(f"{argument} has no option {', '.join(map(repr, unknown))}: its options are {', '.join(known)}")
    return EchoConfig(**value)


def given_options(**values: Any) -> dict[str, Any]:
    """The options, of those of an `EchoConfig`, that differ from what they are where nobody gives them; a factor is then None.

    Example:
        >>> given_options(factor=None, insertion_point="auto", seed=7)
        {'seed': 7}
    """
    defaults = {field.name: field.default for field in fields(EchoConfig)} | {"factor": None}
    return {name: value for name, value in values.items() if value != defaults[name]}


def _check_factor(factor: Any) -> float | str:
    if not isinstance(factor, str):
        return options.check_factor(factor)
    if factor != AUTO_FACTOR:
        raise TypeError(
            f"factor must be a real number >= 1 (1: no echoing) or 'auto', got {factor!r}; a controller is given by the argument "
            "controller"
        )
    return AUTO_FACTOR
