"""What is found out about the user's loader before anything runs."""

from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_echo import EchoLoader


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
