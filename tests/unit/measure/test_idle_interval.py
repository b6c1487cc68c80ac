"""The lower end of the idle fraction's interval, against the formula in plain Python and against what simulated waits do."""

import random
import statistics

import pytest
import torch

from lightning_echo.measure.timing import IdleFraction, idle_low, job_steps


def batch_means(waited, seconds):
    """The same by the textbook, of five blocks, in which the last steps count."""
    size = len(waited) // 5
    cut = [range(len(waited) - size * k, len(waited) - size * (k - 1)) for k in range(5, 0, -1)]
    sums = [(sum(waited[i] for i in block), sum(seconds[i] for i in block)) for block in cut]
    ratio = sum(wait for wait, _ in sums) / sum(time for _, time in sums)
    deviation = statistics.stdev([wait - ratio * time for wait, time in sums])  # their mean is 0
    return max(0.0, ratio - 2.776 * deviation * 5**0.5 / sum(time for _, time in sums))


@pytest.mark.parametrize("steps", [10, 14, 137])
def test_it_is_the_formula_of_batch_means(steps):
    source = random.Random(steps)
    waited = [source.expovariate(2) for _ in range(steps)]
    seconds = [wait + source.uniform(0.9, 1.1) for wait in waited]
    found = idle_low(torch.tensor(waited), torch.tensor(seconds))
    assert found == pytest.approx(batch_means(waited, seconds), abs=1e-6)
    assert 0 < found < sum(waited) / sum(seconds)


def test_steady_waits_prove_themselves_one_long_wait_nothing_and_few_steps_have_none():
    assert idle_low(torch.full((50,), 0.25), torch.ones(50)) == pytest.approx(0.25)
    waited = torch.zeros(50)
    waited[23] = 30.0
    assert idle_low(waited, 1 + waited) == 0
    assert [idle_low(torch.ones(steps), 2 * torch.ones(steps)) for steps in (0, 9)] == [None, None]
    assert job_steps(torch.ones(1, 9), 2 * torch.ones(1, 9)).idle_low is None
    assert idle_low(torch.zeros(10), torch.zeros(10)) is None, "no time has passed"


def test_that_of_a_job_is_of_the_longest_waits_as_a_share_of_the_slowest_ranks_time():
    waited = torch.zeros(2, 20)
    waited[0, ::2] = waited[1, 1::2] = 0.5  # two ranks that wait in turn
    assert job_steps(waited, torch.ones(2, 20)).idle_low == pytest.approx(0.5)
    idle = IdleFraction()
    idle.update(waited[0], torch.ones(20))
    assert idle.steps(10).idle_low == pytest.approx(batch_means([0.5, 0.0] * 5, [1.0] * 10))
    steady = job_steps(torch.full((2, 50), 0.2), torch.stack([torch.ones(50), torch.full((50,), 2.0)]))
    assert (steady.idle_fraction, steady.idle_low) == (pytest.approx(0.1), pytest.approx(0.1))
