"""The lower end of the idle fraction's interval, against the formula in plain Python and against what simulated waits do."""

import random
import statistics

import pytest
import torch

from lightning_echo.measure.control import idle_low
from lightning_echo.measure.timing import IdleFraction, job_steps


def batch_means(waited, seconds, blocks, size):
    """The same by the textbook, for the last steps, of which the longest wait counts as none."""
    last = list(zip(waited, seconds, strict=True))[-blocks * size :]
    longest = max(range(len(last)), key=lambda i: last[i][0])
    last[longest] = 0.0, last[longest][1] - last[longest][0]
    sums = [tuple(map(sum, zip(*last[k * size : (k + 1) * size], strict=True))) for k in range(blocks)]
    ratio = sum(wait for wait, _ in sums) / sum(time for _, time in sums)
    deviation = statistics.stdev([wait - ratio * time for wait, time in sums])  # their mean is 0
    quantile = {5: 3.747, 4: 4.541}[blocks]  # 99% of Student's t, by the tables
    return max(0.0, ratio - quantile * deviation * blocks**0.5 / sum(time for _, time in sums))


def waits_of(steps):
    source = random.Random(steps)
    waited = [source.uniform(0.4, 0.6) for _ in range(steps)]
    return waited, [wait + source.uniform(0.9, 1.1) for wait in waited]


@pytest.mark.parametrize(
    ("steps", "workers", "blocks", "size"),
    [
        pytest.param(8, 1, 4, 2, id="four blocks of two steps"),
        pytest.param(9, 2, 4, 2, id="the last steps count"),
        pytest.param(10, 1, 5, 2, id="five blocks"),
        pytest.param(14, 2, 5, 2, id="five blocks of the last steps"),
        pytest.param(137, 1, 5, 27, id="five long blocks"),
        pytest.param(137, 4, 5, 24, id="whole rounds of the workers"),
        pytest.param(17, 4, 4, 4, id="four whole rounds, rather than five parts of rounds"),
        pytest.param(17, 5, 5, 3, id="fewer than four rounds"),
    ],
)
def test_it_is_the_formula_of_batch_means(steps, workers, blocks, size):
    waited, seconds = waits_of(steps)
    found = idle_low(torch.tensor(waited), torch.tensor(seconds), workers)
    assert found == pytest.approx(batch_means(waited, seconds, blocks, size), abs=1e-6)
    assert 0 < found < sum(waited) / sum(seconds)


def test_steady_waits_prove_themselves_one_long_wait_nothing_and_few_steps_have_none():
    assert 0.23 < idle_low(torch.full((50,), 0.25), torch.ones(50)) < 0.25
    for length in (1.0, 30.0, 3000.0):
        waited = torch.zeros(50)
        waited[23] = length
        assert idle_low(waited, 1 + waited) == 0
    assert [idle_low(torch.ones(steps), 2 * torch.ones(steps)) for steps in (0, 7)] == [None, None]
    assert job_steps(torch.ones(1, 7), 2 * torch.ones(1, 7)).idle_low is None
    assert idle_low(torch.zeros(10), torch.zeros(10)) is None, "no time has passed"


def test_that_of_a_job_is_of_the_longest_waits_as_a_share_of_the_slowest_ranks_time():
    waited = torch.zeros(2, 20)
    waited[0, ::2] = waited[1, 1::2] = 0.5  # two ranks that wait in turn
    found = job_steps(waited, torch.ones(2, 20)).idle_low
    assert found == pytest.approx(batch_means([0.5] * 20, [1.0] * 20, 5, 4))
    idle = IdleFraction()
    idle.update(waited[0], torch.ones(20))
    assert idle.steps(10).idle_low == pytest.approx(batch_means([0.5, 0.0] * 5, [1.0] * 10, 5, 2))
    steady = job_steps(torch.full((2, 50), 0.2), torch.stack([torch.ones(50), torch.full((50,), 2.0)]))
    expected = batch_means([0.2] * 50, [2.0] * 50, 5, 10)
    assert (steady.idle_fraction, steady.idle_low) == (pytest.approx(0.1), pytest.approx(expected))


def test_a_stretch_is_whole_rounds_of_the_workers_and_proved_by_what_came_before_it_if_that_proves_more():
    """Four workers deliver at the same time: the first batch of a round is waited for, and three are there."""
    waited = [0.0, 0.0] + [4.0, 0.0, 0.0, 0.0] * 4
    idle = IdleFraction()
    idle.update(waited, [1 + wait for wait in waited])
    alone, longer = idle.stretch(8, 8, 4), idle.stretch(8, 2, 4)
    assert (alone.steps, alone.idle_fraction) == (8, pytest.approx(0.5))
    assert longer == alone._replace(idle_low=longer.idle_low)
    seconds = [1 + wait for wait in waited]
    assert alone.idle_low == pytest.approx(batch_means(waited, seconds, 4, 2))
    assert longer.idle_low == pytest.approx(batch_means(waited, seconds, 4, 4))
    assert longer.idle_low > alone.idle_low
    assert idle.stretch(8, 8, 16).steps == 10, "less than a round is all there is"
    assert idle.stretch(18, 2, 4) is None
    assert idle.stretch(15, 15, 1).idle_low is None
