"""Two processes on gloo, started once by Lightning itself: ``python ddp_runs.py FOLDER`` runs all scenarios below."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from collection_runs import SeveralRecorder
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler, Subset, SubsetRandomSampler
from trainer_runs import Data, Killed, Recorder, Run, SaveAt, Scans, echoed, trainer

from lightning_echo import Controller, EchoCallback, EchoConfig, EchoDataModule, EchoLoader
from lightning_echo.analysis.analyzer import StallAnalyzer
from lightning_echo.measure.control import Decision, Observation, Reason

LENGTH = 61  # odd: DistributedSampler fills the last place up with the first example
UNEVEN: dict[str, Any] = {"length": LENGTH, "batch_size": 4}
OPTIONS: dict[str, Any] = {"insertion_point": "after_augmentation", "seed": 7}
RANK = int(os.environ.get("LOCAL_RANK", "0"))


class TwoRankRecorder(Recorder):
    """Remembers the validation examples too."""

    def __init__(self, reads_stepping: bool = False) -> None:
        super().__init__(reads_stepping)
        self.validated: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += batch["index"].tolist()


def fit(data: Any, *callbacks: Any, model: Any = None, ckpt_path: Any = None, **options: Any) -> Run:
    options = {"strategy": "ddp", "devices": 2, "callbacks": list(callbacks), **options}
    run = Run(model or TwoRankRecorder(), data, trainer(**options))
    if isinstance(data, pl.LightningDataModule):
        run.trainer.fit(run.model, datamodule=data, ckpt_path=ckpt_path)
    else:
        run.trainer.fit(run.model, data, Data().val_dataloader(), ckpt_path=ckpt_path)
    return run


def seen(run: Run) -> dict[str, Any]:
    """What one rank saw of a run."""
    found = {name: getattr(run.model, name) for name in ("batches", "steps", "epochs", "validated", "weights")}
    loader: Any = run.trainer.train_dataloader
    return {**found, "counts": (loader.counts.fresh, loader.counts.echoed)} if isinstance(loader, EchoLoader) else found


def whole_and_resumed(run: Callable[..., Any], folder: Path, step: int) -> Any:
    """A run as it is, and one that is killed after a step and resumed."""
    folder.mkdir(exist_ok=True)
    whole, save = run(), SaveAt(folder, [step], dies=True)
    try:
        run(save)
    except Killed:
        return {"whole": whole, "resumed": run(ckpt_path=save.path(step)), "step": step}


def bare(factor: float = 2, *, workers: int = 0, **options: Any) -> EchoLoader:
    return EchoLoader(Data(workers, **UNEVEN).train_dataloader(), factor, **{**OPTIONS, **options})


def module(folder: Path) -> Any:
    return seen(fit(echoed(2, workers=2, **UNEVEN), max_epochs=6))


def resumed_bare(folder: Path) -> Any:
    def run(*callbacks: Any, **options: Any) -> Any:
        return seen(fit(bare(workers=2), *callbacks, max_epochs=6, **options))

    return whole_and_resumed(run, folder / "bare", 11)


def users_sampler(folder: Path) -> Any:
    """One that knows nothing of ranks: all of them must see the same order to take their shares from it."""
    sampler = SubsetRandomSampler(range(0, 122, 2))
    return seen(fit(echoed(2, length=122, loader_options={"sampler": sampler}), max_epochs=4))


def unsharded(folder: Path) -> Any:
    return seen(fit(echoed(2, shard=False, **UNEVEN), max_epochs=4, use_distributed_sampler=False))


class OwnHalf(Data):
    """Its loader reads the half of the data that belongs to its rank."""

    def train_dataloader(self) -> Any:
        length = self.scans["length"]
        return DataLoader(Subset(Scans(**self.scans), range(RANK, length, 2)), self.batch_size, shuffle=True)


def users_own_division(folder: Path) -> Any:
    """What Lightning does not divide is not divided: each rank trains on all of its half."""
    data, options = OwnHalf(length=48), {"max_epochs": 4, "use_distributed_sampler": False}
    return {
        "callback": seen(fit(data, EchoCallback(factor=2, summary=False, **OPTIONS), **options)),
        "module": seen(fit(EchoDataModule(data, 2, **OPTIONS), EchoCallback(summary=False), **options)),
    }


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
        self.sampler = Told(dataset, num_replicas=2, rank=RANK, seed=5)
        return DataLoader(dataset, self.batch_size, sampler=self.sampler, num_workers=self.workers)


def own_sampler(folder: Path) -> Any:
    users = Sharded(2, **UNEVEN)
    run = seen(fit(EchoDataModule(users, 2, **OPTIONS), max_epochs=6))
    return {**run, "told": users.sampler.told}


def passed(folder: Path) -> Any:
    """Loaders that are passed to fit: Lightning puts its sampler into them at each reload, before they are echoed."""
    samplers = []

    def run(*callbacks: Any, **options: Any) -> Any:
        options = {"max_epochs": 6, "num_sanity_val_steps": 1, **options}
        done = fit(Data(**UNEVEN).train_dataloader(), EchoCallback(factor=2, **OPTIONS), *callbacks, **options)
        loaders: Any = [done.trainer.train_dataloader.loader, done.trainer.val_dataloaders]  # type: ignore[union-attr]
        samplers.append([(type(each.sampler).__name__, each.sampler.num_replicas, each.sampler.rank) for each in loaders])
        return seen(done)

    found = whole_and_resumed(run, folder / "passed", 11)
    return {**found, "samplers": samplers[0], "reloaded": run(reload_dataloaders_every_n_epochs=1)}


class LocalDecisions(Controller):
    """Would decide differently on each rank: by what the rank itself has logged, and by its number."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def decide(self, observation: Observation) -> Decision:
        self.seen.append(observation.metrics["rank"])
        return Decision(1 + observation.epoch + observation.metrics["rank"] + RANK, Reason.custom, f"of rank {RANK}")


class LogsItsRank(TwoRankRecorder):
    """Logs a metric that is another one on each rank."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("rank", float(self.global_rank), on_step=False, on_epoch=True, sync_dist=False)


def controller(folder: Path) -> Any:
    """Ranks that measure, log and would decide differently."""
    decisions = LocalDecisions()
    echo = EchoCallback(decisions, factor=2, epoch_length="full_pass", **OPTIONS)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="It is recommended to use `self.log")
        run = fit(Data(2, delay=0.002 * RANK, **UNEVEN), echo, model=LogsItsRank(), max_epochs=4)
    return {**seen(run), "reports": [report.state() for report in echo.reports], "shown": decisions.seen}


class AsksEarly(LocalDecisions):
    """Is asked within epochs, too; would decide differently on each rank there."""

    first_after_steps, every_n_steps = 9, 25

    def decide(self, observation: Observation) -> Decision:
        self.seen.append((observation.batches, observation.moment.value, observation.steps, observation.idle_fraction))
        return Decision(1 + len(self.seen) / 2 + RANK, Reason.custom, f"of rank {RANK}")


def early(folder: Path) -> Any:
    """Decisions within epochs, of ranks that wait at different times; and a run that is resumed after the first two of them."""

    def run(*callbacks: Any, **options: Any) -> Any:
        decisions = AsksEarly()
        echo, data = EchoCallback(decisions, factor=1, **OPTIONS), Data(2, length=321, delay=0.002 * RANK)
        done = fit(data, echo, *callbacks, max_epochs=2, **options)
        uses = [(use.step, use.batch, use.factor, use.message) for use in echo.decisions]
        return {**seen(done), "shown": decisions.seen, "uses": uses}

    return whole_and_resumed(run, folder / "early", 24)


def plain(folder: Path) -> Any:
    """The user's data module as it is, to compare with."""
    return seen(fit(Data(**UNEVEN), max_epochs=1))


class DealtOut(Data):
    """Three loaders with the same data."""

    def train_dataloader(self) -> Any:
        loaders = {name: super(DealtOut, self).train_dataloader() for name in ("all", "half", "plain")}
        return CombinedLoader(loaders, "min_size")


class TwoRankSeveral(SeveralRecorder):
    validated: list[int] = []  # noqa: RUF012 (never filled)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def collection(folder: Path) -> Any:
    """Two loaders echoed, one as it is; whole, and killed in the middle and resumed."""

    def run(*callbacks: Any, **options: Any) -> Any:
        configs = {name: EchoConfig(factor, "after_augmentation", seed=7) for name, factor in (("all", 1.0), ("half", 2.0))}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            data = EchoDataModule(DealtOut(**UNEVEN), loaders=configs)
            done = fit(data, *callbacks, model=TwoRankSeveral(), max_epochs=4, **options)
        loaders: Any = done.trainer.train_dataloader
        sampler = loaders["plain"].sampler
        return {
            "batches": {name: done.model.of(position) for position, name in enumerate(("all", "half", "plain"))},
            "steps": done.model.steps,
            "sampler": (type(sampler).__name__, sampler.num_replicas, sampler.rank),
        }

    return whole_and_resumed(run, folder / "collection", 11)


def drawn_seeds(folder: Path) -> Any:
    """Without any seed: each loader draws its own, the same on both ranks, and counts of all ranks are logged of each."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    single = fit(echoed(2, seed=None, **UNEVEN), max_epochs=1)
    run = fit(DealtOut(**UNEVEN), EchoCallback(factor=2, summary=False), model=TwoRankSeveral(), max_epochs=2)
    loaders: Any = run.trainer.train_dataloader
    return {
        "seeds": [single.data.state_dict()["loader"]["seed"], *(loader.seed for loader in loaders.values())],
        "counts": {name: loader.counts.fresh for name, loader in loaders.items()},
        "logged": {name: float(run.trainer.callback_metrics[f"echo/{name}/fresh_examples"]) for name in loaders},
    }


def default_run(folder: Path) -> Any:
    """The factors appear in no other scenario: what is said of them is counted."""
    sharded = fit(echoed(2.75, length=24, workers=2), max_epochs=5)
    fit(echoed(2.25, length=24, shard=False), max_epochs=1, use_distributed_sampler=False)
    fit(EchoDataModule(Sharded(**UNEVEN), 1.75), max_epochs=1)
    return {"batches": sharded.model.batches}


class SlowOnOne(Scans):
    """Its workers on rank 1 take 20 ms for an example."""

    def read(self, index: int) -> Any:
        time.sleep(0.02 * RANK)
        return super().read(index)


def analysis(folder: Path) -> Any:
    def analyzer() -> StallAnalyzer:
        loader = DataLoader(SlowOnOne(400), 4, shuffle=True, num_workers=1)
        kwargs = {"accelerator": "cpu", "strategy": "ddp", "devices": 2}
        return StallAnalyzer(Recorder(), loader, trainer_kwargs=kwargs, say=lambda message: None)

    whole, short = analyzer(), analyzer()
    found = whole.check(whole.run(10), factor=2, insertion_point="after_augmentation")
    found.to_json(folder / f"analysis-{RANK}.json")
    return {
        "indices": sorted(index for batch in whole._training.phases.real.indices for index in batch),
        "steps of a short one": (len(short.run(40, seconds=3).ranks), len(short._training.phases.real)),
    }


SCENARIOS: tuple[Callable[[Path], Any], ...] = (
    *(module, resumed_bare, users_sampler, unsharded, users_own_division, own_sampler, passed),
    *(controller, early, plain, collection, drawn_seeds, default_run, analysis),
)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    if sys.version_info < (3, 12):
        # A lock of the interpreter that another thread holds at a fork stays locked in the child, for good (CPython's issue
        # 112275), and gloo's threads take it now and then: workers are forked from a process without threads.
        multiprocessing.set_forkserver_preload(["torch", "lightning.pytorch", "lightning_echo", "trainer_runs"])
        multiprocessing.set_start_method("forkserver")
    results: dict[str, Any] = {}
    for scenario in SCENARIOS:
        results[scenario.__name__] = scenario(folder)
        torch.save(results, folder / f"rank-{RANK}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
