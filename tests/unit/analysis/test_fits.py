"""The clocks of an analysis, in a real Trainer and by a clock that only the steps move."""

import gc
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_echo.analysis.measured import Pinning, Spread
from lightning_echo.analysis.sources import (
    PreparedLoader,
    RepeatedBatch,
    StepClock,
    TrainingData,
    Transfers,
    fit,
    transfers_noted,
    transfers_skipped,
)

BATCH, CPU = torch.ones(2, 32), torch.device("cpu")


class Clock:
    now = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: Clock.now)


class Steps(BoringModel):
    """Step by step, each takes its time."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.steps = iter(seconds), 0

    def training_step(self, batch, batch_idx):
        Clock.now += next(self.seconds)
        self.steps += 1
        return super().training_step(batch, batch_idx)


def run(model, callback, steps):
    fit(model, RepeatedBatch(BATCH, steps), steps, callback, {"accelerator": "cpu"})


def test_the_fit_ends_when_its_time_is_up():
    model, clock = Steps([1] * 50), StepClock(most_seconds=5, skipped=2)
    run(model, clock, 50)
    assert (model.steps, clock.seconds) == (2 + 6, [1] * 6)


def test_the_first_steps_do_not_count_and_fewer_of_them_where_they_are_slow():
    """Five do not count; but warm-up takes half of the time at most, and a step at least."""
    clock = StepClock()
    run(Steps([9, 9, 9, 9, 9, 1, 2, 3]), clock, 8)
    assert clock.seconds == [1, 2, 3]
    clock = StepClock(most_seconds=20)
    run(Steps([12, 1, 1]), clock, 3)
    assert clock.seconds == [1, 1]
    clock = StepClock(most_seconds=20)
    run(Steps([4] * 8), clock, 8)
    assert clock.seconds == [4] * 5


def test_a_device_that_runs_behind_is_waited_for_every_ten_steps_and_at_the_end(monkeypatch):
    """Of 27 steps of a second on the host two do not count; the device needs three more each time that it is waited for."""

    def wait(device):
        Clock.now += 3

    monkeypatch.setattr("torch.cuda.synchronize", wait)
    clock, module, trainer = StepClock(skipped=2), SimpleNamespace(device=torch.device("cuda")), SimpleNamespace(world_size=1)
    clock.on_train_start(trainer, module)
    for _ in range(27):
        Clock.now += 1
        clock.on_train_batch_end(trainer, module)
    clock.on_train_end(trainer, module)
    assert clock.seconds == pytest.approx([1.3] * 20 + [1.6] * 5)


def test_ranks_ask_each_other_at_the_same_steps_however_long_each_warms_up():
    """Every tenth step, whichever counts; what the answer takes does not."""
    asked, done = [], []

    class Strategy:
        def reduce_boolean_decision(self, is_over, all):
            asked.append((len(done), is_over))
            Clock.now += 100
            return len(done) == 20

    trainer = SimpleNamespace(world_size=2, strategy=Strategy(), should_stop=False)
    module, clock = SimpleNamespace(device=torch.device("cpu")), StepClock(most_seconds=12, skipped=4)
    clock.on_train_start(trainer, module)
    for _ in range(20):
        done.append(1)
        assert not trainer.should_stop
        Clock.now += 1
        clock.on_train_batch_end(trainer, module)
    assert asked == [(10, False), (20, True)]
    assert trainer.should_stop
    assert clock.seconds == [1] * 16


@pytest.mark.parametrize("whose", ["model", "data module"])
def test_copies_are_timed_whoever_makes_them(whose):
    """Each copy takes a quarter of a second; the batch is that before on_after_batch_transfer."""

    def transfer(self, batch, device, dataloader_idx):
        Clock.now += 0.25
        return batch + 1

    def after(self, batch, dataloader_idx):
        Clock.now += 7.0
        return batch * 100

    hooks = {"transfer_batch_to_device": transfer, "on_after_batch_transfer": after}
    model = type("Model", (BoringModel,), hooks if whose == "model" else {})()
    module = type("Module", (pl.LightningDataModule,), hooks if whose == "data module" else {})()
    data, transfers = TrainingData(module), Transfers()
    data.as_given(lambda loader: None)
    with transfers_noted([model, *data.instances], transfers):
        fit(model, data.over(RepeatedBatch(BATCH, 3)), 3, PreparedLoader(), {"accelerator": "cpu"})
    assert transfers.seconds == [0.25] * 3
    assert torch.equal(transfers.batch, BATCH + 1)
    assert not any("transfer_batch_to_device" in vars(each) for each in (model, module, *data.instances))


class Fake:
    """A device that copies from the host: a second for a batch as it is, a fourth of one from pinned memory."""

    def __init__(self):
        self.type = "cuda"
        self.waited = 0

    def wait(self, device):
        assert device is self
        self.waited += 1

    def pin(self, batch):
        Clock.now += 5.0 if self.waited < 4 else 0.5  # the first time, memory is taken
        return f"pinned {batch}"

    def copy(self, batch, device, dataloader_idx):
        Clock.now += 0.25 if batch.startswith("pinned") else 1.0
        return f"{batch} there"


def test_pinning_and_the_copies_from_pinned_memory_are_timed_a_few_times():
    device = Fake()
    transfers = Transfers(pin=device.pin, wait=device.wait)
    for number in range(8):
        assert number < 2 or transfers.pinning == Pinning(Spread.exactly(0.5), Spread.exactly(0.25))
        assert transfers.transfer(device.copy, "batch", device, 0) == "batch there"
    assert (transfers.batch, transfers.host, transfers.no_pinning) == ("batch there", "batch", "")
    assert transfers.seconds == [1.0] * 8
    assert transfers.pinning == Pinning(Spread.exactly(0.5), Spread.exactly(0.25))
    assert device.waited == 2 * (8 + 2 * 6), "before and after each; six times pinned"


@pytest.mark.parametrize(
    ("device", "is_pinned", "why"),
    [
        (CPU, False, "batches are copied to the device 'cpu', and only copies to 'cuda' are faster from pinned memory"),
        (CPU, True, "batches are copied to the device 'cpu'"),
        (Fake(), True, "the loader pins its batches already"),
    ],
)
def test_where_pinning_brings_nothing_it_is_not_timed(device, is_pinned, why):
    transfers = Transfers(is_pinned, pin=lambda batch: pytest.fail("pinned"), wait=lambda device: None)
    assert transfers.no_pinning.startswith("the strategy copies batches in its own way")
    transfers.transfer(lambda batch, device, index: batch, "batch", device, 0)
    assert transfers.pinning is None
    assert transfers.no_pinning.startswith(why)


def test_a_data_module_is_set_up_once_and_torn_down_when_nobody_needs_it_any_more():
    calls = []

    class Module(pl.LightningDataModule):
        def prepare_data(self):
            calls.append("prepare_data")

        def setup(self, stage):
            calls.append("setup")
            self.size = 2

        def teardown(self, stage):
            calls.append(f"teardown {self.size}")

        def train_dataloader(self):
            return DataLoader([torch.ones(32)] * 4, batch_size=self.size)

    users = Module()
    data, first = TrainingData(users), PreparedLoader()
    assert (first.was_here, first.loader) == (False, None)
    fit(BoringModel(), data.as_given(lambda loader: None), 1, first, {"accelerator": "cpu"})
    assert (first.was_here, first.loader.batch_size) == (True, 2)
    for steps in (1, 2):
        model = Steps([0] * steps)
        fit(model, data.over(RepeatedBatch(BATCH, steps)), steps, PreparedLoader(), {"accelerator": "cpu"})
        assert model.steps == steps
    assert calls == ["prepare_data", "setup"]
    assert not hasattr(users, "size")
    del data
    gc.collect()
    assert calls == ["prepare_data", "setup", "teardown 2"]


class Hooks:
    """In the place of a model or a data module."""

    def __init__(self):
        self.before = []

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.before.append(batch)
        return batch

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return f"{batch} on {device}"


@pytest.mark.parametrize("replaced", [transfers_skipped, lambda instances: transfers_noted(instances, Transfers())])
def test_the_hooks_are_given_back_also_after_an_error(replaced):
    model = Hooks()
    with pytest.raises(ZeroDivisionError), replaced([model]):
        raise ZeroDivisionError
    assert set(vars(model)) == {"before"}
    assert model.transfer_batch_to_device("a", CPU, 0) == "a on cpu"
