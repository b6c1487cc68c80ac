"""Every kind of loader, at every point, in every way to set it up: what a training sees, against oracles that know no plan.

Each read of an example draws a number of its own (`stamp`), each augmentation another (`noise`). What is delivered is compared
with the bare ``DataLoader`` (the passes), with the stamps (what is fresh, and what an echo shares with it), with a resumed run,
and with the same training without cache and Trainer.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from loader_cases import ReadLog, case_id
from same_batches import covering
from sharing_runs import wait_until
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info
from trainer_runs import SaveAt, trainer

from lightning_echo import EchoCallback, EchoCounts, EchoDataModule, EchoLoader, StagedDataset
from lightning_echo.data import elsewhere
from lightning_echo.share.config import names

LENGTH, SAVED_AT, COUNT = 53, 13, 33  # examples, and batches of a run
INDEX, STAMP, NOISE = range(3)  # columns of a batch

# ---------------------------------------------------------------------- data


class Read(NamedTuple):
    """The steps of every data set here."""

    log: ReadLog
    has_stamps: bool = True

    def read(self, index: int) -> str:
        if elsewhere._here_is_elsewhere:  # a proof reads twice in a process of its own, and refuses what then differs
            return f"{index} 0"
        stamp = self.log.add(index)
        return f"{index} {stamp if self.has_stamps else 0}"

    def decode(self, raw: str) -> torch.Tensor:
        return torch.tensor([int(number) for number in raw.split()])

    def augment(self, example: torch.Tensor) -> torch.Tensor:
        noisy = torch.cat([example, torch.randint(2**40, (1,))])
        example.zero_()  # an edit in place: the next use must not see it
        return noisy

    def example(self, index: int) -> torch.Tensor:
        return self.augment(self.decode(self.read(index)))


class Plain(Dataset[torch.Tensor]):
    """Nothing shows where it could be cut."""

    def __init__(self, log: ReadLog) -> None:
        self.steps = Read(log)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.steps.example(index)


class Together(Plain):
    """Reads the examples of a batch in one call."""

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Staged(StagedDataset):
    """Says itself where it can be cut."""

    def __init__(self, log: ReadLog, has_stamps: bool = True) -> None:
        self.steps = Read(log, has_stamps)

    def __len__(self) -> int:
        return LENGTH

    def read(self, index: Any) -> Any:
        return self.steps.read(index).encode()

    def decode(self, raw: Any) -> Any:
        return self.steps.decode(raw.decode())

    def augment(self, example: Any) -> Any:
        return self.steps.augment(example)


class Stream(IterableDataset[torch.Tensor]):
    """Each worker has its share of it. Its state is its place in that share."""

    def __init__(self, log: ReadLog) -> None:
        self.steps, self.at = Read(log), 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first + self.at * step, LENGTH, step):
            self.at += 1
            yield self.steps.example(index)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.at = state["at"]


class SizedStream(Stream):
    def __len__(self) -> int:
        return LENGTH


class Batches:
    """No ``DataLoader`` at all: an iterable of batches."""

    def __init__(self, log: ReadLog, batch_size: int) -> None:
        self.steps, self.batch_size = Read(log), batch_size

    def __len__(self) -> int:
        return -(-LENGTH // self.batch_size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for start in range(0, LENGTH, self.batch_size):
            yield torch.stack([self.steps.example(index) for index in range(start, min(start + self.batch_size, LENGTH))])


class InFives(BatchSampler):
    """Every fifth index together: batches of 11 and 10."""

    def __init__(self) -> None:
        super().__init__(range(LENGTH), 1, False)

    def __len__(self) -> int:
        return 5

    def set_epoch(self, epoch: int) -> None:
        """Each pass has the same order."""

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(start, LENGTH, 5)) for start in range(5))


# ---------------------------------------------------------------------- cases

VALUES: dict[str, tuple[Any, ...]] = {
    "kind": ("staged", "plain", "together", "stream", "sized stream", "batch sampler", "batches"),
    "point": ("after_read", "before_augmentation", "after_augmentation", "after_batching", "auto"),
    "cache": ("none", "raw", "loaded"),
    "way": ("loader", "callback", "data module"),
    "share": (False, True),
    "ranks": ("one", "second of two"),
    "shuffle": (False, True),
    "drop_last": (False, True),
    "workers": (0, 1, 2),
    "reuse": ("memory", "each"),
    "factor": (1, 1.5, 2, 3.37),
    "batch_size": (4, 7),
    "epoch_length": ("fixed", "full_pass"),
}
# Those that `is_accepted` looks at.
RULED = ("kind", "point", "cache", "way", "share", "ranks", "shuffle", "drop_last", "workers")
MADE: dict[str, Any] = {"plain": Plain, "together": Together, "stream": Stream, "sized stream": SizedStream}
POINTS_OF = {
    "staged": VALUES["point"],
    "plain": ("after_augmentation", "after_batching", "auto"),
    "together": ("after_augmentation", "after_batching", "auto"),
    "stream": ("after_augmentation", "auto"),  # whole batches of a stream cannot be resumed within a pass
    "sized stream": ("after_augmentation", "auto"),
    "batch sampler": ("after_batching", "auto"),
    "batches": ("after_batching", "auto"),
}
Case = dict[str, Any]


def is_accepted(case: Mapping[str, Any]) -> bool:
    """Whether the package accepts a combination."""
    kind, indexed = case["kind"], case["kind"] in ("staged", "plain", "together")
    return (
        case["point"] in POINTS_OF[kind]
        and (case["cache"] == "none" or (kind == "staged" and (case["cache"], case["point"]) != ("loaded", "after_read")))
        and (not case["shuffle"] or indexed)
        and (not case["drop_last"] or indexed)  # of streams: tests/unit/pipeline/test_streams.py
        and (case["workers"] == 0 or kind != "batches")
        and (case["ranks"] == "one" or (indexed and case["way"] == "loader" and not case["share"]))
        and (not case["share"] or (case["cache"] == "none" and case["point"] not in ("after_read", "before_augmentation")))
    )


CASES: list[Case] = [dict(case) for case in covering(VALUES, RULED, is_accepted)]

# ---------------------------------------------------------------------- runs


class Delivered(NamedTuple):
    """A batch as the training got it, a row for each example, and what is said about it."""

    rows: tuple[tuple[int, ...], ...]
    counts: EchoCounts
    epoch: int

    @property
    def without_stamps(self) -> tuple[Any, ...]:
        rows = tuple((row[INDEX], row[NOISE]) for row in self.rows)
        return rows, (self.counts.fresh, self.counts.echoed), self.epoch  # a resumed run reads live examples again

    @staticmethod
    def of(batch: torch.Tensor, loader: EchoLoader, epoch: int) -> Delivered:
        rows = tuple(map(tuple, batch.tolist()))
        batch.zero_()  # as a training that edits in place
        return Delivered(rows, loader.last_batch_counts, epoch)


class Noting(pl.LightningModule):
    """A model that notes its batches, and has the loader itself."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader, self.delivered, self.layer = loader, list[Delivered](), torch.nn.Linear(3, 1)

    def train_dataloader(self) -> Any:
        return self.loader

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.delivered.append(Delivered.of(batch, self.trainer.train_dataloader, self.current_epoch))
        return self.layer(torch.ones(1, 3)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader


def plain_loader(case: Case, log: ReadLog) -> Any:
    """The loader that the user has, new."""
    if case["kind"] == "batches":
        return Batches(log, case["batch_size"])
    context = {"num_workers": case["workers"], "multiprocessing_context": "fork" if case["workers"] else None}
    if case["kind"] == "batch sampler":
        return DataLoader(Plain(log), batch_sampler=InFives(), **context)
    dataset = Staged(log, has_stamps=case["cache"] == "none") if case["kind"] == "staged" else MADE[case["kind"]](log)
    return DataLoader(dataset, case["batch_size"], shuffle=case["shuffle"] or None, drop_last=case["drop_last"], **context)


def options_of(case: Case) -> dict[str, Any]:
    """The options of echoing. The buffer is small, so that a pass is longer than an example lives."""
    whole = case["point"] == "after_batching" or case["kind"] in ("batch sampler", "batches")
    options = {name: case[name] for name in ("reuse", "epoch_length")}
    options.update(
        insertion_point=case["point"], seed=5, buffer_size=2 if whole else 2 * case["batch_size"] * max(case["workers"], 1)
    )
    if case["cache"] != "none":
        options["cache"] = {"size": "1MiB", "hold": case["cache"]}
    if case["share"]:
        options["share"] = {"name": "every", "window": "1MiB", "linger_seconds": 0}
    if case["ranks"] != "one":
        options.update(num_replicas=2, rank=1)
    return options


def run(case: Case, folder: Path, resumed: Any = None) -> tuple[list[Delivered], Any, EchoLoader]:
    """Trains for `COUNT` batches, or for the rest of them after a resume; returns them, its state at `SAVED_AT`, its loader."""
    plain = plain_loader(case, ReadLog(folder / "reads"))
    if case["way"] == "loader":
        loader = EchoLoader(plain, case["factor"], **options_of(case))
        if resumed is not None:
            loader.load_state_dict(resumed)
        delivered, state, due = list[Delivered](), None, COUNT - SAVED_AT if resumed else COUNT
        while len(delivered) < due:
            epoch = delivered[-1].epoch + 1 if delivered else 0
            for batch in loader:
                delivered.append(Delivered.of(batch, loader, epoch))
                if len(delivered) == SAVED_AT:
                    state = loader.state_dict()
                if len(delivered) == due:
                    break
        loader.close()
        return delivered, state, loader
    model, saving = Noting(plain), SaveAt(folder, [SAVED_AT])
    data = EchoDataModule(Data(plain), case["factor"], **options_of(case)) if case["way"] == "data module" else None
    ours = [] if data else [EchoCallback(factor=case["factor"], **options_of(case))]
    training = trainer(callbacks=[saving, *ours], max_steps=COUNT, max_epochs=-1)
    training.fit(model, datamodule=data, ckpt_path=resumed)
    return model.delivered, saving.path(SAVED_AT), training.train_dataloader


# ---------------------------------------------------------------------- oracles


def check_passes(case: Case, delivered: Sequence[Delivered], folder: Path) -> None:
    """The fresh examples, in order, are passes of the bare loader, each example once."""
    bare = plain_loader({**case, "ranks": "one"}, ReadLog(folder / "bare"))
    plain = [[int(row[INDEX]) for row in batch] for batch in bare]
    if case["ranks"] != "one":
        mine = list(DistributedSampler(range(LENGTH), 2, 1, shuffle=False))
        plain = [mine[at : at + case["batch_size"]] for at in range(0, len(mine), case["batch_size"])]
        plain = [batch for batch in plain if not case["drop_last"] or len(batch) == case["batch_size"]]
    fresh = list(dict.fromkeys(row[:NOISE] for each in delivered for row in each.rows))
    workers = case["workers"] if "stream" in case["kind"] else 1  # of a stream, each worker is at a place of its own
    for worker in range(max(workers, 1)):
        found = [index for index, _ in fresh if index % max(workers, 1) == worker]
        once = [index for batch in plain for index in batch if index % max(workers, 1) == worker]
        for at in range(0, len(found), len(once)):
            of_pass = found[at : at + len(once)]
            if not case["shuffle"]:
                assert of_pass == once[: len(of_pass)]
            else:
                assert len(set(of_pass)) == len(of_pass)
    if "stream" not in case["kind"] or (case["kind"] == "sized stream" and case["epoch_length"] == "fixed"):
        steps = len(plain) if case["epoch_length"] == "fixed" else round(case["factor"] * len(plain))
        ended = [len(list(batches)) for _, batches in itertools.groupby(delivered, lambda each: each.epoch)][:-1]
        assert ended == [steps] * len(ended)


def check_echoes(case: Case, delivered: Sequence[Delivered], loader: EchoLoader) -> None:
    """An echo is what was read, up to the insertion point; counts are those of the stamps, and their share is the factor's."""
    first, uses = dict[int, tuple[int, ...]](), Counter[int]()
    redone = loader.insertion_point in ("after_read", "before_augmentation")
    for each in delivered:
        new = [row for row in each.rows if row[STAMP] not in first]
        assert each.counts == EchoCounts(len(new), len(each.rows) - len(new), 0)
        assert len({row[STAMP] for row in each.rows}) == len(each.rows), "nothing is in a batch twice"
        for row in each.rows:
            if row in new:
                first[row[STAMP]] = row
            else:
                assert row[INDEX] == first[row[STAMP]][INDEX]
                assert (row[NOISE] == first[row[STAMP]][NOISE]) != redone
        uses.update(row[STAMP] for row in each.rows)
    size = 11 if case["kind"] == "batch sampler" else case["batch_size"] if loader.insertion_point == "after_batching" else 1
    assert abs(len(first) - uses.total() / case["factor"]) <= loader.buffer_size * size
    if case["reuse"] == "each":
        assert max(uses.values()) <= math.ceil(case["factor"])


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_training(case: Case, tmp_path: Path, own_folder: None) -> None:
    folders = [tmp_path / name for name in ("whole", "resumed", "alone")]
    for folder in folders:
        folder.mkdir()
    whole, state, loader = run(case, folders[0])
    if case["cache"] == "none":
        check_passes(case, whole, tmp_path)
        check_echoes(case, whole, loader)
    else:
        reads = [index for _, index in ReadLog(folders[0] / "reads").entries()]
        audited = 3 * max(case["workers"], 1)  # of each process the 1st, 10th and 100th hit
        assert len(reads) <= LENGTH + audited, "each example is read once"
    wait_until(lambda: not names(), "the reader of the first run has ended")  # the next one has a log of its own
    resumed, _, _ = run(case, folders[1], state)
    first = whole[SAVED_AT].epoch - resumed[0].epoch  # a loader on its own counts from its resume
    assert [each._replace(epoch=each.epoch + first).without_stamps for each in resumed] == [
        each.without_stamps for each in whole[SAVED_AT:]
    ]
    if (case["cache"], case["way"]) != ("none", "loader") and not case["share"]:  # a shared reader has an order of its own
        by_hand = {**case, "cache": "none", "way": "loader"}
        alone, _, loader = run(by_hand, folders[2])
        assert [each.without_stamps for each in alone] == [each.without_stamps for each in whole]
        check_passes(by_hand, alone, tmp_path)
        check_echoes(by_hand, alone, loader)
