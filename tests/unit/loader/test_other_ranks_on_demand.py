"""A run on demand continues with other ranks: what was delivered is not dealt again, all else is. Slot by slot."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_echo.loader.loader import EchoLoader
from lightning_echo.loader.ranks import counts_of_rank, demand_of_rank, shared_out
from lightning_echo.loader.state import EchoCounts, EchoState, Place, Run
from lightning_echo.pipeline.demand import booked_of, earlier_of
from lightning_echo.pipeline.pipelines import Layout
from lightning_echo.plan.demand import Dealing, delivered_before
from lightning_echo.schema import EchoStateError, plain

PASSES = 3  # that are dealt to their end


def layout(length: int, replicas: int, batch_size: int) -> Layout:
    """As DistributedSampler shares a pass: filled up at its end."""
    each = -(-length // replicas)
    batches = -(-each // batch_size)
    return Layout(length, replicas, batch_size, each - (batches - 1) * batch_size, batches)


class Rank:
    """A rank that delivers what it is dealt, in any order within its window."""

    def __init__(self, saved: dict[str, Any] | None, now: Layout, rank: int, seed: int) -> None:
        self.rank, self.now, self.random = rank, now, random.Random(seed)
        self.dealing = Dealing(
            booked_of(saved, 0),
            pass_length=now.pass_length,
            block=now.batch_size,
            workers=2,
            window=2 * now.batch_size,
            delivered_before=delivered_before(earlier_of(saved), pass_length=now.pass_length, replicas=now.replicas, rank=rank),
        )
        self.open: list[int] = []
        self.number = 0 if saved is None else saved["number"]
        self.fresh = 0

    def step(self) -> list[tuple[int, int]]:
        """Delivers a batch; the slots of its fresh examples, each with the number of its pass."""
        for worker in range(2):
            self.open += [position for block in self.dealing.deal(worker) for position in block]
        self.random.shuffle(self.open)
        size = self.random.randint(0, min(self.now.batch_size, len(self.open)))
        taken, self.open = self.open[:size], self.open[size:]
        self.dealing.book(taken)
        self.number, self.fresh = self.number + 1, self.fresh + size
        return [(p // self.now.pass_length, p % self.now.pass_length * self.now.replicas + self.rank) for p in taken]

    def echo(self) -> list[tuple[int, int]]:
        """Delivers a batch without a fresh example."""
        self.number += 1
        return []

    def place(self) -> Place:
        booked = self.dealing.booked()
        return Place(self.number, booked.frontier, tuple(Run(*run) for run in booked.runs()), self.fresh, self.number)

    def is_over(self) -> bool:
        return self.dealing.booked().frontier >= PASSES * self.now.pass_length


def state_of(places: list[Place], now: Layout, earlier: Any = None) -> EchoState:
    """As rank 0 saves it."""
    own = places[0]
    demand = {
        "number": own.number,
        "frontier": own.frontier,
        "ahead": plain(own)[2],
        "max_factor": 8.0,
        "pending": [],
        **({"ranks": [plain(place) for place in places]} if len(places) > 1 else {}),
        **({} if earlier is None else {"earlier": earlier}),
    }
    return EchoState.from_dict(
        {
            "version": 1,
            "insertion_point": "after_augmentation",
            "layout": now.state(),
            "workers": 2,
            "buffer_size": 64,
            "reuse": "memory",
            "seed": 1,
            "factor": 8.0,
            "constructed_factor": 8.0,
            "largest_factor": 8.0,
            "factor_before": 8.0,
            "factor_since": 0,
            "epoch": 0,
            "epoch_batches": now.batches_per_pass,
            "in_epoch": 0,
            "delivered": own.number,
            "begin_at": [0, 0],
            "passes_over": 0,
            "counts": [own.fresh, own.echoed, 0],
            "plan": None,
            "order": {"distances": [[0, 0]]},
            "demand": demand,
        },
        by_index=True,
    )


@pytest.mark.parametrize("seed", range(30))
def test_each_slot_of_each_pass_is_delivered_once_however_the_ranks_change(seed: int) -> None:
    dice = random.Random(seed)
    length, delivered = dice.randint(20, 60), Counter[tuple[int, int]]()
    state: EchoState | None = None
    for batches in [*(dice.randint(0, 25) for _ in range(3)), None]:  # None: until the passes are over
        now = layout(length, dice.randint(1, 4), dice.randint(1, 5))
        shared = None if state is None else shared_out(state, now)
        assert (shared is None) == (state is None)
        of_ranks = [shared and plain(demand_of_rank(shared, now.replicas, rank)) for rank in range(now.replicas)]
        ranks = [Rank(saved, now, rank, dice.randint(0, 999)) for rank, saved in enumerate(of_ranks)]
        speeds = [1.0 if batches is None else dice.random() for _ in ranks]
        while (batches is None and not all(rank.is_over() for rank in ranks)) or batches:
            batches = batches and batches - 1
            for rank, speed in zip(ranks, speeds, strict=True):
                delivered.update(rank.step() if dice.random() < speed else rank.echo())
        state = state_of([rank.place() for rank in ranks], now, shared and plain(shared).get("earlier"))
    found = {slot: times for slot, times in delivered.items() if slot[0] < PASSES and slot[1] < length}
    assert found == {(number, slot): 1 for number in range(PASSES) for slot in range(length)}


def own_of(demand: Any) -> Place:
    return Place(demand.number, demand.frontier, demand.ahead, 0, 0)


def test_ranks_that_change_share_the_counts_of_all() -> None:
    before = layout(40, 2, 4)
    state = state_of([Place(5, 9, (), 9, 11), Place(5, 4, (Run(6, 2),), 6, 14)], before)
    assert [counts_of_rank(state, 2, rank) for rank in range(2)] == [EchoCounts(9, 11), EchoCounts(6, 14)]
    of_three = [counts_of_rank(state, 3, rank) for rank in range(3)]
    assert (sum(each.fresh for each in of_three), sum(each.echoed for each in of_three)) == (15, 25)
    assert max(each.fresh for each in of_three) - min(each.fresh for each in of_three) <= 1


def test_a_state_is_the_same_whichever_rank_has_saved_it() -> None:
    places = [Place(5, 9, (), 9, 11), Place(5, 4, (Run(6, 2),), 6, 14)]
    state = state_of(places, layout(40, 2, 4))
    assert state.demand is not None
    assert [own_of(demand_of_rank(state.demand, 2, rank))[:3] for rank in range(2)] == [place[:3] for place in places]
    assert state.position == 4


def test_other_ranks_where_passes_are_rearranged_cannot_share_exactly() -> None:
    """A constant factor keeps passes apart by an arrangement that follows from the number of ranks."""
    state = state_of([Place(5, 9, (), 9, 11), Place(5, 4, (), 4, 14)], layout(40, 2, 4))
    spread = state.to_dict() | {"order": {"distances": [[0, 0], [1, 3, 2]]}}
    found = EchoState.from_dict(spread, by_index=True)
    assert shared_out(found, layout(40, 3, 4)) is None  # 42 slots
    assert shared_out(found, layout(40, 4, 4)) is not None  # 40, as before


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([[6, 9, [], 9, 11], [5, 4, [], 4, 16]], "demand.ranks[0] (number)"),
        ([[5, 9, [], 9, 11], [5, 4, [[4, 1]], 5, 15]], "demand.ranks[1].ahead"),
        ([[5, 9, [], 9, 11], [5, 21, [], 21, 0]], "demand.ranks[1].frontier"),
        ([[5, 9, [], 9, 11]], "demand.ranks must be a list of several"),
    ],
)
def test_damaged_places_are_refused(ranks: Any, named: str) -> None:
    saved = state_of([Place(5, 9, (), 9, 11), Place(5, 4, (), 4, 16)], layout(40, 2, 4)).to_dict()
    saved["demand"]["ranks"] = ranks
    with pytest.raises(EchoStateError, match="damaged") as caught:
        EchoState.from_dict(saved, by_index=True)
    assert named in str(caught.value)


def test_a_pass_is_about_to_begin_only_if_it_is_on_all_ranks() -> None:
    now = layout(40, 2, 4)
    for places, expected in (
        ([Place(9, 20, (), 20, 16), Place(9, 20, (), 20, 16)], True),
        ([Place(9, 20, (), 20, 16), Place(9, 19, (), 19, 17)], False),
        ([Place(9, 20, (), 20, 16), Place(9, 20, (Run(22, 1),), 21, 15)], False),
    ):
        demand = state_of(places, now).demand
        assert demand is not None
        assert demand.is_between_passes(now.pass_length) is expected


# ---------------------------------------------------------------------- which ranks can


def numbered(ranks: int, rank: int) -> EchoLoader:
    """A loader of a rank that the user has numbered."""
    data = DataLoader(list(range(40)), 4, shuffle=True)
    return EchoLoader(data, "demand", insertion_point="after_augmentation", seed=1, num_replicas=ranks, rank=rank)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_share_the_same_data_are_refused(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_echo.loader.setting.world", lambda: (4, 1))
    with pytest.raises(ValueError, match=f"the job has 4 ranks and divides its data among {ranks}"):
        next(iter(numbered(ranks, 0)))


def test_only_data_by_index_can_be_on_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = numbered(4, 1)._run._setting
    monkeypatch.setattr("lightning_echo.loader.setting.world", lambda: (4, 1))
    setting.check_ranks_on_demand()
    monkeypatch.setattr(setting, "kind", SimpleNamespace(plans_in_workers=False))
    with pytest.raises(ValueError, match="only data that is read by index"):
        setting.check_ranks_on_demand()


def test_ranks_that_the_user_has_numbered_know_themselves_and_read_again_what_another_has_saved() -> None:
    with closing(numbered(3, 1)) as echoed:
        batches = iter(echoed)
        mine = [index for batch in (next(batches), next(batches)) for index in batch.tolist()]
        saved = echoed.state_dict()
        assert saved["demand"]["ranks"] == [[0, 0, [], 0, 0], [2, 8, [], 8, 0], [0, 0, [], 0, 0]]
        rest = [index for batch in (next(batches), next(batches)) for index in batch.tolist()][: 14 - 8]
    with closing(numbered(3, 1)) as again, warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(saved)
        assert [index for batch in list(again) for index in batch.tolist()] == rest
    with closing(numbered(3, 2)) as other:
        other.load_state_dict(saved)
        with pytest.warns(UserWarning, match=r"the place of rank 2 \(known after batch 0\) is not known after batch 2"):
            first = next(iter(other)).tolist()
    with closing(numbered(3, 2)) as anew:
        assert first == next(iter(anew)).tolist()
    assert not set(first) & set(mine)
