"""Counts and idle fraction against numpy, on one rank, on simulated ranks, and on two processes with gloo."""

import copy
import pickle
import socket

import numpy as np
import pytest
import torch
import torch.multiprocessing
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics import MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_echo.measure.timing import EchoCounter, IdleFraction, job_steps

WAITED, SECONDS = [0.1, 0.0, 0.5, 0.25], [1.0, 0.5, 0.75, 0.25]  # of 2.5 s 0.85 are waited


def the_job(waited, seconds):
    """What `job_steps` is defined to be, step by step: a step waits as long as the rank that waits longest."""
    waited, seconds = np.asarray(waited, np.float32), np.asarray(seconds, np.float32)
    ranks, steps = waited.shape
    longest = [max(waited[rank][step] for rank in range(ranks)) for step in range(steps)]
    was_longest = [sum(waited[rank][step] == longest[step] > 0 for step in range(steps)) for rank in range(ranks)]
    total = max(sum(seconds[rank].tolist()) for rank in range(ranks))
    return min(sum(map(float, longest)), total), total, was_longest


# ---------------------------------------------------------------------- joining what ranks measured


def test_the_job_s_steps_are_those_of_the_definition():
    waited = [[0.5, 0.0, 0.25, 0.125], [0.0, 0.25, 0.5, 0.25], [0.0, 0.0, 0.125, 0.5]]
    seconds = [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.25], [0.5, 1.0, 1.0, 1.0]]
    job = job_steps(torch.tensor(waited), torch.tensor(seconds))
    assert job.steps == 4
    assert job.idle_fraction == (0.5 + 0.25 + 0.5 + 0.5) / 4.25
    assert job.slowest_rank == 1  # longest in the second and third step
    assert (job.wait_seconds, job.step_seconds) == (1.75 / 4, (4.25 - 1.75) / 4)


@given(
    st.integers(1, 5).flatmap(
        lambda ranks: st.lists(
            st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)), min_size=ranks, max_size=ranks), min_size=1, max_size=12
        )
    )
)
def test_whatever_ranks_measured_the_job_is_that_of_the_definition(steps):
    waited = np.array([[wait / 64 for wait, _ in step] for step in steps]).T
    seconds = np.array([[(wait + work) / 64 for wait, work in step] for step in steps]).T
    job = job_steps(torch.tensor(waited), torch.tensor(seconds))
    idle, total, was_longest = the_job(waited, seconds)
    assert job.idle_fraction == pytest.approx(idle / total if total else 0.0)
    assert 0 <= job.idle_fraction <= 1
    assert (job.wait_seconds * job.steps, job.step_seconds * job.steps) == (pytest.approx(idle), pytest.approx(total - idle))
    if was_longest.count(max(was_longest)) == 1 and sum(was_longest) == np.count_nonzero(waited.max(axis=0)) == len(steps):
        assert job.slowest_rank == int(np.argmax(was_longest))


def test_ranks_that_stall_in_turn_stop_the_job_although_each_of_them_hardly_waits():
    """The example of eight ranks: each waits in 11% of its time at most, the job in 63%."""
    steps, turns = 80, [14, 10, 10, 10, 9, 9, 9, 9]  # steps at which each rank stalls, one at a time
    waited = torch.zeros(8, steps)
    waited[[rank for rank, its in enumerate(turns) for _ in range(its)], torch.randperm(steps)] = 0.063
    seconds = torch.full((8, steps), 0.1)
    own = waited.sum(dim=1) / seconds.sum(dim=1)
    assert round(own.max().item(), 2) == 0.11
    job = job_steps(waited, seconds)
    assert round(job.idle_fraction, 2) == 0.63
    assert job.slowest_rank == 0


def test_the_slowest_rank_is_the_one_that_waited_longest_most_often_not_most():
    waited = torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.1, 0.0], [0.0, 0.0, 0.0]])
    waited[1, 2] = 0.1
    assert job_steps(waited, torch.ones(3, 3)).slowest_rank == 1


def test_a_job_is_never_idle_for_longer_than_it_lasts():
    """Clocks of ranks differ a little, and so do what they take for a step."""
    waited = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    job = job_steps(waited, waited + 0.25)
    assert (job.idle_fraction, job.wait_seconds, job.step_seconds) == (1.0, 0.75, 0.0)


def test_steps_that_took_no_time_were_not_idle():
    job = job_steps(torch.zeros(2, 3), torch.zeros(2, 3))
    assert (job.idle_fraction, job.wait_seconds, job.step_seconds) == (0.0, 0.0, 0.0)


# ---------------------------------------------------------------------- IdleFraction on one rank


def filled(waited=WAITED, seconds=SECONDS):
    idle = IdleFraction()
    idle.update(waited, seconds)
    return idle


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda values: torch.tensor(values, dtype=torch.float64)])
def test_idle_is_the_share_of_the_time_that_was_waited(kind):
    idle = filled(kind(WAITED), kind(SECONDS))
    assert idle.compute().shape == ()
    assert idle.compute().item() == pytest.approx(sum(WAITED) / sum(SECONDS))


def test_steps_may_come_in_any_number_of_updates():
    idle = IdleFraction()
    for part in (slice(0, 1), slice(1, 1), slice(1, 4)):
        idle.update(WAITED[part], SECONDS[part])
    assert idle.compute().item() == filled().compute().item()
    assert idle.steps() == filled().steps()


def test_steps_tells_more_and_of_the_last_steps_alone():
    idle = filled()
    assert idle.steps().steps == 4
    assert idle.steps().wait_seconds == pytest.approx(0.85 / 4)
    assert idle.steps().step_seconds == pytest.approx(1.65 / 4)
    last = idle.steps(2)
    assert (last.steps, last.idle_fraction) == (2, pytest.approx(0.75 / 1.0))
    assert idle.steps(4) is None
    assert idle.steps(7) is None


def test_before_the_first_step_there_is_nothing_to_tell():
    idle = IdleFraction()
    assert idle.steps() is None
    idle.update([], [])
    assert idle.steps() is None
    assert torch.isnan(idle.compute())


def test_waits_and_seconds_of_different_steps_are_refused():
    with pytest.raises(ValueError, match=r"waited and seconds must be equally long, got 2 and 1 steps"):
        IdleFraction().update([0.1, 0.2], [1.0])


def test_forward_gives_the_idle_fraction_of_the_new_steps_and_keeps_all():
    idle = IdleFraction()
    assert idle(WAITED[:2], SECONDS[:2]).item() == pytest.approx(0.1 / 1.5)
    assert idle(WAITED[2:], SECONDS[2:]).item() == pytest.approx(0.75 / 1.0)
    assert idle.compute().item() == pytest.approx(0.85 / 2.5)


def test_reset_forgets_all_steps():
    idle = filled()
    idle.compute()
    idle.reset()
    assert idle.per_step.shape == (2, 0)
    assert idle.steps() is None
    idle.update([1.0], [2.0])
    assert idle.compute().item() == 0.5


# ---------------------------------------------------------------------- EchoCounter on one rank


def test_fresh_and_echoed_examples_add_up():
    counter = EchoCounter()
    amounts = [(8, 0), (3, 5), (0, 8), (2**40, 1)]  # more than a float32 could tell apart
    for fresh, echoed in amounts:
        counter.update(fresh, echoed)
    counts = {name: value.item() for name, value in counter.compute().items()}
    assert counts == {"fresh_examples": 2**40 + 11, "echoed_examples": 14}
    assert all(value.shape == () for value in counter.compute().values())


def test_forward_gives_the_new_counts_and_keeps_all():
    counter = EchoCounter()
    counter(1, 2)
    assert {name: int(value) for name, value in counter(3, 5).items()} == {"fresh_examples": 3, "echoed_examples": 5}
    assert counter.compute()["echoed_examples"] == 7


def test_two_counters_share_nothing_and_reset_goes_back_to_zero():
    one, two = EchoCounter(), EchoCounter()
    one.update(5, 6)
    assert two.counts.tolist() == [0, 0]
    one.reset()
    one.update(1, 1)
    one.reset()
    assert one.counts.tolist() == [0, 0]


# ---------------------------------------------------------------------- as any torchmetric


@pytest.fixture(params=["idle", "counter"])
def metric(request):
    if request.param == "idle":
        return filled()
    counter = EchoCounter()
    counter.update(3, 9)
    return counter


def value_of(metric):
    value = metric.compute()
    return {name: each.item() for name, each in value.items()} if isinstance(value, dict) else value.item()


def update_again(metric):
    metric.update(*((WAITED, SECONDS) if isinstance(metric, IdleFraction) else (1, 2)))


@pytest.mark.filterwarnings("ignore:You are using `torch.load`:FutureWarning")  # by torch 2.4, of its own way to unpickle
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda metric: pickle.loads(pickle.dumps(metric))])
def test_a_metric_is_copied_and_pickled_with_what_it_holds(metric, duplicate):
    other, before = duplicate(metric), value_of(metric)
    assert value_of(other) == before
    update_again(other)
    assert value_of(metric) == before


def test_a_state_dict_holds_the_states_only_if_they_are_persistent(metric, tmp_path):
    assert metric.state_dict() == {}
    metric.persistent(True)
    torch.save(metric.state_dict(), tmp_path / "state.pt")
    other = type(metric)()
    other.persistent(True)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    update_again(metric)
    update_again(other)  # also tells torchmetrics that there is something to compute
    assert value_of(other) == value_of(metric)


def test_states_live_and_stay_on_the_metric_s_device(metric):
    """``meta`` stands for any device but the CPU: NCCL cannot reduce what is left there."""
    metric.to("meta")
    update_again(metric)
    states = [getattr(metric, name) for name in metric._defaults]
    assert {state.device.type for state in states} == {"meta"}
    metric.reset()
    assert {getattr(metric, name).device.type for name in metric._defaults} == {"meta"}


def test_they_work_in_a_collection():
    collection = MetricCollection({"idle": IdleFraction(), "counter": EchoCounter()})
    collection["idle"].update(WAITED, SECONDS)
    collection["counter"].update(3, 9)
    values = collection.compute()
    assert set(values) == {"idle", "fresh_examples", "echoed_examples"}


# ---------------------------------------------------------------------- two processes

TURNS = [[0.5, 0.0, 0.5, 0.0], [0.0, 0.5, 0.0, 0.75]]  # what each rank waits, step by step; a step lasts 1 s


def on_a_rank(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    idle, counter = IdleFraction(), EchoCounter()
    idle.update(TURNS[rank][:3], [1.0] * 3)
    idle.update(TURNS[rank][3:], [1.0])
    counter.update(10 + rank, 100 * rank)
    found["own"] = tuple(idle.steps())
    with idle.sync_context():
        found["synced"] = tuple(idle.steps())
        found["last two"] = tuple(idle.steps(2))
        found["shape"] = list(idle.per_step.shape)
    with idle.sync_context(dist_sync_fn=gather_all_tensors):
        found["gathered"] = tuple(idle.steps())
    found["own again"] = tuple(idle.steps())
    found["computed"] = idle.compute().item()
    found["counts"] = {name: int(value) for name, value in counter.compute().items()}
    counter.update(1, 1)  # of this rank's own, not of the sum
    found["own counts"] = counter.counts.tolist()
    found["counts again"] = {name: int(value) for name, value in counter.compute().items()}
    idle.reset()
    with idle.sync_context():
        found["nothing"] = idle.steps()
    idle.update([0.25 * rank], [1.0])
    found["after reset"] = idle.compute().item()
    found["forward"] = [
        IdleFraction()([0.5 * rank], [1.0]).item(),
        IdleFraction(dist_sync_on_step=True)([0.5 * rank], [1.0]).item(),
    ]
    uneven = IdleFraction()
    uneven.update([0.5] * (2 + rank), [1.0] * (2 + rank))
    try:
        uneven.compute()
    except ValueError as error:
        found["uneven"] = str(error)
    drawn = torch.rand(2, 50, generator=torch.Generator().manual_seed(3)).round(decimals=1)  # with equal waits
    of_both = torch.stack([drawn, drawn.roll(7, dims=1) + torch.tensor([[0.0], [0.1]])])
    idle.reset()
    idle.update(*of_both[rank])
    with idle.sync_context():
        found["drawn"] = tuple(idle.steps()), tuple(job_steps(of_both[:, 0], of_both[:, 1]))
    # In torch 2.4 gloo's thread may still hold the last tensor, and wait for the interpreter lock, which destroy_process_group
    # holds while it waits for the thread. A barrier's work holds no tensor of Python's.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo" if "lo" in dict(socket.if_nameindex()).values() else "")
        torch.multiprocessing.spawn(on_a_rank, args=(folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.slow
def test_over_two_processes_the_longest_waits_are_summed(ranks):
    for found in ranks:
        assert found["computed"] == (0.5 + 0.5 + 0.5 + 0.75) / 4
        assert found["synced"] == (4, 0.5625, 0, 0.5625, 0.4375, None)
        assert found["last two"] == (2, 0.625, 0, 0.625, 0.375, None)
        assert found["shape"] == [1, 3, 4], "as much for any number of ranks"


def test_a_function_that_gathers_finds_the_same(ranks):
    for found in ranks:
        assert found["gathered"] == found["synced"]


def test_joined_steps_are_those_of_all_ranks_also_where_two_wait_equally_long(ranks):
    for found in ranks:
        joined, expected = found["drawn"]
        assert joined == pytest.approx(expected, abs=1e-6)


def test_ranks_with_different_numbers_of_steps_are_refused_on_all_of_them(ranks):
    for rank, found in enumerate(ranks):
        assert found["uneven"] == f"all ranks must have made equally many steps, and they have made 2 to 3, this one {2 + rank}"


def test_after_the_gathering_each_process_has_its_own_steps_again(ranks):
    for rank, found in enumerate(ranks):
        assert found["own"] == found["own again"]
        assert found["own"][1] == sum(TURNS[rank]) / 4
        assert found["after reset"] == 0.25
        assert found["nothing"] is None


def test_forward_is_of_one_process_unless_it_is_told_to_reduce(ranks):
    assert [found["forward"] for found in ranks] == [[0.0, 0.5], [0.5, 0.5]]


def test_over_two_processes_counts_are_summed_and_each_goes_on_with_its_own(ranks):
    for rank, found in enumerate(ranks):
        assert found["counts"] == {"fresh_examples": 21, "echoed_examples": 100}
        assert found["own counts"] == [11 + rank, 100 * rank + 1]
        assert found["counts again"] == {"fresh_examples": 23, "echoed_examples": 102}
