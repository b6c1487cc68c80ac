"""PyTorch Geometric: lists of graphs, its data sets with a transform, its samplers, its own data modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from project_runs import (
    WAYS,
    assert_epochs,
    assert_exact,
    assert_noise_redone,
    assert_repeatable,
    assert_resumes_exactly,
    assert_unchanged,
    said,
    train,
)

torch_geometric = pytest.importorskip(
    "torch_geometric", reason="torch_geometric is not installed: pip install 'lightning-echo[test-outside]'"
)

from torch_geometric.data import Data, HeteroData, InMemoryDataset  # noqa: E402
from torch_geometric.data.lightning import LightningDataset, LightningNodeData  # noqa: E402
from torch_geometric.loader import (  # noqa: E402
    DataListLoader,
    DataLoader,
    DynamicBatchSampler,
    ImbalancedSampler,
    RandomNodeLoader,
)
from torch_geometric.transforms import Compose, RandomJitter  # noqa: E402

pytestmark = [
    # Lightning says so of a model with this hook beside any data module.
    pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer` in `LightningModule`"),
    pytest.mark.filterwarnings("ignore:.*was edited in place:UserWarning"),
]

LENGTH, BATCH = 22, 4


def graph(number: int) -> Any:
    """A ring of three to six nodes."""
    nodes = 3 + number % 4
    ring = torch.arange(nodes)
    edges = torch.stack([ring, ring.roll(1)])
    return Data(x=torch.full((nodes, 2), float(number)), edge_index=edges, pos=torch.zeros(nodes, 3), number=number)


def users_and_items(number: int) -> Any:
    data = HeteroData()
    data["user"].x = torch.full((2, 1), float(number))
    data["item"].x = torch.full((3, 1), float(number))
    data["user", "buys", "item"].edge_index = torch.tensor([[0, 1], [2, 0]])
    data.number = number
    return data


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


def see_types(batch: Any) -> Iterator[tuple[int, Any]]:
    for one in batch.to_data_list():
        yield int(one.number), tuple(one[kind].x.sum().item() for kind in ("user", "item"))


def see_noise(batch: Any) -> Iterator[tuple[int, Any]]:
    return ((int(one.number), tuple(one.pos.flatten().tolist())) for one in batch.to_data_list())


PLAIN = {number: content(graph(number)) for number in range(LENGTH)}


@pytest.mark.parametrize(("workers", "way"), WAYS)
@pytest.mark.parametrize("make", [Graphs, lambda: [graph(number) for number in range(LENGTH)]], ids=["data set", "list"])
def test_graphs_come_as_they_are(make: Any, workers: int, way: str) -> None:
    run = train(lambda: DataLoader(make(), BATCH, shuffle=True, num_workers=workers), see, way=way)
    assert_exact(run, range(LENGTH))
    assert_epochs(run, 6)
    assert_unchanged(run, PLAIN)


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_its_data_module_is_echoed_before_its_random_transform(workers: int, way: str, caplog: pytest.LogCaptureFixture) -> None:
    data = LightningDataset(Graphs(Compose([RandomJitter(0.1)])), batch_size=BATCH, num_workers=workers, pin_memory=False)
    with caplog.at_level("INFO"):
        run = train(data, see_noise, way=way)
    assert run.loader.insertion_point == "before_augmentation"
    assert "reuse [load], redo [Compose]; " in said(caplog)
    assert_exact(run, range(LENGTH))
    assert_epochs(run, 6)
    assert_noise_redone(run)


def test_two_runs_with_the_same_seed_jitter_alike() -> None:
    def once(seed: int) -> Any:
        return train(lambda: DataLoader(Graphs(RandomJitter(0.1)), BATCH, num_workers=2), see_noise, epochs=2, seed=seed)

    assert_repeatable(once)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_goes_on_with_the_same_noise(workers: int, tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(Graphs(RandomJitter(0.1)), BATCH, shuffle=True, num_workers=workers)

    assert_resumes_exactly(make, see_noise, tmp_path, (1, 6, 9), epochs=2)


@pytest.mark.parametrize("point", ["auto", "after_batching"])
def test_graphs_with_several_types_of_nodes(point: str) -> None:
    graphs = [users_and_items(number) for number in range(LENGTH)]
    run = train(lambda: DataLoader(graphs, BATCH, shuffle=True), see_types, insertion_point=point)
    assert_exact(run, range(LENGTH))
    assert_epochs(run, 6)
    assert_unchanged(run, {number: (2.0 * number, 3.0 * number) for number in range(LENGTH)})


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("point", ["auto", "after_batching", "after_transfer"])
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

    run = train(
        lambda: DataLoader(Graphs(), BATCH, shuffle=True, num_workers=workers),
        see_edited,
        on_device=on_device,
        insertion_point=point,
    )
    assert_exact(run, range(LENGTH))
    assert_unchanged(run, PLAIN)


def test_batches_of_a_dynamic_size_are_counted_by_their_graphs() -> None:
    """As many graphs as have twelve nodes together: two to four of them."""

    def make() -> Any:
        data = Graphs()
        return DataLoader(data, batch_sampler=DynamicBatchSampler(data, max_num=12, shuffle=True, num_steps=5))

    run = train(make, see)
    assert run.loader.insertion_point == "after_batching"
    assert len({len(batch) for batch in run.model.batches}) > 1
    assert run.loader.counts.delivered == len(run.uses)
    assert_epochs(run, 5)
    assert_unchanged(run, PLAIN)


@pytest.mark.parametrize("workers", [0, 2])
def test_lists_of_graphs_are_counted_by_their_length(workers: int) -> None:
    """What `DataParallel` of PyG wants: batches that are not put together."""

    def see_list(batch: Any) -> Any:
        return [(one.number, content(one)) for one in batch]

    run = train(lambda: DataListLoader(Graphs(), BATCH, num_workers=workers), see_list, insertion_point="after_batching")
    assert_exact(run, range(LENGTH))
    assert_unchanged(run, {number: content(one) for number, one in enumerate(Graphs())})


def test_its_sampler_for_rare_classes_draws_what_it_would_draw_without_echoing() -> None:
    """With replacement: an example may be in a pass more than once."""
    classes = torch.tensor([0] * (LENGTH - 2) + [1] * 2)

    def once(seed: int) -> Any:
        return train(lambda: DataLoader(Graphs(), BATCH, sampler=ImbalancedSampler(classes)), see, epochs=2, seed=seed)

    run = once(3)
    assert run.loader.counts.delivered == len(run.uses) == 2 * LENGTH
    assert sum(use.index >= LENGTH - 2 for use in run.uses) > 0.2 * len(run.uses)
    assert_repeatable(once)


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_parts_of_one_large_graph(workers: int, way: str) -> None:
    """The loader's examples are the numbers of nodes; a subgraph is cut out of them in collate, for echoes too."""
    ring = torch.arange(LENGTH)
    large = Data(x=ring[:, None].float(), edge_index=torch.stack([ring, ring.roll(1)]), number=ring)

    def see_nodes(batch: Any) -> Any:
        return [(int(number), float(x)) for number, x in zip(batch.number, batch.x, strict=True)]

    run = train(lambda: RandomNodeLoader(large, num_parts=4, shuffle=True, num_workers=workers), see_nodes, way=way)
    assert run.loader.counts.delivered == len(run.uses)
    assert_unchanged(run, {number: float(number) for number in range(LENGTH)})


def test_a_whole_graph_in_one_batch() -> None:
    """`LightningNodeData` without neighbour sampling: one batch, one example, an epoch of one step."""
    large = graph(3)
    large.train_mask = torch.ones(large.num_nodes, dtype=torch.bool)
    run = train(LightningNodeData(large, input_train_nodes=large.train_mask, loader="full"), lambda batch: [(3, content(batch))])
    assert_epochs(run, 1)
    assert {use.value for use in run.uses} == {content(large)}
