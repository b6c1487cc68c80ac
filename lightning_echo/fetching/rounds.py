"""What all ranks need, where the nodes exchange what they hold: the order of all ranks at once, and requests with their rounds.

The leader of a node must know which examples the other ranks read for each request. The plan is the same on all ranks, and counts
positions. So it takes the slots of *all* ranks at each of its positions, keeps its own, and hands all of them to the exchange.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from lightning_echo.caching.nodes.joining import Rounds
from lightning_echo.fetching.requests import BatchRequests, ExampleRequests
from lightning_echo.planning.order import Order
from lightning_echo.workers.dataset import Request

__all__ = ["AllRanksOrder", "RequestsInRounds"]


class AllRanksOrder(Order):
    """The order of one rank, read from that of all ranks. It has the same entries and the same states as the order of that rank.

    Args:
        whole: The order of all slots, as that of a single rank would be. Its distance is that of the slots, see `whole_distance`.
        replicas: Number of ranks.
        rank: This rank.

    Attributes:
        taken: What each call of `take` has taken, for all ranks: slot after slot. The caller takes it out.
    """

    def __init__(self, whole: Order, replicas: int, rank: int) -> None:
        super().__init__(whole.length, whole.pass_length // replicas, replicas, rank)
        self._whole = whole
        self.exact = whole.exact
        self.taken: deque[list[Any]] = deque()

    @staticmethod
    def whole_distance(distance: int, replicas: int) -> int:
        """Returns the distance of the order of all slots, so that its passes are spread as those of a rank are."""
        return distance * replicas + replicas - 1 if distance else 0

    def begin_spreading(self) -> None:
        self._whole.begin_spreading()

    def take(self, count: int) -> list[Any]:
        rows = self._whole.take(count * self.replicas)
        self.position += count
        self.taken.append(rows)
        return rows[self.rank :: self.replicas]

    def seek(self, position: int) -> None:
        self.position = position
        self._whole.seek(position * self.replicas)

    def state(self, position: int) -> dict[str, Any]:
        return self._whole.state(position * self.replicas)

    def prune(self, position: int) -> None:
        self._whole.prune(position * self.replicas)

    def load(self, state: dict[str, Any]) -> None:
        self._whole.load(state)


class RequestsInRounds:
    """The batch sampler, where nodes exchange what they hold: the same requests, each with the number of its round.

    What is read again after a resume is not exchanged: it has a round without needs.

    Args:
        requests: The batch sampler.
        rounds: The exchange.
        order: The order of all ranks, on the leader of a node; None elsewhere.
    """

    def __init__(self, requests: ExampleRequests | BatchRequests, rounds: Rounds, order: AllRanksOrder | None) -> None:
        self._requests, self._rounds, self._order = requests, rounds, order
        self._count = 0
        self._first_position = requests.plan.position
        if order is not None:
            order.taken.clear()  # what was live before

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        request = next(self._requests)
        if self._order is not None and self._rounds.exchange is not None:
            by_batches = isinstance(self._requests, BatchRequests)
            reads_anew = request.number >= self._first_position if by_batches else bool(request.fresh)
            self._rounds.exchange.ask(self._order.taken.popleft() if reads_anew else [])
        self._count += 1
        return request._replace(round=self._count - 1)
