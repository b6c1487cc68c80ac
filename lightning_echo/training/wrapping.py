"""`Wrapping`: puts an `EchoLoader` around each of the user's loaders that is to be echoed, and leaves the others as they are.

The options are given for all loaders at once, or by name. Loaders with the same options must not have the same order, draws and
random augmentation. Therefore the seed of each loader of a collection is made from the given seed (or from that of
``seed_everything``) and the loader's name. A single loader has the given seed itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_echo.config import EchoConfig
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.planning.hashing import named_seed
from lightning_echo.training.collection import is_collection, leaves_of, with_leaves

__all__ = ["Wrapping"]


class Wrapping:
    """Wraps the loaders that a ``train_dataloader`` returns.

    Args:
        config: The options of all loaders, or the options of each loader to echo, by name.
        owner_name: Name of the object that the user has, for messages.
        way_out: The end of an error message for a loader that is already an `EchoLoader`. None: such a loader is taken as it is.
        shard: Whether each rank gets its share of the data.

    Attributes:
        configs: The options by name. Options for all loaders have the empty name.
    """

    def __init__(self, config: EchoConfig | Mapping[str, EchoConfig], owner_name: str, way_out: str | None, shard: bool) -> None:
        self._config_of_all = config if isinstance(config, EchoConfig) else None
        self.configs = {"": config} if isinstance(config, EchoConfig) else dict(config)
        self._owner_name, self._way_out, self._shard = owner_name, way_out, shard

    def wrap(
        self, loaders: Any, before: Mapping[str, EchoLoader], factor: float | None, trainer: Any, *, is_dealt_out: bool = False
    ) -> Any:
        """Returns the user's loader, or collection of loaders, with an `EchoLoader` for each loader that is to be echoed.

        Args:
            loaders: What ``train_dataloader`` returned.
            before: The `EchoLoader`s in use so far, by name. One that wraps the same loader is used again.
            factor: The factor of new `EchoLoader`s; None: that of their options.
            trainer: The Trainer, which knows the ranks; None if there is none.
            is_dealt_out: Whether Lightning has already divided the data among the ranks, if it does so at all.

        Raises:
            MisconfigurationException: A name is unknown, or a loader is echoed already.
            TypeError: An object to echo is not a loader.
            ValueError: An option does not fit a loader.
        """
        leaves = leaves_of(loaders)
        ranks: dict[str, Any] = {}  # empty: torch.distributed is asked
        if trainer is not None or not self._shard:
            deals_out = trainer is not None and self._shard and not is_dealt_out
            ranks = {"num_replicas": 1, "rank": 0, **((trainer.distributed_sampler_kwargs if deals_out else None) or {})}
        names = self._names_to_echo(loaders, leaves)
        if is_collection(loaders):
            self._refuse_share_of_several(names)
        echoed = {name: self._echo(name, leaves[name], before.get(name), factor, ranks) for name in names}
        for name, leaf in leaves.items():
            if isinstance(leaf, EchoLoader) and name not in echoed:
                self._refuse_echoed(name)
        if len({id(loader) for loader in echoed.values()}) < len(echoed):
            raise MisconfigurationException(
                "train_dataloader returns the same EchoLoader twice, and each iteration would take batches away from the other: "
                "return one for each"
            )
        return with_leaves(loaders, {**leaves, **echoed})

    def _names_to_echo(self, loaders: Any, leaves: Mapping[str, Any]) -> list[str]:
        if self._config_of_all is not None:
            return list(leaves)
        names = ", ".join(map(repr, leaves))
        if not is_collection(loaders):
            raise MisconfigurationException(
                f"{self._owner_name} has options for loaders named {', '.join(map(repr, self.configs))}, but train_dataloader "
                f"returns a single one ({type(loaders).__name__}): give the options without a name"
            )
        if unknown := [name for name in self.configs if name not in leaves]:
            raise MisconfigurationException(
                f"{self._owner_name} has options for a loader named {', '.join(map(repr, unknown))}, but train_dataloader "
                f"returns loaders named {names}: use these names (keys and positions, joined by '/')"
            )
        return [name for name in leaves if name in self.configs]

    def _refuse_share_of_several(self, names: list[str]) -> None:
        for name in names:
            if (share := (self._config_of_all or self.configs[name]).share) is not None:
                shared = share["name"] if isinstance(share, dict) else share
                raise MisconfigurationException(
                    f"share={shared!r} is impossible for several loaders: a reader reads one. Return a single loader from "
                    "train_dataloader, or leave share out"
                )

    def _echo(self, name: str, loader: Any, before: EchoLoader | None, factor: float | None, ranks: dict[str, Any]) -> EchoLoader:
        """Returns the `EchoLoader` for one loader. If the loader has a name, an error names it."""
        if before is not None and (loader is before.loader or loader is before):
            return before
        if isinstance(loader, EchoLoader):
            return loader if self._way_out is None else self._refuse_echoed(name)
        options = (self._config_of_all or self.configs[name]).as_options()
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

    def _refuse_echoed(self, name: str) -> NoReturn:
        what = f"an EchoLoader as {name!r}" if name else "an EchoLoader"
        raise MisconfigurationException(f"train_dataloader returns {what} already: return the plain loader, or {self._way_out}")
