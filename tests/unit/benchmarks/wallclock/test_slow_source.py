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
