"""Data sets whose ``__getitems__`` returns a batch, or examples that fit each other only: they are echoed by batches."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_echo import CachedDataset, EchoLoader

COUNT, BATCH = 16, 4


class Rows:
    """Columns with a common length, as a ``TensorDict``."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["x"])

    def __getitem__(self, row: int) -> "Rows":
        return Rows(**{name: column[row] for name, column in self.columns.items()})


KINDS = {
    "rows": lambda x: Rows(x=x, y=-x),
    "dict": lambda x: {"x": x, "y": -x},
    "tuple": lambda x: (x, -x),
    "tensor": lambda x: torch.stack([x, -x], 1),
}


class Columns(Dataset[Any]):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, -index])

    def __getitems__(self, indices: list[int]) -> Any:
        return KINDS[self.kind](torch.tensor(indices))


def as_read(batch: Any) -> Any:
    return batch


def pairs(batch: Any) -> list[tuple[int, int]]:
    """The examples of a batch, by the structure that the data set has given it."""
    if isinstance(batch, Rows):
        batch = batch.columns
    if isinstance(batch, torch.Tensor):
        assert batch.shape[1] == 2
        batch = (batch[:, 0], batch[:, 1])
    x, y = batch.values() if isinstance(batch, dict) else batch
    return list(zip(x.tolist(), y.tolist(), strict=True))


def loader(kind: str, batch_size: int = BATCH, workers: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(Columns(kind), batch_size, num_workers=workers, collate_fn=as_read, **options)


# A batch of two has as many examples as columns, so that their number does not tell a tuple of columns from a list of examples.
@pytest.mark.parametrize(("kind", "batch_size", "workers"), [*((kind, 2, 0) for kind in KINDS), ("rows", BATCH, 2)])
def test_a_whole_batch_reaches_the_training_as_it_was_read(kind, batch_size, workers, caplog):
    caplog.set_level("INFO", logger="lightning_echo")
    plain = [pairs(batch) for batch in loader(kind, batch_size)]
    echoed = EchoLoader(loader(kind, batch_size, workers), 2, seed=0)
    delivered = [batch for _ in range(2) for batch in echoed]
    echoed.close()
    assert echoed.insertion_point == "after_batching"
    assert "insertion_point='auto' chose after_batching: __getitems__ of the data set returned " in caplog.text
    assert {type(batch) for batch in delivered} == {type(KINDS[kind](torch.arange(2)))}
    fresh = list(dict.fromkeys(tuple(pairs(batch)) for batch in delivered))
    assert fresh == list(map(tuple, plain))
    assert echoed.counts.fresh == echoed.counts.echoed == COUNT


@pytest.mark.parametrize(
    ("point", "kind", "options"),
    [
        ("after_read", "rows", {"shuffle": True}),
        ("before_augmentation", "tuple", {"sampler": range(COUNT)}),
        ("after_augmentation", "tuple", {"shuffle": True}),
    ],
)
def test_an_earlier_point_is_refused(point, kind, options):
    with pytest.raises(ValueError, match=rf"insertion_point='{point}' is impossible here: __getitems__ .*Use 'after_batching'"):
        EchoLoader(loader(kind, 2, **options), 2, insertion_point=point)


def test_neither_a_cache_nor_a_reader_takes_a_batch_apart():
    for make in (
        lambda: EchoLoader(loader("tuple", 2), 2, cache="1MiB", insertion_point="after_batching"),
        lambda: CachedDataset(Columns("tuple"), "1MiB"),
        lambda: EchoLoader(DataLoader(Columns("tuple"), batch_sampler=[[0, 1], [2, 3]], collate_fn=as_read), 2, share="whole"),
    ):
        with pytest.raises(ValueError, match="is impossible here: __getitems__ of the data set returned 2 examples for 1 index"):
            make()


class Padded(Dataset[Any]):
    """As a tokenizer in ``set_transform``: each call pads its examples to the longest of them."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        longest = max(indices) + 1
        return [torch.tensor([index] * (index + 1) + [-1] * (longest - index - 1)) for index in indices]


def test_examples_that_fit_only_those_of_their_call_are_echoed_by_batches():
    plain = {tuple(map(tuple, batch.tolist())) for batch in DataLoader(Padded(), BATCH)}
    echoed = EchoLoader(DataLoader(Padded(), BATCH), 2, seed=0)
    assert {tuple(map(tuple, batch.tolist())) for _ in range(2) for batch in echoed} == plain
    assert echoed.insertion_point == "after_batching"
    with pytest.raises(ValueError, match=r"'after_augmentation' is impossible here: .* padded .*Use 'after_batching' or 'auto'"):
        EchoLoader(DataLoader(Padded(), BATCH), 2, insertion_point="after_augmentation")
    with pytest.raises(ValueError, match=r"share='padded' is impossible here: .* padded"):
        EchoLoader(DataLoader(Padded(), BATCH), 2, share="padded")


def test_a_collate_function_that_pads_lets_examples_be_echoed():
    def pad(examples: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(examples, batch_first=True, padding_value=-1)

    echoed = EchoLoader(DataLoader(Padded(), BATCH, collate_fn=pad), 2, seed=0)
    first = {row[0] for _ in range(2) for batch in echoed for row in batch.tolist()}
    assert echoed.insertion_point == "after_augmentation"
    assert first == set(range(COUNT))


def test_examples_of_which_no_batch_can_be_made_are_no_matter_of_the_calls():
    """The plain loader fails, too, and its error is the one that is shown."""

    class Ragged(Padded):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            return [torch.zeros(index + 1) for index in indices]

    echoed = EchoLoader(DataLoader(Ragged(), BATCH), 2, seed=0)
    assert echoed.insertion_point == "after_augmentation"
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        next(iter(echoed))
