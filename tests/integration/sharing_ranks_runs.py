"""Two processes on gloo that share as one training: ``python sharing_ranks_runs.py FOLDER RANK`` is one of them.

Each rank writes what it saw to ``FOLDER/rank-R.pt``; test_sharing_ranks.py compares.
"""

import random
import sys
import time
from pathlib import Path

import torch
from sharing_runs import Numbers, end_readers, epochs_of, loader_of, places, rows, wait_until
from torch.utils.data import Subset

RANKS, LENGTH, BATCH_SIZE, EPOCHS = 2, 61, 4, 3
BESIDE = {"name": "beside", "wait_for": 2, "window": 2**13}
PART, OTHER_PART = range(4, 45), range(30, LENGTH)
IN_PARTS = {"name": "parts", "wait_for": 2, "window": 2**13}
LATE = {"name": "late", "window": 2**13, "late": 1.0, "linger_seconds": 20}
LATE_PART = {**LATE, "name": "late-part"}
SKIPPING = {"name": "skipping", "wait_for": 2, "window": 2**14}


def beside_another_training():
    """With a training of one rank, which is in the process of the test."""
    loader = loader_of(Numbers(LENGTH), BATCH_SIZE, **BESIDE)
    found = epochs_of(loader, EPOCHS)
    loader.close()
    return found


def resumed_anywhere(rank):
    """Whether runs go on exactly from each of their batches: passes of 5 on each rank, whose last slot is filled up on rank 1."""
    loader = loader_of(Numbers(9), 2, factor=1.5, name="anywhere", linger_seconds=30)
    found, states = [], []
    for _ in range(3):
        for batch in loader:
            found.append(rows(batch))
            states.append(loader.state_dict())
    loader.close()
    torch.distributed.barrier()
    if rank == 0:
        end_readers()
    torch.distributed.barrier()
    exact = []
    for number, state in enumerate(states[:-1], 1):
        again = loader_of(Numbers(9), 2, factor=1.5, name="anywhere", linger_seconds=30)
        again.load_state_dict(state)
        rest = []
        while len(rest) < len(found) - number:
            rest += [rows(batch) for batch in again]
        again.close()
        torch.distributed.barrier()
        exact.append(rest[: len(found) - number] == found[number:])
    return exact


def rounds_of(stream, of_ranks):
    """The rounds that each rank has had, of what a training beside them has had. Steps, rank and counts are checked.

    A pass of ``stream`` has ``LENGTH`` examples. The last of its rounds is filled up on rank 1.
    """
    places = {}
    for item, example in enumerate(stream):
        number, slot = divmod(item, LENGTH)
        places[tuple(example)] = number * -(-LENGTH // RANKS) + slot // RANKS, slot % RANKS
    rounds = []
    for rank, had in enumerate(of_ranks):
        found = [places[tuple(example)] for epoch in had["epochs"] for batch in epoch for example in batch]
        assert {of for _, of in found} == {rank}
        before, own = -1, []
        for number, _ in found:  # what fills a pass up is the example before, once more
            before = number + (rank == 1 and number == before)
            own.append(before)
        assert own == sorted(set(own))
        assert had["missed"] == own[-1] + 1 - len(own) > 0
        rounds.append(own)
    return rounds


def skipping(rank):
    """What each rank has beside a faster training for which the reader waits, and how many examples it missed."""
    loader = loader_of(Numbers(LENGTH), BATCH_SIZE, **{**SKIPPING, "behind": "skip"})
    generator = random.Random(rank)

    def step():
        time.sleep(generator.random() * 0.1)
        torch.distributed.barrier()  # as DDP does: no rank is a step ahead

    found = epochs_of(loader, 3, step)
    missed = loader.sharing.missed_examples
    loader.close()
    return {"epochs": found, "missed": missed}


def on_a_part():
    """With a training of one rank on another part of the data, which is in the process of the test."""
    loader = loader_of(Subset(Numbers(LENGTH), PART), BATCH_SIZE, **IN_PARTS)
    found = epochs_of(loader, EPOCHS)
    loader.close()
    return found


def coming_late(dataset, share):
    """With a training of one rank, which is within its pass when the ranks come."""
    wait_until(lambda: places(share["name"]), "the training is there")
    torch.distributed.barrier()
    loader = loader_of(dataset, BATCH_SIZE, **share)
    found = epochs_of(loader, EPOCHS)
    again = loader.sharing.read_again_examples
    loader.close()
    return {"epochs": found, "again": again}


def main(folder, rank):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = {"beside": beside_another_training(), "anywhere": resumed_anywhere(rank)}
    torch.distributed.barrier()
    found["part"] = on_a_part()
    torch.distributed.barrier()
    found["skipping"] = skipping(rank)
    torch.distributed.barrier()
    found["late"] = coming_late(Numbers(LENGTH), LATE)
    torch.distributed.barrier()
    found["late part"] = coming_late(Subset(Numbers(LENGTH), PART), LATE_PART)
    torch.save(found, folder / f"rank-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
