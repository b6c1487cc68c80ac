"""States from within a pass that cannot be gone on with are refused; those from between two passes begin the next."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from states import echo_state, plan_state
from torch.utils.data import DataLoader, IterableDataset

from lightning_echo import EchoLoader, EchoStateError
from lightning_echo.insertion import InsertionPoint
from lightning_echo.loader.resuming import (
    adapt_state,
    begin_next_pass,
    follow_state,
    has_own_states,
    order_to_go_on,
    where_to_go_on,
)
from lightning_echo.loader.setting import Setting
from lightning_echo.loader.state import Distance, EchoState, FactorChange, OrderState, PassEnd, PassStart
from lightning_echo.pipeline.kinds import Layout
from lightning_echo.pipeline.pipelines import Start
from lightning_echo.plan.plan import Reuse


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


class Sized(Stream):
    def __len__(self) -> int:
        return 12


class Stateful(Stream):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Batches:
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(12).split(4))


def setting(loader: Any, point: str = "auto", buffer_size: int | None = None, reuse: str = "memory") -> Setting:
    return Setting(loader, InsertionPoint(point), buffer_size, 2.0, None, reuse=Reuse(reuse))


def read(saved: dict[str, Any]) -> EchoState:
    return EchoState.from_dict(saved, by_index="distances" in (saved["order"] or {}))


def state_after(loader: Any, batches: int, **options: Any) -> EchoState:
    echoed, found = EchoLoader(loader, 2, seed=0, **options), 0
    while found < batches:
        for _ in echoed:
            found += 1
            if found == batches:
                break
    return read(echoed.state_dict())


def end_of_pass(loader: Any, **options: Any) -> EchoState:
    echoed = EchoLoader(loader, 2, seed=0, **options)
    list(echoed)
    return read(echoed.state_dict())


RESUMES = [
    (lambda: DataLoader(list(range(12)), 4), "auto"),  # type: ignore[arg-type]
    (lambda: DataLoader(Stateful(), 4), "auto"),
    (lambda: [torch.zeros(4)] * 3, "auto"),
]
# Its epochs have a length: round(factor * steps), after which two passes have begun, and not ended.
SIZED_BATCHES = (lambda: DataLoader(Sized(), 4), "after_batching")
DOES_NOT = [
    (lambda: DataLoader(Stream(), 4), "auto"),
    (lambda: DataLoader(Sized(), 4), "auto"),
    (lambda: DataLoader(Stream(), 4), "after_batching"),
    SIZED_BATCHES,
    (lambda: DataLoader(Stateful(), 4), "after_batching"),
    (lambda: Batches(), "auto"),
]
# Without the stream with a length whose batches are reused: its epoch is round(factor * steps) long, after which two passes
# have begun, and the second one has not ended.
ENDS_WITH_A_PASS = [each for number, each in enumerate(DOES_NOT) if number != 3]
RULES = ["each", "memory"]


@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize(("make", "point"), RESUMES)
def test_what_knows_its_place_goes_on_there(make: Any, point: str, reuse: str) -> None:
    state = state_after(make(), 2, reuse=reuse)
    assert adapt_state(state, setting(make(), point, reuse=reuse)) is state


@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize(("make", "point"), DOES_NOT)
def test_what_does_not_is_refused_within_a_pass(make: Any, point: str, reuse: str) -> None:
    state = state_after(make(), 2, insertion_point=point, reuse=reuse)
    with pytest.raises(EchoStateError, match=r"saved within a pass, and .* cannot continue there: without state_dict\(\)"):
        adapt_state(state, setting(make(), point, reuse=reuse))


@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize(("make", "point"), ENDS_WITH_A_PASS)
def test_and_begins_the_next_pass_where_one_has_ended_with_nothing_live(make: Any, point: str, reuse: str) -> None:
    state = end_of_pass(make(), insertion_point=point, epoch_length="full_pass", reuse=reuse)
    adapted = adapt_state(state, setting(make(), point, reuse=reuse))
    assert adapted.plan is None
    if state.stream is not None:
        assert adapted.stream is not None
        assert (adapted.stream.pass_, adapted.stream.begun, adapted.stream.workers) == (1, False, (None,))
        assert adapted.stream.batches == state.stream.batches
    else:
        assert adapted.begin_at == (3, state.delivered)
        assert adapted.order == OrderState(passes=(PassStart(1, 3),))
    assert adapted.counts == state.counts
    assert adapt_state(adapted, setting(make(), point, reuse=reuse)).begin_at == adapted.begin_at


@pytest.mark.parametrize(("make", "point"), [case for case in DOES_NOT if case != SIZED_BATCHES])
def test_what_begins_the_next_pass_may_be_saved_again_before_its_first_batch(make: Any, point: str) -> None:
    def echoed() -> EchoLoader:
        return EchoLoader(make(), 2, insertion_point=point, epoch_length="full_pass", seed=0)

    whole, resumed, again = echoed(), echoed(), echoed()
    list(whole)
    resumed.load_state_dict(whole.state_dict())
    again.load_state_dict(resumed.state_dict())
    assert again.state_dict() == resumed.state_dict()
    expected, found = (torch.cat([batch.reshape(-1) for batch in loader]).tolist() for loader in (resumed, again))
    assert found == expected
    assert len(found) >= 12


def test_a_state_from_before_the_first_batch_is_no_state_within_a_pass() -> None:
    state = read(EchoLoader(DataLoader(Stream(), 4), 2, seed=0).state_dict())
    assert adapt_state(state, setting(DataLoader(Stream(), 4))) is state
    assert state.plan is None


@pytest.mark.parametrize(("reuse", "batches"), [("each", 16), ("memory", 64)])  # defaults where a pass has no known length
def test_with_another_buffer_a_stream_is_refused_too_and_says_what_has_changed(reuse: str, batches: int) -> None:
    state = state_after(DataLoader(Stateful(), 4), 2, reuse=reuse)
    said = rf"within a pass of a stream, with buffer_size={4 * batches} \(now 9\): the workers divide a stream"
    with pytest.raises(EchoStateError, match=said):
        adapt_state(state, setting(DataLoader(Stateful(), 4), buffer_size=9, reuse=reuse))


def test_with_other_batches_too() -> None:
    state = state_after(DataLoader(Stateful(), 4), 2)
    with pytest.raises(EchoStateError, match=r"within a pass of a stream, with .*batch_size"):
        adapt_state(state, setting(DataLoader(Stateful(), 3), buffer_size=8))


def test_what_is_no_stream_any_more_cannot_go_on_within_the_pass_of_one() -> None:
    state = state_after(DataLoader(Stateful(), 4), 2)
    with pytest.raises(EchoStateError, match="within a pass of a stream, with "):
        adapt_state(state, setting(DataLoader(list(range(12)), 4)))  # type: ignore[arg-type]


@pytest.mark.parametrize("reuse", RULES)
def test_epochs_that_do_not_end_with_the_stream_are_the_way_out(reuse: str) -> None:
    state = state_after(DataLoader(Sized(), 4), 3, reuse=reuse)
    with pytest.raises(EchoStateError, match="by epoch_length='full_pass', and resume from a state saved there"):
        adapt_state(state, setting(DataLoader(Sized(), 4), reuse=reuse))


@pytest.mark.parametrize(("make", "point"), RESUMES)
def test_a_run_of_the_same_process_goes_on_within_its_pass_where_it_can(make: Any, point: str) -> None:
    assert begin_next_pass(state_after(make(), 2), setting(make(), point)) == (None, False)


@pytest.mark.parametrize(("make", "point"), DOES_NOT)
def test_and_begins_the_next_pass_where_it_cannot(make: Any, point: str) -> None:
    state = state_after(make(), 2, insertion_point=point)
    begun, is_cut = begin_next_pass(state, setting(make(), point))
    assert begun is not None
    assert is_cut
    if begun.stream is not None:
        assert (begun.stream.pass_, begun.stream.begun) == (1, False)
    else:
        assert state.plan is not None
        begins_at = state.plan.position  # what is left of a pass is not read: it may end before its length
        assert (begun.plan, begun.begin_at) == (None, (begins_at, 2))
        assert begun.order == OrderState(passes=(PassStart(1, begins_at),))


@pytest.mark.parametrize("by_batches", [False, True])
@pytest.mark.parametrize("saved_at", ["before_augmentation", "after_augmentation", "after_batching", "after_transfer"])
def test_what_all_ranks_had_taken_is_skipped_in_whole_batches(by_batches: bool, saved_at: str) -> None:
    saved_by_batches = saved_at in ("after_batching", "after_transfer")
    before, now = Layout(103, 2, 4, 4, 13), Layout(103, 3, 5, 5, 7)
    for number in range(3):
        for taken in range(0, 13):  # batches of the pass, on each of the two ranks
            position = number * 13 + taken if saved_by_batches else (number * 13 + taken) * 4
            state = echo_state(plan=plan_state(position), insertion_point=InsertionPoint(saved_at), layout=before)
            stream, batch = where_to_go_on(state, now, by_batches)
            skipped = (batch - number * 7) * 5 * 3
            assert skipped <= taken * 4 * 2, "nothing is left out"
            assert skipped > taken * 4 * 2 - 5 * 3 or batch == number * 7 + 6, "and no more than a batch comes again"
            assert stream == (batch if by_batches else batch * 5)


def test_the_order_keeps_where_passes_ended_if_they_end_elsewhere_from_now_on():
    before, ends = Layout(61, 4, 4, 4, 4), ((3, 62), (7, 61))  # 64 slots
    for order, now, expected in (
        (OrderState(distances=(Distance(0, 0),)), Layout(61, 2, 4, 3, 8), ((5, 64),)),
        (
            OrderState(distances=(Distance(0, 0),), ends=tuple(PassEnd(*each) for each in ends)),
            Layout(61, 1, 4, 1, 16),
            (*ends, (5, 64)),
        ),
        (OrderState(distances=(Distance(0, 0),)), Layout(61, 8, 4, 4, 2), None),  # also 64
        (OrderState(passes=(PassStart(0, 0),)), Layout(61, 2, 4, 3, 8), None),
    ):
        state = echo_state(plan=plan_state(5 * 16 + 9), layout=before, order=order)
        found = order_to_go_on(state, now, Start(5 * now.pass_length + 1, 5 * now.batches_per_pass + 1))
        assert found.distances == order.distances
        assert found.ends == expected


class CountedBatches(Batches):
    begun = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.begun += 1
        return super().__iter__()


class CountedStream(Stream):
    begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return super().__iter__()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("make", "point"),
    [
        (CountedBatches, "after_batching"),
        (lambda: DataLoader(CountedStream(), 4), "after_augmentation"),
        (lambda: DataLoader(CountedStream(), 4), "after_batching"),
    ],
)
def test_closed_between_two_passes_it_reads_none_of_them_twice(make: Any, point: str) -> None:
    """What was live then is not used again: to read it would be to read its whole pass."""
    plain = make()
    loader = EchoLoader(plain, 2, insertion_point=point, epoch_length="full_pass", seed=0)
    for number in (1, 2, 3):
        list(loader)
        loader.close()
        assert getattr(plain, "dataset", plain).begun == number
        assert (loader.counts.fresh, loader.counts.refetched) == (12 * number, 0)


def test_a_stream_begins_its_next_pass_with_the_factor_in_force_and_those_to_come() -> None:
    state = end_of_pass(DataLoader(Stream(), 4), epoch_length="full_pass")
    assert state.stream is not None
    factors, pending = (FactorChange(0, 2.0), FactorChange(4, 3.0)), (FactorChange(9, 4.0),)
    state = replace(state, stream=replace(state.stream, factors=factors, pending=pending))
    begun = adapt_state(state, setting(DataLoader(Stream(), 4))).stream
    assert begun is not None
    assert begun.factors == ((begun.request, 3.0),)
    assert begun.pending == ((9, 4.0),)


def test_a_resumed_stream_knows_the_factor_in_force_until_the_new_one_counts() -> None:
    loader, resumed = (EchoLoader(DataLoader(Stream(), 4, num_workers=1), 2, epoch_length="full_pass", seed=0) for _ in range(2))
    list(loader)
    loader.factor = 4
    loader.close()
    assert loader.factor_since > loader.delivered_batches, "a worker is ahead"
    resumed.load_state_dict(loader.state_dict())
    assert (resumed.factor, resumed.factor_since, resumed.factor_in_force) == (4, loader.factor_since, 2)


def test_another_buffer_begins_the_next_pass_of_a_stream_in_the_loader_that_follows() -> None:
    state, before = state_after(DataLoader(Stateful(), 4), 2), setting(DataLoader(Stateful(), 4))
    assert follow_state(state, before, before) == (state, False)
    other = setting(DataLoader(Stateful(), 4), buffer_size=9)
    followed, is_cut = follow_state(state, before, other)
    assert followed is not None
    assert followed.stream is not None
    assert is_cut
    assert (followed.stream.pass_, followed.stream.begun) == (1, False)
    assert followed.conditions == other.conditions()
    assert followed.conditions != state.conditions


def test_passes_that_are_over_and_the_largest_factor_come_with_the_state() -> None:
    loader, resumed = (EchoLoader(Batches(), 2, seed=0) for _ in range(2))
    list(loader)
    loader.factor = 5
    list(loader)
    loader.factor = 3
    list(loader)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.passes == loader.passes == 3
    assert resumed.state_dict()["largest_factor"] == 5


def test_other_workers_begin_the_next_pass_of_a_stream_anew_and_the_first_of_them_is_asked_first() -> None:
    state = end_of_pass(DataLoader(Stateful(), 4), epoch_length="full_pass")
    begun = adapt_state(state, setting(DataLoader(Stateful(), 4, num_workers=2), buffer_size=8)).stream
    assert begun is not None
    assert (begun.pass_, begun.workers, begun.batches) == (1, (None, None), (0, 0))
    assert begun.request > 0
    assert begun.request % 2 == 0


class StatefulBatches(Batches):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: DataLoader(Stateful(), 4), True),
        (StatefulBatches, True),
        (lambda: DataLoader(Stream(), 4), False),
        (Batches, False),
        (lambda: DataLoader(list(range(12)), 4), False),  # type: ignore[arg-type]
    ],
)
def test_states_of_the_users_loader_are_known_as_such(make: Any, expected: bool) -> None:
    assert has_own_states(state_after(make(), 2)) is expected


def test_several_ranks_hear_that_it_is_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_after(DataLoader(Stateful(), 4), 2)
    loader = EchoLoader(DataLoader(Stateful(), 4), 2, seed=0)
    monkeypatch.setattr("lightning_echo.loader.run.world", lambda: (2, 0))
    with pytest.warns(UserWarning, match="every rank continues from the loader's own state on rank 0"):
        loader.load_state_dict(state.to_dict())


class Counting:
    """Ten batches; its state is how many were taken."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.taken < 10:
            self.taken += 1
            yield torch.full((4,), self.taken - 1)
        self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class CountingWithLength(Counting):
    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("buffer_size", [1, 3, 6])
@pytest.mark.parametrize("taken", [1, 4, 9, 14])
@pytest.mark.parametrize("kind", [Counting, CountingWithLength])
def test_with_another_buffer_batches_go_on_at_the_same_place_of_the_pass(kind: Any, taken: int, buffer_size: int) -> None:
    before = EchoLoader(kind(), 2, buffer_size=2, seed=0, epoch_length="full_pass")
    read = {int(batch[0]) for _, batch in zip(range(taken), before, strict=False)}
    resumed = EchoLoader(kind(), 2, buffer_size=buffer_size, seed=0, epoch_length="full_pass")
    resumed.load_state_dict(before.state_dict())
    with pytest.warns(UserWarning, match="buffer_size=2 .now .*the same place of the pass and leaves nothing out"):
        delivered = [int(batch[0]) for batch in resumed]
    rest = set(range(10)) - read
    uses = [delivered.count(index) for index in range(10)]
    assert delivered[0] == min(rest)
    assert all(uses[index] > 0 for index in rest)
    assert kind is CountingWithLength or all(not uses[index] for index in read)


class Pass(IterableDataset[int]):
    """Twelve examples, (pass that it was told last, index)."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:  # type: ignore[override]
        return ((self.epoch, index) for index in range(12))


class SizedPass(Pass):
    def __len__(self) -> int:
        return 12


class SavedPass(SizedPass):
    at = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:  # type: ignore[override]
        while self.at < 12:
            self.at += 1
            yield self.epoch, self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def take(loader: EchoLoader, batches: int) -> list[Any]:
    """Batches as lists, over the ends of epochs."""
    found: list[Any] = []
    while len(found) < batches:
        found += [[tuple(map(int, example)) for example in zip(*batch, strict=True)] for batch in loader]
    return found[:batches]


def made_anew(dataset: Any, **options: Any) -> EchoLoader:
    return EchoLoader(DataLoader(dataset, 4), 2, **{"seed": 0, "insertion_point": "after_augmentation", **options})


class TestTakingThePlaceOfAnother:
    CUT = "a new loader was made within a pass that cannot be continued: the rest of that pass is left out"

    @pytest.mark.filterwarnings("error")
    def test_with_a_state_of_its_own_a_stream_goes_on_as_if_nothing_had_been(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On several ranks too: the state is that of this one."""
        whole = take(made_anew(SavedPass()), 15)
        monkeypatch.setattr("lightning_echo.loader.run.world", lambda: (2, 0))
        found: list[Any] = []
        before = made_anew(SavedPass())
        for _ in range(5):
            found += take(before, 3)
            after = made_anew(SavedPass(), seed=5)
            before.close()
            after.follow(before)
            before = after
        assert found == whole
        assert before.seed == 0

    def test_without_one_the_rest_of_the_pass_is_left_out_and_it_says_so(self) -> None:
        before, after = made_anew(SizedPass()), made_anew(SizedPass())
        assert {number for batch in take(before, 3) for number, _ in batch} == {0}
        before.close()
        with pytest.warns(UserWarning, match=self.CUT):
            after.follow(before)
        assert after.counts == before.counts
        delivered = [example for batch in take(after, 3) for example in batch]
        assert {number for number, _ in delivered} == {1}
        assert (1, 0) in delivered

    @pytest.mark.filterwarnings("error")
    def test_between_two_passes_the_next_one_begins(self) -> None:
        before, after = made_anew(Pass()), made_anew(Pass())
        first = list(before)
        before.close()
        after.follow(before)
        assert len(list(after)) == len(first)
        assert after.counts.fresh == 24
        assert after.loader.dataset.epoch == 1

    @pytest.mark.parametrize("make", [lambda: DataLoader(Sized(), 4), lambda: DataLoader(Stream(), 4), Batches])
    def test_so_do_batches_of_which_no_place_is_known(self, make: Any) -> None:
        before, after = (EchoLoader(make(), 2, insertion_point="after_batching", seed=0) for _ in range(2))
        next(iter(before))
        before.close()
        with pytest.warns(UserWarning, match=self.CUT):
            after.follow(before)
        assert {int(value) for batch in after for value in batch} >= {0, 1, 2, 3}
        assert after.counts.fresh > before.counts.fresh == 4

    def test_data_by_index_in_the_place_of_a_stream_begins_anew_and_goes_on_counting(self) -> None:
        before, after = made_anew(SizedPass()), EchoLoader(DataLoader(list(range(12)), 4), 2, seed=3)  # type: ignore[arg-type]
        list(before)
        before.close()
        with pytest.warns(UserWarning, match=self.CUT):
            after.follow(before)
        delivered, seed = after.delivered_batches, after.seed
        assert (delivered, seed) == (before.delivered_batches, 0)
        list(after)
        assert after.counts.delivered == before.counts.delivered + 12
