"""Positions are dealt to workers in the blocks of the plain loader's batches; each is delivered once, also after a resume."""

import random
from itertools import chain

import pytest

from lightning_echo.plan.demand import Booked, Dealing


def dealing(booked=None, *, pass_length=100, block=8, workers=2, window=24):
    return Dealing(booked or Booked(0), pass_length=pass_length, block=block, workers=workers, window=window)


def plain_batches(pass_length, block, passes):
    for number in range(passes):
        for first in range(0, pass_length, block):
            yield [number * pass_length + i for i in range(first, min(first + block, pass_length))]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("pass_length", [100, 96, 8, 5])
def test_a_worker_that_keeps_up_is_told_the_plain_loaders_batches_in_turn(workers, pass_length):
    deal, told = dealing(pass_length=pass_length, workers=workers), [[] for _ in range(workers)]
    for number in range(60):
        told[number % workers] += deal.deal(number % workers)
        deal.book(chain(*told[number % workers][number // workers : number // workers + 1]))
    in_turn = [list(told[number % workers][number // workers]) for number in range(60)]
    assert in_turn == list(plain_batches(pass_length, 8, 100))[:60]


def random_run(seed, steps=80):
    """Workers of random speed, stopped at random: returns all positions that were delivered, in order."""
    rand = random.Random(seed)
    block, pass_length = rand.randint(1, 9), rand.randint(1, 80)
    delivered, booked = [], Booked(0)
    while len(delivered) < steps * block:
        workers, window = rand.randint(1, 4), rand.randint(1, 4) * block
        deal = dealing(booked, pass_length=pass_length, block=block, workers=workers, window=window)
        assert deal.booked() == booked
        waiting = [[] for _ in range(workers)]
        speeds = [rand.random() for _ in range(workers)]
        for number in range(rand.randint(1, 40)):
            worker = number % workers
            waiting[worker] += chain(*deal.deal(worker))
            count = min(round(speeds[worker] * rand.random() * 2 * block), block)
            rand.shuffle(waiting[worker])  # what arrives first is taken first
            taken, waiting[worker] = waiting[worker][:count], waiting[worker][count:]
            deal.book(taken)
            delivered += taken
        booked = deal.booked()
        booked = Booked.of(booked.frontier, booked.runs())
        assert set(delivered) == {*range(booked.frontier), *booked.ahead}, seed
    return delivered


def test_each_position_is_delivered_once_whatever_the_speeds_and_stops():
    for seed in range(300):
        delivered = random_run(seed)
        assert len(delivered) == len(set(delivered)), seed


def test_what_is_open_after_a_resume_is_dealt_first():
    deal = dealing(Booked(3, frozenset({5, 6, 12})), workers=1, block=4, window=12)
    assert [list(block) for block in deal.deal(0)] == [[3, 4, 7, 8], [9, 10, 11], [13, 14, 15], [16, 17, 18, 19]]


def test_a_worker_can_always_fill_its_next_batch_while_one_example_is_not_read():
    deal = dealing(workers=1, block=4, window=8, pass_length=1000)
    told = set(chain(*deal.deal(0)))
    for _ in range(50):  # position 0 takes long to read
        deal.book(sorted(told - {0})[:4])
        told = (told - set(sorted(told - {0})[:4])) | set(chain(*deal.deal(0)))
        assert len(told - {0}) >= 4
    assert deal.booked().frontier == 0


def test_a_slow_worker_does_not_stop_the_others():
    deal = dealing(workers=2, block=4, window=8, pass_length=10_000)
    for _ in range(200):
        deal.book(chain(*deal.deal(0)))
    stuck = set(chain(*deal.deal(1)))
    booked = deal.booked()
    assert len(booked.ahead) + booked.frontier > 1500
    assert min(stuck) == booked.frontier  # the oldest that is open is dealt, and not lost
    assert len(set(range(max(booked.ahead))) - booked.ahead - stuck) <= 8 + 2 * 4  # a bounded queue


def test_a_position_that_is_delivered_twice_is_a_fault():
    deal = dealing()
    deal.deal(0)
    deal.book([0])
    with pytest.raises(RuntimeError, match="position 0 was delivered twice"):
        deal.book([0])
