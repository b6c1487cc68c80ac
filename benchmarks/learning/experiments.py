"""Does the runs that are due, some at a time, and shows how far they are."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

import torch
from rich.console import Console

from learning.due import Job, Progress
from learning.rules import Seeds
from learning.run import train
from learning.store import Row, Store, row_of
from learning.task import Task

__all__ = ["run_all"]


def run_all(task: Task, seeds: Seeds, store: Store, processes: int, accelerator: str) -> None:
    """Does what is due of a task, some runs at a time, each with one thread, until nothing is."""
    console = Console()
    running: dict[Future[Row], Job] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        while True:
            due = Progress(task, seeds, store.rows).due()
            waiting = [job for job in due if job not in running.values()]
            for job in waiting[: processes - len(running)]:
                running[pool.submit(do, job, accelerator)] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, row = running.pop(future), future.result()
                store.add(row)
                console.print(
                    f"{task.name}: {len(store.rows)} done, {len(due) - 1} due; {row.arm}, rate {row.rate:g}, seed {row.seed}: "
                    f"target after {row.fresh_to_target:g} fresh, {row.steps} steps, {row.seconds:.0f} s",
                    highlight=False,
                    soft_wrap=True,
                )


def do(job: Job, accelerator: str) -> Row:
    """One run, in a process of its own pool."""
    run = train(job.task, job.arm, job.rate, job.seed, ends_at_target=job.ends_at_target, accelerator=accelerator)
    return row_of(job.task, job.arm, job.rate, job.seed, run)
