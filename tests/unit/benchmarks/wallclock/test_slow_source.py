import threading

import pytest
from wallclock.source import SlowSource


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


def test_of_a_sleep_that_took_much_too_long_no_more_than_one_read_is_taken_off() -> None:
    time = Time()
    source = SlowSource(0.5, time.sleep, time.clock)
    time.extra = 100.0
    source()
    time.extra = 0.0
    source()  # for nothing
    source()
    assert time.now == 100.5 + 0.5


def test_a_read_that_is_interrupted_waits_for_the_end_and_then_for_what_was_left() -> None:
    now, sleeps, asleep, awake = [0.0], [], threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 1:
            asleep.set()
            awake.wait(60)
        else:
            now[0] += seconds

    source = SlowSource(5.0, sleep, lambda: now[0])
    reading = threading.Thread(target=source)
    reading.start()
    assert asleep.wait(60)
    now[0] = 3.0
    with source.standing_still():
        assert source.stands_still
        now[0] = 5.0
        awake.set()  # the sleep ends in the meantime; the read does not
        reading.join(0.2)
        assert reading.is_alive()
        now[0] = 13.0
    reading.join(60)
    assert not reading.is_alive()
    assert not source.stands_still
    assert sleeps == [5.0, 2.0]
    assert now == [15.0]
