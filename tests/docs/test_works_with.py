"""The tables of docs/about/works_with.md and of the README say what trainings show, and the tests that they name are there."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import works_with
from works_with import PAGE, README, ROOT, cells_of
from works_with_claims import CLAIMS, NOT_TESTED
from works_with_loaders import KINDS, Kind, fill

TESTS = [test for rows in CLAIMS.values() for claim in rows for test in claim.tests]
NEEDED = {"torchvision's": "torchvision", "MONAI's": "monai", "Hugging": "datasets", "WebDataset": "webdataset"}
NEEDED |= {"WebDataset's": "webdataset", "litdata's": "litdata", "torchdata's": "torchdata"}


def part(page: Path, mark: str) -> str:
    return page.read_text().split(f"<!-- {mark}:begin -->\n")[1].split(f"\n<!-- {mark}:end -->")[0]


def rows_of(page: Path) -> dict[str, tuple[str, ...]]:
    """The cells of each row of the table of loaders, by its first cell."""
    lines = [line.strip("|").split("|") for line in part(page, "loaders").splitlines()[2:]]
    return {name.strip(): tuple(cell.strip() for cell in cells) for name, *cells in lines}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what the loaders of other projects warn of
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_row_of_the_table_of_loaders_says_what_trainings_show(kind: Kind, tmp_path: Path) -> None:
    package = NEEDED.get(kind.name.split()[0])
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert rows_of(PAGE)[kind.name] == cells_of(fill(kind, tmp_path))


def test_the_page_has_a_row_for_each_kind_and_no_other() -> None:
    assert list(rows_of(PAGE)) == [kind.name for kind in KINDS]


def test_the_readme_says_of_a_loader_what_the_page_says() -> None:
    page = rows_of(PAGE)
    rows = {name: cells for names, cells in rows_of(README).items() for name in names.split(", ")}
    assert rows == {kind.in_readme: page[kind.name] for kind in KINDS if kind.in_readme}


def test_the_other_tables_are_those_of_the_source() -> None:
    assert part(PAGE, "claims") == works_with.claims()
    assert part(PAGE, "versions") == works_with.versions()
    assert part(README, "claims") == works_with.claims_in_readme()


@pytest.mark.parametrize("test", dict.fromkeys(TESTS))
def test_a_test_that_is_named_is_there_and_not_switched_off(test: str) -> None:
    file, name = test.split("::")
    found = [node for node in ast.parse((ROOT / file).read_text()).body if getattr(node, "name", "") == name]
    assert len(found) == 1
    marks = " ".join(ast.unparse(mark) for mark in found[0].decorator_list)  # type: ignore[attr-defined]
    assert "mark.skip(" not in marks
    assert "xfail" not in marks


def test_only_what_is_not_tested_names_no_test() -> None:
    assert [claim.name for rows in CLAIMS.values() for claim in rows if (claim.how_far == NOT_TESTED) != (not claim.tests)] == []


@pytest.mark.program
def test_the_tests_that_are_named_are_collected() -> None:
    """But for those of other projects, which are skipped where these are not installed."""
    named = [test for test in dict.fromkeys(TESTS) if "/outside/" not in test and "ray" not in test]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *named],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert [test for test in named if test not in done.stdout] == []
