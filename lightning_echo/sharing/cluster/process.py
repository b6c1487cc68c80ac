"""What the reader's process runs if one node of a cluster reads for all. See also ``reader/process.py``."""

from __future__ import annotations

from lightning_echo.log import LOGGER
from lightning_echo.sharing.cluster.ray_cluster import joined
from lightning_echo.sharing.cluster.relay import Relay
from lightning_echo.sharing.reader.process import left_parent, serve_payload, telling_of_failure

__all__ = ["main"]


_GATHER_SECONDS = 20.0  # relays need about ten seconds to start and to join the cluster


def main(name: str, status: int) -> None:
    """Reads the payload, leaves the parent, joins the cluster, and reads or relays.

    Args:
        name: The name that is shared.
        status: Descriptor of the pipe to the training that waits.
    """
    with telling_of_failure(status):
        payload = left_parent()
        options = payload.options
        with joined(name, options["cluster"], options["print"]) as far:
            if far is None:
                LOGGER.info("this node reads for all nodes")
                serve_payload(name, status, payload, gather_seconds=_GATHER_SECONDS)
            else:
                LOGGER.info("the reader on %s reads for this node", far.where)
                serve_payload(name, status, payload, Relay(far, options["window_bytes"], LOGGER.warning))
