"""Two processes on gloo with different free memory: ``python buffer_ranks_runs.py FOLDER RANK`` is one of them.

Each rank writes what it saw to ``FOLDER/rank-R.pt``; test_buffer_ranks.py compares. A scenario is a function named
``scenario_...`` that returns plain types. All ranks run all of them in the same order. Some loaders are made before the group of
processes is.
"""

from __future__ import annotations

import sys
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_echo import EchoLoader
from lightning_echo.loader import buffer as sizing

RANKS = 2
KIB = 2**10
FREE = (2000, 1000)  # KiB, on each rank


class Kibibytes(Dataset[torch.Tensor]):
    """Examples of 1 KiB that are views of their number."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1,), float(index)).expand(256)

    def __len__(self) -> int:
        return 1600


def set_free(kibibytes: float) -> None:
    sizing.free_memory_bytes = lambda: int(kibibytes * KIB)  # type: ignore[assignment]


def loader(**options: Any) -> EchoLoader:
    plain = DataLoader(Kibibytes(), batch_size=8, shuffle=True)
    return EchoLoader(plain, 4, insertion_point="after_augmentation", seed=3, **options)


def run(echoed: EchoLoader, batches: int = 60) -> dict[str, Any]:
    """What the loader said and did: its size before and after, the state, the warnings."""
    before = echoed.buffer_size
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(islice(echoed, batches))
    state = echoed.state_dict()
    echoed.close()
    said = [str(warning.message) for warning in caught]
    return {"before": before, "size": echoed.buffer_size, "state": state, "said": said}


def made(rank: int, **options: Any) -> EchoLoader:
    set_free(FREE[rank])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return loader(**options)


def scenario_share(rank: int) -> Any:
    return run(made(rank, buffer_size=0.3))


def scenario_default_of_each(rank: int) -> Any:
    return run(made(rank, reuse="each"))


def scenario_resumed_without_room_on_one_rank(rank: int) -> Any:
    set_free(2000)
    first = run(loader(reuse="memory", buffer_size=90))
    set_free((400, 170)[rank])
    resumed = loader(reuse="memory")
    resumed.load_state_dict(first["state"])
    return run(resumed)


def scenario_refused_on_all(rank: int) -> Any:
    set_free((1000, 10)[rank])
    share = loader(buffer_size=0.9)
    try:
        run(share)
    except ValueError as error:
        return str(error)
    return "no error"


def scenario_started_again_on_one_rank_alone(rank: int) -> Any:
    """What was settled is not asked for again: the other rank would not answer."""
    echoed = made(rank, reuse="memory")
    next(iter(echoed))
    if rank == 1:
        echoed.close()
        next(iter(echoed))
    return echoed.buffer_size


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    before_the_job = made(rank, reuse="memory")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = {name: scenario(rank) for name, scenario in globals().items() if name.startswith("scenario_")}
    found["before_the_job"] = run(before_the_job)
    torch.save(found, folder / f"rank-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
