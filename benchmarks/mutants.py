"""Whether the tests notice a changed line: mutants of the parts whose faults would be silent, each run against its tests.

    python benchmarks/mutants.py draw          # writes benchmarks/results/mutants.csv, once, before a change of structure
    python benchmarks/mutants.py run           # runs those without a result, so that it resumes after a stop
    python benchmarks/mutants.py locate        # after a change of structure: which statements are found again, and where
    python benchmarks/mutants.py rerun         # the same against the package and tests as they are now, in columns of its own

A mutant is one change of one statement: an operator, a constant, a condition, or a call that is left out. Messages, log lines
and annotations are never changed. Each runs on a copy of the package, against the tests of its part, until the first failure. A
mutant without a failure within 90 seconds (`time`) counts as not noticed.
"""

from __future__ import annotations

import ast
import csv
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "results" / "mutants.csv"
SEED, COUNT, SECONDS, AT_ONCE = 40, 60, 90.0, 2
RESULTS = ("result", "seconds", "first_failure")
AFTER = tuple(f"{name}_after" for name in RESULTS)  # of `rerun`
FIELDS = ("number", "part", "module", "function", "statement", "old", "new", *RESULTS, *AFTER)
LEFT_ALONE = {"debug", "info", "warning", "warn", "error", "warn_once"}  # calls that log or warn


class Part(NamedTuple):
    """Modules whose statements are changed, and the tests that run against each: unit tests first, then at most five others."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


def _under(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" for name in names)


_UNIT, _WHOLE = "tests/unit", "tests/integration"
PARTS = {
    "plan": Part(
        _under("lightning_echo/plan", "plan.py", "each.py", "memory.py"),
        (
            *_under(_UNIT, "plan", "pipeline"),
            *_under(_WHOLE, "test_loader_counts.py", "test_loader_reuse.py", "test_loader_plain_equivalence.py"),
            *_under(_WHOLE, "test_loader_resume.py", "test_loader_streams.py"),
        ),
    ),
    "order": Part(
        ("lightning_echo/plan/order.py", "lightning_echo/pipeline/requests.py"),
        (
            *_under(_UNIT, "plan", "pipeline"),
            *_under(_WHOLE, "test_loader_resume_order.py", "test_loader_plain_equivalence.py", "test_loader_reproducible.py"),
            *_under(_WHOLE, "test_data_between_epochs.py", "test_loader_resume.py"),
        ),
    ),
    "state": Part(
        (*_under("lightning_echo/loader", "state.py", "resuming.py"), "lightning_echo/schema.py"),
        (
            *_under(_UNIT, "loader"),
            *_under(_WHOLE, "test_loader_resume.py", "test_damaged_states.py", "test_saved_within_a_step.py"),
            *_under(_WHOLE, "test_loader_growing_data.py", "test_resume.py"),
        ),
    ),
    "window": Part(
        ("lightning_echo/share/window.py",),
        (
            *_under(_UNIT, "share"),
            *_under(_WHOLE, "test_sharing.py", "test_sharing_faults.py", "test_sharing_full.py", "test_sharing_streams.py"),
        ),
    ),
    "arena": Part(
        ("lightning_echo/cache/arena.py",),
        (
            *_under(_UNIT, "cache"),
            *_under(_WHOLE, "test_cache_counts.py", "test_cache_bit_equal.py", "test_cache_kept.py", "test_cache_faults.py"),
            *_under(_WHOLE, "test_cache_limits.py"),
        ),
    ),
    "splitting": Part(
        _under("lightning_echo/split", "describe.py", "check.py", "make.py", "prove.py", "staged.py"),
        (
            *_under(_UNIT, "split"),
            *_under(_WHOLE, "test_loader_splits.py", "test_loader_watched_splits.py", "test_loader_after_read.py"),
            *_under(_WHOLE, "test_auto_points.py", "test_loader_points.py"),
        ),
    ),
    "hooks": Part(
        (
            *_under("lightning_echo/training", "hooks.py", "loaders.py", "trainer.py", "training_echo.py"),
            *_under("lightning_echo", "callback.py", "attachment.py"),
        ),
        (
            *_under(_UNIT, "training", "test_attachment.py", "test_echo_callback.py", "test_echo_data_module.py"),
            *_under(_WHOLE, "test_callback.py", "test_trainer_callbacks.py", "test_after_transfer.py", "test_trainer_epochs.py"),
            *_under(_WHOLE, "test_collections.py"),
        ),
    ),
}


class Mutant(NamedTuple):
    """One changed statement: the text of ``old`` in it becomes ``new``."""

    module: str
    function: str
    statement: str
    old: str
    new: str
    start: int  # where ``old`` is in the file, in characters
    end: int

    def applied(self, text: str) -> str:
        assert text[self.start : self.end] == self.old
        return text[: self.start] + self.new + text[self.end :]


# What an operator is written as, and what it becomes.
_OPERATORS = {
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!=")},
    **{ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in")},
    **{ast.NotIn: ("not in", "in"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*")},
    **{ast.Div: ("/", "*"), ast.Mod: ("%", "*"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"), ast.BitAnd: ("&", "|")},
    **{ast.BitOr: ("|", "&"), ast.And: ("and", "or"), ast.Or: ("or", "and")},
}


def mutants_of(module: str, text: str) -> Iterator[Mutant]:
    """Yields every mutant of a module, in the order of its text.

    >>> [mutant.new for mutant in mutants_of("m.py", "def f(a):\\n    if a < 2:\\n        g(a)\\n    return a + 1\\n")]
    ['not (a < 2)', 'a <= 2', '3', 'pass', 'a - 1', '2']
    """
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: ast.AST) -> tuple[int, int]:
        # Columns count bytes; the package has none but ASCII in its code, or the check in `applied` fails.
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def visit(node: ast.AST, function: str, statement: ast.stmt | None) -> Iterator[Mutant]:
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Global, ast.AnnAssign)):
            if not (isinstance(node, ast.AnnAssign) and node.value is not None and function):
                return
            yield from visit(node.value, function, node)
            return
        if isinstance(node, ast.Call) and _tells(node):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{function}.{node.name}".lstrip(".")
            for child in node.body:
                yield from visit(child, inner, child)
            return
        if isinstance(node, ast.stmt):
            statement = node
        if statement is not None and function:
            yield from changed(node, function, statement)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function, statement)

    def changed(node: ast.AST, function: str, statement: ast.stmt) -> Iterator[Mutant]:
        first = (ast.get_source_segment(text, statement) or "").splitlines()[0]

        def one(target: ast.AST, new: str) -> Mutant:
            start, end = place(target)
            return Mutant(module, function, first, text[start:end], new, start, end)

        def operated(node: ast.AST, operands: list[ast.expr], operator: ast.AST) -> Iterator[Mutant]:
            if type(operator) not in _OPERATORS:
                return
            (old, new), (start, end), pieces = _OPERATORS[type(operator)], place(node), list[str]()
            for left, right in pairwise(operands):
                between = text[place(left)[1] : place(right)[0]]
                if between.count(old) != 1:  # there is a comment between them
                    return
                pieces += [text[slice(*place(left))], between.replace(old, new)]
            written = "".join(pieces) + text[place(operands[-1])[0] : end]
            yield Mutant(module, function, first, text[start:end], text[start : place(operands[0])[0]] + written, start, end)

        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield one(node.test, f"not ({ast.get_source_segment(text, node.test)})")
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from operated(node, [node.left, *node.comparators], node.ops[0])
        elif isinstance(node, ast.BinOp):
            yield from operated(node, [node.left, node.right], node.op)
        elif isinstance(node, ast.BoolOp):
            yield from operated(node, node.values, node.op)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield one(node, str(node.value + 1))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield one(node, str(not node.value))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield one(node, "pass")

    yield from visit(ast.parse(text), "", None)


def _tells(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in LEFT_ALONE


def drawn() -> list[dict[str, str]]:
    """Draws the mutants, the same in each run: of each part as many, and no two of one statement."""
    generator, rows = random.Random(SEED), list[dict[str, str]]()
    for place, name in enumerate(PARTS):
        due = COUNT * (place + 1) // len(PARTS) - COUNT * place // len(PARTS)
        found = every_mutant(name)
        taken = dict[tuple[str, str, str], Mutant]()
        while len(taken) < due:
            mutant = generator.choice(found)
            if "__repr__" not in mutant.function:
                taken.setdefault(mutant[:3], mutant)
        rows += [{"part": name, **dict(zip(Mutant._fields[:5], mutant[:5], strict=True))} for mutant in taken.values()]
    return [{"number": str(number), **row, **dict.fromkeys((*RESULTS, *AFTER), "")} for number, row in enumerate(rows)]


@cache
def every_mutant(part: str) -> list[Mutant]:
    return [mutant for module in PARTS[part].modules for mutant in mutants_of(module, (ROOT / module).read_text())]


def found_again(row: dict[str, str]) -> Mutant | None:
    """Returns the mutant in the package as it is now: the same change of the same statement, wherever the statement has moved."""
    every = every_mutant(row["part"])
    same = [m for m in every if (m.statement, m.old, m.new) == (row["statement"], row["old"], row["new"])]
    name = row["function"].rpartition(".")[2]
    return next((m for m in same if m.module == row["module"] and m.function == row["function"]), None) or next(
        (m for m in same if m.function.rpartition(".")[2] == name), same[0] if len(same) == 1 else None
    )


def run_one(row: dict[str, str], columns: tuple[str, ...] = RESULTS) -> None:
    """Runs the tests of a mutant's part against a copy of the package with that mutant, and writes the result into the row."""
    result, seconds, first_failure = columns
    mutant = found_again(row)
    if mutant is None:
        row[result] = "gone"
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in ("lightning_echo", "tests", "benchmarks", "examples", "docs"):
            shutil.copytree(ROOT / name, f"{folder}/{name}", ignore=shutil.ignore_patterns("__pycache__", "_build", "results"))
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"):
            shutil.copy(ROOT / name, folder)
        changed = Path(folder, mutant.module)
        changed.write_text(mutant.applied(changed.read_text()))
        began = time.monotonic()
        lean = "not rest_of_grid and not slow and not program and not alone and not ray"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", lean, "-p", "no:cacheprovider", *PARTS[row["part"]].tests]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=SECONDS)
            row[result] = {0: "survived", 1: "noticed", 2: "noticed"}.get(process.returncode, f"exit {process.returncode}")
            row[first_failure] = next((line[:200] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        except subprocess.TimeoutExpired:
            row[result] = "time"
            os.killpg(process.pid, 9)
            process.communicate()
        row[seconds] = f"{time.monotonic() - began:.0f}"


def main(command: str) -> None:
    if command == "draw":
        write(drawn())
        return
    with ROWS.open() as file:
        rows = list(csv.DictReader(file))
    if command == "locate":
        for row in rows:
            found = found_again(row)
            print(row["number"], row["part"], row["function"], "gone" if found is None else f"{found.module} {found.function}")
        return
    writing = threading.Lock()

    columns = AFTER if command == "rerun" else RESULTS

    def run(row: dict[str, str]) -> None:
        run_one(row, columns)
        with writing:
            write(rows)
            print(row["number"], row["part"], row["function"], *(row.get(name, "") for name in columns), flush=True)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(run, [row for row in rows if not row.get(columns[0])]))


def write(rows: list[dict[str, str]]) -> None:
    with ROWS.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) == 2 else sys.exit(__doc__))
