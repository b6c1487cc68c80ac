"""The facts as a table; where and with what they were found."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from report import Cell, Table, machine, progress
from workloads import BATCH_SIZE, WORKERS

from peers.facts import EPOCHS
from peers.loaders import FACTOR, OURS, PEERS, Peer
from peers.processes import gather
from peers.verdicts import Facts, expected_steps, wrong

_COLUMNS = (
    *("peer", "version", "reads per example", "duplicates per batch", "steps between uses", "edited %"),
    *("len", "delivered", "steps in Lightning", "expected", "resume", "two ranks saw %", "both saw %", "wrong"),
)


def correctness(names: list[str], examples: int) -> Table:
    """What each peer does by itself, in a Trainer, resumed, and on two ranks."""
    here = [name for name in names if PEERS[name].version and not PEERS[name].only_speed]
    with TemporaryDirectory() as folder:
        progress(f"by itself and in a Trainer: {', '.join(here)}")
        alone = gather(here, 1, examples, Path(folder))
        progress("on two ranks")
        (Path(folder) / "ranks").mkdir()
        ranks = gather(here, 2, examples, Path(folder) / "ranks")
    rows = []
    for name in names:
        peer = PEERS[name]
        if not peer.version:
            rows.append(_empty(peer, "not installed"))
        elif name in here:
            one, two = alone[name], ranks[name]
            if isinstance(one, str) or isinstance(two, str):
                rows.append(_empty(peer, "; ".join(each for each in (one, two) if isinstance(each, str))))
            else:
                rows.append(_row(peer, Facts.of(one[0], two, examples), examples))
    text = (
        f"{examples} examples in batches of {BATCH_SIZE}, echo factor {FACTOR}, {WORKERS} workers, {EPOCHS} epochs. Steps "
        "between uses: median, 0 is within a batch. Edited: examples that arrive with an in-place edit of an earlier step. "
        "Expected: steps by the peer's own documentation. Two ranks saw: while they used as many examples as a pass and its "
        "echoes have; both saw: in the first half of that"
    )
    return Table("peers", text, _COLUMNS, rows)


def failures(table: Table) -> int:
    """Rows of ours that are not right in all columns."""
    titles = [PEERS[name].title for name in OURS]
    return sum(row[0] in titles and row[-1] != "nothing" for row in table.rows)


def place(options: str, load_before: float) -> Table:
    """Machine and versions."""
    table = machine(options, load_before)
    packages = ("lightning-echo", "lightning", *(package for peer in PEERS.values() for package in peer.version.split()[:1]))
    known = {row[0] for row in table.rows}
    rows = [(name, version(name)) for name in dict.fromkeys(packages) if name not in known]
    return replace(table, name="peers_machine", rows=[*table.rows, *rows])


def _row(peer: Peer, facts: Facts, examples: int) -> tuple[Cell, ...]:
    return (
        *(peer.title, peer.version, facts.reads_per_example, facts.duplicates_per_batch),
        "-" if facts.steps_between_uses is None else facts.steps_between_uses,
        100 * facts.edited,
        "none" if facts.length is None else facts.length,
        *(" + ".join(map(str, facts.delivered)), " + ".join(map(str, facts.steps))),
        " + ".join([str(expected_steps(peer, examples))] * EPOCHS),
        *(facts.resume, 100 * facts.seen, 100 * facts.seen_twice),
        ", ".join(wrong(peer, facts, examples)) or "nothing",
    )


def _empty(peer: Peer, why: str) -> tuple[Cell, ...]:
    return (peer.title, peer.version, *["-"] * (len(_COLUMNS) - 3), why)
