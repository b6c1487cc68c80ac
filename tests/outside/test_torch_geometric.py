"""PyTorch Geometric: lists of graphs, its data sets with a transform, its samplers, its own data modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from project_runs import (
    BATCH,
    LENGTH,
    STEPS,
    WAYS,
    assert_resumes_exactly,
    assert_right,
    said,
    train,
)

torch_geometric = pytest.importorskip(
    "torch_geometric", reason="torch_geometric is not installed: pip install 'lightning-echo[test-outside]'"
)

from torch_geometric.data import Data, InMemoryDataset  # noqa: E402
from torch_geometric.data.lightning import LightningDataset  # noqa: E402
from torch_geometric.loader import DataLoader  # noqa: E402
from torch_geometric.transforms import Compose, RandomJitter  # noqa: E402

pytestmark = [
    # Lightning says so of a model with this hook beside any data module.
    pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer` in `LightningModule`"),
    pytest.mark.filterwarnings("ignore:.*was edited in place:UserWarning"),
]


def graph(number: int) -> Any:
    """A ring of three to six nodes."""
    nodes = 3 + number % 4
    ring = torch.arange(nodes)
    edges = torch.stack([ring, ring.roll(1)])
    return Data(x=torch.full((nodes, 2), float(number)), edge_index=edges, pos=torch.zeros(nodes, 3), number=number)


class Graphs(InMemoryDataset):
    """As PyG's own data sets are: one large graph and slices of it."""

    def __init__(self, transform: Any = None) -> None:
        super().__init__(None, transform)
        self.data, self.slices = self.collate([graph(number) for number in range(LENGTH)])


def content(one: Any) -> tuple[Any, ...]:
    """Everything that a graph of one type of nodes holds."""
    return tuple((key, tuple(torch.as_tensor(value).flatten().tolist())) for key, value in sorted(one.to_dict().items()))


def see(batch: Any) -> Iterator[tuple[int, Any]]:
    return ((int(one.number), content(one)) for one in batch.to_data_list())


PLAIN = {number: content(graph(number)) for number in range(LENGTH)}


@pytest.mark.parametrize(("workers", "way"), WAYS)
@pytest.mark.parametrize("make", [Graphs, lambda: [graph(number) for number in range(LENGTH)]], ids=["data set", "list"])
def test_graphs_come_as_they_are(make: Any, workers: int, way: str) -> None:
    run = train(lambda: DataLoader(make(), BATCH, shuffle=True, num_workers=workers), see, way=way)
    assert_right(run, range(LENGTH), steps=STEPS, values=PLAIN)


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_its_data_module_is_echoed_before_its_random_transform(workers: int, way: str, caplog: pytest.LogCaptureFixture) -> None:
    data = LightningDataset(Graphs(Compose([RandomJitter(0.1)])), batch_size=BATCH, num_workers=workers, pin_memory=False)
    with caplog.at_level("INFO"):
        run = train(data, see, way=way)
    assert "reuse [load], redo [Compose]; " in said(caplog)
    assert_right(run, range(LENGTH), point="before_augmentation", steps=STEPS, noise="redone")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_goes_on_with_the_same_noise(workers: int, tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(Graphs(RandomJitter(0.1)), BATCH, shuffle=True, num_workers=workers)

    assert_resumes_exactly(make, see, tmp_path, (1, 9), epochs=2)


@pytest.mark.parametrize(("point", "workers"), [("auto", 2), ("after_batching", 0), ("after_transfer", 2)])
def test_what_a_hook_does_to_a_batch_does_not_reach_its_echo(point: str, workers: int) -> None:
    """Nodes edited in place, a column added, another one removed."""

    def on_device(batch: Any) -> Any:
        assert "doubled" not in batch
        batch.doubled = 2 * batch.x
        batch.x.add_(100)
        del batch.pos
        return batch

    def see_edited(batch: Any) -> Any:
        assert (batch.x - 100 == batch.doubled / 2).all()
        for one in batch.to_data_list():
            plain = Data(x=one.x - 100, edge_index=one.edge_index, number=one.number, pos=torch.zeros(one.num_nodes, 3))
            yield int(one.number), content(plain)

    def make() -> Any:
        return DataLoader(Graphs(), BATCH, shuffle=True, num_workers=workers)

    run = train(make, see_edited, on_device=on_device, insertion_point=point)
    assert_right(run, range(LENGTH), steps=STEPS, values=PLAIN)
