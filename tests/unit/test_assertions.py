"""What a test must have: an assertion, no silent way out, a file that can be read in one go."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PATHS = [path for path in TESTS.rglob("*.py") if path.stem != "conftest"]
FILES = {path.stem: path for path in PATHS}  # no two files have the same name: pytest imports them by it
TEST_FILES = sorted(name for name in FILES if name.startswith("test_"))
MOST_LINES = 600
EXPECTS = ("raises", "warns", "fail")  # of pytest


def functions_of(tree):
    """Returns the test functions of a module: at its top, and in its classes."""
    for node in tree.body:
        in_a_class = isinstance(node, ast.ClassDef) and node.name.startswith("Test")
        for function in node.body if in_a_class else [node]:
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                yield function


def own_nodes(function):
    """Walks a function without the functions, lambdas and classes that are defined in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            yield node
            yield from own_nodes(node)


def calls_of(function):
    """Returns the names that are called: `f` for ``f()``, ``self.f()`` and ``module.f()``."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            yield node.func.attr


def asserts(function, helpers, seen=()):
    """Whether a function asserts something, itself or in a helper that it calls."""
    calls = set(calls_of(function))
    if any(isinstance(node, ast.Assert) for node in ast.walk(function)) or not calls.isdisjoint(EXPECTS):
        return True
    called = [helper for name in calls for helper in helpers(name) if helper.name not in seen]
    return any(asserts(helper, helpers, (*seen, function.name)) for helper in called)


def helpers_of(tree):
    """Returns how to find the helpers of a module by name: its own and those that it imports from another file of the tests."""
    trees = [tree]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in FILES and not node.level:
            trees.append(ast.parse(FILES[node.module].read_text()))
    found = {}
    for each in trees:
        for node in ast.walk(each):
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(node)
    return lambda name: found.get(name, [])


def without_an_assertion(source):
    tree = ast.parse(source)
    helpers = helpers_of(tree)
    return [function.name for function in functions_of(tree) if not asserts(function, helpers)]


def with_a_silent_end(source):
    """A test that returns looks passed, whatever it has looked at."""
    return [
        function.name
        for function in functions_of(ast.parse(source))
        if any(isinstance(node, ast.Return) for node in own_nodes(function))
    ]


@pytest.mark.parametrize("name", TEST_FILES)
def test_each_test_asserts_something(name):
    assert without_an_assertion(FILES[name].read_text()) == []


@pytest.mark.parametrize("name", TEST_FILES)
def test_no_test_returns_before_its_end(name):
    assert with_a_silent_end(FILES[name].read_text()) == []


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_file_is_too_long_to_be_read_in_one_go(name):
    assert len(FILES[name].read_text().splitlines()) <= MOST_LINES


def test_no_two_files_have_the_same_name():
    assert len(FILES) == len(PATHS)


def test_the_checks_above_can_fail():
    helper = "def check(x):\n    assert x\n"
    nothing = "def test_it():\n    f()\n"
    for source in (nothing, "class TestIt:\n    def test_it(self):\n        self.f()\n", "def f(): f()\n" + nothing):
        assert without_an_assertion(source) == ["test_it"]
    for body in ("assert 1", "check(1)", "pytest.raises(ValueError)", "again(1)"):
        source = f"{helper}def again(x):\n    check(x)\ndef test_it():\n    {body}\n"
        assert without_an_assertion(source) == []
    assert with_a_silent_end("def test_it():\n    if x:\n        return\n    assert x\n") == ["test_it"]
    assert with_a_silent_end("def test_it():\n    def f():\n        return 1\n    assert f()\n") == []
