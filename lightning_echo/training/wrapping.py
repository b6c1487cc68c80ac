"""`Wrapping`: an `EchoLoader` around each of the user's loaders that is to be echoed; the others are left as they are.

Options are given for all of them at once or by name. Loaders with the same options must not share order, draws and noise, so that
the seed of each is made of the one given (or of ``seed_everything``'s) and its name; that of a single loader is as it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_echo.config import EchoConfig
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.planning.hashing import named_seed
from lightning_echo.training.collection import is_collection, leaves_of, with_leaves

__all__ = ["Wrapping", "check_configs", "check_echo"]


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

    def wrap(self, given: Any, before: Mapping[str, EchoLoader], factor: float | None, trainer: Any) -> Any:
        """The user's loader echoed, or the user's collection of loaders with those echoed that are to be.

        Args:
            given: What ``train_dataloader`` returned.
            before: Those in use so far, by name: kept where they stand around the same loader.
            factor: For loaders that are new; None: that of their options.
            trainer: Knows the ranks; None: there is none.

        Raises:
            MisconfigurationException: A name is unknown, or a loader is echoed already.
            TypeError: What is to be echoed is no loader.
            ValueError: An option does not fit a loader.
        """
        leaves = leaves_of(given)
        echoed = {name: self._echo(name, leaves[name], before.get(name), factor, trainer) for name in self._names(given, leaves)}
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

    def _echo(self, name: str, loader: Any, before: EchoLoader | None, factor: float | None, trainer: Any) -> EchoLoader:
        if before is not None and (loader is before.loader or loader is before):
            return before
        if isinstance(loader, EchoLoader):
            return loader if self._way_out is None else self._refuse_echoed(name)
        options = (self._for_all or self.configs[name]).as_options()
        if before is not None or factor is not None:
            options["factor"] = factor if before is None else before.factor
        if options["seed"] is not None:
            options["seed"] = named_seed(options["seed"], name)
        ranks = {}
        if trainer is not None or not self._shard:
            shards = trainer.distributed_sampler_kwargs if trainer is not None and self._shard else None
            ranks = {"num_replicas": 1, "rank": 0, **(shards or {})}
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


def check_configs(argument: str, configs: Any) -> None:
    """Refuses what are no options by name.

    Raises:
        TypeError: It is no mapping of names to `EchoConfig`.
        ValueError: It is empty.
    """
    example = f'{argument}={{"labelled": EchoConfig(factor=4)}}'
    if not isinstance(configs, Mapping):
        raise TypeError(f"{argument} must map names of loaders to an EchoConfig each, got {configs!r}: {example}")
    if not configs:
        raise ValueError(f"{argument} is empty, so that nothing would be echoed: {example}")
    for name, config in configs.items():
        if not isinstance(name, str) or not isinstance(config, EchoConfig):
            raise TypeError(
                f"{argument} must map names of loaders to an EchoConfig each, got {name!r}: {type(config).__name__} {config!r}: "
                f"{example}; positions in a list are the names '0', '1', ..."
            )


def check_echo(echo: Any) -> None:
    """Refuses what is neither `EchoConfig`, nor options by name, nor None.

    Raises:
        TypeError: It is something else.
        ValueError: It is empty.
    """
    if echo is None or isinstance(echo, EchoConfig):
        return
    if not isinstance(echo, Mapping) or not all(isinstance(config, EchoConfig) for config in echo.values()):
        raise TypeError(
            f"echo must be an EchoConfig, a dict of them by names of loaders, or None, got {type(echo).__name__} {echo!r}: "
            "EchoConfig(factor=4), EchoConfig(**options) of a dict, OmegaConf.to_object(config) of a structured config"
        )
    check_configs("echo", echo)
