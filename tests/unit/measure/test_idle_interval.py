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
    beyond = [wait - ratio * time for wait, time in sums]
    deviation = statistics.stdev([*beyond])  # their mean is 0
    return max(0.0, ratio - 2.776 * deviation * 5**0.5 / sum(time for _, time in sums))


@pytest.mark.parametrize("steps", [10, 14, 50, 137])
def test_it_is_the_formula_of_batch_means(steps):
    source = random.Random(steps)
    waited = [source.expovariate(2) for _ in range(steps)]
    seconds = [wait + source.uniform(0.9, 1.1) for wait in waited]
    found = idle_low(torch.tensor(waited), torch.tensor(seconds))
    assert found == pytest.approx(batch_means(waited, seconds), abs=1e-6)
    assert 0 < found < sum(waited) / sum(seconds)


def test_of_steady_waits_it_is_the_idle_fraction_itself():
    assert idle_low(torch.full((50,), 0.25), torch.ones(50)) == pytest.approx(0.25)
    assert idle_low(torch.zeros(50), torch.ones(50)) == 0


def test_one_long_wait_proves_nothing():
    waited = torch.zeros(50)
    waited[23] = 30.0
    assert idle_low(waited, 1 + waited) == 0


@pytest.mark.parametrize("steps", [0, 1, 9])
def test_a_few_steps_have_none(steps):
    assert idle_low(torch.ones(steps), 2 * torch.ones(steps)) is None
    assert steps == 0 or job_steps(torch.ones(1, steps), 2 * torch.ones(1, steps)).idle_low is None


def test_steps_that_took_no_time_have_none():
    assert idle_low(torch.zeros(10), torch.zeros(10)) is None


def test_that_of_a_job_is_of_the_longest_waits():
    waited = torch.zeros(2, 20)
    waited[0, ::2] = waited[1, 1::2] = 0.5  # two ranks that wait in turn
    assert job_steps(waited, torch.ones(2, 20)).idle_low == pytest.approx(0.5)
    idle = IdleFraction()
    idle.update(waited[0], torch.ones(20))
    assert idle.steps(10).idle_low == pytest.approx(batch_means([0.5, 0.0] * 5, [1.0] * 10))


def bursts(period):
    def waits(source, mean):
        first = source.randrange(period)
        return [mean * period * source.lognormvariate(-0.005, 0.1) if (i + first) % period == 0 else 0.0 for i in range(50)]

    return waits


SIMULATED = {
    "independent": lambda source, mean: [mean * source.lognormvariate(-0.045, 0.3) for _ in range(50)],
    "bursts of 4": bursts(4),
    "bursts of 16": bursts(16),
    "rare": lambda source, mean: [mean / 0.05 * source.expovariate(1) * (source.random() < 0.05) for _ in range(50)],
}


@pytest.mark.parametrize("kind", SIMULATED)
def test_it_is_seldom_too_high(kind):
    """Waits of 5% of the time on average: 97.5% of the lower ends must not lie above that."""
    source, too_high = random.Random(0), 0
    for _ in range(400):
        waited = torch.tensor(SIMULATED[kind](source, 0.05 / 0.95))
        too_high += idle_low(waited, 1 + waited) > 0.05
    assert too_high <= 20


def test_of_several_ranks_it_is_a_share_of_the_slowest_one_s_time():
    waited, seconds = torch.full((2, 50), 0.2), torch.stack([torch.ones(50), torch.full((50,), 2.0)])
    steps = job_steps(waited, seconds)
    assert steps.idle_fraction == pytest.approx(0.1)
    assert steps.idle_low == pytest.approx(0.1), "it does not vary"
