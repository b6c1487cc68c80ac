"""CONTRIBUTING.md leads where it says: files that are there, and the names in them."""

import ast
import re
from pathlib import Path

import pytest

import lightning_echo

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
_, _, AFTER = TEXT.partition("## Ten questions")
ROWS = [line.split("|")[1:-1] for line in AFTER.partition("\n## ")[0].splitlines() if line.startswith("|")][2:]
PLACE = re.compile(r"\[([\w/.]+)\]\((lightning_echo/[\w/.]+)\): `([\w.]+)`")
MENTIONED = sorted(
    set(re.findall(r"`((?:lightning_echo|tests|docs|benchmarks|examples)/[\w./*-]+|\.(?:ci|github)/[\w./]+)`", TEXT))
)


def names_of(path):
    """Returns what a file defines: functions, classes, methods, and the attributes that classes declare."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            for inside in node.body:
                if isinstance(inside, ast.FunctionDef):
                    found.add(f"{node.name}.{inside.name}")
                elif isinstance(inside, ast.AnnAssign) and isinstance(inside.target, ast.Name):
                    found.add(f"{node.name}.{inside.target.id}")
    return found


def test_ten_questions_are_answered():
    assert len(ROWS) == 10
    assert all(question.strip().endswith("?") for question, *_ in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip(" ?"))
def test_a_question_is_answered_by_at_most_two_files_and_the_names_in_them(row):
    places = [PLACE.search(cell) for cell in row[1:] if cell.strip()]
    assert 1 <= len(places) <= 2
    for place in places:
        shown, path, name = place.groups()
        assert path == f"lightning_echo/{shown}"
        assert name in names_of(ROOT / path)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip(" ?"))
def test_a_file_that_answers_says_in_its_docstring_what_it_is_for(row):
    for _, path, _ in PLACE.findall("|".join(row)):
        assert len(ast.get_docstring(ast.parse((ROOT / path).read_text())).split()) > 8


@pytest.mark.parametrize("mentioned", MENTIONED)
def test_files_and_folders_that_the_text_names_are_there(mentioned):
    assert list(ROOT.glob(mentioned))


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([\w./]+)\)", TEXT))))
def test_links_lead_to_files(target):
    assert (ROOT / target).exists()


@pytest.mark.parametrize(
    "name", ["put", "get", "lengths_of", "counts", "freeze", "keys", "budget_bytes", "is_in_memory", "address", "attach"]
)
def test_a_store_has_the_methods_that_the_text_asks_of_one(name):
    assert f"`{name}`" in TEXT
    assert f"Arena.{name}" in names_of(Path(lightning_echo.__file__).parent / "cache" / "arena.py")
