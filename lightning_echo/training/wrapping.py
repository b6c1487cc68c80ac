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

    def wrap(self, loaders: Any, before: Mapping[str, EchoLoader], factor: float | None, ranks: dict[str, Any]) -> Any:
        """Returns the user's loader, or collection of loaders, with an `EchoLoader` for each loader that is to be echoed.

        Args:
            loaders: What ``train_dataloader`` returned.
            before: The `EchoLoader`s in use so far, by name. One that wraps the same loader is used again.
            factor: The factor of new `EchoLoader`s; None: that of their options.
            ranks: What `ranks` returned.

        Raises:
            MisconfigurationException: A name is unknown, or a loader is echoed already.
            TypeError: An object to echo is not a loader.
            ValueError: An option does not fit a loader.
        """
        leaves = leaves_of(loaders)
        names = self.names_to_echo(loaders, leaves)
        echoed = {name: self.echo(name, leaves[name], before.get(name), factor, ranks) for name in names}
        return self.put_together(loaders, {**leaves, **echoed})

    def ranks(self, trainer: Any, *, deals_out: bool = True) -> dict[str, Any]:
        """Returns the options of an `EchoLoader` that say how it divides its data. If empty, ``torch.distributed`` is asked.

        Args:
            trainer: The Trainer, which knows the ranks; None if there is none.
            deals_out: Whether the `EchoLoader` is to divide the data, as Lightning would by its ``DistributedSampler``.
        """
        if trainer is None:
            return {} if self._shard else {"num_replicas": 1, "rank": 0}
        share = trainer.distributed_sampler_kwargs if self._shard and deals_out else None
        return {"num_replicas": 1, "rank": 0, **(share or {})}

    def put_together(self, loaders: Any, leaves: Mapping[str, Any]) -> Any:
        """Returns what the Trainer trains on.

        Args:
            loaders: What ``train_dataloader`` returned.
            leaves: Its loaders by name, with an `EchoLoader` for each loader that is echoed.

        Raises:
            MisconfigurationException: An `EchoLoader` stands in the collection twice.
        """
        echoed = [id(leaf) for leaf in leaves.values() if isinstance(leaf, EchoLoader)]
        if len(set(echoed)) < len(echoed):
            raise MisconfigurationException(
                "train_dataloader returns the same EchoLoader twice, and each iteration would take batches away from the other: "
                "return one for each"
            )
        return with_leaves(loaders, leaves)

    def names_to_echo(self, loaders: Any, leaves: Mapping[str, Any]) -> list[str]:
        """Returns the names of the loaders that are to be echoed.

        Raises:
            MisconfigurationException: A name is unknown, or a loader is echoed already that is not to be, or several loaders
                would share their reading.
        """
        names = self._names_chosen(loaders, leaves)
        if is_collection(loaders):
            self._refuse_share_of_several(names)
        for name, leaf in leaves.items():
            if isinstance(leaf, EchoLoader) and name not in names:
                self._refuse_echoed(name)
        return names

    def _names_chosen(self, loaders: Any, leaves: Mapping[str, Any]) -> list[str]:
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

    def echo(self, name: str, loader: Any, before: EchoLoader | None, factor: float | None, ranks: dict[str, Any]) -> EchoLoader:
        """Returns the `EchoLoader` for one loader. If the loader has a name, an error names it.

        Args:
            name: The name of the loader.
            loader: The user's loader.
            before: The `EchoLoader` of that name in use so far. If it wraps the same loader, it is used again.
            factor: See `wrap`.
            ranks: What `ranks` returned.

        Raises:
            MisconfigurationException: The loader is echoed already.
            TypeError: It is not a loader.
            ValueError: An option does not fit it.
        """
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
