"""Two processes on gloo, started once by Lightning itself: ``python ddp_runs.py FOLDER`` runs all scenarios below.

Each rank writes what it saw to ``FOLDER/rank-R.pt``; test_ddp.py compares. A scenario is a function named ``scenario_...`` that
returns plain types. All ranks run all of them in the same order, in one process group.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from collection_runs import SeveralRecorder
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler, Subset, SubsetRandomSampler
from trainer_runs import Data, Killed, Recorder, Run, SaveAt, Scans, SetFactor, echoed, trainer

from lightning_echo import Controller, EchoCallback, EchoConfig, EchoDataModule, EchoLoader, FactorSchedule
from lightning_echo.analysis.analyzer import StallAnalyzer
from lightning_echo.cache.kept import CacheConfig
from lightning_echo.measure.control import Decision, Observation, Reason

LENGTH = 61  # odd: DistributedSampler fills the last place up with the first example
UNEVEN = {"length": LENGTH, "batch_size": 4}


class TwoRankRecorder(Recorder):
    """Remembers the validation examples too."""

    def __init__(self, reads_stepping: bool = False) -> None:
        super().__init__(reads_stepping)
        self.validated: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += batch["index"].tolist()


def fit(data: Any, *, ckpt_path: Any = None, reads_stepping: bool = False, **options: Any) -> Run:
    run = Run(TwoRankRecorder(reads_stepping), data, trainer(**{"strategy": "ddp", "devices": 2, **options}))
    if isinstance(data, pl.LightningDataModule):
        run.trainer.fit(run.model, datamodule=data, ckpt_path=ckpt_path)
    else:
        run.trainer.fit(run.model, data, Data().val_dataloader(), ckpt_path=ckpt_path)
    return run


def seen(run: Run) -> dict[str, Any]:
    """What one rank saw of a run."""
    counts = run.loader.counts
    return {
        "batches": run.model.batches,
        "steps": run.model.steps,
        "epochs": run.model.epochs,
        "validated": run.model.validated,
        "counts": (counts.fresh, counts.echoed),
        "seed": run.loader.seed,
        "weights": run.model.weights,
    }


def bare(point: str = "after_augmentation", *, workers: int = 0, factor: float = 2, **options: Any) -> EchoLoader:
    return EchoLoader(Data(workers, **UNEVEN).train_dataloader(), factor, insertion_point=point, seed=7, **options)


def scenario_module(folder: Path) -> Any:
    return seen(fit(echoed(2, workers=2, **UNEVEN), max_epochs=6))


def scenario_bare(folder: Path) -> Any:
    return seen(fit(bare(workers=2), max_epochs=6))


def scenario_before_augmentation(folder: Path) -> Any:
    return seen(fit(echoed(2, point="before_augmentation", **UNEVEN), max_epochs=6))


def scenario_batches(folder: Path) -> Any:
    return seen(fit(echoed(2, point="after_batching", workers=2, **UNEVEN), max_epochs=6))


def scenario_device_batches(folder: Path) -> Any:
    return seen(fit(echoed(2, point="after_transfer", workers=2, **UNEVEN), max_epochs=6))


def scenario_drop_last(folder: Path) -> Any:
    options = {"shuffle": True, "drop_last": True}
    return seen(fit(echoed(2, loader_options=options, **UNEVEN), max_epochs=6))


def scenario_users_sampler(folder: Path) -> Any:
    """Samplers that know nothing of ranks: all ranks must see the same order to take their shares from it."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, sampler in {
        "with a generator": SubsetRandomSampler(range(0, 122, 2), generator=generator),
        "without": SubsetRandomSampler(range(0, 122, 2)),
    }.items():
        data = echoed(2, length=122, loader_options={"sampler": sampler})
        found[name] = seen(fit(data, max_epochs=6))
    return found


class Stream:
    """A sized iterable of batches."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        return iter(DataLoader(Scans(24), 4))


def scenario_batches_of_an_iterable(folder: Path) -> Any:
    """An iterable of batches cannot be sharded by anyone: every rank sees it whole."""
    return seen(fit(EchoDataModule.from_dataloaders(Stream(), factor=2, seed=7), max_epochs=3))


def scenario_unsharded(folder: Path) -> Any:
    module = fit(echoed(2, shard=False, **UNEVEN), max_epochs=4, use_distributed_sampler=False)
    loader = fit(bare(num_replicas=1, rank=0), max_epochs=4, use_distributed_sampler=False)
    return {"module": seen(module), "bare": seen(loader)}


class OwnHalf(Data):
    """Its loader reads the half of the data that belongs to its rank."""

    def train_dataloader(self) -> Any:
        rank, length = int(os.environ.get("LOCAL_RANK", "0")), self.scans["length"]
        return DataLoader(Subset(Scans(**self.scans), range(rank, length, 2)), self.batch_size, shuffle=True)


def scenario_users_own_division(folder: Path) -> Any:
    """What Lightning does not divide is not divided: each rank trains on all of its half."""
    found = {}
    for name, echo in {
        "callback": EchoCallback(factor=2, insertion_point="after_augmentation", seed=7, summary=False),
        "cache": EchoCallback(cache="1MiB", seed=7, summary=False),
        "module": None,
    }.items():
        data: Any = OwnHalf(length=48)
        if echo is None:
            data = EchoDataModule(data, 2, insertion_point="after_augmentation", seed=7)
        run = fit(data, callbacks=[echo or EchoCallback(summary=False)], max_epochs=4, use_distributed_sampler=False)
        found[name] = {"batches": run.model.batches, "steps": run.model.steps}
    return found


class Told(DistributedSampler[int]):
    """The user's own DistributedSampler; remembers the passes that it was told."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)
        super().set_epoch(epoch)


class Sharded(Data):
    """A data module that shards by itself."""

    def train_dataloader(self) -> Any:
        dataset = Scans(**self.scans)
        self.sampler = Told(dataset, num_replicas=2, rank=int(os.environ.get("LOCAL_RANK", 0)), seed=5)
        return DataLoader(dataset, self.batch_size, sampler=self.sampler, num_workers=self.workers)


def scenario_own_sampler(folder: Path) -> Any:
    users = [Sharded(workers, **UNEVEN) for workers in (0, 2, 0)]
    module = EchoDataModule(users[0], 2, insertion_point="after_augmentation", seed=7)
    loader = EchoLoader(users[1].train_dataloader(), 2, insertion_point="after_augmentation", seed=7)
    runs = {"module": fit(module, max_epochs=6), "bare": fit(loader, max_epochs=6)}
    plain = EchoDataModule(users[2], 1, insertion_point="after_augmentation", seed=7)
    runs["factor 1"] = fit(plain, max_epochs=3)
    return {name: {**seen(run), "told": user.sampler.told} for (name, run), user in zip(runs.items(), users, strict=True)}


def scenario_seeds(folder: Path) -> Any:
    os.environ.pop("PL_GLOBAL_SEED", None)
    found: dict[str, Any] = {}
    for name in ("drawn", "drawn again"):
        run = fit(echoed(2, seed=None, **UNEVEN), max_epochs=1)
        found[name] = {**seen(run), "state": run.data.state_dict()["loader"]}
    loader = EchoLoader(Data(**UNEVEN).train_dataloader(), 2)
    found["bare"] = {**seen(fit(loader, max_epochs=1)), "state": loader.state_dict()}
    pl.seed_everything(11, verbose=False)
    run = fit(echoed(2, seed=None, **UNEVEN), max_epochs=1)
    found["everything"] = {**seen(run), "state": run.data.state_dict()["loader"]}
    os.environ.pop("PL_GLOBAL_SEED", None)
    return found


RESUMED = {  # point, workers, whether a bare loader, whether the model reads estimated_stepping_batches, step, limit
    "before_augmentation": ("before_augmentation", 2, False, True, 11, 1.0),
    "after_augmentation": ("after_augmentation", 0, False, False, 8, 1.0),
    "after_batching": ("after_batching", 2, False, False, 13, 1.0),
    "bare": ("before_augmentation", 2, True, False, 11, 1.0),
    "limited": ("after_augmentation", 2, False, True, 10, 5),
}


def resumable(name: str) -> Any:
    point, workers, is_bare, reads_stepping, step, limit = RESUMED[name]

    def run(**options: Any) -> Run:
        data = bare(point, workers=workers) if is_bare else echoed(2, point=point, workers=workers, **UNEVEN)
        return fit(data, reads_stepping=reads_stepping, max_epochs=4, limit_train_batches=limit, **options)

    return run, step


def scenario_resume(folder: Path) -> Any:
    found = {}
    for name in RESUMED:
        run, step = resumable(name)
        (folder / name).mkdir(exist_ok=True)
        save = SaveAt(folder / name, [step], dies=True)
        whole = seen(run())
        try:
            run(callbacks=[save])
        except Killed:
            resumed = seen(run(ckpt_path=save.path(step)))
        found[name] = {"whole": whole, "resumed": resumed, "step": step}
    return found


class OwnLoaders(TwoRankRecorder):
    """A model that has its data itself."""

    def train_dataloader(self) -> Any:
        return Data(2, **UNEVEN).train_dataloader()

    def val_dataloader(self) -> Any:
        return Data().val_dataloader()


def with_callback(of_model: bool, *callbacks: Any, ckpt_path: Any = None) -> Run:
    """A run that `EchoCallback` echoes; the same options as scenario_module."""
    echo = EchoCallback(echo=EchoConfig(2, "after_augmentation", seed=7))
    model = OwnLoaders() if of_model else TwoRankRecorder()
    run = Run(model, echo.attachment.echo, trainer(strategy="ddp", devices=2, max_epochs=6, callbacks=[echo, *callbacks]))
    run.trainer.fit(model, datamodule=None if of_model else Data(2, **UNEVEN), ckpt_path=ckpt_path)
    return run


def scenario_callback(folder: Path) -> Any:
    found = {"module": seen(with_callback(False)), "own": seen(with_callback(True))}
    (folder / "callback").mkdir(exist_ok=True)
    save = SaveAt(folder / "callback", [11], dies=True)
    try:
        with_callback(True, save)
    except Killed:
        found["resumed at 11"] = seen(with_callback(True, ckpt_path=save.path(11)))
    return found


def scenario_passed(folder: Path) -> Any:
    """Loaders that are passed to fit: Lightning puts its sampler into them, anew for each reload, before they are echoed."""
    (folder / "passed").mkdir(exist_ok=True)

    def run(*callbacks: Any, factor: float = 2, loader: Any = None, ckpt_path: Any = None, **options: Any) -> Run:
        echo = EchoCallback(factor=factor, insertion_point="after_augmentation", seed=7)
        loader = Data(**UNEVEN).train_dataloader() if loader is None else loader
        options = {"max_epochs": 6, "callbacks": [echo, *callbacks], "num_sanity_val_steps": 1, **options}
        done = Run(TwoRankRecorder(), echo.attachment.echo, trainer(strategy="ddp", devices=2, **options))
        done.trainer.fit(done.model, loader, Data().val_dataloader(), ckpt_path=ckpt_path)
        return done

    whole = run()
    sampler, val_sampler = (each.sampler for each in (whole.loader.loader, whole.trainer.val_dataloaders))  # type: ignore[union-attr]
    found = {
        "whole": seen(whole),
        "samplers": [(type(each).__name__, each.num_replicas, each.rank) for each in (sampler, val_sampler)],
        "left": "process_dataloader" in vars(whole.trainer.strategy),
        "reloaded": seen(run(reload_dataloaders_every_n_epochs=1)),
        "factor 1": seen(run(factor=1, max_epochs=3)),
        "unsharded": seen(run(use_distributed_sampler=False)),
    }
    users = DataLoader(Scans(122), 4, sampler=SubsetRandomSampler(range(0, 122, 2)))
    found["users sampler"] = seen(run(loader=users))
    save = SaveAt(folder / "passed", [11], dies=True)
    try:
        run(save)
    except Killed:
        found["resumed at 11"] = seen(run(ckpt_path=save.path(11)))
    return found


class LocalDecisions(Controller):
    """Would decide differently on each rank: by what the rank itself has logged, and by its number."""

    def __init__(self, rank: int) -> None:
        self.rank, self.seen = rank, []  # type: ignore[var-annotated]

    def decide(self, observation: Observation) -> Decision:
        self.seen.append(dict(observation.metrics))
        factor = 1 + observation.epoch + observation.metrics["rank"] + self.rank
        return Decision(factor, Reason.custom, f"of rank {self.rank}")


class LogsItsRank(TwoRankRecorder):
    """Logs a metric that is another one on each rank."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("rank", float(self.global_rank), on_step=False, on_epoch=True, sync_dist=False)


def scenario_controller(folder: Path) -> Any:
    """Ranks that measure, log and would decide differently."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    found = {}
    for epoch_length in ("fixed", "full_pass"):
        controller = LocalDecisions(rank)
        echo = EchoCallback(controller, echo=EchoConfig(2, "after_augmentation", seed=7, epoch_length=epoch_length))
        run = Run(LogsItsRank(), echo.attachment.echo, trainer(strategy="ddp", devices=2, max_epochs=4, callbacks=[echo]))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="It is recommended to use `self.log")
            run.trainer.fit(run.model, datamodule=Data(2, delay=0.002 * rank, **UNEVEN))
        reports = [report.state() for report in echo.reports]
        found[epoch_length] = {**seen(run), "reports": reports, "shown": controller.seen}
    return found


class AsksEarly(LocalDecisions):
    """Is asked within epochs, too; would decide differently on each rank there."""

    first_after_steps, every_n_steps = 3, 25

    def decide(self, observation: Observation) -> Decision:
        self.seen.append((observation.batches, observation.moment.value, observation.steps, observation.idle_fraction))
        return Decision(1 + len(self.seen) / 2 + self.rank, Reason.custom, f"of rank {self.rank}")


def scenario_early(folder: Path) -> Any:
    """Decisions within epochs, of ranks that wait at different times; and a run that is resumed after the first of them."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    (folder / "early").mkdir(exist_ok=True)
    save = SaveAt(folder / "early", [24], dies=True)

    def run(*callbacks: Any, ckpt_path: Any = None) -> Any:
        controller = AsksEarly(rank)
        echo = EchoCallback(controller, echo=EchoConfig(1, "after_augmentation", seed=7))
        done = Run(
            TwoRankRecorder(),
            echo.attachment.echo,
            trainer(strategy="ddp", devices=2, max_epochs=2, callbacks=[echo, *callbacks]),
        )
        done.trainer.fit(done.model, datamodule=Data(2, length=321, delay=0.002 * rank), ckpt_path=ckpt_path)
        uses = [(use.step, use.batch, use.factor, use.message) for use in echo.decisions]
        return {**seen(done), "shown": controller.seen, "uses": uses}

    found = {"whole": run()}
    try:
        run(save)
    except Killed:
        found["resumed"] = run(ckpt_path=save.path(24))
    return found


def scenario_reports_resumed(folder: Path) -> Any:
    """Counts of all ranks, when a run was saved in the middle of an epoch and goes on."""
    (folder / "reports").mkdir(exist_ok=True)
    save = SaveAt(folder / "reports", [11], dies=True)

    def run(*callbacks: Any, ckpt_path: Any = None) -> Any:
        echo = EchoCallback(FactorSchedule({0: 2.0, 2: 1.5}), echo=EchoConfig(2, "after_augmentation", seed=7))
        runner = trainer(strategy="ddp", devices=2, max_epochs=3, callbacks=[echo, *callbacks])
        runner.fit(TwoRankRecorder(), datamodule=Data(2, **UNEVEN), ckpt_path=ckpt_path)
        return [report.state() for report in echo.reports]

    try:
        run(save)
    except Killed:
        return {"whole": run(), "resumed": run(ckpt_path=save.path(11))}


def scenario_from_one_rank(folder: Path) -> Any:
    """A checkpoint that a single process saved at step 8, see test_ddp.py."""
    data = echoed(2, **UNEVEN)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = fit(data, max_epochs=3, ckpt_path=str(folder / "step-8.ckpt"))
    return {**seen(run), "said": [str(each.message) for each in said if "the state was saved" in str(each.message)]}


def scenario_changing_factor(folder: Path) -> Any:
    data = echoed(1, workers=2, epoch_length="full_pass", **UNEVEN)
    full = fit(data, max_epochs=4, callbacks=[SetFactor(data, {0: 3, 1: 1.5})])
    data = echoed(2, workers=2, **UNEVEN)
    fixed = fit(data, max_epochs=4, callbacks=[SetFactor(data, {0: 4, 1: 1})])
    return {"full_pass": seen(full), "fixed": seen(fixed)}


def scenario_plain(folder: Path) -> Any:
    """The user's data module as it is, to compare with."""
    run = fit(Data(**UNEVEN), max_epochs=1)
    return {"validated": run.model.validated, "steps": run.model.steps}


class DealtOut(Data):
    """Three loaders with the same data; the last one yields the numbers of examples, without a sampler of its own."""

    def train_dataloader(self) -> Any:
        loaders = {name: super(DealtOut, self).train_dataloader() for name in ("all", "half", "plain")}
        return CombinedLoader(loaders, "min_size")


class TwoRankSeveral(SeveralRecorder):
    validated: list[int] = []  # noqa: RUF012 (never filled)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def scenario_collection(folder: Path) -> Any:
    """Two loaders echoed, one as it is; whole, and killed in the middle and resumed."""
    (folder / "collection").mkdir(exist_ok=True)
    save = SaveAt(folder / "collection", [11], dies=True)

    def run(*callbacks: Any, ckpt_path: Any = None) -> Any:
        configs = {name: EchoConfig(factor, "after_augmentation", seed=7) for name, factor in (("all", 1.0), ("half", 2.0))}
        data = EchoDataModule(DealtOut(**UNEVEN), loaders=configs)
        model = TwoRankSeveral()
        runner = trainer(strategy="ddp", devices=2, max_epochs=4, callbacks=list(callbacks))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            runner.fit(model, datamodule=data, ckpt_path=ckpt_path)
        loaders: Any = runner.train_dataloader
        sampler = loaders["plain"].sampler
        return {
            "batches": {name: model.of(position) for position, name in enumerate(("all", "half", "plain"))},
            "steps": model.steps,
            "sampler": (type(sampler).__name__, sampler.num_replicas, sampler.rank),
            "weights": model.weights,
        }

    try:
        run(save)
    except Killed:
        return {"whole": run(), "resumed": run(ckpt_path=save.path(11))}


def scenario_collection_seeds(folder: Path) -> Any:
    """Without any seed: each loader draws its own, the same on both ranks, and counts of all ranks are logged of each."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    echo = EchoCallback(echo=EchoConfig(2, "after_augmentation"))
    model = TwoRankSeveral()
    runner = trainer(strategy="ddp", devices=2, max_epochs=2, callbacks=[echo])
    runner.fit(model, datamodule=DealtOut(**UNEVEN))
    loaders: Any = runner.train_dataloader
    logged = {name: float(value) for name, value in runner.callback_metrics.items() if name.startswith("echo/")}
    return {
        "seeds": [loader.seed for loader in loaders.values()],
        "counts": {name: (loader.counts.fresh, loader.counts.echoed) for name, loader in loaders.items()},
        "logged": logged,
    }


class CountedScans(Scans):
    """Counts its reads. Raw items take 32 KiB: a cache of a MiB holds about a half of them."""

    reads = 0

    def read(self, index: Any) -> Any:
        self.reads += 1
        return f"{index} 0".encode().ljust(2**15)


class AtEpochEnds(pl.Callback):
    """Remembers how many examples this rank has read and was given, and how many it was given fresh."""

    def __init__(self, loader: EchoLoader) -> None:
        self.loader, self.counts = loader, list[tuple[int, int]]()

    def on_train_epoch_end(self, *args: Any) -> None:
        self.counts.append((self.loader.loader.dataset.reads, self.loader.counts.fresh))


def scenario_cache(folder: Path) -> Any:
    """Two ranks share a cache that holds a half of the data."""
    cache = CacheConfig("1MiB", hold="raw")
    plain = DataLoader(CountedScans(LENGTH), 4, shuffle=True)
    loader = EchoLoader(plain, 1.5, insertion_point="after_augmentation", seed=7, cache=cache)
    echo, at_ends = EchoCallback(summary=False), AtEpochEnds(loader)
    fit(loader, callbacks=[echo, at_ends], max_epochs=9)
    return {"counts": at_ends.counts, "reports": [report.state() for report in echo.reports]}


def scenario_default_run(folder: Path) -> Any:
    """The factors appear in no other scenario: what is said of them is counted."""
    sharded = fit(echoed(2.75, length=24, workers=2), max_epochs=5)
    fit(echoed(2.25, length=24, shard=False), max_epochs=1, use_distributed_sampler=False)
    fit(EchoDataModule(Sharded(**UNEVEN), 1.75), max_epochs=1)
    return {"batches": sharded.model.batches}


class SlowOnOne(Scans):
    """Its workers on rank 1 take 20 ms for an example."""

    def read(self, index: int) -> Any:
        time.sleep(0.02 if os.environ.get("LOCAL_RANK") == "1" else 0.0)
        return super().read(index)


def scenario_analysis(folder: Path) -> Any:
    def analyzer() -> StallAnalyzer:
        loader = DataLoader(SlowOnOne(400), 4, shuffle=True, num_workers=1)
        kwargs = {"accelerator": "cpu", "strategy": "ddp", "devices": 2}
        return StallAnalyzer(Recorder(), loader, trainer_kwargs=kwargs, say=lambda message: None)

    whole, short = analyzer(), analyzer()
    found = whole.check(whole.run(10), factor=2, insertion_point="after_augmentation")
    found.to_json(folder / f"analysis-{os.environ.get('LOCAL_RANK', '0')}.json")
    return {
        "indices": sorted(index for batch in whole._training.phases.real.indices for index in batch),
        "steps of a short one": (len(short.run(40, seconds=3).ranks), len(short._training.phases.real)),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    if sys.version_info < (3, 12):
        # A lock of the interpreter that another thread holds at a fork stays locked in the child, for good (CPython's issue
        # 112275), and gloo's threads take it now and then: workers are forked from a process without threads.
        multiprocessing.set_forkserver_preload(["torch", "lightning.pytorch", "lightning_echo", "trainer_runs"])
        multiprocessing.set_start_method("forkserver")
    scenarios = {name.removeprefix("scenario_"): each for name, each in globals().items() if name.startswith("scenario_")}
    results: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        results[name] = scenario(folder)
        torch.save(results, folder / f"rank-{os.environ.get('LOCAL_RANK', '0')}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
