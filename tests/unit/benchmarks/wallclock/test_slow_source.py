import random
import statistics

import numpy as np
import pytest
import torch
from learning.glyphs import StagedGlyphs
from learning.language_model import StagedBytes
from wallclock.source import Bursts, HeavyTail, PacedSource, SlowReads, SlowSource


class Time:
    """A clock that only sleeping moves; each sleep takes `extra` too long."""

    def __init__(self, extra: float = 0.0) -> None:
        self.now, self.extra = 0.0, extra
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds + self.extra


def test_what_a_sleep_takes_too_long_is_taken_off_the_next() -> None:
    time = Time(extra=0.125)
    source = SlowSource(0.5, time.sleep, time.clock)
    for _ in range(100):
        source()
    assert time.now == pytest.approx(100 * 0.5 + 0.125)
    assert time.sleeps[:2] == [0.5, 0.375]


class Even:
    """Each read takes so long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def end(self, begin: float, number: int) -> float:
        return begin + self.seconds


def test_a_storage_is_no_faster_however_many_reads_are_in_flight() -> None:
    """100 reads of 0.5 s, all asked at once, on two lanes: the last one has its answer after 25 s."""
    time = Time()
    source = PacedSource(Even(0.5), 2, time.sleep, time.clock)
    source.begin()
    ends = [source._answered_at(0.0) for _ in range(100)]
    assert ends == [0.5 * (1 + place // 2) for place in range(100)]


def test_what_a_sleep_takes_too_long_makes_a_storage_no_slower() -> None:
    time = Time(extra=0.000125)
    source = PacedSource(Even(0.5), 1, time.sleep, time.clock)
    source.begin()
    for _ in range(100):
        source()
    assert time.now == pytest.approx(100 * 0.5 + 0.000125)


def test_a_lane_that_nobody_asked_does_not_work_ahead() -> None:
    time = Time()
    source = PacedSource(Even(0.5), 1, time.sleep, time.clock)
    source.begin()
    source()
    time.now = 10.0
    source()
    assert time.now == 10.5


def test_reads_before_the_training_take_no_time_and_its_beginning_begins_a_burst() -> None:
    time = Time()
    source = PacedSource(Bursts(read_seconds=1.0, on_seconds=4.0), 1, time.sleep, time.clock)
    source()
    assert time.sleeps == []
    time.now = 6.0
    source.begin()
    ends = []
    for _ in range(9):
        source()
        ends.append(time.now - 6.0)
    assert ends == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 8.5]  # twice the speed for 4 s, nothing for 4 s


def test_bursts_are_as_slow_on_average() -> None:
    bursts, at = Bursts(read_seconds=0.3, on_seconds=1.0), 0.0
    for number in range(1000):
        at = bursts.end(at, number)
    assert at == pytest.approx(300, abs=1.0)  # give or take a pause


@pytest.mark.parametrize("on_seconds", [0.8, 0.771, 0.36248, 1 / 3])
def test_each_read_ends_in_a_burst_whatever_rounding_does(on_seconds: float) -> None:
    bursts, chance = Bursts(read_seconds=0.0194, on_seconds=on_seconds), random.Random(1)
    at = 0.0
    for number in range(5000):
        begin = at if chance.random() < 0.5 else at + chance.expovariate(20)
        at = bursts.end(begin, number)
        assert begin < at <= begin + on_seconds + 0.0194
        assert at % (2 * on_seconds) <= on_seconds + 1e-9 or at % (2 * on_seconds) > 2 * on_seconds - 1e-9


def test_no_pause_passes_while_a_storage_stands_still() -> None:
    time = Time()
    source = PacedSource(Bursts(read_seconds=1.0, on_seconds=4.0), 1, time.sleep, time.clock)
    source.begin()
    source()
    with source.standing_still():
        time.now += 1000
    source()
    assert time.now == 1001.0


def test_a_heavy_tail_has_its_mean_and_is_the_same_in_each_run() -> None:
    """Lognormal, sigma 1.5: the median read takes exp(-1.125) of the mean."""
    first, again, other = HeavyTail(2.0, seed=1), HeavyTail(2.0, seed=1), HeavyTail(2.0, seed=2)
    reads = [first.end(5.0, number) - 5.0 for number in range(20_000)]
    assert statistics.median(reads) == pytest.approx(2.0 * np.exp(-1.125), rel=0.05)
    assert statistics.fmean(reads) == pytest.approx(2.0, rel=0.1)
    assert max(reads) > 50
    assert [again.end(5.0, number) - 5.0 for number in range(10)] == reads[:10]
    assert other.end(5.0, 0) - 5.0 != reads[0]


def test_a_data_set_behind_a_source_waits_in_read_alone_and_gives_the_same() -> None:
    asked = []

    class Counting(PacedSource):
        def __call__(self) -> None:
            asked.append(None)

    source = Counting(Even(0.0), 1)
    text = StagedBytes(torch.arange(200, dtype=torch.uint8))
    slow = SlowReads(text, source)
    raw = slow.read(1)
    assert len(asked) == 1
    assert all(map(torch.equal, slow.augment(slow.decode(raw)), text[1]))
    glyphs = StagedGlyphs(np.zeros((3, 20, 20), np.uint8), np.arange(3))
    slow = SlowReads(glyphs, source)
    assert len(slow) == 3
    image, label = slow.augment(slow.decode(slow.read(2)))
    assert (image.shape, label) == ((1, 20, 20), 2)
    assert len(asked) == 2
