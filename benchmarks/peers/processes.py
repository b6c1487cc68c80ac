"""Facts are gathered in processes of their own: one that dies or hangs is a fact, too, and the others go on in the next.

``python -m peers.processes FOLDER RANKS EXAMPLES PEER ...`` is such a process, one after another of the peers; with two ranks
Lightning starts it a second time. Each rank writes ``FOLDER/PEER-RANK.json``.

A peer has to hang twice until that is a fact: where Python is older than September 2024 any loader may by chance, since a worker
that is forked while one of gloo's threads makes a thread state waits for a lock that nobody holds there (CPython's issue 112275;
twice in some 450 trainings of the bare loader on two ranks, three at a time).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from peers.facts import alone, on_rank
from peers.loaders import PEERS

_BENCHMARKS = Path(__file__).parents[1]
_PATIENCE_SECONDS = 60  # for one peer
_HANGS = "hangs"
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b.*)", re.MULTILINE)


def gather(names: list[str], ranks: int, examples: int, folder: Path) -> dict[str, list[dict[str, Any]] | str]:
    """For each peer the facts of each rank, or how the process ended that was to find them."""
    found: dict[str, list[dict[str, Any]] | str] = {}
    left, tried_again = list(names), set[str]()
    while left:
        last_words = _run(left, ranks, examples, folder)
        while left and (facts := _read(folder, left[0], ranks)):
            found[left.pop(0)] = facts
        if left and last_words.startswith(_HANGS) and left[0] not in tried_again:
            tried_again.add(left[0])
        elif left:
            found[left.pop(0)] = last_words
    return found


def _run(names: list[str], ranks: int, examples: int, folder: Path) -> str:
    """Runs the peers in one process (and what it starts); its last words."""
    command = [sys.executable, "-m", "peers.processes", str(folder), str(ranks), str(examples), *names]
    paths = [str(_BENCHMARKS), str(_BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    left_out = ("LOCAL_RANK", "PL_GLOBAL_SEED")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    ended, output = False, ""
    try:
        while not ended:
            written = len(list(folder.iterdir()))
            try:
                output, _ = process.communicate(timeout=_PATIENCE_SECONDS)
                ended = True
            except subprocess.TimeoutExpired:
                if len(list(folder.iterdir())) == written:
                    break
    finally:
        if not ended:
            os.killpg(process.pid, signal.SIGKILL)  # workers and the other rank with it
            output, _ = process.communicate()
    if error := _ERROR.search(output):
        return f"dies: {error[1][:120]}"
    return f"dies with status {process.returncode}" if ended else f"{_HANGS}: nothing for {_PATIENCE_SECONDS} s"


def _read(folder: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    """Facts of all ranks; empty unless all have written theirs."""
    files = [folder / f"{name}-{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files] if all(file.exists() for file in files) else []


def main(folder: Path, ranks: int, examples: int, names: list[str]) -> None:
    torch.set_num_threads(1)  # torch's own threads wait actively, and take the cores from workers and ranks
    for name in names:
        room = folder / name
        room.mkdir(exist_ok=True)
        peer = PEERS[name]
        rank, facts = (0, alone(peer, examples, room)) if ranks == 1 else on_rank(peer, examples, room)
        part = folder / f"{name}-{rank}.part"
        part.write_text(json.dumps(facts))
        part.rename(folder / f"{name}-{rank}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
