"""A training pipeline in discrete events, clocked as the real one is: the world that a controller's decisions are tried in.

Nothing of the cost model is in here. ``DataLoader`` hands batch ``k`` to worker ``k % workers`` as soon as batch
``k - prefetch_factor * workers`` was fetched; a thread fetches, in order, up to two batches ahead of the training loop; a step
takes the device a fixed time. How many fresh examples a batch has says the real plan, which may fill its buffers up after
a change. Reads may have a heavy tail: single ones that take far longer, each for itself, or all of a worker's at times.
"""

import itertools
import random
from bisect import bisect
from collections import deque
from dataclasses import dataclass
from functools import cache
from math import ceil, log
from statistics import fmean
from types import SimpleNamespace

from lightning_echo.measure.control import Moment, Observation, PipelineCosts
from lightning_echo.measure.timing import IdleFraction
from lightning_echo.plan.memory import make_plan
from lightning_echo.plan.plan import PlanShape, Reuse
from lightning_echo.training.counts import AskingSteps

DEPTH = 2


@dataclass(frozen=True, kw_only=True)
class World:
    """What a pipeline is made of. Seconds of the host are those of one batch, were all its examples fresh."""

    point: str
    source: float  # worker seconds before the insertion point
    rest: float = 0.0  # worker seconds after it, except collate
    collate: float = 0.0
    device: float = 1.0  # seconds of a step
    workers: int = 2
    batch_size: int = 8
    unseen: float = 0.0  # worker seconds per batch that no clock sees: the hand-over
    unseen_share: float = 0.0  # the same, as a share of what the clocks see
    jitter: float = 0.0  # standard deviation of the logarithm of a batch's worker seconds
    slow_share: float = 0.0  # of the reads that are slow
    slow_seconds: float = 0.0  # what a slow read takes beyond its share of `source`
    hangs_every: float = 0.0  # seconds from one time that a worker's source hangs to the next; 0: it never does
    hangs_seconds: float = 0.0
    prefetch_factor: int = 2
    reuse: Reuse = Reuse.each
    seed: int = 0

    @property
    def by_batches(self):
        return self.point in ("after_batching", "after_transfer")

    @property
    def items(self):
        """What a plan counts: items in a batch, and buffers that hold them."""
        return (1, 1) if self.by_batches else (self.batch_size, max(self.workers, 1))


def plan_of(items, factor, reuse=Reuse.each):
    """The plan that a loader makes with its default buffer."""
    size, buffers = items
    shape = PlanShape(
        batch_size=size,
        last_batch_size=size,
        batches_per_pass=1_000_000,
        workers=buffers,
        buffer_size=max(16, 2 * buffers) * size,
        seed=0,
        distinct=size > 1,
        reuse=reuse,
    )
    return make_plan(shape, factor)


def fresh_shares(plan):
    """Share of fresh items, batch after batch."""
    while True:
        batch = plan.next_batch()
        yield batch.fresh / len(batch.positions)


class Pipeline:
    """Runs a `World`, which may be replaced between two epochs, and observes it as the callback does.

    With ``shares`` of fresh items it has no plan of its own, and its factor cannot be changed. The first ``skips`` steps are not
    judged: those of workers that start, as the callback sees them.
    """

    def __init__(self, world, factor=1.0, *, shares=None, skips=0):
        self.world, self.factor = world, factor
        self._largest = factor
        self._plan = plan_of(world.items, factor, world.reuse)
        self._shares = fresh_shares(self._plan) if shares is None else iter(shares)
        self._random = random.Random(world.seed)
        self._epochs = itertools.count()
        self._number = self._read = 0  # batches delivered, batches that workers have made
        self._done = [0.0] * max(world.workers, 1)  # when each worker is free again
        self._hangs = [world.hangs_every] * len(self._done)  # when each worker's source hangs next
        self._asked = deque([0.0] * world.prefetch_factor * world.workers)  # when the workers are asked for their next batches
        self._arrived = deque([0.0] * DEPTH)  # when the training loop got the last batches
        self._fetched = self._now = 0.0
        self._idle = IdleFraction()  # of the epoch
        self._seconds = [0.0, 0.0, 0.0]  # of source, rest and collate in the epoch, all workers
        self._costs = (0.0, 0.0, 0.0)  # the same per batch, when last known
        self._fresh = 0.0  # in batches
        self._judged_from = max(self._filling(), skips)

    def change_factor(self, factor):
        """As at the end of an epoch: from the first batch on that cannot be in flight."""
        if factor != self.factor:
            number = self._number + self._lookahead(self._largest)
            self._plan.change_factor(number, factor)
            self._largest = max(self._largest, factor)
            self.factor = factor
            self._judged_from = number + self._filling()

    @property
    def seconds(self):
        """Since the start."""
        return self._now

    def epoch(self, steps, moment=Moment.epoch_end):
        """Trains for so many steps and returns the observation."""
        self._seconds, self._fresh, read = [0.0, 0.0, 0.0], 0.0, self._read
        begin = self._idle.per_step.shape[1]
        waits, busy = [], []
        for _ in range(steps):
            wait = self._deliver()
            waits.append(wait if self._number else 0.0)  # the wait for the run's first batch is a figure of its own
            self._number += 1
            busy.append(self._step())
            self._now += busy[-1]
        source, rest, collate = self._seconds
        made, world = self._read - read, self.world
        if self._fresh:  # else they are known from before
            self._costs = source / self._fresh, rest / made, collate / made
        seen = {"epoch": next(self._epochs), "factor": self.factor, "moment": moment, "batches": self._number}
        self._idle.update(waits, [wait + step for wait, step in zip(waits, busy, strict=True)])
        settled = max(0, 2 * begin - (begin + steps), self._judged_from - self._number + begin + steps)
        if moment is Moment.epoch_end:
            judged = self._idle.steps(max(begin, settled), max(world.workers, 1))
            self._idle.reset()
        else:
            judged = self._idle.stretch(max(begin, settled), settled, max(world.workers, 1))
        if judged is not None:
            seen |= {"steps": judged.steps, "idle_fraction": judged.idle_fraction, "idle_low": judged.idle_low}
            seen["step_seconds"] = judged.wait_seconds + judged.busy_seconds
        device = fmean(busy or [world.device]) if judged is None else judged.busy_seconds
        return Observation(**seen, costs=PipelineCosts(world.point, *self._costs, device, world.workers))

    def _step(self):
        """Seconds that the device takes for the present step."""
        return self.world.device

    def _lookahead(self, factor):
        """Batches that may be in flight: as the loader counts them."""
        in_flight = self.world.prefetch_factor * self.world.workers
        if not in_flight:
            return 0
        uses = ceil(factor) + 1 if factor > 1 else 1
        return (in_flight + 3) * uses + DEPTH if self.world.by_batches else in_flight + DEPTH

    def _filling(self):
        """Batches in which the plan may fill its buffers after a change."""
        size, buffers = self.world.items
        if self.factor == 1:
            return 0
        return buffers if self.world.reuse is Reuse.memory else ceil(self._plan.shape.buffer_size / size)

    def _deliver(self):
        """Lets the training loop have its next batch, and returns how long it waited for it."""
        world, share, asked = self.world, next(self._shares), self._now
        if not world.workers:
            self._now += self._work(share, 0, self._now)
            return self._now - asked
        self._fetched = max(self._fetched, self._arrived.popleft())
        if share or not world.by_batches:
            worker = self._read % world.workers
            begun = max(self._done[worker], self._asked.popleft())
            self._done[worker] = begun + self._work(share, worker, begun)
            self._fetched = max(self._fetched, self._done[worker])
            self._asked.append(self._fetched)
        self._now = max(asked, self._fetched)
        self._arrived.append(self._now)
        return self._now - asked

    def _work(self, share, worker, begun):
        """Seconds that a worker takes for a batch that it begins at this time."""
        world = self.world
        noise = self._random.lognormvariate(-(world.jitter**2) / 2, world.jitter) if world.jitter else 1.0
        slow = 0.0
        if world.slow_share:
            slow += world.slow_seconds * sum(
                self._random.random() < world.slow_share for _ in range(round(share * world.batch_size))
            )
        if world.hangs_every and share and begun >= self._hangs[worker]:
            slow += world.hangs_seconds
            self._hangs[worker] = begun + slow + world.hangs_every
        seconds = [share * world.source * noise + slow, world.rest * noise, world.collate * noise]
        self._seconds = [total + took for total, took in zip(self._seconds, seconds, strict=True)]
        self._fresh += share
        self._read += 1
        return sum(seconds) * (1 + world.unseen_share) + world.unseen


SKIPPED, STEADY = 150, 500


@cache
def steady_shares(items, factor, steps=STEADY):
    """Shares of fresh items at a constant factor: for all worlds that have as many workers."""
    return list(itertools.islice(fresh_shares(plan_of(items, factor)), SKIPPED + steps))


def steady_idle(world, factor):
    """Idle fraction at a constant factor, once the buffers are full."""
    pipeline = Pipeline(world, factor, shares=steady_shares(world.items, factor))
    pipeline.epoch(SKIPPED)
    return pipeline.epoch(STEADY).idle_fraction


def ideal_factor(world, target, largest=20.0):
    """The smallest constant factor whose steady idle fraction is not above the target, to half a per cent: by trying."""
    factors = [1.005**exponent for exponent in range(ceil(log(largest, 1.005)))]
    found = bisect(factors, False, key=lambda factor: steady_idle(world, factor) <= target)  # the larger, the less idle
    assert found < len(factors), f"no factor up to {largest} feeds {world}"
    return factors[found]


TARGET, STEPS = 0.05, 500


def train(pipeline, controller, epochs, steps=STEPS):
    """Epochs and decisions in turn; the observations and the decisions."""
    seen, decided = [], []
    for _ in range(epochs):
        seen.append(pipeline.epoch(steps))
        decided.append(controller.decide(seen[-1]))
        pipeline.change_factor(decided[-1].factor)
    return seen, decided


def observe(factor, idle, costs=None, step_seconds=None, steps=100):
    """An observation at an epoch's end; the device takes 10 ms of each step."""
    step_seconds = step_seconds if step_seconds is not None else 0.01 / (1 - idle)
    return Observation(0, factor, steps=steps, idle_fraction=idle, step_seconds=step_seconds, costs=costs)


def costs_of(source, redone=0.0, device=0.01, workers=1, point="after_augmentation"):
    return PipelineCosts(point, source, 0.0, redone, device, workers)


def train_and_look(pipeline, controller, steps, epoch=1_000_000):
    """Trains for so many steps, and asks the controller when the callback would; the decisions, by the number of the step."""
    asking = AskingSteps(controller)
    asking.start(SimpleNamespace(epoch_length="fixed", has_length=True))
    decided, before = {}, 0
    for step in range(1, steps + 1):
        in_epoch = (step - 1) % epoch + 1
        moment = Moment.epoch_end if in_epoch == epoch else asking.after_step(in_epoch, step, ends_epoch=False)
        if moment is not None:
            decided[step] = controller.decide(pipeline.epoch(step - before, moment))
            pipeline.change_factor(decided[step].factor)
            before = step
    pipeline.epoch(steps - before)
    return decided
