"""What is found out about the user's loader before anything runs."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_echo import EchoLoader
from lightning_echo.echoing import sizing


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


def test_auto_falls_back_where_only_a_worker_can_read_the_data_set() -> None:
    echoed = EchoLoader(loader(num_workers=1, worker_init_fn=open_here), 1)
    assert echoed.insertion_point == "after_augmentation"
    assert [value for batch in echoed for value in batch.tolist()] == list(range(100, 116))


def test_an_explicit_point_lets_the_data_sets_own_error_through() -> None:
    with pytest.raises(AssertionError, match="not opened"):
        EchoLoader(loader(num_workers=1, worker_init_fn=open_here), 2, insertion_point="before_augmentation")


def test_without_a_worker_init_fn_an_unreadable_data_set_is_an_error_at_once() -> None:
    with pytest.raises(AssertionError, match="not opened"):
        EchoLoader(loader(), 2)


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


@pytest.mark.parametrize("collection", [{"a": range(3)}, [DataLoader(range(3))], (DataLoader(range(3)), 1)])
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


class ModuleData(torch.nn.Module):
    """A data set that is a module too: where a module was, it takes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = torch.nn.Identity()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.tensor(index))


def test_auto_falls_back_where_a_transform_cannot_be_replaced() -> None:
    plain: Any = DataLoader(ModuleData(), batch_size=2)  # type: ignore[arg-type]
    assert EchoLoader(plain, 2).insertion_point == "after_augmentation"
    with pytest.raises(ValueError, match=r"ModuleData\.transform cannot be replaced"):
        EchoLoader(plain, 2, insertion_point="before_augmentation")
