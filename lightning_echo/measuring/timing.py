"""Clocks: how long each step took, and for how much of it the device waited for input.

    ... step k-1 | fetch k | copy k | (logging, hooks) | step k | ...
                 |<- waited ------>|
                 |<- seconds of step k ------------------------->|

* Only fetching and copying count as waiting.
* Validation is taken out of the time. Logging and hooks are part of the time, but not of the waiting.

On CUDA the host runs ahead of the device. There, events on the stream tell how long the device really had nothing to do between
two steps. Of that gap, at most the time that the host waited counts. An event is read after the device has passed it, so a step
never synchronises. Only the end of an epoch, and a decision within one, wait for the last event.

The first batch of an epoch is a special case:

* If workers have to start for the epoch, the epoch's time begins when the first batch arrives. The wait for that batch is a
  figure of its own, because no echo factor makes it shorter.
* If the workers stay alive from the epoch before, the wait for the first batch counts like any other wait. The epoch's time
  begins when the host asks for that batch. The time between two epochs belongs to neither.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, Protocol

__all__ = ["DeviceEvent", "StepTimer", "StepTimes"]


class DeviceEvent(Protocol):
    """A moment on a device's stream, like ``torch.cuda.Event(enable_timing=True)``."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float: ...  # milliseconds


class StepTimes(NamedTuple):
    """The times of some steps, in seconds.

    Attributes:
        waited: Time that each step waited for input.
        seconds: Time of each step, with the waiting.
    """

    waited: list[float]
    seconds: list[float]


class _Pending(NamedTuple):
    """A step whose events the device may not have passed yet. Times are in seconds."""

    waited: float
    paused: float
    previous_end: DeviceEvent | None
    begin: DeviceEvent
    end: DeviceEvent


class StepTimer:
    """Measures how long steps take and wait. Its methods are called when something happens around a step.

    Args:
        new_event: Makes a `DeviceEvent`. None: only the host's clock is used.
        clock: Returns the time in seconds.

    Attributes:
        first_batch_seconds: Wait for the epoch's first batch, if workers had to start for it. None before that batch, and if no
            worker had to start.
        steps: Number of the epoch's steps whose times are known so far.
        waited_seconds: Seconds that these steps waited for input, in sum.
        seconds: Seconds that these steps took, with the waiting, in sum.

    Example:
        >>> now = iter([0.0, 5.0, 5.75, 5.75, 6.0, 6.25]).__next__
        >>> timer = StepTimer(clock=now)
        >>> timer.begin_epoch()
        >>> timer.begin_fetch(); timer.end_fetch(); timer.begin_step(); timer.end_step()  # the first batch took 5 s
        >>> timer.begin_fetch(); timer.end_fetch(); timer.begin_step(); timer.end_step()
        >>> timer.first_batch_seconds, timer.take()
        (5.0, StepTimes(waited=[0.0, 0.25], seconds=[0.75, 0.5]))
    """

    def __init__(self, new_event: Callable[[], DeviceEvent] | None = None, clock: Callable[[], float] = perf_counter) -> None:
        self._new_event, self._clock = new_event, clock
        self._spare: list[DeviceEvent] = []
        self._pending: deque[_Pending] = deque()
        self._last_event: DeviceEvent | None = None
        self.begin_epoch()

    def begin_epoch(self, *, goes_on: bool = False) -> None:
        """Begins an epoch, and forgets the epoch before.

        Args:
            goes_on: Whether no worker has to start for the first batch. The wait for it then counts like any other.
        """
        if self._last_event is not None and not self._pending:
            self._spare.append(self._last_event)
        self._goes_on = goes_on
        self.first_batch_seconds: float | None = None
        self.steps, self.waited_seconds, self.seconds = 0, 0.0, 0.0
        self._step_waited, self._step_seconds = array("d"), array("d")  # eight bytes each, since an epoch may have many steps
        self._pending.clear()
        self._last_end: float | None = None  # when the last step ended; before the first one, when the epoch's time began
        self._last_event = None
        self._begin: DeviceEvent | None = None  # of the step under way
        self._waited = self._paused = 0.0  # since the last step
        self._since = 0.0
        self._is_paused = False

    def begin_fetch(self) -> None:
        """Notes that the host asks for the next batch."""
        self.resume()  # if validation had no batch, Lightning calls no hook at its end
        self._since = self._clock()
        if self._goes_on and self._last_end is None:
            self._last_end, self._paused = self._since, 0.0
            if self._new_event is not None:  # the device may still be busy with work from between the epochs
                self._last_event = self._event(self._new_event)

    def end_fetch(self) -> None:
        """Notes that the batch has arrived."""
        now = self._clock()
        if self._last_end is None:
            self.first_batch_seconds, self._last_end = now - self._since, now
        else:
            self._waited += now - self._since
        if self._begin is not None:  # fetched by the step itself
            self._begin.record()

    def begin_copy(self) -> None:
        """Notes that the host begins to hand the batch to the device."""
        self._since = self._clock()

    def end_copy(self) -> None:
        """Notes that the host has handed the batch to the device."""
        if not self._is_paused:
            self._waited += self._clock() - self._since

    def begin_step(self) -> None:
        """Notes that the batch is used from here on."""
        self.resume()
        if self._new_event is not None:
            self._begin = self._event(self._new_event)

    def end_step(self) -> None:
        """Notes that the optimizer has stepped, or that the gradients are accumulated."""
        now, last = self._clock(), self._last_end
        waited, paused = self._waited, self._paused
        self._waited = self._paused = 0.0
        if last is None:  # no fetch was seen: the time has no beginning, and the wait is not known
            if self._begin is not None:
                self._spare.append(self._begin)
            self._begin = None
            return
        self._last_end = now
        if self._new_event is None:
            self._count(waited, now - last - paused)
            return
        begin = self._begin or self._event(self._new_event)  # for a batch that is None, Lightning calls only the step's end
        end = self._event(self._new_event)
        self._pending.append(_Pending(waited, paused, self._last_event, begin, end))
        self._last_event, self._begin = end, None
        while self._pending and self._pending[0].end.query():
            self._settle(self._pending.popleft())

    def pause(self) -> None:
        """Notes that validation begins."""
        if not self._is_paused:
            self._paused_at, self._is_paused = self._clock(), True

    def resume(self) -> None:
        """Notes that validation is over."""
        if self._is_paused:
            self._paused += self._clock() - self._paused_at
            self._is_paused = False

    def take(self) -> StepTimes:
        """Returns the times of the steps that are known and were not returned before."""
        taken = StepTimes(self._step_waited.tolist(), self._step_seconds.tolist())
        self._step_waited, self._step_seconds = array("d"), array("d")
        return taken

    def settle(self) -> None:
        """Waits until the device has passed all events: at the end of an epoch, and for a decision within one."""
        if self._pending:
            self._pending[-1].end.synchronize()
        while self._pending:
            self._settle(self._pending.popleft())

    def _event(self, new_event: Callable[[], DeviceEvent]) -> DeviceEvent:
        event = self._spare.pop() if self._spare else new_event()
        event.record()
        return event

    def _settle(self, step: _Pending) -> None:
        """Counts a step whose events have passed. Of the device's gap before it, at most the time that the host waited counts."""
        if step.previous_end is None:  # the first step: the device had nothing to do before it
            waited, seconds = step.waited, step.waited + step.begin.elapsed_time(step.end) / 1e3
        else:
            gap = step.previous_end.elapsed_time(step.begin) / 1e3 - step.paused
            waited = min(max(gap, 0.0), step.waited)
            seconds = max(step.previous_end.elapsed_time(step.end) / 1e3 - step.paused, waited)
            self._spare.append(step.previous_end)
        self._spare.append(step.begin)
        self._count(waited, seconds)

    def _count(self, waited: float, seconds: float) -> None:
        self._step_waited.append(waited)
        self._step_seconds.append(seconds)
        self.steps += 1
        self.waited_seconds += waited
        self.seconds += seconds
