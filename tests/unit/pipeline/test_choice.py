"""What is found out about the user's loader before anything runs."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_echo import EchoLoader, StagedDataset, insertion
from lightning_echo.insertion import InsertionPoint
from lightning_echo.loader import sizing
from lightning_echo.pipeline.choice import choose
from lightning_echo.pipeline.kinds import kind_of


class OpenedInWorkers(Dataset[int]):
    """Can only be read where `open_here` has run: torch's documented use of ``worker_init_fn``."""

    transform = staticmethod(int)
    file: list[int] | None = None

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        assert self.file is not None, "not opened"
        return self.transform(self.file[index])


def open_here(worker: int) -> None:
    get_worker_info().dataset.file = list(range(100, 116))  # type: ignore[union-attr]


def loader(**options: Any) -> DataLoader[int]:
    return DataLoader(OpenedInWorkers(), batch_size=4, **options)


def test_what_only_a_worker_can_read_is_read_there() -> None:
    echoed = EchoLoader(loader(num_workers=1, worker_init_fn=open_here), 1)
    assert echoed.insertion_point == "before_augmentation"
    assert [value for batch in echoed for value in batch.tolist()] == list(range(100, 116))


def test_an_explicit_point_lets_the_data_sets_own_error_through() -> None:
    with pytest.raises(AssertionError, match="not opened"):
        EchoLoader(loader(), 2, insertion_point="before_augmentation")


def test_of_an_unreadable_data_set_a_training_shows_what_the_plain_one_shows() -> None:
    echoed = EchoLoader(loader(), 2)
    assert "reading an example raised AssertionError: not opened" in choose(kind_of(loader()), InsertionPoint.auto).reason
    with pytest.raises(AssertionError, match="not opened"):
        next(iter(echoed))


class Named(Dataset[str]):
    """Its indices are names."""

    transform = None

    def __init__(self) -> None:
        self.values = {"a": "first", "b": "second", "c": "third"}

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, name: str) -> str:
        return self.values[name]


class Names(Sampler[str]):
    def __iter__(self) -> Any:
        return iter("cab")

    def __len__(self) -> int:
        return 3


def test_auto_falls_back_where_only_the_sampler_knows_the_indices() -> None:
    echoed = EchoLoader(DataLoader(Named(), batch_size=3, sampler=Names()), 1)
    assert echoed.insertion_point == "after_augmentation"
    assert list(echoed) == [["third", "first", "second"]]


@pytest.mark.parametrize("indices", [[3, 1, 2, 0], {3, 1, 2, 0}, torch.tensor([3, 1, 2, 0]), np.array([3, 1, 2, 0])])
def test_whatever_can_be_iterated_is_a_sampler(indices: Any) -> None:
    plain: Any = DataLoader(range(4), batch_size=2, sampler=indices)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in EchoLoader(plain, 1)] == [batch.tolist() for batch in plain]


def test_lists_of_indices_are_a_batch_sampler() -> None:
    plain: Any = DataLoader(range(4), batch_sampler=[[0, 1, 3], [2]])  # type: ignore[arg-type]
    assert [batch.tolist() for batch in EchoLoader(plain, 1)] == [[0, 1, 3], [2]]


@pytest.mark.parametrize(
    "sampler", [SubsetRandomSampler(range(5, 9)), WeightedRandomSampler([1.0] * 12, 12)], ids=["subset", "weighted"]
)
@pytest.mark.parametrize("point", ["after_augmentation", "after_batching"])
def test_a_buffer_that_cannot_fit_is_refused_whatever_sampler_of_torchs(
    sampler: Any, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: 100 * 2**20)
    plain = DataLoader(TensorDataset(torch.zeros(12, 2**18)), batch_size=2, sampler=sampler)
    with pytest.raises(ValueError, match="buffer_size=101 cannot fit"):
        EchoLoader(plain, 2, insertion_point=point, buffer_size=101)


@pytest.mark.parametrize("collection", [{"a": range(3), "b": range(3)}, [DataLoader(range(3))] * 2, (DataLoader(range(3)), 1)])
def test_collections_of_loaders_are_refused_with_the_way_out(collection: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a single loader, got a \w+ of loaders; wrap each of them in an EchoLoader"):
        EchoLoader(collection, 2)


def test_reading_an_example_before_training_leaves_the_users_data_as_it_is() -> None:
    class InPlace(Dataset[torch.Tensor]):
        def __init__(self) -> None:
            self.rows, self.records = torch.ones(8, 3), [{"label": 1} for _ in range(1000)]

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            row = self.rows[index]
            row -= self.records[index].pop("label")
            return row

    dataset = InPlace()
    EchoLoader(DataLoader(dataset, batch_size=4), 1)
    assert dataset.rows.tolist() == [[1, 1, 1]] * 8
    assert dataset.records == [{"label": 1}] * 1000


class FixedData(Dataset[Any]):
    """A data set whose transform is what it is."""

    transform = property(lambda self: torch.nn.Identity())

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.tensor(index))


def test_auto_falls_back_where_a_transform_cannot_be_replaced() -> None:
    plain = DataLoader(FixedData(), batch_size=2)
    assert EchoLoader(plain, 2).insertion_point == "after_augmentation"
    with pytest.raises(ValueError, match=r"FixedData\.transform cannot be replaced"):
        EchoLoader(plain, 2, insertion_point="before_augmentation")


class ModuleData(torch.nn.Module):
    """A data set that is a module too: where a module was, it takes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = torch.nn.Identity()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.tensor(index))


def test_the_transform_of_a_module_can_be_taken_out_of_a_copy() -> None:
    dataset: Any = ModuleData()
    module = dataset.transform
    assert EchoLoader(DataLoader(dataset, batch_size=2), 2).insertion_point == "before_augmentation"
    assert dataset.transform is module
    assert vars(dataset).keys() == vars(ModuleData()).keys()


POINTS = [point.value for point in insertion.POINTS]


class Transformed(Dataset[int]):
    """Follows torchvision's convention."""

    def __init__(self) -> None:
        self.transform = float

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return self.transform(index)


class FailsOnce(Transformed):
    """As over a network: its first read of all fails."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def __getitem__(self, index: int) -> float:
        if not self.path.exists():
            self.path.touch()
            raise OSError("network")
        return super().__getitem__(index)


def test_an_error_that_does_not_come_again_is_no_reason_against_a_split(tmp_path: Path) -> None:
    assert choose(kind_of(DataLoader(FailsOnce(tmp_path / "read"), 4)), InsertionPoint.auto).point == "before_augmentation"


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
    "read and decode": (lambda: DataLoader(Staged(), 4), "after_read", "before_augmentation", ""),
    "transform": (lambda: DataLoader(Transformed(), 4), "before_augmentation", "before_augmentation", ""),
    "all in one": (lambda: DataLoader(list(range(8)), 4), "after_augmentation", "after_augmentation", "augment"),  # type: ignore[arg-type]
    "stream": (lambda: DataLoader(Stream(), 4), "after_augmentation", "after_augmentation", "stream, which has no index"),
    "own batches": (
        lambda: DataLoader(Transformed(), batch_sampler=[[0, 1], [2, 3]]),
        "after_batching",
        "after_batching",
        "batch_sampler of its own",
    ),
    "opaque examples": (lambda: DataLoader(Transformed(), None), "after_batching", "after_batching", "batch_size=None"),
    "opaque stream": (lambda: DataLoader(Stream(), None), "after_batching", "after_batching", "batch_size=None"),
    "own iteration": (lambda: OwnIteration(Transformed(), 4), "after_batching", "after_batching", "__iter__ of its own"),
    "iterable": (lambda: [torch.zeros(4)], "after_batching", "after_batching", "list is an iterable of batches"),
}
STAGES = ["read", "decode", "load", "augment", "collate", "transfer"]


@pytest.mark.parametrize("kind", KINDS)
def test_auto_takes_the_earliest_and_says_why_not_an_earlier_one(kind: str) -> None:
    make, _, auto, reason = KINDS[kind]
    choice = choose(kind_of(make()), InsertionPoint.auto)
    assert choice.point == auto
    assert reason in choice.reason
    assert bool(choice.reason) is bool(reason)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_for_is_taken_or_refused_with_the_way_out(kind: str, point: str) -> None:
    make, earliest, auto, _ = KINDS[kind]
    if POINTS.index(point) >= POINTS.index(earliest):
        choice = choose(kind_of(make()), InsertionPoint(point))
        assert (choice.point, choice.reason) == (point, "")
    else:
        with pytest.raises(ValueError, match=f"insertion_point='{point}' is impossible here: .*") as raised:
            choose(kind_of(make()), InsertionPoint(point))
        ways_out = {"before_augmentation": "decode", "after_augmentation": "augment|Use 'after_augmentation'"}
        assert re.search(ways_out.get(auto, "Use 'after_batching' or 'auto'"), str(raised.value))


@pytest.mark.parametrize("kind", ["all in one", "stream"])
@pytest.mark.parametrize(("point", "reused"), [("after_augmentation", 4), ("after_batching", 5), ("after_transfer", 6)])
def test_what_comes_before_the_point_is_reused_and_what_comes_after_it_is_redone(kind: str, point: str, reused: int) -> None:
    choice = choose(kind_of(KINDS[kind][0]()), InsertionPoint(point))
    assert list(choice.reused) == STAGES[2:reused]
    assert list(choice.redone) == (STAGES[reused:] or ["on_after_batch_transfer"])


@pytest.mark.parametrize(("point", "expected"), [("after_augmentation", 1024), ("after_batching", 4 * 1024)])
def test_memory_is_that_of_an_example_or_of_a_batch(point: str, expected: int) -> None:
    rows = [torch.zeros(256) for _ in range(12)]
    assert choose(kind_of(DataLoader(rows, 4)), InsertionPoint(point)).item_bytes == expected  # type: ignore[arg-type]


def test_a_subset_sampler_says_which_examples_may_be_read() -> None:
    class OnlyFrom5To8(Transformed):
        def __getitem__(self, index: int) -> float:
            if not 5 <= index <= 8:
                raise IndexError(index)
            return super().__getitem__(index)

    plain = DataLoader(OnlyFrom5To8(), 2, sampler=SubsetRandomSampler([5, 6, 7, 8]))
    assert choose(kind_of(plain), InsertionPoint.auto).point == "before_augmentation"


def test_what_kept_an_example_from_being_read_is_said() -> None:
    by_name = choose(kind_of(DataLoader(Named(), batch_size=3, sampler=Names())), InsertionPoint.auto)
    assert "its sampler (Names) seems to yield no integers: reading an example raised KeyError: " in by_name.reason
    assert by_name.reason.endswith(
        "if the data set augments, its echoes repeat that augmentation, which a StagedDataset can redo for each use"
    )


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


@pytest.mark.parametrize(
    ("dataset", "expected"), [(Queue(), True), (Counting(), False), (Noisy(), False), (Once(), False), ([1, 1], False)]
)
def test_a_data_set_that_ignores_its_index_is_found_by_its_answers_and_said(dataset: Any, expected: bool) -> None:
    choice = choose(kind_of(DataLoader(dataset, 4)), InsertionPoint.auto)
    assert choice.point == "after_augmentation"
    assert ("returns what comes next, whatever index it is asked for" in choice.caution) is expected
    if expected:
        assert choice.caution.startswith("Queue ")
        assert (dataset.patches, dataset.filled) == ([], 0)  # asked of copies


class Seen(Dataset[int]):
    """What was asked of it and of its copies is remembered; its examples say that they have so many bytes."""

    def __init__(self, size: int, log: Path) -> None:
        self.size, self.log = size, log

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        with self.log.open("a") as log:  # of all processes
            log.write(f"{index} ")
        return torch.zeros(1, dtype=torch.uint8).expand(self.size)


@pytest.mark.parametrize(("size", "reads"), [(100, "0 0 0 0 1 2 3 4 5 6 7 "), (2**40, "0 ")], ids=["small", "huge"])
def test_examples_over_all_the_data_are_weighed_and_a_huge_one_is_read_once(size: int, reads: str, tmp_path: Path) -> None:
    choose(kind_of(DataLoader(Seen(size, tmp_path / "log"), 4)), InsertionPoint.after_augmentation)
    assert sorted((tmp_path / "log").read_text().split()) == reads.split(), "in whatever order"


class Endless(Dataset[int]):
    """Has no length, and a sampler that needs none."""

    def __getitem__(self, index: int) -> int:
        return index


def test_a_data_set_need_not_have_a_length() -> None:
    loader = DataLoader(Endless(), 4, sampler=WeightedRandomSampler([1.0] * 8, 8))
    assert choose(kind_of(loader), InsertionPoint.auto).caution == ""


def test_of_a_subset_with_one_example_no_other_is_asked_for() -> None:
    dataset = Queue()
    assert choose(kind_of(DataLoader(dataset, 4, sampler=SubsetRandomSampler([5]))), InsertionPoint.auto).caution == ""


class RunningQueue(Dataset[int]):
    """As TorchIO's: it returns what its own loader yields next. By default that loader has begun before anything is asked."""

    def __init__(self, begins: bool) -> None:
        self.running = iter(self.loader()) if begins else None

    def loader(self) -> DataLoader[int]:
        return DataLoader(range(16), batch_size=None, shuffle=True)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        self.running = self.running or iter(self.loader())
        return next(self.running)


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("point", ["auto", "after_augmentation", "after_batching"])
def test_a_queue_that_ignores_its_index_is_said_to_resume_with_other_data(point: str, begins: bool) -> None:
    chosen = choose(kind_of(DataLoader(RunningQueue(begins), batch_size=4)), InsertionPoint(point))
    assert "RunningQueue returns what comes next, whatever index it is asked for" in chosen.caution


def test_of_a_data_set_that_is_read_by_index_nothing_is_said() -> None:
    assert choose(kind_of(DataLoader(TensorDataset(torch.zeros(8)), batch_size=4)), InsertionPoint.auto).caution == ""
