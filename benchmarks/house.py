"""Counts files, lines, functions, import statements, and phrases to replace by the terms of the trade.

    python benchmarks/house.py [FOLDER OR FILE ...]

Without arguments it counts the package, its tests and the pages, a line each. A line of code is one that is neither blank, a
comment nor part of a docstring. The body of a function is its lines of code below the signature.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ENGLISH = {
    "is no X": r"\b(?:is|are|was|were) no (?!longer\b|more\b|other\b)[a-z]",
    "anew": r"\banew\b",
    "goes on": r"\b(?:goes|go|went|going|gone) on\b",
    "way out": r"\bways? out\b",
    "beside": r"\bbeside\b",
    "says, tells": r"\b(?:says|said|say|tells|told|tell)\b",
    "what": r"\bwhat\b",
    "78%": r"\d %(?![a-z(])",
}


class Counts(NamedTuple):
    """What one file holds. `bodies` has the lines of code of each function's body."""

    lines: int
    code: int
    docstrings: int
    imports: int
    bodies: list[int]


def counts_of(text: str) -> Counts:
    """Counts one file of Python.

    >>> counts_of('def f():\\n    "What f does."\\n\\n    # why\\n    return 1\\n')
    Counts(lines=5, code=2, docstrings=1, imports=0, bodies=[1])
    """
    tree = ast.parse(text)
    docstrings = {line for node in _docstrings(tree) for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in empty:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docstrings
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    bodies = [len(code & set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))) for node in functions]
    imports = sum(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.walk(tree))
    return Counts(text.count("\n"), len(code), len(docstrings), imports, bodies)


def _docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and ast.get_docstring(node) is not None
        ):
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            yield first.value


def files_of(place: Path, suffix: str) -> list[Path]:
    return [place] if place.is_file() else sorted(path for path in place.rglob(f"*{suffix}") if "_build" not in path.parts)


def line_about(name: str, files: list[Path]) -> str:
    """Returns one line of text about files of Python."""
    counts = [counts_of(path.read_text()) for path in files]
    bodies = sorted(body for each in counts for body in each.bodies) or [0]
    lines, code, docstrings, imports = (sum(column) for column in zip(*(each[:4] for each in counts), strict=True))
    return (
        f"{name:<16} {len(files):>5} files {lines:>7} lines {code:>7} code {docstrings:>6} docstrings {imports:>5} imports "
        f"{len(bodies):>5} functions, body median {statistics.median(bodies):g}, p90 {bodies[len(bodies) * 9 // 10]}"
    )


def english_in(text: str) -> dict[str, int]:
    """Counts the phrases to replace.

    >>> english_in("This is no loader: it goes on beside it")["is no X"]
    1
    """
    return {name: len(re.findall(pattern, text)) for name, pattern in ENGLISH.items()}


def main(arguments: list[str]) -> None:
    places = [Path(each) for each in arguments] or [
        ROOT / "lightning_echo",
        ROOT / "tests",
        ROOT / "benchmarks",
        ROOT / "examples",
    ]
    for place in places:
        print(line_about(place.name, files_of(place, ".py")))
    print("\n" + " " * 16 + "".join(f"{name:>13}" for name in ENGLISH))
    pages = {} if arguments else {"README, docs": [ROOT / "README.md", *files_of(ROOT / "docs", ".md")]}
    for name, files in {**{place.name: files_of(place, ".py") for place in places[:1]}, **pages}.items():
        found = english_in("\n".join(path.read_text() for path in files))
        print(f"{name:<16}" + "".join(f"{count:>13}" for count in found.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
