"""StallAnalyzer with a real Trainer and real workers: what it finds, and what it leaves as it was.

The stages of these pipelines sleep, so that times have lower bounds and known proportions; nothing here compares them closely,
which benchmarks/stalls.py does. Where a test compares with a step that does not sleep, a batch sleeps for 0.1 s: with eight
processes on two processors such a step was seen to take 0.03 s in place of 0.001.
"""

import copy
import random
import time
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_echo import EchoDataModule, EchoLoader, StagedDataset, StallAnalysis
from lightning_echo.analysis.analyzer import StallAnalyzer
from lightning_echo.analysis.predict import TrainingSetting
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


def loader_of(dataset, workers=1, batch_size=4, **options):
    return DataLoader(dataset, batch_size, num_workers=workers, **options)


def analyze(model, data, steps=10, **options):
    analyzer = StallAnalyzer(model, data, trainer_kwargs=CPU, say=lambda message: None)
    return analyzer, analyzer.run(steps, **options)


# ------------------------------------------------------------------ what it finds


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


def test_the_step_alone_is_ingestion_and_the_loader_is_not():
    _, found = analyze(Slept(20 * MS), loader_of(Staged(read_seconds=25 * MS)), 8)
    assert 20 * MS <= found.ingestion_seconds < found.step_seconds
    assert found.step_seconds >= 50 * MS  # as above, of 100
    assert found.stages.batch_size == 4
    assert found.stages.workers == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_taking_a_batch_from_a_worker_takes_time_and_without_workers_there_is_none(workers):
    _, found = analyze(BoringModel(), loader_of(Staged(), workers=workers))
    assert (found.stages.hand_over.median > 0) is bool(workers)
    assert found.stages.workers == workers


@pytest.mark.slow
def test_a_setting_that_is_tried_is_put_beside_what_was_predicted():
    analyzer, found = analyze(Slept(1 * MS), loader_of(Staged(read_seconds=25 * MS)), 8)
    for setting in (
        {"factor": 4, "insertion_point": "before_augmentation"},
        {"factor": 4, "insertion_point": "after_transfer"},
        {"workers": 2},
        {"cached_fraction": 0.5},
        {"cached_fraction": 0.5, "hold": "raw"},
        {"cached_fraction": 0.5, "hold": "loaded", "factor": 2, "insertion_point": "before_augmentation"},
    ):
        found = analyzer.check(found, **setting)
        checked = found.checked[-1]
        assert checked.setting == TrainingSetting(**setting)
        assert 1 * MS <= checked.step_seconds.median < found.step_seconds  # each of them is a gain of two at least
    assert len(found.checked) == 6
    assert analyzer.check(found).checked[-1].setting == found.verdict.setting


class Workers(Staged):
    """Examples tell how many workers there are."""

    def augment(self, example):
        info = get_worker_info()
        return torch.full((32,), 0.0 if info is None else float(info.num_workers))


class Notes(BoringModel):
    workers: list[float] = []  # noqa: RUF012  # of all copies

    def training_step(self, batch, batch_idx):
        self.workers.append(batch[0, 0].item())
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"factor": 2, "insertion_point": "after_augmentation"},
        {"cached_fraction": 0.5},
        {"cached_fraction": 0.5, "hold": "loaded"},
    ],
)
def test_a_setting_is_tried_with_its_workers(setting):
    analyzer, found = analyze(Notes(), loader_of(Workers()))
    for workers in (2, 1):
        Notes.workers.clear()
        analyzer.check(found, workers=workers, **setting)
        assert set(Notes.workers) == {workers}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"storage_speedup": 2}, "storage_speedup=2 cannot be tried on this machine"),
        ({"step_speedup": 3}, "step_speedup=3 cannot be tried on this machine"),
        ({"shared_by": 2}, "shared_by=2 cannot be tried with one training"),
        ({"factor": 2, "cached_fraction": 0.5}, "without hold and factor > 1 cannot be tried together"),
    ],
)
def test_what_cannot_be_tried_is_refused(setting, message):
    analyzer, found = analyze(BoringModel(), loader_of(Staged(), workers=0))
    with pytest.raises(ValueError, match=message):
        analyzer.check(found, **setting)


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


def test_before_the_real_run_the_files_are_dropped_from_memory(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr("lightning_echo.analysis.analyzer.drop_pages", lambda paths: events.append(sorted(map(str, paths))))
    analyzer = StallAnalyzer(BoringModel(), loader_of(Files(tmp_path), workers=0), trainer_kwargs=CPU, say=events.append)
    analyzer.run(10)
    assert events[-2].startswith("the training as it is")
    assert events[-1] == sorted(str(tmp_path / str(index)) for index in range(40))


def test_a_share_of_files_is_in_memory_where_it_is_tried(tmp_path, monkeypatch):
    analyzer, found = analyze(BoringModel(), loader_of(Files(tmp_path)))
    assert found.notes == ()
    assert len(analyzer._training.phases.files) == 40
    dropped, read = [], []
    monkeypatch.setattr("lightning_echo.analysis.analyzer.drop_pages", dropped.extend)
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: read.append(path.name))
    analyzer.check(found, cached_fraction=0.25)
    assert len(dropped) == 40
    assert read == [str(index) for index in range(3, 40, 4)]


def test_a_few_small_files_do_not_hold_the_data_and_a_share_of_it_cannot_be_in_memory(tmp_path):
    class Remote(Dataset):
        def __len__(self):
            return 200

        def __getitem__(self, index):
            return torch.full((32,), float((tmp_path / "label").read_text()))

    (tmp_path / "label").write_text("7")
    analyzer, found = analyze(BoringModel(), loader_of(Remote(), workers=0))
    assert found.notes[0].startswith("fetch rate: no file was seen to be opened")
    assert analyzer._training.phases.files == ()
    with pytest.raises(ValueError, match="cached_fraction cannot be tried, only predicted: this data set opens fewer than two"):
        analyzer.check(found, cached_fraction=0.5)


def test_the_models_own_loader_and_what_is_echoed_already_are_looked_at_without_echoing():
    class WithLoader(BoringModel):
        def train_dataloader(self):
            return loader_of(Staged(), workers=0)

    module = EchoDataModule.from_dataloaders(loader_of(Staged(), workers=0), factor=3)
    echoed = EchoLoader(loader_of(Staged()), 3)
    for model, data, workers in ((WithLoader(), None, 0), (BoringModel(), module, 0), (BoringModel(), echoed, 1)):
        _, found = analyze(model, data)
        assert found.stages.workers == workers
        assert found.stages.points[0] == "after_read"


def test_hooks_of_the_data_module_are_part_of_a_step_and_see_a_batch_as_in_a_training():
    class OnDevice(pl.LightningDataModule):
        def train_dataloader(self):
            return loader_of(Staged(), workers=0)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            assert not batch.requires_grad, "it has been here before"
            time.sleep(10 * MS)
            return batch.clone().requires_grad_()

    _, found = analyze(BoringModel(), OnDevice())
    assert found.ingestion_seconds >= 10 * MS


def test_a_hook_before_the_transfer_sees_each_batch_once():
    class Named(pl.LightningDataModule):
        def train_dataloader(self):
            return loader_of([{"x": torch.ones(32), "name": str(index)} for index in range(200)], workers=0)

        def on_before_batch_transfer(self, batch, dataloader_idx):
            batch.pop("name")
            return batch["x"]

    analyzer, found = analyze(BoringModel(), Named())
    assert analyzer.check(found, factor=2, insertion_point="after_batching").checked


def test_a_schedule_that_monitors_validation_goes_without_it():
    class Plateau(BoringModel):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    _, found = analyze(Plateau(), loader_of(Staged(), workers=0))
    assert found.step_seconds > 0


def test_callbacks_of_the_model_take_no_part_and_its_logger_may_be_written_to():
    class Watched(BoringModel):
        def configure_callbacks(self):
            return [pl.callbacks.EarlyStopping("val_loss")]

        def training_step(self, batch, batch_idx):
            self.logger.experiment.add_scalar("a", 1)
            return super().training_step(batch, batch_idx)

    _, found = analyze(Watched(), loader_of(Staged(), workers=0))
    assert found.step_seconds > 0


class Uneven:
    """Batches of 2 and 6 examples in turn, from a sampler that names no size."""

    def __iter__(self):
        return iter([list(range(start, start + size)) for start, size in zip(range(0, 320, 4), [2, 6] * 40, strict=True)])

    def __len__(self):
        return 80


def test_batches_of_a_users_sampler_have_their_mean_size():
    dataset = Staged(read_seconds=5 * MS)
    _, found = analyze(Slept(), DataLoader(dataset, batch_sampler=Uneven()), 20)
    assert found.stages.batch_size == 4
    assert 4 * MS < found.stages.read.median < 20 * MS
    assert found.stages.points == ("after_batching", "after_transfer")
    assert found.predict().step_seconds >= 4 * 4 * MS


def test_a_data_module_that_echoes_by_itself_is_looked_at_without_echoing():
    class Echoes(pl.LightningDataModule):
        def train_dataloader(self):
            return EchoLoader(loader_of(Staged(), workers=0), 3)

    _, found = analyze(BoringModel(), Echoes())
    assert found.stages.points[0] == "after_read"


class Stream(IterableDataset):
    """100 batches, the examples of which sleep."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def __iter__(self):
        for _ in range(400):
            time.sleep(self.seconds)
            yield torch.zeros(32)


@pytest.mark.slow
def test_of_a_stream_only_the_whole_is_measured_and_that_is_said():
    analyzer, found = analyze(Slept(), loader_of(Stream(seconds=25 * MS)), 8)
    assert (found.fetch_stall_fraction, found.prep_stall_fraction, found.fetch_rate) == (None, None, None)
    # By arrivals, and a batch that came late leaves less time to the next one.
    assert found.stages.decode.median >= 25 * MS / 2
    assert found.step_seconds >= 2 * 25 * MS
    assert found.notes[0].startswith(
        "skipped: fetch rate, preparation rate and single stages. The training loader goes over Stream"
    )
    assert found.stages.points == ("after_augmentation", "after_batching", "after_transfer")
    found = analyzer.check(found, factor=4, insertion_point="after_batching")
    assert found.checked[0].step_seconds.median < found.step_seconds
    with pytest.raises(ValueError, match="of a stream cannot be tried"):
        analyzer.check(found, workers=2)


def test_more_steps_than_a_stream_has_are_refused():
    with pytest.raises(ValueError, match="steps must be at most 100, the batches of the training loader, got 101"):
        StallAnalyzer(BoringModel(), loader_of(Stream()), trainer_kwargs=CPU, say=str).run(101)


def test_time_is_kept_to_and_what_was_begun_is_finished():
    """A batch takes 0.1 s, and a phase may take less: three batches with one worker, the first two of which it begins with."""
    analyzer, _ = analyze(BoringModel(), loader_of(Staged(read_seconds=25 * MS)), steps=100, seconds=1.1)
    assert len(analyzer._training.phases.real) == 3


def test_a_training_has_a_step_for_each_worker_whatever_the_time():
    """What workers began together arrives in bursts."""
    analyzer, _ = analyze(BoringModel(), loader_of(Staged(), workers=2))
    object.__setattr__(analyzer._training, "most_seconds", 0.0)
    assert len(analyzer._training.clock(analyzer._training.phases.real, 10).seconds) == 2


def test_progress_is_told():
    said = []
    StallAnalyzer(BoringModel(), loader_of(Staged()), trainer_kwargs=CPU, say=said.append).run(10)
    assert [message.rsplit(" (", 1)[0] for message in said] == [
        "what the Trainer makes of the data",
        "the loader: files and transforms",
        "fetch rate: reading alone, num_workers=2",
        "preparation rate: from memory, num_workers=2",
        "fetch rate: reading alone",
        "preparation rate: from memory",
        "augmentation alone",
        "what a cache holds of an example",
        "hand-over and copy",
        "ingestion rate: the step alone",
        "the training, its data in memory",
        "the training as it is",
    ]


def test_progress_is_in_lightnings_log_by_default(caplog):
    with caplog.at_level("INFO"):
        StallAnalyzer(BoringModel(), loader_of(Staged(), workers=0), trainer_kwargs=CPU).run(4)
    assert "lightning_echo: analyzing: ingestion rate: the step alone (" in caplog.text


def test_an_echoed_trial_counts_only_once_its_buffer_is_full(monkeypatch):
    """A step waits for the first batches, all of them fresh, however long that takes.

    Drawn from memory, echoes come from the second batch on; where each is used as often as the others, sixteen batches fill it.
    """
    made = []

    class Noted(StepClock):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    analyzer, found = analyze(BoringModel(), loader_of(Staged(read_seconds=2 * MS)))
    monkeypatch.setattr("lightning_echo.analysis.analyzer.StepClock", Noted)
    object.__setattr__(analyzer._training, "most_seconds", 0.0)
    analyzer.check(found, factor=4, insertion_point="after_batching")
    assert made[0]._counts_from == 1 + 5
    training = analyzer._training
    clock = training.clock_echoed(training.loader, 10, factor=4, insertion_point="after_batching", reuse="each")
    assert clock._counts_from == 16 + 5


def test_what_a_trial_takes_is_the_mean_over_fresh_and_echoed_batches(monkeypatch):
    """One step of 8 ms and three of 1: each four of them take 2.75 ms in the mean, wherever a block ends."""
    analyzer, found = analyze(BoringModel(), loader_of(Staged(), workers=0))
    seconds = [8 * MS, 1 * MS, 1 * MS, 1 * MS] * 8
    monkeypatch.setattr(type(analyzer._training), "clock_echoed", lambda *_, **__: SimpleNamespace(seconds=seconds[:30]))
    checked = analyzer.check(found, factor=4, insertion_point="after_batching").checked[0]
    assert checked.step_seconds.median == pytest.approx(2.75 * MS)


# ------------------------------------------------------------------ what it leaves as it was


class Draws(Staged):
    """From every source of random numbers."""

    def augment(self, example):
        return super().augment(example) * float(np.random.rand()) + random.random()


class Counting(pl.LightningDataModule):
    def __init__(self, workers):
        super().__init__()
        self.set_up, self.workers = 0, workers
        self.dataset = Draws()

    def setup(self, stage):
        self.set_up += 1

    def train_dataloader(self):
        return loader_of(self.dataset, workers=self.workers, shuffle=True)


class WithOptimizer(BoringModel):
    """Has its optimizer from the beginning, with a state."""

    def __init__(self):
        super().__init__()
        self.momentum = torch.optim.Adam(self.parameters())
        self.layer(torch.ones(1, 32)).sum().backward()
        self.momentum.step()

    def configure_optimizers(self):
        return self.momentum


def test_what_a_model_does_at_the_end_of_a_training_is_not_done():
    class Ends(BoringModel):
        def on_train_epoch_end(self):
            pytest.fail("an epoch ends")

        def on_train_end(self):
            pytest.fail("a training ends")

        on_fit_end = on_train_end

    _, found = analyze(Ends(), loader_of(Staged(), workers=0))
    assert found.step_seconds > 0


@pytest.mark.parametrize(("fails", "workers"), [(False, 0), (False, 2), (True, 0)])
def test_weights_optimizer_random_numbers_and_data_module_are_as_they_were(fails, workers):
    model, data = WithOptimizer(), Counting(workers)
    if fails:
        model.on_train_start = lambda: 1 / 0
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(model.momentum.state_dict())
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    attributes = dict(vars(data))
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    numbers = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    analyzer = StallAnalyzer(model, data, trainer_kwargs=CPU, say=lambda message: None)
    if fails:
        with pytest.raises(ZeroDivisionError):
            analyzer.run(10)
    else:
        analyzer.check(analyzer.run(10), factor=2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
    after = model.momentum.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for index, values in state["state"].items():
        for name, value in values.items():
            assert torch.equal(after["state"][index][name], value)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert model._trainer is None
    assert model.training
    assert vars(data) == attributes
    assert data.trainer is None
    assert (data.set_up, data.dataset.length) == (0, 2000)
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == numbers[1:]


class OnlyHere(Dataset):
    """Fails in a worker, as what holds a device does."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        if get_worker_info() is not None:
            raise RuntimeError("no device here")
        time.sleep(5 * MS)
        return torch.zeros(32)


@pytest.mark.slow
def test_a_data_set_that_fails_in_workers_is_analyzed_without_and_workers_are_not_advised(tmp_path):
    analyzer, found = analyze(BoringModel(), loader_of(OnlyHere(), workers=0), 5)
    assert found.step_seconds >= 4 * 5 * MS
    assert "(RuntimeError: no device here)" in found.notes[0]
    assert found.verdict.message.startswith("Make the data set work in worker processes first")
    found.to_json(tmp_path / "analysis.json")
    assert StallAnalysis.from_json(tmp_path / "analysis.json") == found
    assert analyzer.check(found).checked[0].setting == TrainingSetting()


class Seeded(Counting):
    """Its loader has a generator of its own."""

    def __init__(self, generator):
        super().__init__(0)
        self.generator = generator

    def train_dataloader(self):
        return loader_of(self.dataset, shuffle=True, generator=self.generator)


def of_a_stream(generator):
    return loader_of(Stream(), generator=generator)


@pytest.mark.parametrize("data_of", [Seeded, lambda generator: Seeded(generator).train_dataloader(), of_a_stream])
def test_a_generator_of_the_loaders_own_is_as_it_was(data_of):
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    analyzer = StallAnalyzer(BoringModel(), data_of(generator), trainer_kwargs=CPU, say=lambda message: None)
    analysis = analyzer.run(5)
    assert torch.equal(generator.get_state(), before)
    before = generator.manual_seed(2).get_state()
    analyzer.check(analysis, factor=2)  # whatever the verdict is
    assert torch.equal(generator.get_state(), before)
