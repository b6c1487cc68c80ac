"""A node of a training in which one of two goes wrong: ``python partitioned_fault_runs.py FOLDER RANK FAULT``.

The steps are those of DDP: each ends with a collective of the default group. What a rank saw is printed, line by line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from partitioned_runs import Numbers, cached

FAULT_AT = 20  # step
STEPS = 60
LENGTH = 120
STOPPED_SECONDS, TIME_OUT_SECONDS = 4, 20


def step(value: torch.Tensor) -> None:
    torch.distributed.all_reduce(value)


def run(rank: int, fault: str) -> None:
    dataset = Numbers(LENGTH)
    loader, done = cached(dataset, epoch_length="full_pass"), 0
    while done < STEPS:
        for batch in loader:
            if done == FAULT_AT and rank == 1 and fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if done == FAULT_AT and rank == 1 and fault == "unreadable":
                _break(loader)
            if done == FAULT_AT and rank == 1 and fault == "stopped for a while":
                subprocess.Popen(["sh", "-c", f"sleep {STOPPED_SECONDS}; kill -CONT {os.getpid()}"])
            if done == FAULT_AT and rank == 1 and fault.startswith("stopped"):
                os.kill(os.getpid(), signal.SIGSTOP)
            step(batch.sum())
            done += 1
            if done == STEPS:
                break
    if fault == "different ends" and rank == 0:
        time.sleep(2)
    loader.close()


def _break(loader: Any) -> None:
    """This node cannot read any more what it holds."""
    arena = loader._run._setting.cache.of_node.arena

    def fails(*_: Any) -> Any:
        raise OSError("the disk is gone")

    arena.lengths_of = fails


def main(folder: str, rank: int, fault: str) -> None:
    os.environ.update(LOCAL_RANK="0", GROUP_RANK=str(rank))
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=TIME_OUT_SECONDS)
    )
    run(rank, fault)
    torch.distributed.destroy_process_group()
    print("ended, with threads", sorted(thread.name for thread in threading.enumerate()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
