"""Starts the processes of a job that stands for several nodes, on this machine: by torchrun, as Slurm does, or by Lightning.

A simulated node is a group of processes with a node number of its own in the launcher's variables. By it the package tells nodes
apart, since all of them have the same host name.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import pytest
import torch

T = TypeVar("T")
PATIENCE = 240  # seconds
# What launchers set. A job must not take these from the environment of the test.
_OF_LAUNCHERS = ("MASTER_", "SLURM_", "TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_", "NODE_RANK", "RANK", "WORLD_", "PL_GLOBAL_")


def torchrun(nodes: int, ranks: int, *program: object, restarts: int = 0) -> str:
    """Runs a program (a file and its arguments) under one ``torchrun`` for each node; what all of them printed.

    ``restarts``: how often a rank may fail. Nodes then find each other by c10d, with which all of them restart if one has to.
    """
    port = _free_port()
    options = [f"--nnodes={nodes}", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    if restarts:
        options += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
    else:
        options += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    agents = [[*command, *([] if restarts else [f"--node-rank={node}"]), *map(str, program)] for node in range(nodes)]
    # Without this, what restarts finds the addresses of the processes before it (PyTorch's issue 135712): see docs/nodes.md.
    return _run(agents, [{"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}] * nodes)


def slurm(nodes: int, ranks: int, *program: object) -> str:
    """Runs a program with the variables of ``srun --distribution=cyclic``: rank r is on node r modulo the number of nodes."""
    size, port = nodes * ranks, _free_port()
    common = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": size,
        "SLURM_NTASKS_PER_NODE": ranks,
        "SLURM_NNODES": nodes,
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_PORT": port,
    }
    of_ranks = [{"SLURM_PROCID": rank, "SLURM_NODEID": rank % nodes, "SLURM_LOCALID": rank // nodes} for rank in range(size)]
    return _run([[sys.executable, *map(str, program)]] * size, [{**common, **each} for each in of_ranks])


def lightning(nodes: int, *program: object) -> str:
    """Runs a program once on each node, where Lightning starts the other ranks itself."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    return _run([[sys.executable, *map(str, program)]] * nodes, [{**common, "NODE_RANK": node} for node in range(nodes)])


def alone(*program: object) -> str:
    """Runs a program in one process, which starts others itself."""
    return _run([[sys.executable, *map(str, program)]], [{}])


def with_ranks(ranks: int, folder: Path, file: str, patience: float = PATIENCE) -> tuple[str, list[Any]]:
    """Runs a program that starts its ranks itself, with a folder; what it printed, and what each rank has written there."""
    printed = _run([[sys.executable, file, str(folder)]], [{}], patience)
    return printed, [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(ranks)]


def side_by_side(ranks: int, folder: Path, *program: object) -> list[Any]:
    """Runs a program for each rank, which it is told after the folder; what each has written to ``FOLDER/rank-R.pt``."""
    file, *arguments = map(str, program)
    _run([[sys.executable, file, str(folder), str(rank), *arguments] for rank in range(ranks)], [{}] * ranks)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(ranks)]


def once(folders: pytest.TempPathFactory, name: str, launch: Callable[[Path], T]) -> T:
    """Returns what ``launch`` returns for a new folder. Of several processes of pytest-xdist, one calls it for all of them."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return launch(folders.mktemp(name))
    folder = folders.getbasetemp().parent / name
    returned = folder.with_suffix(".pickle")
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not returned.exists():
                folder.mkdir()  # if it is there, this has failed in another process
                returned.write_bytes(pickle.dumps(launch(folder)))
            return cast(T, pickle.loads(returned.read_bytes()))
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open, too


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(commands: Sequence[list[str]], variables: Sequence[dict[str, object]], patience: float = PATIENCE) -> str:
    """Runs all commands side by side; a failure of one shows what all of them printed."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    here = str(Path(__file__).parents[2])  # before an installed copy of the package
    bare |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, (here, bare.get("PYTHONPATH"))))}
    with ExitStack() as open_files:
        files = [open_files.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]  # no pipe, which may be full
        started = [
            subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env={**bare, **{name: str(value) for name, value in own.items()}}
            )
            for command, own, file in zip(commands, variables, files, strict=True)
        ]
        end = time.monotonic() + patience
        try:
            ended = [process.wait(timeout=max(end - time.monotonic(), 0)) for process in started]
        except subprocess.TimeoutExpired:
            ended = [process.poll() for process in started]
        finally:
            for process in started:
                process.terminate()  # torchrun ends its ranks then
        printed = [_content(file) for file in files]
    assert ended == [0] * len(started), "\n".join(each[-3000:] for each in printed)
    return "\n".join(printed)


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
