"""A process of a node with a partitioned cache, which writes what it saw: ``python partitioned_runs.py FOLDER RANK RANKS NODES``.

A scenario is a function named ``scenario_...`` that returns plain types. All ranks run all of them in the same order.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, Subset

from lightning_echo import EchoLoader, StagedDataset

LENGTH = 66  # of four ranks, two get an example of the start once more
LARGE_BYTES = 40_000  # of an example of `Large`: a MiB has room for 25
EPOCHS = 4


class Numbers(StagedDataset):
    """Examples that tell their number and a random one. It counts its reads, over all processes of a rank."""

    size = 1000

    def __init__(self, length: int = LENGTH, offset: int = 0) -> None:
        self.length, self.offset = length, offset
        self.reads = torch.zeros(length, dtype=torch.int64).share_memory_()

    def load(self, index: int) -> torch.Tensor:
        self.reads[index] += 1
        return torch.full((self.size,), index + self.offset, dtype=torch.uint8)

    def augment(self, example: torch.Tensor) -> torch.Tensor:
        return torch.cat([example[:1].float(), torch.rand(3)])

    def __len__(self) -> int:
        return self.length


class Large(Numbers):
    size = LARGE_BYTES


def cached(dataset: Any, size: Any = "1MiB", factor: float = 1, **options: Any) -> EchoLoader:
    """A loader with a partitioned cache; without a cache if ``size`` is None."""
    mine = {"insertion_point": "before_augmentation", "seed": 3, "reuse": "each"}
    loading = {"batch_size": 4, "shuffle": True, "num_workers": 1}
    for name, value in options.items():
        (mine if name in ("insertion_point", "seed", "reuse", "epoch_length") else loading)[name] = value
    if "sampler" in options or "batch_sampler" in options:
        del loading["shuffle"]
    if "batch_sampler" in options:
        del loading["batch_size"]
    cache = None if size is None else {"size": size, "partitioned": True, "hold": "loaded"}
    return EchoLoader(DataLoader(dataset, **loading), factor, cache=cache, **mine)  # type: ignore[arg-type]


def epoch(loader: EchoLoader) -> list[list[float]]:
    """All examples of an epoch, each as numbers."""
    return [example.tolist() for batch in loader for example in batch]


def held(loader: EchoLoader) -> list[int]:
    """The keys that the cache of this node holds."""
    cache = loader._run._setting.cache
    assert cache is not None
    return [key for key in range(cache.of_node.keys) if key in cache.of_node.arena]


def both(make: Any) -> dict[str, Any]:
    """What is seen with the cache and without it, and how often the data set was read by the end of each epoch."""
    plain = make(Numbers(), None)
    expected = [epoch(plain) for _ in range(EPOCHS)]
    plain.close()
    dataset = Numbers()
    loader = make(dataset, "1MiB")
    dataset.reads.zero_()  # of the proofs
    seen, reads = [], []
    for _ in range(EPOCHS):
        seen.append(epoch(loader))
        torch.distributed.barrier()  # workers go on reading ahead, so that this is a little more than the epoch
        reads.append(int(dataset.reads.sum()))
        torch.distributed.barrier()
    counts = loader.cache_counts
    assert counts is not None
    torch.distributed.barrier()
    found = {"seen": seen, "expected": expected, "reads": reads, "held": held(loader), "received": counts.received}
    loader.close()
    return found


def distributed(dataset: Numbers, size: Any) -> EchoLoader:
    """As Lightning makes it. Passes are spread for each rank by itself."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return cached(dataset, size, 2.37, sampler=DistributedSampler(dataset, ranks, rank, seed=4))


def of_batches(dataset: Numbers, size: Any) -> EchoLoader:
    sampler = RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(5))
    return cached(dataset, size, 1, insertion_point="after_batching", batch_sampler=BatchSampler(sampler, 3, False))


def of_torch(dataset: Numbers, size: Any) -> EchoLoader:
    return cached(dataset, size, 1.5, sampler=RandomSampler(range(LENGTH), replacement=True, num_samples=50))


SEEN = {  # loaders whose batches are compared with and without the cache
    "plain": cached,
    "from memory": lambda dataset, size: cached(dataset, size, 2.37, reuse="memory", num_workers=0),
    "whole batches": lambda dataset, size: cached(dataset, size, 2, insertion_point="after_batching"),
    "subset in order": lambda dataset, size: cached(Subset(dataset, list(range(60, 2, -1))), size, shuffle=False, drop_last=True),
    "sampler of torch": of_torch,
    "batch sampler": of_batches,
    "distributed sampler": distributed,
}


class Dealing(DistributedSampler[int]):
    """Deals in its own way, perhaps."""


def scenario_little_room(rank: int) -> Any:
    """Two passes fill what there is; then the reads of a pass are counted. The nodes have different budgets."""
    dataset, nodes = Large(200), int(os.environ["GROUP_RANK"])
    sizes = [2 * 2**20, 2**20, 2**20, 2**20]
    loader, plain = cached(dataset, sizes[nodes], epoch_length="full_pass"), cached(Large(200), None, epoch_length="full_pass")
    expected = [epoch(plain) for _ in range(5)]
    plain.close()
    seen = [epoch(loader) for _ in range(3)]
    torch.distributed.barrier()
    before, kept = dataset.reads.clone(), held(loader)
    torch.distributed.barrier()
    seen += [epoch(loader) for _ in range(2)]
    torch.distributed.barrier()
    counts = loader.cache_counts
    assert counts is not None
    found = {"reads": (dataset.reads - before).tolist(), "held_before": kept, "held": held(loader), "bytes": counts.bytes}
    torch.distributed.barrier()
    loader.close()
    return {**found, "seen": seen, "expected": expected, "size": sizes[nodes]}


def scenario_resumed(rank: int) -> Any:
    plain = cached(Numbers(), None, 1.5)
    expected = [epoch(plain) for _ in range(3)]
    plain.close()
    first = cached(Numbers(), factor=1.5)
    batches = iter(first)
    seen = [example.tolist() for _ in range(3) for example in next(batches)]
    state = first.state_dict()
    first.close()
    second = cached(Numbers(), factor=1.5)
    second.load_state_dict(state)
    seen += epoch(second)
    second.close()  # and goes on where it was, with other workers and another thread
    rest = [epoch(second) for _ in range(2)]
    second.load_state_dict(state)
    again = epoch(second)
    second.close()
    return {"seen": [seen, *rest], "expected": expected, "again": again, "rest": expected[0][12:]}


def refused(loader: EchoLoader) -> str:
    """Runs until a rank fails, which ends a training on all ranks. Returns what this rank has said."""
    said, failed = "nothing", [False] * torch.distributed.get_world_size()
    for _ in range(3):
        try:
            epoch(loader)
        except (ValueError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
        torch.distributed.all_gather_object(failed, said != "nothing")
        if any(failed):
            break
    loader.close()
    return said


class Private(Sampler[int]):
    """Each rank has an order of its own, and nothing tells."""

    def __init__(self) -> None:
        self._random = random.Random(torch.distributed.get_rank())

    def __iter__(self) -> Iterator[int]:
        return iter(self._random.sample(range(LENGTH), LENGTH))

    def __len__(self) -> int:
        return LENGTH


def scenario_refused(rank: int) -> Any:
    node = int(os.environ["GROUP_RANK"])
    numbers, ranks = Numbers(), torch.distributed.get_world_size()
    generator, seeded = torch.Generator().manual_seed(node), DistributedSampler(range(LENGTH), ranks, rank, seed=node)
    return {
        "data": refused(cached(Numbers(offset=node))),
        "length": refused(cached(Numbers(LENGTH + node))),
        "workers": refused(cached(numbers, num_workers=1 + node)),
        "deals": refused(cached(numbers, sampler=Dealing(range(LENGTH), ranks, rank))),
        "seed": refused(cached(numbers, sampler=seeded)),
        "generator": refused(cached(numbers, sampler=RandomSampler(range(LENGTH), generator=generator))),
        "private": refused(cached(numbers, sampler=Private())),
    }


def scenario_one_node(rank: int) -> Any:
    """All ranks say that they are on one node."""
    before = {name: os.environ[name] for name in ("GROUP_RANK", "LOCAL_RANK")}
    os.environ.update(GROUP_RANK="0", LOCAL_RANK=str(rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = both(cached)
    os.environ.update(before)
    return {**found, "said": [str(each.message) for each in caught if "partitioned" in str(each.message)]}


def main(folder: Path, rank: int, ranks: int, nodes: int) -> None:
    each = ranks // nodes
    os.environ.update(LOCAL_RANK=str(rank % each), GROUP_RANK=str(rank // each))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = {f"scenario_{name}": both(make) for name, make in SEEN.items()}
    for name, scenario in globals().items():
        if name.startswith("scenario_"):
            found[name] = scenario(rank)
    torch.save(found, folder / f"rank-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
