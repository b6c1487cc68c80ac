"""The table of the insertion points: what it says of each, the pages say the same; no other file names a point."""

import ast
import copy
import pickle
import re
from pathlib import Path

import pytest

import lightning_echo
from lightning_echo.insertion import POINTS, STAGES, InsertionPoint, Needs, Place, earliest, points_from

PACKAGE = Path(lightning_echo.__file__).parent
NAMES = ("after_read", "before_augmentation", "after_augmentation", "after_batching", "after_transfer")


@pytest.mark.parametrize("name", [*NAMES, "auto"])
def test_a_member_is_a_plain_string_wherever_one_is_wanted_and_a_copy_of_it_the_member(name):
    assert [member.value for member in InsertionPoint] == [*POINTS, "auto"] == [*NAMES, "auto"]
    member = InsertionPoint(name)
    assert (member.name, member == name, {name: 1}[member], f"{member}", str(member)) == (name, True, 1, name, name)
    assert type(member.value) is str
    assert member.option == f"insertion_point='{name}'"
    assert copy.deepcopy(member) is pickle.loads(pickle.dumps(member)) is member


def test_auto_stands_for_another_point_and_has_no_row():
    assert not InsertionPoint.auto.by_batches
    assert not InsertionPoint.auto.on_device
    with pytest.raises(ValueError, match="insertion_point='auto' stands for another point"):
        _ = InsertionPoint.auto.properties


def test_the_later_a_point_the_more_is_reused_and_the_less_it_needs():
    needs = list(Needs)
    for number, point in enumerate(POINTS, 1):
        row = point.properties
        assert list(row.reused) == list(STAGES)[:number]
        assert list(row.redone) == (list(STAGES)[number:] or ["on_after_batch_transfer"])
        assert point.by_batches is row.by_batches is ("collate" in row.reused)
        assert point.on_device is (row.place is Place.device) is ("transfer" in row.reused)
        assert (row.place is Place.workers) is not point.by_batches
    order = [needs.index(point.properties.needs) for point in POINTS]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("needs", "allowed"),
    [(Needs.raw_items, NAMES), (Needs.split, NAMES[1:]), (Needs.examples, NAMES[2:]), (Needs.batches, NAMES[3:])],
)
def test_a_loader_allows_the_points_that_need_no_more_than_it_is(needs, allowed):
    assert points_from(needs) == allowed
    assert earliest(needs) is InsertionPoint(allowed[0])


def cells(path, point):
    """The cells of the first row about a point."""
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"| `{point}` |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("point", POINTS)
def test_the_site_and_the_readme_of_the_package_say_what_the_table_says(point):
    row = point.properties
    reused, redone = (", ".join(name if name in STAGES else f"`{name}`" for name in names) for names in (row.reused, row.redone))
    *told, purpose = cells(PACKAGE.parent / "docs" / "concepts" / "insertion_points.md", point)
    assert told == [f"`{point}`", row.item, redone, row.memory]
    assert purpose
    in_words = [row.place.value, str(row.live_batches), row.needs.value, "yes" if row.for_auto else "no"]
    assert cells(PACKAGE / "README.md", point) == [f"`{point}`", row.item, reused, redone, *in_words]


def spoken_of(node, parents):
    """The argument, comparison or statement that a literal stands in."""
    parent = parents[node]
    while not isinstance(parent, ast.arguments | ast.arg | ast.keyword | ast.Compare | ast.stmt):
        node, parent = parent, parents[parent]
    if not isinstance(parent, ast.arguments):
        return ast.unparse(parent)
    positional = [*parent.posonlyargs, *parent.args]
    defaults = dict(zip(parent.defaults, positional[len(positional) - len(parent.defaults) :], strict=True))
    defaults |= {value: name for name, value in zip(parent.kwonlyargs, parent.kw_defaults, strict=True) if value is not None}
    return defaults[node].arg


def named_in(source):
    """Where a file names a point: line and what stands there. A string that stands alone is a docstring, and may."""
    a_point, auto = re.compile(rf"\b({'|'.join(NAMES)})\b"), re.compile(r"['\"]auto['\"]")
    tree = ast.parse(source if a_point.search(source) or auto.search(source) else "")
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            found.append((node.lineno, node.attr))
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or isinstance(parents[node], ast.Expr):
            continue
        is_auto = node.value == "auto" or auto.search(node.value)
        spoken = spoken_of(node, parents).lower() if is_auto else ""
        # A factor may be "auto", too, and so may what a cache holds, and the number of reads.
        is_other = any(name in spoken for name in ("factor", "hold", "in_flight"))
        if a_point.search(node.value) or (is_auto and not is_other):
            found.append((node.lineno, node.value))
    return found


def test_points_are_named_in_the_table_alone():
    named = {str(path.relative_to(PACKAGE)): named_in(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {name for _, name in named.pop("insertion.py")} >= {*NAMES, "auto"}, "the check sees names"
    assert {path: found for path, found in named.items() if found} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("point = 'after_read'", 1),
        ("raise ValueError(f'{one}: use insertion_point=\\'after_batching\\' there, {other}')", 1),
        ("def f(factor, insertion_point='auto', /, *, other): pass", 1),
        ("class C:\n    insertion_point: str = 'auto'", 1),
        ("'''after_read: see there.'''", 0),
        ("def f(insertion_point=None, factor='auto'): pass", 0),
        ("class C:\n    hold: str = 'auto'", 0),
    ],
)
def test_the_check_of_names_sees_a_point_and_nothing_else(source, names):
    assert len(named_in(source)) == names
