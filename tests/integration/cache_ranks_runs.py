"""Four processes on gloo that stand for two nodes of two ranks each: ``python cache_ranks_runs.py FOLDER RANK`` is one of them.

A scenario is a function named ``scenario_...`` that returns plain types. All ranks run all of them in the same order.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.cache.node_cache import NodeCache

RANKS = 4
LENGTH = 64
EPOCHS = 5


class Numbers(StagedDataset):
    """Examples that tell their number, the data set's own offset, and a random number; counts its reads over all processes."""

    def __init__(self, length: int = LENGTH, offset: int = 0) -> None:
        self.length, self.offset = length, offset
        self.reads = torch.zeros(length, dtype=torch.int64).share_memory_()

    def read(self, index: int) -> bytes:
        self.reads[index] += 1
        return bytes([index + self.offset]) * 1000

    def decode(self, raw: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).float()

    def augment(self, example: torch.Tensor) -> torch.Tensor:
        return torch.cat([example[:1], torch.rand(3)])

    def __len__(self) -> int:
        return self.length


def loader(dataset: Numbers, *, size: Any = "1MiB", factor: float = 1, hold: str = "auto", where: Any = None) -> EchoLoader:
    cache = None if size is None else {"size": size, "hold": hold, **(where or {})}
    plain = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=1)
    return EchoLoader(plain, factor, insertion_point="before_augmentation", seed=3, cache=cache)


def passes(echoed: EchoLoader, number: int = EPOCHS) -> list[list[float]]:
    """All examples of some passes, each as numbers."""
    found = [example.tolist() for _ in range(number) for batch in echoed for example in batch]
    echoed.close()
    return found


def counts_of_node(echoed: EchoLoader) -> tuple[int, int, int, int]:
    """What the cache counts when all ranks are at the same place."""
    torch.distributed.barrier()
    counts = echoed.cache_counts
    assert counts is not None
    torch.distributed.barrier()
    return counts.examples, counts.bytes, counts.hits, counts.misses


def scenario_same_data(rank: int) -> Any:
    dataset = Numbers()
    cached = loader(dataset)
    dataset.reads.zero_()  # of the proofs
    seen = passes(cached)
    return {
        "seen": seen,
        "plain": passes(loader(Numbers(), size=None)),
        "reads": dataset.reads.tolist(),
        "counts": counts_of_node(cached),
        "fresh": cached.counts.fresh,
    }


def scenario_echoed_and_short_of_memory(rank: int) -> Any:
    dataset = Numbers()
    cached = loader(dataset, size=2**20, factor=2.37, hold="loaded")  # 256 of 4,000 bytes
    return {
        "seen": passes(cached),
        "plain": passes(loader(Numbers(), size=None, factor=2.37)),
        "counts": counts_of_node(cached),
        "fresh": cached.counts.fresh,
    }


def scenario_data_of_each_rank(rank: int) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cached = loader(Numbers(offset=10 * rank))
        seen = passes(cached)
    said = [str(warning.message) for warning in caught if "cache" in str(warning.message)]
    return {"seen": seen, "counts": counts_of_node(cached), "said": said, "fresh": cached.counts.fresh}


class Memorizing(Numbers):
    """Remembers what it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.memo: dict[int, bytes] = {}

    def read(self, index: int) -> bytes:
        return self.memo.setdefault(index, super().read(index))


def scenario_each_rank_has_read_others(rank: int) -> Any:
    dataset = Memorizing()
    dataset.read(rank)  # as a validation does before the training
    cached = loader(dataset)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        passes(cached)
    return {"counts": counts_of_node(cached), "said": [str(each.message) for each in caught if "cache" in str(each.message)]}


def scenario_reload(rank: int) -> Any:
    first = loader(Numbers())
    passes(first, 2)
    held = counts_of_node(first)[0]
    again = loader(Numbers())
    again.follow(first)
    next(iter(again))
    same = counts_of_node(again)[0]
    again.close()
    other = Numbers(offset=1)
    filtered = loader(other)
    filtered.follow(again)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = passes(filtered, 1)
    return {"held": held, "same": same, "seen": seen, "said": [str(each.message) for each in caught]}


def scenario_first_rank_fails(rank: int) -> Any:
    cached = loader(Numbers())
    if rank == 2:  # the first one of the second node

        def fails(*_: Any) -> Any:
            raise ValueError("no memory here")

        make, NodeCache.make = NodeCache.make, fails  # type: ignore[method-assign,assignment]
    try:
        passes(cached, 1)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if rank == 2:
            NodeCache.make = make  # type: ignore[method-assign]
    return "no error"


def scenario_kept(rank: int) -> Any:
    """Two jobs, of which the second one finds the file that the first one has left."""
    found, folder = [], Path(sys.argv[1]) / f"kept-{rank // 2}"
    folder.mkdir(exist_ok=True)
    for _ in range(2):
        cached = loader(Numbers(), size="1MiB", where={"path": str(folder), "name": "train"})
        passes(cached, 1)
        found.append(counts_of_node(cached))
        del cached
        gc.collect()
        torch.distributed.barrier()
    return found


def main(folder: Path, rank: int) -> None:
    os.environ.update(LOCAL_RANK=str(rank % 2), GROUP_RANK=str(rank // 2))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = {name: scenario(rank) for name, scenario in globals().items() if name.startswith("scenario_")}
    torch.save(found, folder / f"rank-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
