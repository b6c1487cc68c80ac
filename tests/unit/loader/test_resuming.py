"""States from within a pass that cannot be gone on with are refused; those from between two passes begin the next."""

import pytest
import torch
from own_states import Ends
from states import echo_state, plan_state
from torch.utils.data import DataLoader, IterableDataset

from lightning_echo import EchoLoader, EchoStateError
from lightning_echo.insertion import InsertionPoint
from lightning_echo.loader.resuming import (
    adapt_state,
    begin_next_pass,
    has_own_states,
    order_to_go_on,
    where_to_go_on,
)
from lightning_echo.loader.setting import Setting
from lightning_echo.loader.state import Distance, EchoState, OrderState, PassEnd, PassStart
from lightning_echo.pipeline.pipelines import Layout, Start
from lightning_echo.plan.plan import Reuse


class Stream(IterableDataset):
    """Twelve examples, 100 * (pass that it was told last) + index."""

    epoch, begun = 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.begun += 1
        return iter(range(100 * self.epoch, 100 * self.epoch + 12))


class Sized(Stream):
    def __len__(self):
        return 12


class Stateful(Ends, IterableDataset):
    def __init__(self):
        super().__init__(12)


class Batches:
    begun = 0

    def __iter__(self):
        self.begun += 1
        return iter(torch.arange(12).split(4))


class StatefulBatches(Ends):
    """Ten batches of four."""

    def __init__(self):
        super().__init__(10)

    def item(self):
        return torch.full((4,), self.at)


class StatefulBatchesWithLength(StatefulBatches):
    def __len__(self):
        return 10


def of(dataset, batch_size=4, **options):
    return DataLoader(dataset, batch_size, **options)


def by_index():
    return of(range(12))


def echo(loader, **options):
    return EchoLoader(loader, 2, **{"seed": 0, **options})


def setting(loader, point="auto", buffer_size=None, reuse="memory"):
    return Setting(loader, InsertionPoint(point), buffer_size, 2.0, None, reuse=Reuse(reuse))


def read(saved):
    return EchoState.from_dict(saved, by_index="distances" in (saved["order"] or {}))


def take(loader, batches):
    """Batches as lists, over the ends of epochs."""
    found = []
    while len(found) < batches:
        for batch in loader:
            found.append(batch.tolist())
            if len(found) == batches:
                break
    return found


def state_after(loader, batches, **options):
    echoed = echo(loader, **options)
    take(echoed, batches)
    return read(echoed.state_dict())


def end_of_pass(loader, **options):
    echoed = echo(loader, epoch_length="full_pass", **options)
    list(echoed)
    return read(echoed.state_dict())


RESUMES = [(by_index, "auto"), (lambda: of(Stateful()), "auto"), (lambda: [torch.zeros(4)] * 3, "auto")]
DOES_NOT = [
    (lambda: of(Stream()), "auto"),
    (lambda: of(Sized()), "auto"),
    (lambda: of(Stream()), "after_batching"),
    (lambda: of(Stateful()), "after_batching"),
    (Batches, "auto"),
]
# Its epochs have a length: round(factor * steps), after which two passes have begun, and the second one has not ended.
SIZED_BATCHES = (lambda: of(Sized()), "after_batching")
RULES = ["each", "memory"]


@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize(("make", "point"), RESUMES)
def test_what_knows_its_place_goes_on_there_in_another_process_and_in_this_one(make, point, reuse):
    state, now = state_after(make(), 2, reuse=reuse), setting(make(), point, reuse=reuse)
    assert adapt_state(state, now) is state
    assert begin_next_pass(state, now) == (None, False)


@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize(("make", "point"), [*DOES_NOT, SIZED_BATCHES])
def test_what_does_not_is_refused_within_a_pass_and_in_this_process_begins_the_next(make, point, reuse):
    state, now = state_after(make(), 2, insertion_point=point, reuse=reuse), setting(make(), point, reuse=reuse)
    with pytest.raises(
        EchoStateError, match=r"saved within a pass, and .* cannot continue there: without state_dict\(\)"
    ) as said:
        adapt_state(state, now)
    assert ("by epoch_length='full_pass', and resume from a state saved there" in str(said.value)) == (state.epoch_batches >= 0)
    begun, is_cut = begin_next_pass(state, now)
    assert is_cut
    if begun.stream is not None:
        assert (begun.stream.pass_, begun.stream.begun) == (1, False)
    else:
        begins_at = state.plan.position  # what is left of a pass is not read: it may end before its length
        assert (begun.plan, begun.begin_at) == (None, (begins_at, 2))
        assert begun.order == OrderState(passes=(PassStart(1, begins_at),))


@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize(("make", "point"), DOES_NOT)
def test_and_begins_the_next_pass_where_one_has_ended_with_nothing_live(make, point, reuse):
    state = end_of_pass(make(), insertion_point=point, reuse=reuse)
    adapted = adapt_state(state, setting(make(), point, reuse=reuse))
    assert adapted.plan is None
    if state.stream is not None:
        assert (adapted.stream.pass_, adapted.stream.begun, adapted.stream.workers) == (1, False, (None,))
        assert adapted.stream.batches == state.stream.batches
    else:
        assert adapted.begin_at == (3, state.delivered)
        assert adapted.order == OrderState(passes=(PassStart(1, 3),))
    assert adapted.counts == state.counts
    assert adapt_state(adapted, setting(make(), point, reuse=reuse)).begin_at == adapted.begin_at


@pytest.mark.parametrize(("make", "point"), DOES_NOT)
def test_what_begins_the_next_pass_may_be_saved_again_before_its_first_batch(make, point):
    whole, resumed, again = (echo(make(), insertion_point=point, epoch_length="full_pass") for _ in range(3))
    list(whole)
    resumed.load_state_dict(whole.state_dict())
    again.load_state_dict(resumed.state_dict())
    assert again.state_dict() == resumed.state_dict()
    expected, found = (torch.cat([batch.reshape(-1) for batch in loader]).tolist() for loader in (resumed, again))
    assert found == expected
    assert len(found) >= 12


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (lambda: setting(of(Stateful()), buffer_size=9), r"buffer_size=256 \(now 9\): the workers divide a stream"),
        (lambda: setting(of(Stateful()), buffer_size=9, reuse="each"), "reuse='memory'"),
        (lambda: setting(of(Stateful(), 3), buffer_size=8), ".*batch_size"),
        (lambda: setting(by_index()), ""),
    ],
    ids=["buffer", "rule", "batches", "no stream"],
)
def test_within_a_pass_of_a_stream_anything_else_is_refused_by_what_has_changed(now, said):
    state = state_after(of(Stateful()), 2)
    with pytest.raises(EchoStateError, match=f"within a pass of a stream, with .*{said}"):
        adapt_state(state, now())


@pytest.mark.parametrize("by_batches", [False, True])
@pytest.mark.parametrize("saved_at", ["after_augmentation", "after_batching"])
def test_what_all_ranks_had_taken_is_skipped_in_whole_batches(by_batches, saved_at):
    before, now = Layout(103, 2, 4, 4, 13), Layout(103, 3, 5, 5, 7)
    for number in range(3):
        for taken in range(0, 13):  # batches of the pass, on each of the two ranks
            position = number * 13 + taken if saved_at == "after_batching" else (number * 13 + taken) * 4
            state = echo_state(plan=plan_state(position), insertion_point=InsertionPoint(saved_at), layout=before)
            stream, batch = where_to_go_on(state, now, by_batches)
            skipped = (batch - number * 7) * 5 * 3
            assert skipped <= taken * 4 * 2, "nothing is left out"
            assert skipped > taken * 4 * 2 - 5 * 3 or batch == number * 7 + 6, "and no more than a batch comes again"
            assert stream == (batch if by_batches else batch * 5)


def test_the_order_keeps_where_passes_ended_if_they_end_elsewhere_from_now_on():
    before, ends = Layout(61, 4, 4, 4, 4), (PassEnd(3, 62), PassEnd(7, 61))  # 64 slots
    distances = (Distance(0, 0),)
    for order, now, expected in (
        (OrderState(distances=distances), Layout(61, 2, 4, 3, 8), ((5, 64),)),
        (OrderState(distances=distances, ends=ends), Layout(61, 1, 4, 1, 16), (*ends, (5, 64))),
        (OrderState(distances=distances), Layout(61, 8, 4, 4, 2), None),  # also 64
        (OrderState(passes=(PassStart(0, 0),)), Layout(61, 2, 4, 3, 8), None),
    ):
        state = echo_state(plan=plan_state(5 * 16 + 9), layout=before, order=order)
        found = order_to_go_on(state, now, Start(5 * now.pass_length + 1, 5 * now.batches_per_pass + 1))
        assert (found.distances, found.ends) == (order.distances, expected)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("make", "point"),
    [(Batches, "after_batching"), (lambda: of(Stream()), "after_augmentation"), (lambda: of(Stream()), "after_batching")],
)
def test_closed_between_two_passes_it_reads_none_of_them_twice(make, point):
    """What was live then is not used again: to read it would be to read its whole pass."""
    plain = make()
    loader = echo(plain, insertion_point=point, epoch_length="full_pass")
    for number in (1, 2, 3):
        list(loader)
        loader.close()
        assert getattr(plain, "dataset", plain).begun == number
        assert (loader.counts.fresh, loader.counts.refetched) == (12 * number, 0)


def test_a_resumed_stream_knows_the_factor_in_force_until_the_new_one_counts():
    loader, resumed = (echo(of(Stream(), num_workers=1), epoch_length="full_pass") for _ in range(2))
    list(loader)
    loader.factor = 4
    loader.close()
    assert loader.factor_since > loader.delivered_batches, "a worker is ahead"
    resumed.load_state_dict(loader.state_dict())
    assert (resumed.factor, resumed.factor_since, resumed.factor_in_force) == (4, loader.factor_since, 2)


def test_several_ranks_hear_that_the_own_state_of_a_loader_is_that_of_one(monkeypatch):
    made = [of(Stateful()), StatefulBatches(), of(Stream()), Batches(), by_index()]
    states = [state_after(each, 2) for each in made]
    assert [has_own_states(state) for state in states] == [True, True, False, False, False]
    loader = echo(of(Stateful()))
    monkeypatch.setattr("lightning_echo.loader.run.world", lambda: (2, 0))
    with pytest.warns(UserWarning, match="every rank continues from the loader's own state on rank 0"):
        loader.load_state_dict(states[0].to_dict())


@pytest.mark.grid
@pytest.mark.parametrize("buffer_size", [1, 3, 6])
@pytest.mark.parametrize("taken", [1, 4, 9, 14])
@pytest.mark.parametrize("kind", [StatefulBatches, StatefulBatchesWithLength])
def test_with_another_buffer_batches_go_on_at_the_same_place_of_the_pass(kind, taken, buffer_size):
    before = echo(kind(), buffer_size=2, epoch_length="full_pass")
    read = {batch[0] for batch in take(before, taken)}
    resumed = echo(kind(), buffer_size=buffer_size, epoch_length="full_pass")
    resumed.load_state_dict(before.state_dict())
    with pytest.warns(UserWarning, match="buffer_size=2 .now .*the same place of the pass and leaves nothing out"):
        delivered = [int(batch[0]) for batch in resumed]
    rest = set(range(10)) - read
    assert delivered[0] == min(rest)
    assert set(delivered) >= rest
    assert kind is StatefulBatchesWithLength or not set(delivered) & read


class TestTakingThePlaceOfAnother:
    CUT = "a new loader was made within a pass that cannot be continued: the rest of that pass is left out"

    @pytest.mark.filterwarnings("error")
    def test_with_a_state_of_its_own_a_stream_goes_on_as_if_nothing_had_been(self, monkeypatch):
        """On several ranks too: the state is that of this one."""
        whole, found, before = take(echo(of(Stateful())), 15), [], echo(of(Stateful()))
        monkeypatch.setattr("lightning_echo.loader.run.world", lambda: (2, 0))
        for _ in range(5):
            found += take(before, 3)
            after = echo(of(Stateful()), seed=5)
            before.close()
            after.follow(before)
            before = after
        assert found == whole
        assert before.seed == 0

    @pytest.mark.parametrize(
        ("make", "point"),
        [(lambda: of(Sized()), "auto"), SIZED_BATCHES, (lambda: of(Stream()), "after_batching"), (Batches, "auto")],
    )
    def test_without_one_the_rest_of_the_pass_is_left_out_and_it_says_so(self, make, point):
        before, after = echo(make(), insertion_point=point), echo(make(), insertion_point=point)
        take(before, 1)
        before.close()
        with pytest.warns(UserWarning, match=self.CUT):
            after.follow(before)
        assert after.counts == before.counts
        delivered = {number for batch in take(after, 6) for number in batch}
        begins = 100 if isinstance(after.loader, DataLoader) and point == "auto" else 0  # a stream is told its pass
        assert delivered >= {begins, begins + 1, begins + 2, begins + 3}
        assert min(delivered) == begins
