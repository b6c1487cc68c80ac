"""The table of the insertion points: what it says of each; no other file names a point.

The site (docs/concepts/insertion_points.md) and the README of the package say the same.
"""

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


# ---------------------------------------------------------------- the public enum


def test_members_are_their_names_and_auto_is_the_last():
    assert [member.value for member in InsertionPoint] == [*NAMES, "auto"]
    assert [member.name for member in InsertionPoint] == [*NAMES, "auto"]
    assert POINTS == NAMES
    assert lightning_echo.InsertionPoint is InsertionPoint


@pytest.mark.parametrize("name", [*NAMES, "auto"])
def test_a_member_is_a_plain_string_wherever_one_is_wanted(name):
    member = InsertionPoint(name)
    assert (member == name, {name: 1}[member], f"{member}", str(member)) == (True, 1, name, name)
    assert type(member.value) is str
    assert repr(member) == f"<InsertionPoint.{name}: '{name}'>"
    assert member.option == f"insertion_point='{name}'"


@pytest.mark.parametrize("member", InsertionPoint)
def test_a_copy_of_a_member_is_the_member(member):
    assert copy.deepcopy(member) is member
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(member, protocol)) is member


def test_auto_stands_for_another_point_and_has_no_row():
    assert not InsertionPoint.auto.by_batches
    assert not InsertionPoint.auto.on_device
    with pytest.raises(ValueError, match="insertion_point='auto' stands for another point"):
        _ = InsertionPoint.auto.properties


# ---------------------------------------------------------------- the rows


@pytest.mark.parametrize("point", POINTS)
def test_what_is_not_reused_is_redone(point):
    row = point.properties
    stages = list(STAGES)
    assert list(row.reused) == stages[: len(row.reused)]
    assert list(row.redone) == (stages[len(row.reused) :] or ["on_after_batch_transfer"])


def test_each_point_reuses_a_stage_more_than_the_one_before():
    assert [len(point.properties.reused) for point in POINTS] == [1, 2, 3, 4, 5]


def test_items_are_batches_once_they_are_collated_and_on_the_device_once_they_are_transferred():
    for point in POINTS:
        assert point.by_batches is point.properties.by_batches is ("collate" in point.properties.reused)
        assert point.on_device is (point.properties.place is Place.device) is ("transfer" in point.properties.reused)
        assert (point.properties.place is Place.workers) is not point.by_batches


def test_the_later_a_point_the_less_it_needs():
    needs = list(Needs)
    order = [needs.index(point.properties.needs) for point in POINTS]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("needs", "allowed"),
    [(Needs.raw_items, NAMES), (Needs.split, NAMES[1:]), (Needs.examples, NAMES[2:]), (Needs.batches, NAMES[3:])],
)
def test_a_loader_allows_the_points_that_need_no_more_than_it_is(needs, allowed):
    assert points_from(needs) == allowed
    assert earliest(needs) is InsertionPoint(allowed[0])


def test_auto_takes_the_earliest_of_each_kind_of_loader_but_does_not_ask_for_raw_items():
    assert [point for point in POINTS if point.properties.for_auto] == list(map(earliest, list(Needs)[1:]))


# ---------------------------------------------------------------- the pages


def cells(path, point):
    """The cells of the first row about a point."""
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"| `{point}` |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def stages(names):
    return ", ".join(name if name in STAGES else f"`{name}`" for name in names)


@pytest.mark.parametrize("point", POINTS)
def test_the_page_on_insertion_points_says_what_the_table_says(point):
    row = point.properties
    name, item, redone, memory, purpose = cells(PACKAGE.parent / "docs" / "concepts" / "insertion_points.md", point)
    assert (name, item, redone, memory) == (f"`{point}`", row.item, stages(row.redone), row.memory)
    assert purpose


@pytest.mark.parametrize("point", POINTS)
def test_the_readme_of_the_package_says_what_the_table_says(point):
    row = point.properties
    assert cells(PACKAGE / "README.md", point) == [
        f"`{point}`",
        row.item,
        stages(row.reused),
        stages(row.redone),
        row.place.value,
        str(row.live_batches),
        row.needs.value,
        "yes" if row.for_auto else "no",
    ]


# ---------------------------------------------------------------- no other file names a point


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
    tree = ast.parse(source)
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    a_point, auto = re.compile(rf"\b({'|'.join(NAMES)})\b"), re.compile(r"['\"]auto['\"]")
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            found.append((node.lineno, node.attr))
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or isinstance(parents[node], ast.Expr):
            continue
        is_auto = node.value == "auto" or auto.search(node.value)
        spoken = spoken_of(node, parents).lower() if is_auto else ""
        # A factor may be "auto", too, and so may what a cache holds.
        if a_point.search(node.value) or (is_auto and "factor" not in spoken and "hold" not in spoken):
            found.append((node.lineno, node.value))
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_points_are_named_in_the_table_alone(path):
    named = named_in(path.read_text())
    if path == PACKAGE / "insertion.py":
        assert {name for _, name in named} >= {*NAMES, "auto"}, "the check sees names"
    else:
        assert named == []


@pytest.mark.parametrize(
    "source",
    [
        "point = 'after_read'",
        "raise ValueError(f'{one}: use insertion_point=\\'after_batching\\' there, {other}')",
        "if point is InsertionPoint.after_transfer: pass",
        "def f(factor, *, other=1, insertion_point='auto'): pass",
        "def f(factor, insertion_point='auto', /, *, other): pass",
        "make(factor=4, insertion_point='auto')",
        "is_asked = point != 'auto'",
        "message = \"ask for 'auto'\"",
        "class C:\n    insertion_point: str = 'auto'",
    ],
)
def test_the_check_of_names_can_fail(source):
    assert len(named_in(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "'''after_read: see there.'''",
        "def f(insertion_point=None, factor='auto'): pass",
        "def f(factor: Literal['auto'] | float): pass",
        "make(insertion_point=point, factor='auto')",
        "if factor == 'auto': point = None",
        "class C:\n    hold: str = 'auto'",
        "HOLDS = ('auto', 'raw')",
        "mode = 'autograd'",
    ],
)
def test_the_check_of_names_lets_through_what_names_no_point(source):
    assert named_in(source) == []
