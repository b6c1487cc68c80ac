"""The loaders that a Trainer trains on, a single one or a collection, and an `EchoLoader` around each that is to be echoed."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import reduce
from typing import Any, NoReturn, TypeAlias

from lightning_echo.config import AUTO_FACTOR, DEMAND, EchoConfig, check_demand
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.loader.state import EchoCounts
from lightning_echo.pipeline.journal import Replay
from lightning_echo.plan.plan import named_seed
from lightning_echo.training.package import MisconfigurationException, classes

# ---------------------------------------------------------------------- collection
# A Trainer trains on a single loader, or on a collection that Lightning combines: a dict, list or tuple of loaders, nested or
# not, or a ``CombinedLoader`` around one. It is a tree, and the loaders are its leaves. The name of a leaf is its key (or field),
# or its position from ``"0"`` on. In nested collections, ``/`` joins the names: ``"labelled"``, ``"0"``, ``"scans/1"``. A single
# loader has the empty name.
#
# The `EchoLoader`s of a collection form an `EchoLoaders`. Each step takes a batch of each of them, so their counts are added.
# Their times are not: the workers of all loaders run concurrently, and the step waits for the slowest.

_DICTS = (dict, OrderedDict, defaultdict)  # Lightning looks into these classes, and not into other subclasses


def is_combined(loaders: Any) -> bool:
    return isinstance(loaders, classes("utilities.CombinedLoader"))


def is_collection(loaders: Any) -> bool:
    """Whether Lightning would combine the parts of an object."""
    if is_combined(loaders):
        return True
    children = dict(_children(loaders))
    return not all(isinstance(child, int | float | str) for child in children.values())  # plain values: a sequence of batches


def leaves_of(loaders: Any) -> dict[str, Any]:
    """Returns the loaders of a collection by name, in Lightning's order; raises a ValueError if two have the same name.

    >>> leaves_of({"scans": [range(3), range(4)], "text": range(5)})
    {'scans/0': range(0, 3), 'scans/1': range(0, 4), 'text': range(0, 5)}
    """
    found: dict[str, Any] = {}
    for name, leaf in _walk(loaders, ""):
        if name in found:
            raise ValueError(
                f"two loaders of the collection are named {name!r}: names are keys and positions, joined by '/'. Use other keys"
            )
        found[name] = leaf
    return found


def with_leaves(loaders: Any, leaves: Mapping[str, Any]) -> Any:
    """Returns a copy of a collection with other leaves: same types, order and way of combining.

    >>> with_leaves({"scans": [range(3), range(4)], "text": range(5)}, {"scans/0": "a", "scans/1": "b", "text": "c"})
    {'scans': ['a', 'b'], 'text': 'c'}
    """
    if is_combined(loaders):
        combined = copy(loaders)
        combined.flattened = [leaves[name] for name, _ in _walk(loaders, "")]
        return combined
    return _map(loaders, "", leaves)


def parts_at_leaves(loaders: Any, batch: Any) -> list[Any]:
    """Returns the batches of the single loaders in the batch of a collection. A batch of another structure counts as one part.

    >>> parts_at_leaves({"scans": [range(3), range(4)], "text": range(5)}, {"scans": [[0, 1], None], "text": [0]})
    [[0, 1], None, [0]]
    """
    return _parts(loaders.iterables if is_combined(loaders) else loaders, batch)


def names_in_words(names: Mapping[str, Any]) -> str:
    """Returns the names of loaders as words for a message.

    >>> names_in_words({"scans": 1, "text": 2}), names_in_words({"": 1})
    ("loaders named 'scans', 'text'", 'a single loader')
    """
    return "a single loader" if set(names) == {""} else f"loaders named {', '.join(map(repr, names))}"


# ---------------------------------------------------------------------- the loaders that are echoed


class EchoLoaders(dict[str, EchoLoader]):
    """The `EchoLoader`s of a collection by name. ``not_echoed`` names its other loaders."""

    passes = None  # each loader has passes of its own

    def __init__(self, loaders: Mapping[str, EchoLoader], not_echoed: tuple[str, ...] = ()) -> None:
        super().__init__(loaders)
        self.not_echoed = not_echoed

    @property
    def counts(self) -> EchoCounts:
        return reduce(EchoCounts.__add__, (loader.counts for loader in self.values()), EchoCounts())

    @property
    def saved_counts(self) -> EchoCounts:
        return reduce(EchoCounts.__add__, (loader.saved_counts for loader in self.values()), EchoCounts())

    @property
    def factor(self) -> float:
        """The echo factor that was set last. If the loaders have different factors, their mean."""
        return _mean_factor(loader.factor for loader in self.values())

    @property
    def factor_in_force(self) -> float:
        """The echo factor of the next batches. If the loaders have different factors, their mean."""
        return _mean_factor(loader.factor_in_force for loader in self.values())

    @property
    def on_demand(self) -> bool:
        """Whether one of the loaders echoes on demand."""
        return any(loader.on_demand for loader in self.values())

    @property
    def has_one_factor(self) -> bool:
        return len({loader.factor for loader in self.values()}) == 1

    @property
    def fits_cost_model(self) -> bool:
        """Whether the cost model can treat these loaders as one: all are echoed with one factor, and all or none have workers."""
        alike = {(loader.factor, loader.num_workers > 0) for loader in self.values()}
        # Without workers their costs are added.
        points = {loader.insertion_point for loader in self.values() if not loader.num_workers}
        return len(alike) == 1 and len(points) <= 1 and not self.not_echoed


Echoed: TypeAlias = EchoLoader | EchoLoaders


def echoed_in(loaders: Any) -> Echoed | None:
    """Returns the `EchoLoader` if it is the only loader, or an `EchoLoaders`; None if nothing is echoed."""
    leaves = leaves_of(loaders)
    echoed = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, EchoLoader)}
    if not echoed:
        return None
    if leaves.keys() == {""}:
        return echoed[""]
    return EchoLoaders(echoed, tuple(name for name in leaves if name not in echoed))


def parts_of(echoed: Echoed | None) -> Mapping[str, EchoLoader]:
    """Returns the `EchoLoader`s by name. A single one has the empty name."""
    if echoed is None:
        return {}
    return echoed if isinstance(echoed, EchoLoaders) else {"": echoed}


def write_journals(loader: Echoed | None, directory: str | None) -> None:
    """Lets loaders that echo on demand write their journals into the folder of the run, unless the user has given another one."""
    for part in parts_of(loader).values():
        if part.on_demand and part.journal is None:
            part.journal = directory


def flush_journals(loader: Echoed | None) -> None:
    """Lets what was delivered be in the files: a state that is asked for is never later than its journal."""
    for part in parts_of(loader).values():
        if part.on_demand and part.journal is not None:
            part.state_dict()


def common_factor(factors: Mapping[str, float]) -> float:
    """Returns the echo factor of all loaders; raises a MisconfigurationException if they have different ones."""
    if len(set(factors.values())) > 1:
        listed = ", ".join(f"{name} {factor:g}" for name, factor in factors.items())
        raise MisconfigurationException(
            f"the loaders have different echo factors ({listed}), but here all of them must have the same one (a controller "
            "decides on a single factor): give all of them the same factor, or leave the controller out and ask each EchoLoader"
        )
    return next(iter(factors.values()))


def _mean_factor(factors: Iterator[float]) -> float:
    """Returns the harmonic mean. A step takes a batch of each loader, and of all their examples the share 1 / mean is fresh."""
    each = list(factors)
    return each[0] if len(set(each)) == 1 else len(each) / sum(1 / factor for factor in each)


# ---------------------------------------------------------------------- the tree


def _walk(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    if is_combined(node) and not name:
        node = node.iterables
    if _is_leaf(node):
        yield name, node
        return
    for key, child in _children(node):
        yield from _walk(child, _join(name, key))


def _map(node: Any, name: str, leaves: Mapping[str, Any]) -> Any:
    if _is_leaf(node):
        return leaves[name]
    children = [_map(child, _join(name, key), leaves) for key, child in _children(node)]
    if type(node) in _DICTS:
        changed = copy(node)  # keeps the factory of a defaultdict
        changed.update(zip(node, children, strict=True))
        return changed
    return type(node)(*children) if hasattr(node, "_fields") else type(node)(children)


def _parts(node: Any, batch: Any) -> list[Any]:
    if _is_leaf(node):
        return [batch]
    children, parts = _children(node), _children(batch)
    if [key for key, _ in parts] != [key for key, _ in children]:
        return [batch]
    return [leaf for (_, child), (_, part) in zip(children, parts, strict=True) for leaf in _parts(child, part)]


def _is_leaf(node: Any) -> bool:
    """Whether Lightning treats a node as one loader. It does so with a ``CombinedLoader`` inside a collection."""
    return is_combined(node) or not is_collection(node)


def _children(node: Any) -> list[tuple[Any, Any]]:
    """Returns keys and children of a container that Lightning looks into; an empty list for anything else."""
    if type(node) in _DICTS:
        return list(node.items())
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    return list(enumerate(node)) if type(node) in (list, tuple) else []


def _join(name: str, key: Any) -> str:
    return f"{name}/{key}" if name else str(key)


def delivered_in(loader: Echoed | None) -> int | dict[str, int]:
    """Returns the number of the next batch of the run. For several loaders: the numbers by name."""
    return _of_each(loader, lambda part: part.delivered_batches)


def since_in(loader: Echoed | None) -> int | dict[str, int]:
    """Returns the number of the first batch with the factor that was set last. For several loaders: the numbers by name."""
    return _of_each(loader, lambda part: part.factor_since)


def _of_each(loader: Echoed | None, number: Callable[[EchoLoader], int]) -> int | dict[str, int]:
    numbers = {name: number(part) for name, part in parts_of(loader).items()}
    return numbers if isinstance(loader, EchoLoaders) else numbers.get("", 0)


def go_on_after_reload(before: Echoed | None, now: Echoed | None) -> None:
    """Lets loaders that the user's hook has newly made continue where the loaders of the same names stopped."""
    for name, part in parts_of(now).items():
        earlier = parts_of(before).get(name)
        if earlier is not None and earlier is not part and part.is_at_start:
            part.follow(earlier)
            earlier.close()


# ---------------------------------------------------------------------- wrapping
# The options are given for all loaders at once, or by name. Loaders with the same options must not have the same order, draws and
# random augmentation. Therefore the seed of each loader of a collection is made from the given seed (or from that of
# ``seed_everything``) and the loader's name. A single loader has the given seed itself.


class Wrapping:
    """Wraps each loader of a ``train_dataloader`` that is to be echoed. ``remedy``: the ``hint`` of `TrainingEcho`."""

    def __init__(self, config: EchoConfig | Mapping[str, EchoConfig], owner_name: str, remedy: str | None, shard: bool) -> None:
        self._config_of_all = config if isinstance(config, EchoConfig) else None
        self.configs = {"": config} if isinstance(config, EchoConfig) else dict(config)
        self.is_auto = any(each.factor == AUTO_FACTOR for each in self.configs.values())
        self._owner_name, self._remedy, self._shard = owner_name, remedy, shard

    def wrap(self, loaders: Any, before: Mapping[str, EchoLoader], factor: float | None, ranks: dict[str, Any]) -> Any:
        """Returns the result of ``train_dataloader``, echoed. New `EchoLoader`s have this factor; None: that of their options."""
        leaves = leaves_of(loaders)
        names = self.names_to_echo(loaders, leaves)
        echoed = {name: self.echo(name, leaves[name], before.get(name), factor, ranks) for name in names}
        return self.put_together(loaders, {**leaves, **echoed})

    def ranks(self, trainer: Any, *, deals_out: bool = True) -> dict[str, Any]:
        """Returns the options of an `EchoLoader` that divide its data, as Lightning's ``DistributedSampler`` would if it
        ``deals_out``. If they are empty, ``torch.distributed`` is asked.
        """
        if trainer is None:
            return {} if self._shard else {"num_replicas": 1, "rank": 0}
        share = trainer.distributed_sampler_kwargs if self._shard and deals_out else None
        return {"num_replicas": 1, "rank": 0, **(share or {})}

    def put_together(self, loaders: Any, leaves: Mapping[str, Any]) -> Any:
        """Returns the object that the Trainer trains on; ``leaves`` has an `EchoLoader` for each loader that is echoed."""
        echoed = [id(leaf) for leaf in leaves.values() if isinstance(leaf, EchoLoader)]
        if len(set(echoed)) < len(echoed):
            raise MisconfigurationException(
                "train_dataloader returns the same EchoLoader twice, and each iteration would take batches away from the other: "
                "return one for each"
            )
        return with_leaves(loaders, leaves)

    def names_to_echo(self, loaders: Any, leaves: Mapping[str, Any]) -> list[str]:
        """Returns the names of the loaders to echo; raises a MisconfigurationException if that is impossible."""
        names = self._names_chosen(loaders, leaves)
        for name in names if is_collection(loaders) else ():
            if (share := (self._config_of_all or self.configs[name]).share) is not None:
                shared = share["name"] if isinstance(share, dict) else share
                number = "a list or dict of one loader" if len(leaves) == 1 else "several loaders"
                hint = "Return the loader itself" if len(leaves) == 1 else "Return a single loader"
                raise MisconfigurationException(
                    f"share={shared!r} is impossible for {number}: a reader reads a single one. {hint} from train_dataloader, or "
                    "leave share out"
                )
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

    def echo(self, name: str, loader: Any, before: EchoLoader | None, factor: float | None, ranks: dict[str, Any]) -> EchoLoader:
        """Returns the `EchoLoader` for one loader: the one of that name in use ``before``, if it wraps the same loader."""
        if before is not None and (loader is before.loader or loader is before):
            return before
        if isinstance(loader, EchoLoader):
            return loader if self._remedy is None else self._refuse_echoed(name)
        options = (self._config_of_all or self.configs[name]).as_options()
        if self.is_auto:
            options |= {"factor": 1.0, "max_factor": None}  # for now, see `decide_auto`
        on_demand = options["factor"] == DEMAND
        if before is not None and before.on_demand == on_demand:
            factor = before.factor
        if factor is not None and Replay.of(options["factor"]) is None:  # a journal has its own bound
            options["max_factor" if on_demand else "factor"] = factor
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

    def decide_auto(self, parts: Mapping[str, EchoLoader], users: Mapping[str, Any], before: Mapping[str, EchoLoader]) -> str:
        """Lets loaders with ``factor="auto"`` echo on demand, if all of them can. Returns what was decided, for people.

        ``users``: the loaders that the user has made. ``before``: the `EchoLoader`s that were in use.
        """
        constant = {name: part for name, part in parts.items() if not part.on_demand}
        for name, part in constant.items():
            if part is users[name]:
                why = "it is an EchoLoader with a factor of its own"
            else:
                why = part.why_not_on_demand() if part.is_at_start else "the run has begun with a constant factor"
            if why:
                which = f"the loader {name!r}: " if name else ""
                return f"factor='auto' is TargetIdle() here, because on demand is impossible: {which}{why}"
        for name, part in constant.items():
            earlier, config = before.get(name), self._config_of_all or self.configs[name]
            bound = check_demand(DEMAND, config.max_factor)[1]
            part.echo_on_demand(earlier.factor if earlier is not None and earlier.on_demand else bound)
        return "factor='auto' echoes on demand: if no fresh example has arrived, the training trains on one from memory"

    def _refuse_echoed(self, name: str) -> NoReturn:
        what = f"an EchoLoader as {name!r}" if name else "an EchoLoader"
        raise MisconfigurationException(f"train_dataloader returns {what} already: return the plain loader, or {self._remedy}")
