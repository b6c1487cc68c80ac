"""Clocks: how long each step took, and for how much of it the device waited for input; and the same as torchmetrics."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_echo.measure.control import idle_low, slice_ends

# ---------------------------------------------------------------------- timing
#     ... step k-1 | fetch k | copy k | (logging, hooks) | step k | ...
#                  |<- waited ------>|
#                  |<- seconds of step k ------------------------->|
#
# Only fetching and copying count as waiting. Validation is taken out of the time; logging and hooks stay in it.
#
# On CUDA the host runs ahead of the device. There, events on the stream measure how long the device really had nothing to do
# between two steps. Of that gap, at most the time that the host waited counts. An event is read after the device has passed it,
# so a step never synchronises; only the end of an epoch, and a decision within one, wait for the last event.
#
# The first batch of an epoch is special:
#
# * If workers have to start for the epoch, its time begins when the first batch arrives. The wait for that batch is a figure of
#   its own, because no echo factor makes it shorter.
# * If the workers stay alive, the wait for the first batch counts like any other, and the epoch's time begins when the host asks
#   for that batch. The time between two epochs belongs to neither.


class DeviceEvents:
    """The events of one device, used again and again. None is ever freed, if the process keeps this object.

    A worker is a fork: it inherits the timer of a training that is over as garbage, and collects it some time. To free a CUDA
    event there aborts the worker, because CUDA cannot be called after a fork.

    Example:
        >>> events = DeviceEvents(object)
        >>> event = events.take()
        >>> events.give_back(event)
        >>> events.take() is event, events.made
        (True, 1)
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._all: list[torch.Event] = []
        self._spare: list[torch.Event] = []

    @property
    def made(self) -> int:
        """Number of events, in use or spare."""
        return len(self._all)

    def take(self) -> torch.Event:
        try:
            return self._spare.pop()  # without a look before: another thread may train on this device, too
        except IndexError:
            event: torch.Event = self._new_event()
            self._all.append(event)
            return event

    def give_back(self, *events: torch.Event) -> None:
        self._spare += events


class StepTimes(NamedTuple):
    waited: list[float]  # for input, in seconds
    seconds: list[float]  # durations, with the waiting


class _Pending(NamedTuple):
    """A step whose events the device may not have passed yet. Times are in seconds."""

    waited: float
    paused: float
    previous_end: torch.Event | None
    begin: torch.Event
    end: torch.Event


class StepTimer:
    """Measures how long steps take and wait. Its methods are called at the events around a step.

    Without ``events`` of the device, only the host's ``clock`` is used.

    Example:
        >>> now = iter([0.0, 5.0, 5.75, 5.75, 6.0, 6.25]).__next__
        >>> timer = StepTimer(clock=now)
        >>> timer.begin_epoch()
        >>> timer.begin_fetch(); timer.end_fetch(); timer.begin_step(); timer.end_step()  # the first batch took 5 s
        >>> timer.begin_fetch(); timer.end_fetch(); timer.begin_step(); timer.end_step()
        >>> timer.first_batch_seconds, timer.take()
        (5.0, StepTimes(waited=[0.0, 0.25], seconds=[0.75, 0.5]))
    """

    def __init__(self, events: DeviceEvents | None = None, clock: Callable[[], float] = perf_counter) -> None:
        self._events, self._clock = events, clock
        self._pending: deque[_Pending] = deque()
        self._last_event: torch.Event | None = None
        self._begin: torch.Event | None = None  # of the step under way
        self.begin_epoch()

    def begin_epoch(self, *, goes_on: bool = False) -> None:
        """Begins an epoch, and forgets the one before. With ``goes_on``, no worker has to start for the first batch, whose wait
        then counts.
        """
        self.close()
        self._goes_on = goes_on
        self.first_batch_seconds: float | None = None  # the wait for the first batch, if workers had to start for it
        self.steps, self.waited_seconds, self.seconds = 0, 0.0, 0.0  # in sum; seconds contain the waiting
        self._step_waited, self._step_seconds = array("d"), array("d")  # eight bytes each, since an epoch may have many steps
        self._last_end: float | None = None  # when the last step ended; before the first one, when the epoch's time began
        self._waited = self._paused = 0.0  # since the last step
        self._since = 0.0
        self._is_paused = False

    def begin_fetch(self) -> None:
        self.resume()  # if validation had no batch, Lightning calls no hook at its end
        self._since = self._clock()
        if self._goes_on and self._last_end is None:
            self._last_end, self._paused = self._since, 0.0
            if self._events is not None:  # the device may still be busy with work from between the epochs
                self._last_event = self._event(self._events)

    def end_fetch(self) -> None:
        now = self._clock()
        if self._last_end is None:
            self.first_batch_seconds, self._last_end = now - self._since, now
        else:
            self._waited += now - self._since
        if self._begin is not None:  # fetched by the step itself
            self._begin.record()

    def begin_copy(self) -> None:
        self._since = self._clock()

    def end_copy(self) -> None:
        if not self._is_paused:
            self._waited += self._clock() - self._since

    def begin_step(self) -> None:
        self.resume()
        if self._events is not None:
            self._begin = self._event(self._events)

    def end_step(self) -> None:
        """Notes that the optimizer has stepped, or that the gradients are accumulated."""
        now, last = self._clock(), self._last_end
        waited, paused = self._waited, self._paused
        self._waited = self._paused = 0.0
        if last is None:  # no fetch was seen: the time has no beginning, and the wait is unknown
            if self._events is not None and self._begin is not None:
                self._events.give_back(self._begin)
            self._begin = None
            return
        self._last_end = now
        if self._events is None:
            self._count(waited, now - last - paused)
            return
        begin = self._begin or self._event(self._events)  # for a batch that is None, Lightning calls only the step's end
        end = self._event(self._events)
        self._pending.append(_Pending(waited, paused, self._last_event, begin, end))
        self._last_event, self._begin = end, None
        while self._pending and self._pending[0].end.query():
            self._settle(self._events, self._pending.popleft())

    def pause(self) -> None:
        if not self._is_paused:
            self._paused_at, self._is_paused = self._clock(), True

    def resume(self) -> None:
        if self._is_paused:
            self._paused += self._clock() - self._paused_at
            self._is_paused = False

    def take(self) -> StepTimes:
        """Returns the times of the known steps that were not returned before."""
        taken = StepTimes(self._step_waited.tolist(), self._step_seconds.tolist())
        self._step_waited, self._step_seconds = array("d"), array("d")
        return taken

    def settle(self) -> None:
        """Waits until the device has passed all events: at the end of an epoch, and for a decision within one."""
        if self._events is None or not self._pending:
            return
        self._pending[-1].end.synchronize()
        while self._pending:
            self._settle(self._events, self._pending.popleft())

    def close(self) -> None:
        """Gives back all events. Steps that the device has not passed are forgotten. You may call it at any time."""
        if self._events is not None:  # an event that ends a step also begins the next one's gap: it is given back once
            held = [event for step in self._pending for event in (step.previous_end, step.begin)]
            self._events.give_back(*(event for event in (*held, self._last_event, self._begin) if event is not None))
        self._pending.clear()
        self._last_event = self._begin = None

    @staticmethod
    def _event(events: DeviceEvents) -> torch.Event:
        event = events.take()
        event.record()
        return event

    def _settle(self, events: DeviceEvents, step: _Pending) -> None:
        """Counts a step whose events have passed. Of the device's gap before it, at most the host's wait counts."""
        if step.previous_end is None:  # the first step: the device had nothing to do before it
            waited, seconds = step.waited, step.waited + step.begin.elapsed_time(step.end) / 1e3
        else:
            gap = step.previous_end.elapsed_time(step.begin) / 1e3 - step.paused
            waited = min(max(gap, 0.0), step.waited)
            seconds = max(step.previous_end.elapsed_time(step.end) / 1e3 - step.paused, waited)
            events.give_back(step.previous_end)
        events.give_back(step.begin)
        self._count(waited, seconds)

    def _count(self, waited: float, seconds: float) -> None:
        self._step_waited.append(waited)
        self._step_seconds.append(seconds)
        self.steps += 1
        self.waited_seconds += waited
        self.seconds += seconds


# ---------------------------------------------------------------------- metrics
# The steps of a job are synchronous: if one rank waits, all ranks wait. So the idle time of a step is the longest wait of any
# rank, and the idle fraction of the job is neither the mean nor the maximum of its ranks' idle fractions. Therefore
# `IdleFraction` stores the waits of an epoch, and the ranks join them once: for each step, the longest wait and its rank. Each
# rank sends and holds one number per step, no matter how many ranks there are.


class JobSteps(NamedTuple):
    """The steps of a job, joined over its ranks."""

    steps: int
    idle_fraction: float
    slowest_rank: int  # its wait was the longest most often
    wait_seconds: float  # the longest wait of any rank, mean over steps
    busy_seconds: float  # the time in which no rank waited, mean over steps
    idle_low: float | None = None  # lower end of the 99% interval of the idle fraction; None if there are too few steps


def job_steps(waited: Tensor, seconds: Tensor, workers: int = 1) -> JobSteps:
    """Joins the steps of all ranks: waits and durations in seconds, each of shape (ranks, steps), steps >= 1. See `idle_low`.

    Example:
        >>> waited = torch.tensor([[0.5, 0.0], [0.0, 0.5]])  # two ranks that wait in turn
        >>> job_steps(waited, torch.ones(2, 2)).idle_fraction
        0.5
    """
    return _of_joined(*_of_ranks(waited, seconds), workers)


def _of_ranks(waited: Tensor, seconds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the arguments of `_of_joined`."""
    longest, rank = waited.max(dim=0)
    return longest, rank, seconds[int(seconds.sum(dim=1).argmax())]


def _of_joined(longest: Tensor, rank: Tensor, seconds: Tensor, workers: int) -> JobSteps:
    """Returns the steps of a job from the longest waits of any rank, shape (steps,), their ranks, and the seconds from step to
    step of the rank whose steps took longest in sum.
    """
    total, count = float(seconds.sum()), len(longest)
    idle = min(float(longest.sum()), total)
    slowest = int(torch.bincount(rank).argmax())
    low = idle_low(longest.tolist(), seconds.tolist(), workers)
    return JobSteps(count, idle / total if total else 0.0, slowest, idle / count, (total - idle) / count, low)


def _join(per_step: Tensor, group: Any = None) -> list[Tensor]:
    """Joins the steps of all ranks by reductions. Gathering them would take 3.3 GB for 100,000 steps of 4,096 ranks.

    It raises a ValueError if the ranks have made different numbers of steps. ``per_step`` has the waits and the seconds of this
    rank, shape (2, steps). The result, in a list for torchmetrics, has the arguments of `_of_joined`, shape (3, steps), float64.
    """
    rank, steps = torch.distributed.get_rank(group), per_step.shape[1]
    waited, seconds = per_step.double()
    whole = torch.stack([seconds.new_tensor(steps).long(), seconds.new_tensor(-steps).long(), _marked(seconds.sum(), rank)])
    torch.distributed.all_reduce(whole, op=torch.distributed.ReduceOp.MAX, group=group)
    most, fewest, slowest = whole.tolist()
    if most != -fewest:
        raise ValueError(f"all ranks must have made equally many steps, and they have made {-fewest} to {most}, this one {steps}")
    marked = _marked(waited, rank)
    if rank != _LAST_RANK - (slowest & _LAST_RANK):
        seconds = torch.zeros_like(seconds)
    if steps:
        torch.distributed.all_reduce(marked, op=torch.distributed.ReduceOp.MAX, group=group)
        torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.SUM, group=group)
    return [torch.stack([(marked >> _RANK_BITS) / 1e9, (_LAST_RANK - (marked & _LAST_RANK)).double(), seconds])]


_RANK_BITS = 16
_LAST_RANK = 2**_RANK_BITS - 1


def _marked(seconds: Tensor, rank: int) -> Tensor:
    """Returns times as integers that also hold the number of the rank. Of equal times, the lowest rank's is the largest."""
    marked: Tensor = ((seconds * 1e9).round().long() << _RANK_BITS) | (_LAST_RANK - rank)
    return marked


class IdleFraction(Metric):
    """Share of a job's training time in which it waited for input, 0 to 1.

    ``update`` takes the steps of one rank. ``compute`` joins all ranks. If they have made different numbers of steps, it raises a
    ValueError on all of them. There may be up to 65,536 ranks.

    Example:
        >>> idle = IdleFraction()
        >>> idle.update(waited=[0.1, 0.3], seconds=[1.0, 1.0])
        >>> round(idle.compute().item(), 6)
        0.2
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = True  # otherwise ``forward`` would stack the new steps on the old ones, as if they were another rank's
    per_step: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("per_step", torch.zeros(2, 0), dist_reduce_fx=None)

    def update(self, waited: list[float] | Tensor, seconds: list[float] | Tensor) -> None:
        """Adds steps.

        Args:
            waited: Seconds waited for input before each step, shape (steps,).
            seconds: Seconds from step to step, shape (steps,).

        Raises:
            ValueError: The two are not equally long.
        """
        if len(waited) != len(seconds):
            raise ValueError(f"waited and seconds must be equally long, got {len(waited)} and {len(seconds)} steps")
        added = torch.stack([torch.as_tensor(part, dtype=torch.float32, device=self.device) for part in (waited, seconds)])
        self.per_step = torch.cat([self.per_step, added], dim=1)

    def sync(
        self,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Callable[..., Any] | None = None,
    ) -> None:
        """Joins the steps of all ranks, see torchmetrics. Uses reductions, unless another ``dist_sync_fn`` is given."""
        super().sync(dist_sync_fn or self.dist_sync_fn or _join, process_group, should_sync, distributed_available)

    def compute(self) -> Tensor:
        """Returns the job's idle fraction, shape (); NaN before the first step."""
        steps = self.steps()
        return torch.tensor(float("nan") if steps is None else steps.idle_fraction, device=self.device)

    def steps(self, first: int = 0, workers: int = 1) -> JobSteps | None:
        """Returns the job's steps from number ``first`` on, or None if there are none.

        Within ``sync_context()`` the steps of all ranks are joined. Otherwise they are the steps of this rank.

        Args:
            first: Number of the first step to return, from 0.
            workers: Number of workers that deliver their batches in turn, see `idle_low`.
        """
        return _of_joined(*self._joined(first), workers) if first < self.per_step.shape[-1] else None

    def slices(self) -> list[tuple[float, float]]:
        """Returns the seconds of waiting and all seconds of each slice of the steps, see `slice_ends` and `steps`."""
        if not self.per_step.shape[-1]:
            return []
        longest, _, seconds = self._joined(0)
        ends = torch.tensor(slice_ends(len(longest))) - 1
        up_to = torch.stack([longest, seconds]).double().cumsum(dim=1)[:, ends]
        waited, whole = up_to.diff(dim=1, prepend=torch.zeros(2, 1, dtype=torch.double)).tolist()  # one call, however many slices
        return [(min(idle, passed), passed) for idle, passed in zip(waited, whole, strict=True)]

    def _joined(self, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the arguments of `_of_joined` for the steps from number ``first`` on."""
        per_step = self.per_step[..., first:].cpu()
        if per_step.shape[-2] == 3:  # joined
            longest, rank, seconds = per_step[0]
            return longest, rank.long(), seconds
        per_step = per_step.reshape(-1, *per_step.shape[-2:])  # (ranks, 2, steps): own steps, or gathered by another function
        return _of_ranks(per_step[:, 0], per_step[:, 1])

    def stretch(self, first: int, settled: int, workers: int) -> JobSteps | None:
        """Returns the job's steps from number ``first`` on, as whole rounds of the workers, or None if there are none.

        All workers deliver their batches at about the same time, so part of a round would have too few waits or too many. The
        lower end of the interval is that of these steps, or of all steps from ``settled`` on, whichever is higher.

        Args:
            first: Number of the first step of the stretch.
            settled: Number of the first step that is like those of the stretch, at most ``first``.
            workers: Number of workers that deliver their batches in turn, >= 1.
        """
        steps = self.per_step.shape[-1] - first
        of_stretch = self.steps(first + (steps % workers if steps > workers else 0), workers)
        longer = self.steps(settled, workers)
        if of_stretch is None or longer is None:
            return None
        lows = [low for low in (of_stretch.idle_low, longer.idle_low) if low is not None]
        return of_stretch._replace(idle_low=max(lows, default=None))


class EchoCounter(Metric):
    """Counts fresh and echoed examples over all ranks.

    Example:
        >>> counter = EchoCounter()
        >>> counter.update(fresh=8, echoed=24)
        >>> {name: int(value) for name, value in counter.compute().items()}
        {'fresh_examples': 8, 'echoed_examples': 24}
    """

    is_differentiable = False
    full_state_update = False
    counts: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("counts", torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, fresh: int, echoed: int) -> None:
        """Adds examples of this rank.

        Args:
            fresh: Number of fresh examples.
            echoed: Number of echoed examples.
        """
        self.counts += torch.tensor([fresh, echoed], device=self.device)

    def compute(self) -> dict[str, Tensor]:
        """Returns ``fresh_examples`` and ``echoed_examples``, each of shape ()."""
        return {"fresh_examples": self.counts[0], "echoed_examples": self.counts[1]}
