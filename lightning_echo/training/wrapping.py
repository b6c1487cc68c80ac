"""`Wrapping`: an `EchoLoader` around each of the user's loaders that is to be echoed; the others are left as they are.

Options are given for all of them at once or by name. Loaders with the same options must not share order, draws and noise, so that
the seed of each is made of the one given (or of ``seed_everything``'s) and its name; that of a single loader is as it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_echo.config import AUTO_FACTOR, EchoConfig, config_of
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.planning.hashing import named_seed
from lightning_echo.training.collection import is_collection, leaves_of, with_leaves

__all__ = ["Options", "Wrapping", "read_loaders", "read_options", "without_auto"]

Options: TypeAlias = EchoConfig | dict[str, EchoConfig]


class Wrapping:
    """What becomes of the loaders that a ``train_dataloader`` returns.

    Args:
        config: The options of all of them, or by name of those that are echoed.
        owner: What the user has in hands.
        way_out: What to do where a loader is an `EchoLoader` already, to end a sentence; None: it is taken as it is.
        shard: Whether each rank gets its share of the data.

    Attributes:
        configs: The options by name; those of all loaders under the empty name.
    """

    def __init__(self, config: EchoConfig | Mapping[str, EchoConfig], owner: str, way_out: str | None, shard: bool) -> None:
        self._for_all = config if isinstance(config, EchoConfig) else None
        self.configs = {"": config} if isinstance(config, EchoConfig) else dict(config)
        self._owner, self._way_out, self._shard = owner, way_out, shard

    def wrap(
        self, given: Any, before: Mapping[str, EchoLoader], factor: float | None, trainer: Any, *, is_dealt_out: bool = False
    ) -> Any:
        """The user's loader echoed, or the user's collection of loaders with those echoed that are to be.

        Args:
            given: What ``train_dataloader`` returned.
            before: Those in use so far, by name: kept where they stand around the same loader.
            factor: For loaders that are new; None: that of their options.
            trainer: Knows the ranks; None: there is none.
            is_dealt_out: Whether Lightning has dealt the data out to the ranks already, where it does so.

        Raises:
            MisconfigurationException: A name is unknown, or a loader is echoed already.
            TypeError: What is to be echoed is no loader.
            ValueError: An option does not fit a loader.
        """
        leaves = leaves_of(given)
        ranks: dict[str, Any] = {}  # else torch.distributed is asked
        if trainer is not None or not self._shard:
            deals_out = trainer is not None and self._shard and not is_dealt_out
            ranks = {"num_replicas": 1, "rank": 0, **((trainer.distributed_sampler_kwargs if deals_out else None) or {})}
        echoed = {name: self._echo(name, leaves[name], before.get(name), factor, ranks) for name in self._names(given, leaves)}
        for name, leaf in leaves.items():
            if isinstance(leaf, EchoLoader) and name not in echoed:
                self._refuse_echoed(name)
        if len({id(loader) for loader in echoed.values()}) < len(echoed):
            raise MisconfigurationException(
                "train_dataloader returns the same EchoLoader twice, and each iteration would take batches away from the other: "
                "return one for each"
            )
        return with_leaves(given, {**leaves, **echoed})

    def _names(self, given: Any, leaves: Mapping[str, Any]) -> list[str]:
        """Of those to be echoed."""
        if self._for_all is not None:
            return list(leaves)
        names = ", ".join(map(repr, leaves))
        if not is_collection(given):
            raise MisconfigurationException(
                f"{self._owner} has options for loaders named {', '.join(map(repr, self.configs))}, but train_dataloader returns"
                f" a single one ({type(given).__name__}): give the options without a name"
            )
        if unknown := [name for name in self.configs if name not in leaves]:
            raise MisconfigurationException(
                f"{self._owner} has options for a loader named {', '.join(map(repr, unknown))}, but train_dataloader returns "
                f"loaders named {names}: use these names (keys and positions, joined by '/')"
            )
        return [name for name in leaves if name in self.configs]

    def _echo(self, name: str, loader: Any, before: EchoLoader | None, factor: float | None, ranks: dict[str, Any]) -> EchoLoader:
        if before is not None and (loader is before.loader or loader is before):
            return before
        if isinstance(loader, EchoLoader):
            return loader if self._way_out is None else self._refuse_echoed(name)
        options = (self._for_all or self.configs[name]).as_options()
        if before is not None or factor is not None:
            options["factor"] = factor if before is None else before.factor
        if options["seed"] is not None:
            options["seed"] = named_seed(options["seed"], name)
        try:
            echoed = EchoLoader(loader, **options, **ranks)
        except (TypeError, ValueError) as error:
            if not name:
                raise
            raise (TypeError if isinstance(error, TypeError) else ValueError)(f"loader {name!r}: {error}") from error
        echoed.name = name
        return echoed

    def _refuse_echoed(self, name: str) -> Any:
        what = f"an EchoLoader as {name!r}" if name else "an EchoLoader"
        raise MisconfigurationException(f"train_dataloader returns {what} already: return the plain loader, or {self._way_out}")


def read_options(argument: str, given: Any) -> Options | None:
    """The options of all loaders, or by name of those that are echoed; None where nothing is given.

    Args:
        argument: What they were given as, for error messages.
        given: An `EchoConfig`, a mapping of its options, or a mapping of names of loaders to these. A mapping may be a dict or
            OmegaConf's ``DictConfig``.

    Raises:
        TypeError: It is something else, or an option has a wrong type.
        ValueError: It is empty, or an option has an impossible value.
    """
    if given is None or isinstance(given, EchoConfig):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{argument} must be an EchoConfig, a dict or DictConfig of its options, a dict of these by names of loaders, or "
            f"None, got {type(given).__name__} {given!r}: EchoConfig(factor=4)"
        )
    if not given or any(isinstance(value, EchoConfig | Mapping) for value in given.values()):
        return read_loaders(argument, given)
    return config_of(argument, given)


def read_loaders(argument: str, given: Any) -> dict[str, EchoConfig]:
    """The options by names of loaders: each an `EchoConfig` or a mapping of its options.

    Raises:
        TypeError: It is something else, or an option has a wrong type.
        ValueError: It is empty, or an option has an impossible value.
    """
    example = f'{argument}={{"labelled": EchoConfig(factor=4)}}'
    if not isinstance(given, Mapping):
        raise TypeError(f"{argument} must map names of loaders to an EchoConfig each, got {given!r}: {example}")
    if not given:
        raise ValueError(f"{argument} is empty, so that nothing would be echoed: {example}")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, EchoConfig | Mapping):
            raise TypeError(
                f"{argument} must map names of loaders to an EchoConfig each, got {name!r}: {type(value).__name__} {value!r}: "
                f"{example}; positions in a list are the names '0', '1', ..."
            )
    return {name: config_of(f"{argument}[{name!r}]", value) for name, value in given.items()}


def without_auto(argument: str, given: Options) -> tuple[Options, bool]:
    """The options to begin with, and whether a controller is to decide on the factor: ``factor="auto"`` becomes 1.

    Raises:
        ValueError: Only some of the loaders have it, and a controller decides on one factor for all.
    """
    configs = given if isinstance(given, dict) else {"": given}
    named = [name for name, config in configs.items() if config.factor == AUTO_FACTOR]
    if not named:
        return given, False
    if len(named) < len(configs):
        raise ValueError(
            f"{argument} has factor='auto' for {', '.join(map(repr, named))} alone, but a controller decides on one factor for "
            "all loaders that are echoed: give all of them 'auto', or each a number"
        )
    begun = {name: EchoConfig(**{**config.as_options(), "factor": 1.0}) for name, config in configs.items()}
    return (begun if isinstance(given, dict) else begun[""]), True
