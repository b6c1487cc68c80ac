"""What other code reads of a loader reaches the plain one, and what would let it build a loader that does not echo is refused."""

from typing import Any

import pytest
from lightning.fabric.utilities.data import has_iterable_dataset
from torch.utils.data import DataLoader, IterableDataset

from lightning_echo import EchoLoader


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(8))


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


def test_lightning_does_not_take_an_echoed_stream_with_a_length_for_a_stream():
    assert not has_iterable_dataset(EchoLoader(DataLoader(Stream()), 2))


class Prepared:
    """As a loader of accelerate: it has the methods of a state, whatever is inside."""

    def __init__(self, loader: Any) -> None:
        self.base_dataloader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __iter__(self):
        return iter(self.base_dataloader)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def state_dict(self) -> dict[str, Any]:
        return self.base_dataloader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base_dataloader.load_state_dict(state)


def batches_of(loader: EchoLoader, epochs: int) -> list[Any]:
    return [batch.tolist() for _ in range(epochs) for batch in loader]


def test_a_pass_of_a_prepared_loader_is_read_again():
    def make() -> EchoLoader:
        return EchoLoader(Prepared(DataLoader(range(16), 2, shuffle=True)), 2, seed=3)

    expected, killed = batches_of(make(), 2), make()
    batches = iter(killed)
    for _ in range(3):
        next(batches)
    resumed = make()
    resumed.load_state_dict(killed.state_dict())
    assert len(expected) == 16
    assert batches_of(resumed, 2) == expected[3:]
