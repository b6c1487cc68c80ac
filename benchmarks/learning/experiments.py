"""Does the runs that are due, some at a time, and shows how far they are."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, TypeVar

import torch
from rich.console import Console

from learning.due import Job, Progress
from learning.reuse.due import ReuseJob, ReuseProgress, due
from learning.reuse.rows import ReuseRow, reuse_row
from learning.reuse.run import train as train_reuse
from learning.reuse.studies import Study
from learning.rules import Seeds
from learning.run import train
from learning.store import Row, Store, row_of
from learning.task import Task

__all__ = ["run_all", "run_reuse"]

J = TypeVar("J")


def run_all(task: Task, seeds: Seeds, store: Store, processes: int, accelerator: str) -> None:
    """Does what is due of a task, some runs at a time, each with one thread, until nothing is."""

    def add(row: Row) -> str:
        store.add(row)
        return (
            f"{task.name}: {len(store.rows)} done; {row.arm}, rate {row.rate:g}, seed {row.seed}: "
            f"target after {row.fresh_to_target:g} fresh, {row.steps} steps, {row.seconds:.0f} s"
        )

    _run_due(lambda: Progress(task, seeds, store.rows).due(), _do, (accelerator,), add, processes)


def run_reuse(studies: Sequence[Study], seeds: Seeds, stores: Mapping[str, Store], processes: int, accelerator: str) -> None:
    """Does what is due of the study of reuse in its order, which alternates between the tasks, until nothing is.

    Args:
        studies: What is run.
        seeds: For tuning and for the report.
        stores: Of the rows, by the name of the task.
        processes: Runs at a time.
        accelerator: As in ``Trainer``.
    """
    by_name = {study.task.name: study for study in studies}

    def all_due() -> list[ReuseJob]:
        progress = {name: ReuseProgress(study, seeds, stores[name].rows) for name, study in by_name.items()}
        return due(studies, progress)

    def add(row: ReuseRow) -> str:
        stores[row.task].add(row)
        return (
            f"{row.task}: {len(stores[row.task].rows)} done; {row.arm}, rate {row.rate:g}, seed {row.seed}: "
            f"target after {row.steps_to_target:g} steps, {row.fresh_to_target:g} fresh, {row.seconds:.0f} s"
        )

    _run_due(all_due, _do_reuse, (by_name, accelerator), add, processes)


def _run_due(
    due: Callable[[], Sequence[J]], do: Callable[..., Any], arguments: tuple[Any, ...], add: Callable[[Any], str], processes: int
) -> None:
    """Does what is due, some jobs at a time, and asks again after each: more may follow from its result.

    Args:
        due: The jobs that are due, in order.
        do: From a job and ``arguments`` to its row, in a process of its own pool.
        arguments: What each job needs beside.
        add: Keeps a row, and says what is shown of it.
        processes: Jobs at a time.
    """
    console = Console()
    running: dict[Future[Any], J] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        while True:
            jobs = due()
            waiting = [job for job in jobs if job not in running.values()]
            for job in waiting[: processes - len(running)]:
                running[pool.submit(do, job, *arguments)] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                running.pop(future)
                console.print(f"{add(future.result())}; {len(jobs) - 1} due", highlight=False, soft_wrap=True)


def _do(job: Job, accelerator: str) -> Row:
    run = train(job.task, job.arm, job.rate, job.seed, ends_at_target=job.ends_at_target, accelerator=accelerator)
    return row_of(job.task, job.arm, job.rate, job.seed, run)


def _do_reuse(job: ReuseJob, studies: Mapping[str, Study], accelerator: str) -> ReuseRow:
    study = studies[job.task]
    return reuse_row(study, job.arm, job.rate, job.seed, train_reuse(study, job.arm, job.rate, job.seed, accelerator))
