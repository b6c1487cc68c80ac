"""What all ranks need, if the nodes exchange examples: the order of all ranks together, and requests with their rounds.

The leader of a node must know which examples the other ranks read for each request. The plan is the same on all ranks, and counts
positions. So the leader takes the slots of *all* ranks at each of its positions, keeps its own, and gives all of them to the
exchange.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch.utils.data import DistributedSampler, Sampler

from lightning_echo.caching.nodes.joining import Rounds
from lightning_echo.fetching.requests import BatchRequests, ExampleRequests
from lightning_echo.planning.order import Order
from lightning_echo.workers.dataset import Request

__all__ = ["AllRanksOrder", "OrdersOfRanks", "RequestsInRounds", "samplers_of_ranks"]


class AllRanksOrder(Order):
    """The order of one rank, taken from the order of all ranks. It has the same entries and states as that rank's own order.

    Args:
        whole: The order of all slots, as if there were one rank. Its passes are spread for all ranks.
        replicas: Number of ranks.
        rank: This rank.

    Attributes:
        taken: What each call of `take` has taken, for all ranks: slot after slot. The caller removes it.
    """

    def __init__(self, whole: Order, replicas: int, rank: int) -> None:
        super().__init__(whole.length, whole.pass_length // replicas, replicas, rank)
        self._whole = whole
        self.exact = whole.exact
        self.taken: deque[list[Any]] = deque()

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


class OrdersOfRanks(Order):
    """The order of one rank, together with those of the others, if the sampler divides its indices among the ranks.

    Args:
        orders: The order of each rank.
        rank: This rank.

    Attributes:
        taken: As in `AllRanksOrder`.
    """

    def __init__(self, orders: Sequence[Order], rank: int) -> None:
        own = orders[rank]
        super().__init__(own.length, own.pass_length)
        self._orders, self._own = orders, own
        self.exact = own.exact
        self.taken: deque[list[Any]] = deque()

    def begin_spreading(self) -> None:
        for order in self._orders:
            order.begin_spreading()

    def take(self, count: int) -> list[Any]:
        columns = {id(order): order.take(count) for order in self._orders}
        self.position += count
        self.taken.append(list(chain.from_iterable(zip(*columns.values(), strict=True))))
        return columns[id(self._own)]

    def seek(self, position: int) -> None:
        self.position = position
        for order in self._orders:
            order.seek(position)

    def state(self, position: int) -> dict[str, Any]:
        for order in self._orders:
            order.prune(position)
        return self._own.state(position)

    def prune(self, position: int) -> None:
        for order in self._orders:
            order.prune(position)

    def load(self, state: dict[str, Any]) -> None:
        for order in self._orders:
            order.load(state)


def samplers_of_ranks(sampler: DistributedSampler[Any]) -> list[Sampler[Any]]:
    """Returns a sampler for each rank, made from the ``DistributedSampler`` of one rank. The indices of a pass are made once."""
    whole = copy.copy(sampler)
    ranks, whole.num_replicas, whole.rank, whole.num_samples = sampler.num_replicas, 1, 0, sampler.total_size
    shared = _Whole(whole)
    return [_OfRank(shared, rank, ranks, sampler.num_samples) for rank in range(ranks)]


class _Whole:
    """The indices, for all ranks, of the latest pass that was asked for."""

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self._sampler, self._number = sampler, -1
        self._indices: list[Any] = []

    def indices_of(self, number: int) -> list[Any]:
        if number != self._number:
            self._sampler.set_epoch(number)
            self._indices, self._number = list(self._sampler), number
        return self._indices


class _OfRank(Sampler[Any]):
    """The sampler of one rank."""

    def __init__(self, whole: _Whole, rank: int, ranks: int, length: int) -> None:
        self._whole, self._rank, self._ranks, self._length = whole, rank, ranks, length
        self._number = 0

    def set_epoch(self, number: int) -> None:
        self._number = number

    def __iter__(self) -> Iterator[Any]:
        return iter(self._whole.indices_of(self._number)[self._rank :: self._ranks])

    def __len__(self) -> int:
        return self._length


class RequestsInRounds:
    """The batch sampler, if nodes exchange examples: the same requests, each with the number of its round.

    Examples that are read again after a resume are not exchanged: their round has no needs.

    Args:
        requests: The batch sampler.
        rounds: The exchange.
        order: The order of all ranks, on the leader of a node; None on other ranks.
    """

    def __init__(
        self, requests: ExampleRequests | BatchRequests, rounds: Rounds, order: AllRanksOrder | OrdersOfRanks | None
    ) -> None:
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
