"""StallAnalyzer with a real Trainer and real workers: what it finds, what it refuses, and what it leaves as it was.

The stages of these pipelines sleep, so that times have lower bounds and known proportions; nothing here compares them closely,
which benchmarks/stalls.py does. Where a test compares with a step that does not sleep, a batch sleeps for 0.1 s: with eight
processes on two processors such a step was seen to take 0.03 s in place of 0.001.
"""

import copy
import random
import sys
import time
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.analysis.analyzer import StallAnalyzer
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.result import promising
from lightning_echo.analysis.sources import StepClock

MS = 1e-3
CPU = {"accelerator": "cpu"}


class Staged(StagedDataset):
    """Reading and augmentation sleep."""

    def __init__(self, read_seconds=0.0, augment_seconds=0.0, length=2000):
        self.read_seconds, self.augment_seconds, self.length = read_seconds, augment_seconds, length

    def __len__(self):
        return self.length

    def read(self, index):
        time.sleep(self.read_seconds)
        return index

    def decode(self, raw):
        return torch.full((32,), float(raw))

    def augment(self, example):
        time.sleep(self.augment_seconds)
        return example + torch.rand(32)


class Slept(BoringModel):
    """A step that takes at least a while."""

    def __init__(self, seconds=0.0):
        super().__init__()
        self.seconds = seconds

    def training_step(self, batch, batch_idx):
        time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)


def loader_of(dataset=None, workers=1, batch_size=4, **options):
    return DataLoader(dataset or Staged(), batch_size, num_workers=workers, **options)


def analyze(model, data, steps=10, kwargs=CPU, say=str, **options):
    analyzer = StallAnalyzer(model, data, trainer_kwargs=kwargs, say=say)
    return analyzer, analyzer.run(steps, **options)


@pytest.mark.slow
def test_a_slow_storage_is_a_fetch_stall_and_a_slow_transform_a_prep_stall():
    _, fetch = analyze(Slept(), loader_of(Staged(read_seconds=25 * MS)))
    _, prep = analyze(Slept(), loader_of(Staged(augment_seconds=25 * MS)))
    assert fetch.step_seconds >= 2 * 25 * MS  # 100 ms a batch, but some of the first ones are ready before
    assert fetch.stages.read.median >= 25 * MS > fetch.stages.augment.median
    assert fetch.fetch_stall_fraction > 0.5 > fetch.prep_stall_fraction
    assert prep.stages.augment.median >= 25 * MS > prep.stages.read.median
    assert prep.prep_stall_fraction > 0.5 > prep.fetch_stall_fraction
    assert (fetch.costliest[0][0], prep.costliest[0][0]) == ("read", "augment")


@pytest.mark.slow
def test_the_step_alone_is_ingestion_and_each_phase_is_told():
    said = []
    _, found = analyze(Slept(20 * MS), loader_of(Staged(read_seconds=25 * MS)), 8, say=said.append)
    assert 20 * MS <= found.ingestion_seconds < found.step_seconds
    assert found.step_seconds >= 50 * MS  # as above, of 100
    assert (found.stages.batch_size, found.stages.workers, found.stages.hand_over.median > 0) == (4, 1, True)
    phases = [message.rsplit(" (", 1)[0] for message in said]
    assert len(set(phases)) == len(phases) == 12
    assert phases[:2] == ["what the Trainer makes of the data", "the loader: files and transforms"]
    assert phases[-3:] == ["ingestion rate: the step alone", "the training, its data in memory", "the training as it is"]


class Files(Dataset):
    """An example each."""

    def __init__(self, folder):
        self.folder = folder
        for index in range(200):
            (folder / str(index)).write_text(str(index))

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.full((32,), float((self.folder / str(index)).read_text()))


def test_before_the_real_run_files_are_dropped_and_a_share_is_in_memory_where_it_is_tried(tmp_path, monkeypatch):
    events, read = [], []
    for file in ("analyzer", "trials"):
        monkeypatch.setattr(f"lightning_echo.analysis.{file}.drop_pages", lambda paths: events.append(sorted(map(str, paths))))
    analyzer, found = analyze(BoringModel(), loader_of(Files(tmp_path), workers=0), say=events.append)
    assert found.notes == ()
    assert events[-2].startswith("the training as it is")
    dropped = sorted(str(tmp_path / str(index)) for index in range(40))
    assert events.pop() == dropped
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: read.append(path.name))
    checked = analyzer.check(found, cached_fraction=0.25).checked[-1]
    assert (checked.setting, checked.step_seconds.median > 0) == (TrainingSetting(cached_fraction=0.25), True)
    assert events[-1] == dropped
    assert read == [str(index) for index in range(3, 40, 4)]


@pytest.mark.slow
def test_a_setting_is_proved_in_turns_with_the_training_as_it_is():
    """A batch takes a worker 40 ms, a step 10 ms. Two workers halve that, and factor 4 after batching leaves the step alone."""
    said, echoing = [], TrainingSetting(factor=4, insertion_point="after_batching")
    loader = DataLoader(Staged(5 * MS, length=800), 8, num_workers=1)
    analyzer, found = analyze(Slept(10 * MS), loader, 20, say=said.append)
    del said[:]
    proved = analyzer.prove(found, TrainingSetting(2), echoing, seconds=0.1)
    (by_workers, by_echoing) = proved.proved
    assert [by_workers.setting, by_echoing.setting] == [each.setting for each in proved.checked] == [TrainingSetting(2), echoing]
    assert 1.3 < by_workers.gain < 2.5
    assert by_echoing.gain > by_workers.gain
    for each in proved.proved:
        assert each.low < each.gain < each.high
        assert each.blocks == 4
    one_after_the_other = [line.partition(" (")[0].rpartition(": ")[2] for line in said]
    arms = ["the training as it is", "num_workers=2", "factor 4 at after_batching"]
    assert one_after_the_other == [*arms, *arms[::-1]] * 2
    with pytest.raises(ValueError, match="storage_speedup=2 cannot be tried"):
        analyzer.prove(found, TrainingSetting(storage_speedup=2))


def test_with_verify_a_run_also_proves_what_it_advises():
    """A batch takes a worker 8 ms, and a step less than one."""
    loader = DataLoader(Staged(2 * MS, length=400), 4, num_workers=1)
    found = StallAnalyzer(BoringModel(), loader, trainer_kwargs=CPU, say=str, verify=True).run(10, 2)
    assert [each.setting for each in found.proved] == list(promising(found.verdict)) != []
    assert found.proved[0].gain > 1


def test_without_an_analysis_or_advice_nothing_is_proved():
    analyzer = StallAnalyzer(BoringModel(), loader_of(range(10), workers=0))
    with pytest.raises(RuntimeError, match=r"call run\(\) first"):
        analyzer.prove(None)


def test_an_echoing_data_module_is_looked_at_without_echoing_and_its_hooks_see_a_batch_once():
    class Module(pl.LightningDataModule):
        def train_dataloader(self):
            return EchoLoader(loader_of([{"x": torch.ones(32), "name": str(index)} for index in range(200)], workers=0), 3)

        def on_before_batch_transfer(self, batch, dataloader_idx):
            batch.pop("name")
            return batch["x"]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            assert not batch.requires_grad, "it has been here before"
            time.sleep(10 * MS)
            return batch.clone().requires_grad_()

    analyzer, found = analyze(BoringModel(), Module())
    assert found.ingestion_seconds >= 10 * MS
    assert (found.stages.points[0], found.stages.hand_over.median) == ("after_augmentation", 0)
    assert analyzer.check(found, factor=2, insertion_point="after_batching").checked


def test_callbacks_end_hooks_and_monitors_of_the_model_take_no_part_and_its_logger_may_be_written_to():
    class Watched(BoringModel):
        def configure_callbacks(self):
            return [pl.callbacks.EarlyStopping("val_loss")]

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

        def training_step(self, batch, batch_idx):
            self.logger.experiment.add_scalar("a", 1)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self):
            pytest.fail("an epoch or a training ends")

        on_train_end = on_fit_end = on_train_epoch_end

    _, found = analyze(Watched(), loader_of(workers=0))
    assert found.step_seconds > 0


@pytest.mark.slow
def test_time_is_kept_to_and_what_was_begun_is_finished():
    """A batch takes 0.1 s, and a phase may take less: three batches with one worker, the first two of which it begins with."""
    analyzer, _ = analyze(BoringModel(), loader_of(Staged(read_seconds=25 * MS)), steps=100, seconds=1.1)
    assert len(analyzer._training.phases.real) == 3


def test_an_echoed_trial_counts_only_once_its_buffer_is_full_and_has_a_step_for_each_worker(monkeypatch):
    """A step waits for the first batches, all of them fresh, however long that takes.

    Drawn from memory, echoes come from the second batch on; where each is used as often as the others, sixteen batches fill it.
    """
    made = []

    class Noted(StepClock):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    analyzer, found = analyze(BoringModel(), loader_of(workers=2), steps=4)
    training = analyzer._training
    monkeypatch.setattr("lightning_echo.analysis.trials.StepClock", Noted)
    object.__setattr__(training, "most_seconds", 0.0)
    analyzer.check(found, factor=4, insertion_point="after_batching")
    assert made[0]._counts_from == 1 + 5
    clock = training.clock_echoed(training.loader, 10, factor=4, insertion_point="after_batching", reuse="each")
    assert clock._counts_from == 16 + 5
    assert len(training.clock(training.phases.real, 10).seconds) == 2  # what workers began together arrives in bursts


class Draws(Staged):
    """From every source of random numbers."""

    def augment(self, example):
        return super().augment(example) * float(np.random.rand()) + random.random()


class WithOptimizer(BoringModel):
    """Has its optimizer from the beginning, with a state."""

    def __init__(self):
        super().__init__()
        self.momentum = torch.optim.Adam(self.parameters())
        self.layer(torch.ones(1, 32)).sum().backward()
        self.momentum.step()

    def configure_optimizers(self):
        return self.momentum


@pytest.mark.parametrize("fails", [False, True])
def test_weights_optimizer_and_random_numbers_are_as_they_were(fails):
    model = WithOptimizer()
    if fails:
        model.on_train_start = lambda: 1 / 0
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(model.momentum.state_dict())
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    numbers = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    analyzer = StallAnalyzer(model, loader_of(Draws(), workers=0, shuffle=True), trainer_kwargs=CPU, say=str)
    if fails:
        with pytest.raises(ZeroDivisionError):
            analyzer.run(10)
    else:
        analyzer.check(analyzer.run(10), factor=2)
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    torch.testing.assert_close(model.momentum.state_dict()["state"], state["state"], rtol=0, atol=0)
    assert model.momentum.state_dict()["param_groups"] == state["param_groups"]
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], gradients, rtol=0, atol=0)
    assert (model._trainer, model.training) == (None, True)
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == numbers[1:]


class Both(BoringModel):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch["a"], batch_idx)


SPAWNS = {**CPU, "devices": 1, "strategy": "ddp_spawn"}


@pytest.mark.parametrize(
    ("model", "data", "kwargs", "message"),
    [
        (BoringModel, [], CPU, "datamodule has no training batch to analyze"),
        (
            Both,
            {name: loader_of(workers=0) for name in "ab"},
            CPU,
            "must train on one DataLoader, got dict: analyze each loader by",
        ),
        pytest.param(BoringModel, loader_of(), SPAWNS, "use strategy='ddp'", marks=pytest.mark.slow),
    ],
    ids=["an empty loader", "two loaders", "processes that do not stay"],
)
def test_what_cannot_be_analyzed_is_refused(model, data, kwargs, message):
    with pytest.raises(MisconfigurationException, match=message):
        analyze(model(), data, kwargs=kwargs)


def test_options_of_a_training_that_would_end_or_disturb_it_are_left_out(tmp_path):
    kwargs = {**CPU, "fast_dev_run": True, "max_steps": 3, "min_epochs": 5, "val_check_interval": 1000, "max_time": "00:00:00:01"}
    kwargs |= {"default_root_dir": tmp_path, "limit_train_batches": 2, "profiler": "simple", "overfit_batches": 1}
    _, found = analyze(BoringModel(), loader_of(workers=0), 20, kwargs=kwargs)
    assert found.step_seconds > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_initialized", [True, False])
def test_an_analysis_knows_whether_its_program_is_connected_to_a_cluster(is_initialized, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: is_initialized))
    _, found = analyze(BoringModel(), loader_of(workers=0), 20)
    assert found.stages.has_cluster is is_initialized


class Yields(IterableDataset):
    def __iter__(self):
        return (torch.full((32,), float(number)) for number in range(2000))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (loader_of(), ""),
        (loader_of(Yields()), "what is shared is an example of a stream"),
        (loader_of(batch_size=1, batch_sampler=BatchSampler(RandomSampler(Staged()), 4, True)), "the examples of a batch"),
    ],
    ids=["indexed", "stream", "own batches"],
)
def test_workers_on_other_machines_are_predicted_only_of_data_that_they_can_read(data, why):
    _, found = analyze(Slept(), data, 4, seconds=5.0)
    assert found.stages.no_cluster_workers.endswith(why)
    assert bool(found.stages.no_cluster_workers) is bool(why)
    if not why:
        assert found.predict(cluster_workers=2).step_seconds >= found.ingestion_seconds
    else:
        with pytest.raises(ValueError, match=f"^cluster_workers=2 is not possible here: .*{why}$"):
            found.predict(cluster_workers=2)


class Rarely(Dataset):
    """One example of 64 takes long, so that one batch of 16 does."""

    def __init__(self, long_seconds):
        self.long_seconds = long_seconds

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        time.sleep(self.long_seconds if index % 64 == 29 else 2 * MS)
        return torch.ones(32)


@pytest.mark.slow
def test_rare_long_batches_are_evened_out_by_prefetching_and_a_steady_source_is_not_advised_to():
    """8 ms of a batch, 166 of every sixteenth: 18 of two workers' 40 for a step of 20. The four that are queued last 80 ms."""
    analyzer, found = analyze(Slept(20 * MS), loader_of(Rarely(160 * MS), workers=2), 64)
    verdict = found.verdict
    first = verdict.remedies[0]
    assert (first.name, first.setting.prefetch_factor > 2) == ("prefetching", True)
    assert verdict.setting.lines[0] == f"prefetch_factor={first.setting.prefetch_factor}"
    found = analyzer.check(found, prefetch_factor=first.setting.prefetch_factor)
    checked = found.checked[-1].step_seconds.median
    assert 0.7 < found.predict().step_seconds / found.step_seconds < 1.4
    assert 0.7 < found.predict(prefetch_factor=first.setting.prefetch_factor).step_seconds / checked < 1.4
    _, steady = analyze(Slept(20 * MS), loader_of(Rarely(2 * MS), workers=2), 64)
    assert len(steady.stages.batch_seconds) > 16
    assert [remedy.name for remedy in steady.verdict.remedies if remedy.name == "prefetching"] == []
    assert steady.predict(prefetch_factor=16).speedup == pytest.approx(1, abs=0.04)


def test_pinning_is_refused_where_no_device_copies_from_the_host():
    analyzer, found = analyze(BoringModel(), loader_of(workers=0), 4)
    why = "batches are copied to the device 'cpu', and only copies to 'cuda' are faster from pinned memory"
    assert (found.stages.pinning, found.stages.no_pinning) == (None, why)
    with pytest.raises(ValueError, match=f"pin_memory=True cannot be tried here: {why}"):
        analyzer.check(found, pin_memory=True)
    with pytest.raises(ValueError, match=f"pin_memory=True is not possible here: {why}"):
        found.predict(pin_memory=True)
