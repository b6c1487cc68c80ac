"""Counts and idle fraction against numpy, on one rank, on simulated ranks, and on two processes with gloo."""

import socket

import numpy as np
import pytest
import torch
import torch.multiprocessing
from hypothesis import given
from hypothesis import strategies as st
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


def test_the_job_s_steps_are_those_of_the_definition():
    waited = [[9.0, 0.0, 0.25, 0.125], [0.0, 0.25, 0.5, 0.25], [0.0, 0.0, 0.125, 0.5]]
    seconds = [[10.0, 1.0, 1.0, 1.0], [10.0, 1.0, 1.0, 1.25], [0.5, 1.0, 1.0, 1.0]]
    job = job_steps(torch.tensor(waited), torch.tensor(seconds))
    assert (job.steps, job.idle_fraction) == (4, pytest.approx((9 + 0.25 + 0.5 + 0.5) / 13.25))
    assert job.slowest_rank == 1  # longest most often, though rank 0 waited most
    assert (job.wait_seconds, job.busy_seconds) == (pytest.approx(10.25 / 4), pytest.approx((13.25 - 10.25) / 4))


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
    assert (job.wait_seconds * job.steps, job.busy_seconds * job.steps) == (pytest.approx(idle), pytest.approx(total - idle))
    if was_longest.count(max(was_longest)) == 1 and sum(was_longest) == np.count_nonzero(waited.max(axis=0)) == len(steps):
        assert job.slowest_rank == int(np.argmax(was_longest))


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda values: torch.tensor(values, dtype=torch.float64)])
def test_idle_is_the_share_of_the_time_that_was_waited_in_any_number_of_updates(kind):
    idle = IdleFraction()
    assert idle.steps() is None
    idle.update([], [])
    assert torch.isnan(idle.compute())
    for part in (slice(0, 1), slice(1, 1), slice(1, 4)):
        idle.update(kind(WAITED[part]), kind(SECONDS[part]))
    assert (idle.compute().shape, idle.compute().item()) == ((), pytest.approx(0.85 / 2.5))
    assert (idle.steps().steps, idle.steps().wait_seconds) == (4, pytest.approx(0.85 / 4))
    last = idle.steps(2)
    assert (last.steps, last.idle_fraction) == (2, pytest.approx(0.75 / 1.0))
    assert (idle.steps(4), idle.steps(7)) == (None, None)
    with pytest.raises(ValueError, match=r"waited and seconds must be equally long, got 2 and 1 steps"):
        idle.update([0.1, 0.2], [1.0])


def test_forward_gives_what_is_new_and_keeps_all_and_reset_forgets():
    idle, counter = IdleFraction(), EchoCounter()
    assert idle(WAITED[:2], SECONDS[:2]).item() == pytest.approx(0.1 / 1.5)
    assert idle(WAITED[2:], SECONDS[2:]).item() == pytest.approx(0.75 / 1.0)
    assert idle.compute().item() == pytest.approx(0.85 / 2.5)
    idle.reset()
    assert (idle.per_step.shape, idle.steps()) == ((2, 0), None)
    idle.update([1.0], [2.0])
    assert idle.compute().item() == 0.5
    counter(2**40, 2)  # more than a float32 could tell apart
    assert {name: int(value) for name, value in counter(3, 5).items()} == {"fresh_examples": 3, "echoed_examples": 5}
    assert {name: int(value) for name, value in counter.compute().items()} == {
        "fresh_examples": 2**40 + 3,
        "echoed_examples": 7,
    }
    counter.reset()
    assert counter.counts.tolist() == EchoCounter().counts.tolist() == [0, 0]


@pytest.mark.parametrize(("metric", "values"), [(IdleFraction(), (WAITED, SECONDS)), (EchoCounter(), (3, 9))])
def test_states_live_and_stay_on_the_metric_s_device(metric, values):
    """``meta`` stands for any device but the CPU: NCCL cannot reduce what is left there."""
    metric.to("meta")
    metric.update(*values)
    assert {getattr(metric, name).device.type for name in metric._defaults} == {"meta"}
    metric.reset()
    assert {getattr(metric, name).device.type for name in metric._defaults} == {"meta"}


TURNS = [[0.5, 0.0, 0.5, 0.0], [0.0, 0.5, 0.0, 0.75]]  # what each rank waits, step by step; a step lasts 1 s


def on_a_rank(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found, idle, counter = {}, IdleFraction(), EchoCounter()
    idle.update(TURNS[rank][:3], [1.0] * 3)
    idle.update(TURNS[rank][3:], [1.0])
    counter.update(10 + rank, 100 * rank)
    found["own"] = tuple(idle.steps())
    with idle.sync_context():
        found["synced"], found["last two"], found["shape"] = tuple(idle.steps()), tuple(idle.steps(2)), list(idle.per_step.shape)
    with idle.sync_context(dist_sync_fn=gather_all_tensors):
        found["gathered"] = tuple(idle.steps())
    found["own again"], found["computed"] = tuple(idle.steps()), idle.compute().item()
    found["counts"] = {name: int(value) for name, value in counter.compute().items()}
    counter.update(1, 1)  # of this rank's own, not of the sum
    found["own counts"] = counter.counts.tolist()
    idle.reset()
    with idle.sync_context():
        found["nothing"] = idle.steps()
    found["forward"] = [IdleFraction(dist_sync_on_step=on)([0.5 * rank], [1.0]).item() for on in (False, True)]
    uneven = IdleFraction()
    uneven.update([0.5] * (2 + rank), [1.0] * (2 + rank))
    try:
        uneven.compute()
    except ValueError as error:
        found["uneven"] = str(error)
    drawn = torch.rand(2, 50, generator=torch.Generator().manual_seed(3)).round(decimals=1)  # with equal waits
    of_both = torch.stack([drawn, drawn.roll(7, dims=1) + torch.tensor([[0.0], [0.1]])])
    idle.update(*of_both[rank])
    with idle.sync_context():
        found["drawn"] = tuple(idle.steps()), tuple(job_steps(of_both[:, 0], of_both[:, 1]))
    # In torch 2.4 gloo's thread may still hold the last tensor, and wait for the interpreter lock, which destroy_process_group
    # holds while it waits for the thread. A barrier's work holds no tensor of Python's.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    torch.save(found, f"{folder}/{rank}.pt")


def test_two_processes_join_their_steps_and_counts_and_then_each_has_its_own_again(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo" if "lo" in dict(socket.if_nameindex()).values() else "")
    torch.multiprocessing.start_processes(on_a_rank, args=(tmp_path,), nprocs=2, start_method="fork")
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found["computed"] == (0.5 + 0.5 + 0.5 + 0.75) / 4
        assert found["synced"] == found["gathered"] == (4, 0.5625, 0, 0.5625, 0.4375, None)
        assert found["last two"] == (2, 0.625, 0, 0.625, 0.375, None)
        assert found["shape"] == [1, 3, 4], "as much for any number of ranks"
        joined, expected = found["drawn"]
        assert joined == pytest.approx(expected, abs=1e-6), "also where two ranks wait equally long"
        assert found["uneven"] == f"all ranks must have made equally many steps, and they have made 2 to 3, this one {2 + rank}"
        assert found["own"] == found["own again"]
        assert found["own"][1] == sum(TURNS[rank]) / 4
        assert found["nothing"] is None
        assert found["forward"] == [0.5 * rank, 0.5]
        assert found["counts"] == {"fresh_examples": 21, "echoed_examples": 100}
        assert found["own counts"] == [11 + rank, 100 * rank + 1]
