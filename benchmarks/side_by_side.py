"""What keeps examples, on two ranks: hits per pass, memory, time per epoch.

``python -m side_by_side RANK FOLDER EXAMPLES SECONDS EPOCHS KEEPER ...`` is a rank. It runs the partners in turn and writes
``FOLDER/RANK.json``.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from keepers import BATCH_SIZE, EXAMPLE_BYTES, KEEPERS, WORKERS, Books, Deliveries, Keeper, Run
from report import Table, progress

_RANKS = 2
_PATIENCE_SECONDS = 180
_COLUMNS = ("what", "version", "hits per pass", "MiB of two ranks", "first epoch s", "epoch s", "lowest", "highest")


def side_by_side(quick: bool) -> Table:
    """Two ranks of two workers each over the same data, half of which there is memory for."""
    examples, seconds, epochs, rounds = (256, 0.004, 3, 1) if quick else (512, 0.004, 5, 3)
    there = [keeper for keeper in KEEPERS if keeper.version]
    found = []
    for number in range(rounds):
        progress(f"side by side, round {number + 1} of {rounds}")
        found.append(run_ranks([keeper.name for keeper in there], examples, seconds, epochs))
    rows = [_row(keeper, [each[keeper.name] for each in found] if keeper in there else []) for keeper in KEEPERS]
    text = (
        f"{_RANKS} ranks with {WORKERS} workers each, {examples} examples of {EXAMPLE_BYTES // 1024} KiB that take "
        f"{1e3 * seconds:g} ms to read, batch {BATCH_SIZE}, shuffled, no step; the memory is to hold half of them. Hits are "
        f"counted in the data set, from the second of {epochs} passes on; time of the slower rank, median of the epochs of "
        f"{rounds} rounds in turn"
    )
    return Table("cache_side_by_side", text, _COLUMNS, rows)


def run_ranks(names: list[str], examples: int, seconds: float, epochs: int) -> dict[str, dict[str, Any]]:
    """Runs the partners, one after the other, on two ranks; tried again once where that hangs, as `benchmarks/peers` does.

    Returns:
        Of each partner its hits in each pass, bytes held, and seconds of each epoch.

    Raises:
        RuntimeError: A rank has failed, with its last words.
    """
    for attempt in range(2):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            if (ended := _ended(Path(folder), names, examples, seconds, epochs)) is not None:
                status, output = ended
                if status:
                    raise RuntimeError(f"a rank has failed: {output[-2000:]}")
                facts = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(_RANKS)]
                return {name: joined([each[name] for each in facts]) for name in names}
        progress(f"nothing for {_PATIENCE_SECONDS} s (attempt {attempt + 1})")
    raise RuntimeError("two ranks have hung twice")


def joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the facts of all ranks as one.

    Example:
        >>> joined([{"hits": [0, 5], "bytes": 7, "seconds": [2.0, 1.0]}, {"hits": [0, 4], "bytes": 7, "seconds": [1.0, 3.0]}])
        {'hits': [0, 9], 'bytes': 7, 'seconds': [2.0, 3.0]}
    """
    return {
        "hits": [sum(hits) for hits in zip(*(each["hits"] for each in ranks), strict=True)],
        "bytes": max(each["bytes"] for each in ranks),
        "seconds": [max(seconds) for seconds in zip(*(each["seconds"] for each in ranks), strict=True)],
    }


def _row(keeper: Keeper, rounds: list[dict[str, Any]]) -> tuple[Any, ...]:
    if not rounds:
        return (keeper.name, "not installed", *["-"] * (len(_COLUMNS) - 2))
    later = [seconds for each in rounds for seconds in each["seconds"][1:]]
    return (
        *(keeper.name, keeper.version),
        statistics.median(hits for each in rounds for hits in each["hits"][1:]),
        statistics.median(each["bytes"] for each in rounds) / 2**20,
        statistics.median(each["seconds"][0] for each in rounds),
        *(statistics.median(later), min(later), max(later)),
    )


def _ended(folder: Path, names: list[str], *numbers: float) -> tuple[int, str] | None:
    """Returns status and output of the ranks; None if they hang."""
    here = Path(__file__).parent
    paths = os.pathsep.join(filter(None, (str(here), str(here.parent), os.environ.get("PYTHONPATH", ""))))
    processes = []
    for rank in range(_RANKS):
        command = [sys.executable, "-m", "side_by_side", str(rank), str(folder), *map(str, numbers), *names]
        environment = {**os.environ, "PYTHONPATH": paths, "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        with open(folder / f"{rank}.log", "w") as log:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            )
    end = time.monotonic() + _PATIENCE_SECONDS
    try:
        statuses = [process.wait(max(end - time.monotonic(), 0.1)) for process in processes]
    except subprocess.TimeoutExpired:
        return None
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its workers with it
                process.wait()
    return max(map(abs, statuses)), "".join((folder / f"{rank}.log").read_text() for rank in range(_RANKS))


# ---------------------------------------------------------------------- one rank


def run_rank(rank: int, folder: Path, examples: int, seconds: float, epochs: int, names: list[str]) -> dict[str, Any]:
    """Runs the partners; returns the facts of this rank."""
    facts = {}
    for number, keeper in enumerate(keeper for keeper in KEEPERS if keeper.name in names):
        # As in a job of several ranks, which a cache asks what their data sets are.
        store = torch.distributed.FileStore(str(folder / f"store-{number}"), _RANKS)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS)
        mine = folder / str(number)
        if not rank:
            mine.mkdir()
            Books(mine, examples)
        torch.distributed.barrier()
        facts[keeper.name] = _facts(keeper, Run(Books(mine, examples), mine, examples, seconds, _RANKS, rank), epochs)
        torch.distributed.destroy_process_group()
    return facts


def _facts(keeper: Keeper, run: Run, epochs: int) -> dict[str, Any]:
    hits, seconds, deliveries = [], [], Deliveries(run.books, run.folder)
    if keeper.package:
        import_module(keeper.package)
    torch.distributed.barrier()
    started = time.perf_counter()
    loader = keeper.make(run)  # MONAI's reads what it keeps here: that is part of its first epoch
    torch.distributed.barrier()
    for epoch in range(epochs):
        if epoch:
            torch.distributed.barrier()
            started = time.perf_counter()
        if callable(set_epoch := getattr(getattr(loader, "sampler", None), "set_epoch", None)):
            set_epoch(epoch)
        found = 0
        for _, indices in loader:
            found += sum(map(deliveries.is_hit, indices.tolist()))
        seconds.append(time.perf_counter() - started)
        hits.append(found)
    torch.distributed.barrier()
    held = keeper.held(run, loader)
    torch.distributed.barrier()
    if callable(close := getattr(loader, "close", None)):
        close()
    return {"hits": hits, "bytes": held, "seconds": seconds}


if __name__ == "__main__":
    _rank, _folder, _examples, _seconds, _epochs, *_names = sys.argv[1:]
    _found = run_rank(int(_rank), Path(_folder), int(_examples), float(_seconds), int(_epochs), _names)
    Path(_folder, f"{_rank}.json").write_text(json.dumps(_found))
