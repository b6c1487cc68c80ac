"""What is found out about the user's loader before anything runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_echo import EchoLoader, StagedDataset, insertion
from lightning_echo.insertion import InsertionPoint
from lightning_echo.pipeline.choice import Choice, choose
from lightning_echo.pipeline.kinds import kind_of

POINTS = [point.value for point in insertion.POINTS]


def chosen(loader: Any, point: str = "auto") -> Choice:
    return choose(kind_of(loader), InsertionPoint(point))


class Transformed(Dataset[Any]):
    """Follows torchvision's convention."""

    transform: Any = float

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.transform(index)


class OpenedInWorkers(Transformed):
    """Can only be read where `open_here` has run: torch's documented use of ``worker_init_fn``."""

    transform = staticmethod(int)
    file: list[int] | None = None

    def __getitem__(self, index: int) -> int:
        assert self.file is not None, "not opened"
        return self.transform(self.file[index])


def open_here(worker: int) -> None:
    get_worker_info().dataset.file = list(range(100, 108))  # type: ignore[union-attr]


def test_what_only_a_worker_can_read_is_read_there_and_elsewhere_its_own_error_is_shown() -> None:
    echoed = EchoLoader(DataLoader(OpenedInWorkers(), 4, num_workers=1, worker_init_fn=open_here), 1)
    assert echoed.insertion_point == "before_augmentation"
    assert [value for batch in echoed for value in batch.tolist()] == list(range(100, 108))
    unreadable = DataLoader(OpenedInWorkers(), 4)
    assert "reading an example raised AssertionError: not opened" in chosen(unreadable).reason
    with pytest.raises(AssertionError, match="not opened"):
        next(iter(EchoLoader(unreadable, 2)))
    with pytest.raises(AssertionError, match="not opened"):
        EchoLoader(unreadable, 2, insertion_point="before_augmentation")


class Named(Transformed):
    """Its indices are names."""

    transform = staticmethod(str)

    def __getitem__(self, name: Any) -> str:
        return {"a": "first", "b": "second", "c": "third"}[name]


class Names(Sampler[str]):
    def __iter__(self) -> Any:
        return iter("cab")

    def __len__(self) -> int:
        return 3


def test_auto_falls_back_where_only_the_sampler_knows_the_indices_and_says_so() -> None:
    by_name = DataLoader(Named(), batch_size=3, sampler=Names())
    echoed = EchoLoader(by_name, 1)
    assert echoed.insertion_point == "after_augmentation"
    assert list(echoed) == [["third", "first", "second"]]
    reason = chosen(by_name).reason
    assert "its sampler (Names) seems to yield no integers: reading an example raised KeyError: " in reason
    assert reason.endswith(
        "if the data set augments, its echoes repeat that augmentation, which a StagedDataset can redo for each use"
    )


def test_reading_an_example_before_training_leaves_the_users_data_as_it_is() -> None:
    class InPlace(Transformed):
        def __init__(self) -> None:
            self.rows, self.records = torch.ones(8, 3), [{"label": 1} for _ in range(1000)]

        def __getitem__(self, index: int) -> torch.Tensor:
            row = self.rows[index]
            row -= self.records[index].pop("label")
            return row

    dataset = InPlace()
    EchoLoader(DataLoader(dataset, batch_size=4), 1)
    assert dataset.rows.tolist() == [[1, 1, 1]] * 8
    assert dataset.records == [{"label": 1}] * 1000


def test_an_error_that_does_not_come_again_is_no_reason_against_a_split(tmp_path: Path) -> None:
    class FailsOnce(Transformed):
        """As over a network: its first read of all fails."""

        def __getitem__(self, index: int) -> float:
            if not (tmp_path / "read").exists():
                (tmp_path / "read").touch()
                raise OSError("network")
            return super().__getitem__(index)

    assert chosen(DataLoader(FailsOnce(), 4)).point == "before_augmentation"


class Staged(StagedDataset):
    def __len__(self) -> int:
        return 8

    def read(self, index: int) -> bytes:
        return bytes([index])

    def decode(self, raw: bytes) -> int:
        return raw[0]

    def augment(self, example: int) -> int:
        return -example


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


class OwnIteration(DataLoader[int]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


# The loader; the earliest point that it allows (all later ones, too); what `auto` takes; a word of the reason if that is not the
# earliest there is. docs/concepts/insertion_points.md.
KINDS: dict[str, tuple[Any, str, str, str]] = {
    "read and decode": (DataLoader(Staged(), 4), "after_read", "before_augmentation", ""),
    "transform": (DataLoader(Transformed(), 4), "before_augmentation", "before_augmentation", ""),
    "all in one": (DataLoader(list(range(8)), 4), "after_augmentation", "after_augmentation", "augment"),  # type: ignore[arg-type]
    "stream": (DataLoader(Stream(), 4), "after_augmentation", "after_augmentation", "stream, which has no index"),
    "own batches": (
        DataLoader(Transformed(), batch_sampler=[[0, 1], [2, 3]]),
        "after_batching",
        "after_batching",
        "batch_sampler of its own",
    ),
    "opaque examples": (DataLoader(Transformed(), None), "after_batching", "after_batching", "batch_size=None"),
    "own iteration": (OwnIteration(Transformed(), 4), "after_batching", "after_batching", "__iter__ of its own"),
    "iterable": ([torch.zeros(4)], "after_batching", "after_batching", "list is an iterable of batches"),
}
STAGES = ["read", "decode", "load", "augment", "collate", "transfer"]


@pytest.mark.parametrize("kind", KINDS)
def test_auto_takes_the_earliest_and_what_is_asked_for_is_taken_or_refused_with_the_way_out(kind: str) -> None:
    loader, earliest, auto, reason = KINDS[kind]
    choice = chosen(loader)
    assert choice.point == auto
    assert reason in choice.reason
    assert bool(choice.reason) is bool(reason)
    for point in POINTS:
        if POINTS.index(point) >= POINTS.index(earliest):
            choice = chosen(loader, point)
            assert (choice.point, choice.reason) == (point, "")
        else:
            with pytest.raises(ValueError, match=f"insertion_point='{point}' is impossible here: .*") as raised:
                chosen(loader, point)
            ways_out = {"before_augmentation": "decode", "after_augmentation": "augment|Use 'after_augmentation'"}
            assert re.search(ways_out.get(auto, "Use 'after_batching' or 'auto'"), str(raised.value))


@pytest.mark.parametrize(("point", "reused"), [("after_augmentation", 4), ("after_batching", 5), ("after_transfer", 6)])
def test_what_comes_before_the_point_is_reused_and_what_comes_after_it_is_redone(point: str, reused: int) -> None:
    choice = chosen(KINDS["all in one"][0], point)
    assert list(choice.reused) == STAGES[2:reused]
    assert list(choice.redone) == (STAGES[reused:] or ["on_after_batch_transfer"])


@pytest.mark.parametrize(("point", "expected"), [("after_augmentation", 1024), ("after_batching", 4 * 1024)])
def test_memory_is_that_of_an_example_or_of_a_batch(point: str, expected: int) -> None:
    rows = [torch.zeros(256) for _ in range(12)]
    assert chosen(DataLoader(rows, 4), point).item_bytes == expected  # type: ignore[arg-type]


def test_a_subset_sampler_says_which_examples_may_be_read() -> None:
    class OnlyFrom5To8(Transformed):
        def __getitem__(self, index: int) -> float:
            if not 5 <= index <= 8:
                raise IndexError(index)
            return super().__getitem__(index)

    assert chosen(DataLoader(OnlyFrom5To8(), 2, sampler=SubsetRandomSampler([5, 6, 7, 8]))).point == "before_augmentation"


class Queue(Dataset[int]):
    """As TorchIO's: returns what comes next from a list of its own, whatever index it is asked for."""

    def __init__(self) -> None:
        self.patches: list[int] = []
        self.filled = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if not self.patches:
            self.patches = [10 * self.filled + patch for patch in (3, 2, 1)]
            self.filled += 1
        return self.patches.pop()


class RunningQueue(Queue):
    """Returns what its own loader yields next. By default that loader has begun before anything is asked."""

    def __init__(self, begins: bool) -> None:
        super().__init__()
        self.running = iter(self.loader()) if begins else None

    def loader(self) -> DataLoader[int]:
        return DataLoader(range(16), batch_size=None, shuffle=True)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> int:
        self.running = self.running or iter(self.loader())
        return next(self.running)


class Counting(Queue):
    """Counts its reads, and returns what it is asked for."""

    def __getitem__(self, index: int) -> int:
        return index + 0 * super().__getitem__(index)


class Noisy(Queue):
    """Draws at each read."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(())


class Once(Queue):
    """Can be read once."""

    def __getitem__(self, index: int) -> int:
        if self.filled:
            raise RuntimeError("only once")
        return super().__getitem__(index)


class Endless(Dataset[int]):
    """Has no length, and a sampler that needs none."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "point"),
    [
        (Queue(), "auto"),
        (RunningQueue(True), "auto"),
        (RunningQueue(False), "after_augmentation"),
        (RunningQueue(True), "after_batching"),
    ],
)
def test_a_data_set_that_ignores_its_index_is_found_by_its_answers_and_said(dataset: Any, point: str) -> None:
    caution = chosen(DataLoader(dataset, 4), point).caution
    assert caution.startswith(f"{type(dataset).__name__} returns what comes next, whatever index it is asked for")
    assert (dataset.patches, dataset.filled) == ([], 0)  # asked of copies


@pytest.mark.parametrize(
    ("dataset", "sampler"),
    [
        (Counting(), None),
        (Noisy(), None),
        (Once(), None),
        ([1, 1], None),
        (Endless(), WeightedRandomSampler([1.0] * 8, 8)),
        (Queue(), SubsetRandomSampler([5])),  # no other example may be asked for
    ],
)
def test_of_others_nothing_is_said(dataset: Any, sampler: Any) -> None:
    choice = chosen(DataLoader(dataset, 4, sampler=sampler))
    assert (choice.point, choice.caution) == ("after_augmentation", "")


@pytest.mark.parametrize(("size", "reads"), [(100, "0 0 0 0 1 2 3 4 5 6 7 "), (2**40, "0 ")], ids=["small", "huge"])
def test_examples_over_all_the_data_are_weighed_and_a_huge_one_is_read_once(size: int, reads: str, tmp_path: Path) -> None:
    class Seen(Transformed):
        """What was asked of it and of its copies is remembered; its examples say that they have so many bytes."""

        def __getitem__(self, index: int) -> Any:
            with (tmp_path / "log").open("a") as log:  # of all processes
                log.write(f"{index} ")
            return torch.zeros(1, dtype=torch.uint8).expand(size)

    chosen(DataLoader(Seen(), 4), "after_augmentation")
    assert sorted((tmp_path / "log").read_text().split()) == reads.split(), "in whatever order"
