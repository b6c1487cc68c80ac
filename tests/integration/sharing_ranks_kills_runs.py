"""Two ranks on gloo that share as one training, whose reader is killed: ``... sharing_ranks_kills_runs.py FOLDER BEHIND RANK``.

It trains until there is a file ``FOLDER/over``, and for one epoch more, and writes what it saw to ``FOLDER/rank-R.pt``;
test_sharing_ranks_kills.py compares.
"""

import random
import sys
import time
from pathlib import Path

import torch
from sharing_ranks_runs import BATCH_SIZE, LENGTH, RANKS
from sharing_runs import Numbers, epochs_of, loader_of

SHARE = {"name": "killed", "wait_for": 2, "window": 2**14, "linger_seconds": 5}
MOST_STEP_SECONDS = {"wait": 0.01, "skip": 0.05}


def is_over(folder):
    """Whether the test is over, for both ranks alike."""
    found = torch.tensor(int((folder / "over").exists()))
    torch.distributed.all_reduce(found)
    return bool(found)


def main(folder, behind, rank):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    loader = loader_of(Numbers(LENGTH), BATCH_SIZE, behind=behind, **SHARE)
    generator, epochs = random.Random(rank), []

    def step():
        time.sleep(generator.random() * MOST_STEP_SECONDS[behind])
        torch.distributed.barrier()  # as DDP does: no rank is a step ahead

    while not is_over(folder):
        epochs += epochs_of(loader, 1, step)
    epochs += epochs_of(loader, 1, step)  # which no kill disturbs
    torch.save({"epochs": epochs, "missed": loader.sharing.missed_examples}, folder / f"rank-{rank}.pt")
    loader.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
