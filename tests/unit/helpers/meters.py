"""A `RunMeter` in a training, with a fake Trainer, loader and clock."""

import math
from types import SimpleNamespace

import torch
from spent import spent

from lightning_echo.insertion import InsertionPoint
from lightning_echo.loader.state import EchoCounts
from lightning_echo.measure.timing import StepTimer
from lightning_echo.pipeline.worker import StageSeconds
from lightning_echo.training.loaders import EchoLoaders
from lightning_echo.training.meters import RunMeter

FETCH = "[_TrainingEpochLoop].train_dataloader_next"
BATCH = torch.zeros(8, 3)


class Loader:
    """In the place of an `EchoLoader` with batches of 8."""

    def __init__(self, factor=2.0, workers=2, settled_at=0):
        self.factor, self.num_workers, self.settled_at = factor, workers, settled_at
        self.insertion_point = InsertionPoint.after_augmentation
        self.counts, self.delivered_batches, self.seconds = EchoCounts(), 0, StageSeconds()
        self.is_running = False
        self.cache_counts = None
        self.reads_ahead = self.on_demand = False
        self.sharing = None

    @property
    def saved_counts(self):
        """Those of a state that is saved now: no batch is in a step."""
        return self.counts

    def deliver(self, fresh, stages, in_flight=0.0):
        self.counts += EchoCounts(fresh, 8 - fresh)
        self.delivered_batches, self.is_running = self.delivered_batches + 1, True
        self.seconds = spent(self.seconds, fresh, stages, in_flight)


class Run:
    """A meter in a training on one rank of a job.

    Args:
        others: What the other ranks say at an epoch's end: stages and first wait. The rest, of their cores, they do not know.
        others_start: Whether workers start for an epoch on one of them.
        workers: Of the plain loader; None: it does not say.
    """

    def __init__(self, loader=None, *, others=(), others_start=False, rank=0, workers=None, hears=True, state=None):
        self.loader, self.now, self.others, self.others_start = loader, 0.0, list(others), others_start
        self.profiler = SimpleNamespace(start=lambda name: None, stop=lambda name: None)
        plain = SimpleNamespace() if workers is None else SimpleNamespace(num_workers=workers)
        used = dict(loader) if isinstance(loader, EchoLoaders) else loader or plain
        self.trainer = SimpleNamespace(
            world_size=1 + len(self.others),
            node_rank=0,
            is_global_zero=rank == 0,
            profiler=self.profiler,
            train_dataloader=used,
        )
        self.module = SimpleNamespace(device=torch.device("cpu"), all_gather=self.all_gather)
        self.meter, self.hears = RunMeter(), hears
        self.meter.timer = StepTimer(clock=lambda: self.now)
        if state is not None:
            self.meter.load_state_dict(state)
        self.meter.start(self.trainer, self.module, loader)

    def all_gather(self, values):
        if not self.others:
            return values  # as Lightning does in a single process
        at_start = [float(self.others_start), 0.0]  # whether workers start there, and how many it has
        unknown = [math.nan] * len(values)
        others = [at_start if len(values) <= 2 else [*other, *unknown] for other in self.others]
        return torch.stack([values, *(torch.tensor(other[: len(values)], dtype=values.dtype) for other in others)])

    def step(self, wait=0.25, work=0.75, *, fresh=4, stages=(0.4, 0.2, 0.1), **reads):
        """One step of 1 s; what workers spent on its batch on source, rest and collate; its reads ``in_flight``."""
        if self.hears:
            self.profiler.start(FETCH)
        self.now += wait
        if self.loader is not None:
            self.loader.deliver(fresh, stages, **reads)
        if self.hears:
            self.profiler.stop(FETCH)
        self.meter.begin_step()
        self.now += work
        self.meter.end_step(self.loader, BATCH, 0)

    def epoch(self, steps=8, **options):
        self.meter.begin_epoch(self.loader)
        for _ in range(steps):
            self.step(**options)
        return self.meter.end_epoch(self.loader)


class LateEvent:
    """Has not passed before somebody waits for it, or for one after it."""

    passed = False

    def record(self):
        pass

    def query(self):
        return LateEvent.passed

    def synchronize(self):
        LateEvent.passed = True

    def elapsed_time(self, end_event):
        return 1000.0


def saved(run, folder):
    """The meter's state, as it comes from a checkpoint."""
    torch.save(run.meter.state_dict(run.loader), folder / "meter.pt")
    return torch.load(folder / "meter.pt", weights_only=True)
