"""What is found out about the user's loader before anything runs, and what other code may read of it."""

import re
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
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


@pytest.mark.parametrize("kind", KINDS)
def test_auto_takes_the_earliest_and_what_is_asked_for_is_taken_or_refused_with_a_hint(kind: str) -> None:
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


@pytest.mark.parametrize("point", ["auto", "after_augmentation", "after_batching"])
def test_a_data_set_that_ignores_its_index_is_found_by_its_answers_and_said(point: str) -> None:
    dataset = Queue()
    caution = chosen(DataLoader(dataset, 4), point).caution
    assert caution.startswith("Queue returns what comes next, whatever index it is asked for")
    assert (dataset.patches, dataset.filled) == ([], 0)  # asked of copies


def test_the_plain_loaders_attributes_can_be_read():
    plain = DataLoader(range(10), batch_size=4, drop_last=True, collate_fn=list)
    echoed = EchoLoader(plain, 2)
    assert echoed.dataset is plain.dataset
    assert (echoed.batch_size, echoed.drop_last, echoed.collate_fn) == (4, True, list)
    assert not hasattr(EchoLoader([1, 2, 3], 2), "batch_size"), "what the plain loader lacks"


@pytest.mark.parametrize(("loader", "name"), [(DataLoader(range(8)), "sampler"), (DataLoader(Stream()), "dataset")])
def test_what_a_plain_loader_could_be_built_from_is_refused_with_what_to_do(loader: Any, name: str):
    with pytest.raises(AttributeError, match=rf"has no '{name}'.* ignore_data_skip=True .*\.loader\.{name}$"):
        getattr(EchoLoader(loader, 2), name)
