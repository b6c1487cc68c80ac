"""All code that uses Ray: where a training is in the cluster, and how its reader finds or makes the actor of a name.

Only these functions import Ray. They run in the main processes of trainings and readers, never in the workers of a
``DataLoader``, because a call from there hangs. Every call has a time-out.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from lightning_echo.log import LOGGER
from lightning_echo.sharing.cluster.chunk import Chunk
from lightning_echo.sharing.cluster.handing import Handing
from lightning_echo.sharing.cluster.relay import FarLost
from lightning_echo.sharing.folder import shared_folder
from lightning_echo.sharing.reader.server import Start

__all__ = ["RayFar", "check_ray", "joined", "place_of_training"]


_NAMESPACE = "lightning_echo"
_MOST_CALLS = 64  # at the same time in an actor; each relay makes two
_MOST_ANSWER_SECONDS = 30.0  # the actor answers within a second, or a few seconds over a slow network
_MOST_MEETING_SECONDS = 60.0  # Ray needs up to half of this time to notice that a node is lost
_BETWEEN_TRIES_SECONDS = 0.5


# ---------------------------------------------------------------------- in a training


def check_ray(name: str) -> None:
    """Makes sure that Ray is installed.

    Args:
        name: The name that is shared.

    Raises:
        ModuleNotFoundError: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise ModuleNotFoundError(
            f"share={name!r} with share.cluster='ray' needs Ray, which is not installed: pip install 'lightning-echo[ray]'"
        )


def place_of_training(name: str) -> dict[str, str]:
    """Returns what a process that this training starts needs to join the cluster, and the node on which they both are.

    Args:
        name: The name that is shared.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ValueError: This process is in no cluster.
    """
    check_ray(name)
    import ray

    if not ray.is_initialized():
        raise ValueError(
            f"share={name!r} with share.cluster='ray' needs a training that Ray runs (Ray Tune, Ray Train, a task), or "
            "ray.init(address=...) before it, and this process is in no cluster. Leave cluster out to share on this machine alone"
        )
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        warnings.warn(
            f"lightning_echo: share={name!r} "
            "sends examples through a Ray cluster without tokens: whoever reaches its ports can read them "
            "and run programs there. Before Ray is started, set RAY_AUTH_MODE=token on all nodes, and RAY_AUTH_TOKEN_PATH to a "
            "file that has the token and that nobody else can read (chmod 600)",
            UserWarning,
            stacklevel=2,
        )
    context = ray.get_runtime_context()
    return {"address": context.gcs_address, "node": context.get_node_id()}


# ---------------------------------------------------------------------- in a reader


class RayFar:
    """The actor of another node. See `Far` for its methods.

    Args:
        actor: The handle of the actor.
        where: The actor's node, for people.
        label: This node, for people.

    Attributes:
        where: As given.
    """

    def __init__(self, actor: Any, where: str, label: str) -> None:
        self._actor, self.where, self._label = actor, where, label

    def enter(self, relay: str, start: Start) -> None:
        """Lets a relay in."""
        _answer(self._actor.enter.remote(relay, self._label, *start), self.where)

    def ask(self, relay: str, needed: int) -> Any:
        """Asks for the next chunk."""
        return self._actor.take.remote(relay, needed)

    def chunk(self, asked: Any) -> Chunk:
        """Returns the chunk that was asked for."""
        return Chunk.from_array(_answer(asked, self.where))

    def stay(self, relay: str, need_nanoseconds: int) -> int:
        """Tells the actor that a relay is there. Returns the number of other nodes."""
        return int(_answer(self._actor.stay.remote(relay, need_nanoseconds), self.where))

    def leave(self, relay: str) -> None:
        """Tells the actor that a relay ends."""
        self._actor.leave.remote(relay)


@contextmanager
def joined(name: str, place: dict[str, str], data_print: dict[str, str]) -> Iterator[RayFar | None]:
    """Joins the cluster until the ``with`` block ends. Yields the actor of the node that reads; None if this node reads.

    Args:
        name: The name that is shared.
        place: See `place_of_training`.
        data_print: What is compared of the data.

    Raises:
        FarLost: There is no actor, and no actor could be made.
        ValueError: The node that reads has other data.
    """
    import ray

    ray.init(address=place["address"], namespace=_NAMESPACE, log_to_driver=False, configure_logging=False)
    try:
        here = f"{ray.util.get_node_ip_address()} (node {place['node'][:8]})"
        actor, met = _met(name, place["node"], here, data_print)
        if met["differs"]:
            raise ValueError(
                f"share={name!r} is the name of other data on {met['where']}: {met['differs']}. Trainings that share must have "
                "the same data set, sampler and transforms; give another name for other data"
            )
        yield None if met["node"] == place["node"] else RayFar(actor, met["where"], f"node {place['node'][:8]}")
    finally:
        ray.shutdown()


def _met(name: str, node: str, here: str, data_print: dict[str, str]) -> tuple[Any, dict[str, str]]:
    """Returns the actor of a name, and what it tells. If there is no actor, makes one on this node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # The actor must find this package where this process finds it, and the sockets of this node.
    paths = os.pathsep.join(path for path in sys.path if path)
    variables = {"PYTHONPATH": paths, "LIGHTNING_ECHO_SHARED": str(shared_folder())}
    kind = ray.remote(Handing).options(
        name=f"share-{name}",
        namespace=_NAMESPACE,
        get_if_exists=True,
        num_cpus=0,
        max_concurrency=_MOST_CALLS,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        runtime_env={"env_vars": variables},
    )
    end = time.monotonic() + _MOST_MEETING_SECONDS
    while True:
        actor = kind.remote(name, node, here, data_print)
        try:
            return actor, _answer(actor.meet.remote(data_print), "the actor")
        except FarLost as error:  # it ends, since its reader has died, or its node is lost
            if time.monotonic() > end:
                raise
            LOGGER.info("tries again: %s", error)
        time.sleep(_BETWEEN_TRIES_SECONDS)


def _answer(asked: Any, where: str) -> Any:
    """Returns what an actor answers.

    Raises:
        FarLost: The actor is gone, does not answer, or says that its reader has ended.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError

    try:
        return ray.get(asked, timeout=_MOST_ANSWER_SECONDS)
    except GetTimeoutError as error:
        raise FarLost(f"{where} has not answered for {_MOST_ANSWER_SECONDS:.0f} s") from error
    except RayTaskError as error:
        raise FarLost(f"{where} says: {error.cause}") from error
    except RayError as error:
        raise FarLost(f"{where} is lost: {error}") from error
