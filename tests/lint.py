"""What `make lint` looks at beside ruff and mypy: tests, imports, messages, and files that must agree.

Each check is a function that yields its faults. ``python tests/lint.py`` runs all of them, prints what they found, and ends with
status 1 if that is anything. ``python tests/lint.py messages`` prints what the package says to its users, in a row.
"""

from __future__ import annotations

import ast
import datetime
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = ROOT / "lightning_echo", ROOT / "tests"
Check = Callable[[], Iterator[str]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """Puts a function among the checks."""
    CHECKS.append(function)
    return function


def main(arguments: list[str]) -> int:
    """Runs the checks. Returns the exit status."""
    if arguments == ["messages"]:
        print(*(f"{each.place}  {each.kind}: {each.text}" for each in all_messages()), sep="\n")
        return 0
    faults = [f"{each.__name__}: {fault}" for each in CHECKS for fault in each()]
    print(*faults, f"{len(CHECKS)} checks, {len(faults)} faults", sep="\n")
    return 1 if faults else 0


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


# ---------------------------------------------------------------------- tests: each asserts something, none ends silently

MOST_LINES = 600  # of a file: it is read in one go
EXPECTS = ("raises", "warns", "fail")  # of pytest


@cache
def test_modules() -> dict[str, Path]:
    """By name. No two files have the same one: pytest imports them by it."""
    return {path.stem: path for path in sorted(TESTS.rglob("*.py")) if path.stem != "conftest"}


def test_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The tests of a module: at its top, and in its classes."""
    for node in tree.body:
        in_class = isinstance(node, ast.ClassDef) and node.name.startswith("Test")
        for function in node.body if in_class else [node]:  # type: ignore[attr-defined]
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                yield function


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions, lambdas and classes that are defined in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            yield node
            yield from own_nodes(node)


def calls_of(function: ast.AST) -> set[str]:
    """Names that are called: `f` for ``f()``, ``self.f()`` and ``module.f()``."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.add(node.func.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            found.add(node.func.attr)
    return found


def helpers_of(tree: ast.Module) -> dict[str, list[ast.FunctionDef]]:
    """The functions of a module and of the files of the tests that it imports, by name."""
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    trees = [tree, *(tree_of(test_modules()[name]) for name in imported if name in test_modules())]
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in (node for each in trees for node in ast.walk(each)):
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


def asserts(function: ast.FunctionDef, helpers: dict[str, list[ast.FunctionDef]], seen: tuple[str, ...] = ()) -> bool:
    """Whether a function asserts something, itself or in a helper that it calls."""
    calls = calls_of(function)
    if any(isinstance(node, ast.Assert) for node in ast.walk(function)) or not calls.isdisjoint(EXPECTS):
        return True
    called = [helper for name in calls for helper in helpers.get(name, []) if helper.name not in seen]
    return any(asserts(helper, helpers, (*seen, function.name)) for helper in called)


def without_an_assertion(tree: ast.Module) -> list[str]:
    helpers = helpers_of(tree)
    return [function.name for function in test_functions(tree) if not asserts(function, helpers)]


def with_a_silent_end(tree: ast.Module) -> list[str]:
    """A test that returns looks passed, whatever it has looked at."""
    return [each.name for each in test_functions(tree) if any(isinstance(node, ast.Return) for node in own_nodes(each))]


@check
def each_test_asserts_something_and_runs_to_its_end() -> Iterator[str]:
    for name, path in test_modules().items():
        if name.startswith("test_"):
            yield from (f"{path}: {each} asserts nothing" for each in without_an_assertion(tree_of(path)))
            yield from (f"{path}: {each} returns" for each in with_a_silent_end(tree_of(path)))


@check
def a_file_of_tests_is_read_in_one_go_and_has_a_name_of_its_own() -> Iterator[str]:
    paths = [path for path in TESTS.rglob("*.py") if path.stem != "conftest"]
    yield from (f"{path} is longer than {MOST_LINES} lines" for path in paths if path.read_text().count("\n") > MOST_LINES)
    yield from (f"two files are called {path.stem}" for path in paths if test_modules()[path.stem] != path)


# ---------------------------------------------------------------------- imports: one way, from the bottom up

# The folders, and the files beside them: each imports what stands before it. lightning_echo/README.md.
LEVELS = (
    *("log", "insertion", "plan", "schema", "data", "split", "cache", "pipeline", "share", "measure", "config", "loader"),
    *("training", "datamodule", "analysis", "doctor", "attachment", "callback", "cli", "pytorch_lightning", "run", "__main__"),
)
MOST_FILES = 128  # 121; then stories that shared a file got their own: advice, page, waits, and four of the analysis
METHOD = LEVELS[: LEVELS.index("loader") + 1]  # data echoing itself
FOREIGN = {
    *("lightning", "pytorch_lightning", "lightning_fabric", "torchvision", "torchmetrics", "jsonargparse", "omegaconf", "ray"),
}
OF_PYTHON = set(sys.stdlib_module_names)
ARITHMETIC = {  # all that planning may import
    *("__future__", "abc", "array", "base64", "bisect", "collections", "dataclasses", "enum", "fractions", "functools"),
    *("hashlib", "heapq", "itertools", "math", "random", "typing", "zlib", "lightning_echo"),
}
# Beside what the whole level may import.
ALLOWED = {"plan/order.py": {"numpy"}, "plan/journal.py": {"json"}, "measure/timing.py": {"torch", "torchmetrics"}}
ALLOWED |= {name: {"ray"} for name in ["share/ray.py", "share/ray_actor.py", "share/ray_workers.py"]}
ALLOWED |= {name: {"matplotlib"} for name in ["measure/page.py", "measure/report.py", "measure/compare.py"]}


def files_of(level: str) -> list[Path]:
    """The files of a level: those of a folder and of all folders in it, or a file beside the folders."""
    return sorted((PACKAGE / level).rglob("*.py")) if (PACKAGE / level).is_dir() else [PACKAGE / f"{level}.py"]


def imported_by(tree: ast.Module) -> set[str]:
    """Full names of the modules that a file imports anywhere, also inside functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def roots_of(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_by(tree_of(path))}


def level_of(module: str) -> str | None:
    """Which level a module of the package is of; None: the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVELS else None


def upward(level: str, tree: ast.Module) -> set[str]:
    """What a file of a level imports that does not stand before it."""
    allowed = {*LEVELS[: LEVELS.index(level) + 1], None}
    return {name for name in imported_by(tree) if name.startswith("lightning_echo.") and level_of(name) not in allowed}


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """Names along a cycle; none, if there is no cycle."""
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            path.append(name)
            for other in sorted(graph[name]):
                if cycle := visit(other):
                    return cycle
            path.pop()
            done.add(name)
        return []

    return next((cycle for name in sorted(graph) if (cycle := visit(name))), [])


def graph_of(folder: Path) -> dict[str, set[str]]:
    """For each module of a folder: the modules of the same folder that it imports."""
    prefix = ".".join(("lightning_echo", *folder.relative_to(PACKAGE).parts, ""))
    known = {path.stem: path for path in folder.glob("*.py") if path.stem != "__init__"}
    return {
        name: {each.removeprefix(prefix).split(".")[0] for each in imported_by(tree_of(path)) if each.startswith(prefix)}
        & known.keys()
        for name, path in known.items()
    }


@check
def each_file_of_the_package_is_of_a_level_and_imports_what_stands_before_it() -> Iterator[str]:
    beside = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    yield from (f"{name} is of no level, or not there" for name in (beside | folders) ^ set(LEVELS))
    for level in LEVELS:
        for path in files_of(level):
            yield from (f"{path} imports {name}" for name in upward(level, tree_of(path)))
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        if cycle := cycle_in(graph_of(folder)):
            yield f"{folder}: {' imports '.join(cycle)}"


@check
def a_level_imports_only_what_it_may() -> Iterator[str]:
    """The method knows neither Lightning nor torchvision, planning no torch, measuring no Trainer."""
    usual = OF_PYTHON | {"lightning_echo", "torch", "numpy"}
    of_level = dict.fromkeys(METHOD, usual) | {"share": usual | {"cloudpickle"}}
    of_level |= {"plan": ARITHMETIC, "measure": OF_PYTHON | {"lightning_echo"}}
    for level, allowed in of_level.items():
        for path in files_of(level):
            extra = ALLOWED.get(path.relative_to(PACKAGE).as_posix(), set())
            yield from (f"{path} imports {name}" for name in roots_of(path) - allowed - extra)
    for level, levels, exempt in (
        ("measure", {"insertion", "schema", "measure"}, set()),
        ("analysis", {*METHOD, "analysis", "measure"}, {"analyzer", "command", "sources", "trials"}),  # they train
    ):
        for path in (path for path in files_of(level) if path.stem not in exempt):
            found = {name for name in imported_by(tree_of(path)) if level_of(name) not in {*levels, None}}
            yield from (f"{path} imports {name}" for name in found | roots_of(path) & FOREIGN - {"torchmetrics"})


@check
def nothing_of_lightning_that_begins_with_an_underscore_is_used() -> Iterator[str]:
    for path in PACKAGE.rglob("*.py"):
        for name in imported_by(tree_of(path)):
            if name.split(".")[0] in ("lightning", "pytorch_lightning") and any(part[0] == "_" for part in name.split(".")):
                yield f"{path} imports {name}"


@check
def the_package_is_small_enough_to_be_known_and_its_readme_is_the_map() -> Iterator[str]:
    files = list(PACKAGE.rglob("*.py"))
    if len(files) > MOST_FILES:
        yield f"{len(files)} files"
    yield from (
        f"{path} is longer than three lines"
        for path in files
        if path.stem == "__init__" and path.parent != PACKAGE and not 1 <= path.read_text().count("\n") <= 3
    )
    readme = (PACKAGE / "README.md").read_text()
    section = readme.split("## The house\n")[1].split("\n## ")[0]
    named = [line.split("|")[1].strip().strip("`*") for line in section.splitlines() if line.startswith(("| `", "| **`"))]
    if (order := tuple(dict.fromkeys(name.split("/")[0].removesuffix(".py") for name in named))) != LEVELS:
        yield f"the map has another order: {order}"
    there = {path.relative_to(PACKAGE).as_posix() for path in files if path.stem != "__init__"}
    there |= {f"{level}/" for level in LEVELS if (PACKAGE / level).is_dir()}
    yield from (f"{name} is in the map or in the package only" for name in set(named) ^ there)
    words = [
        line.split("|")[1].strip() for line in readme.split("## Words\n")[1].split("\n## ")[0].splitlines() if line[:2] == "| "
    ][2:]
    text = " ".join(path.read_text() for level in METHOD for path in files_of(level))
    yield from (f"nobody uses {word!r}" for word in words if not re.search(rf"\b{word.replace(' ', '[ _]')}s?\b", text))


# ---------------------------------------------------------------------- messages: errors, warnings, lines of the log

WARNS, INFORMS = {"warn", "rank_zero_warn"}, {"rank_zero_info"}
LOGS = {"LOGGER.info", "LOGGER.warning", "LOGGER.error", "LOGGER.debug"}
# They end something, are caught in the package, and are never seen: they need no text.
CONTROL_FLOW = {"Closed", "NextReader", "OrdersDifferError", "PassOver"}
PROTOCOLS = {"StopIteration", "NotImplementedError"}  # of Python, and of a subclass of ours
# Begin with a name that has a capital letter, which does not begin a sentence.
NAMES = r"(CachedDataset|StagedDataset|EchoCallback|EchoDataModule|EchoLoader|Decision|StopIteration|Trainer)\b"


class Message(NamedTuple):
    """A place in the package that says something.

    Attributes:
        place: File and line.
        kind: The name of the exception, or of the function that warns or logs.
        text: Of an f-string, a field is shown as ``{name}``; what is put together elsewhere as ``{call(...)}``.
        call: The call in the source.
    """

    place: str
    kind: str
    text: str
    call: ast.Call


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return f"{{{ast.unparse(node)}}}"


def messages_of(tree: ast.Module, name: str) -> list[Message]:
    """All messages of a file, in the order of their lines."""
    found = []
    for node in ast.walk(tree):
        call: Any = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(node, ast.Raise) and isinstance(call, ast.Name) and call.id[0].isupper():
            call = ast.copy_location(ast.Call(call, [], []), call)  # ``raise ValueError`` is ``raise ValueError()``
        if not isinstance(call, ast.Call):
            continue
        kind = ast.unparse(call.func)
        if isinstance(node, ast.Raise) or kind in LOGS or kind.split(".")[-1] in WARNS | INFORMS:
            found.append(Message(f"{name}:{call.lineno}", kind, text_of(call.args[0]) if call.args else "", call))
    return sorted(found, key=lambda message: message.call.lineno)


@cache
def all_messages() -> tuple[Message, ...]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return tuple(each for path in paths for each in messages_of(tree_of(path), str(path.relative_to(PACKAGE))))


def is_error(each: Message) -> bool:
    return re.fullmatch(r"[A-Z]\w+", each.kind) is not None


def is_told(each: Message) -> bool:
    """Outside the log."""
    return each.kind in ("warnings.warn", "rank_zero_warn", "rank_zero_info")


def wordless(each: Message) -> bool:
    """An error without a text, though somebody may see it."""
    return is_error(each) and not each.text and each.kind not in CONTROL_FLOW | PROTOCOLS


def without_value(each: Message) -> bool:
    """An error about a value that does not say which value came: neither after "got", nor anywhere in the sentence."""
    is_about = each.kind in ("TypeError", "ValueError") and re.search(r"\bmust (be|have|map)\b", each.text)
    return bool(is_about) and " got " not in each.text and "{" not in each.text


def untidy(each: Message) -> bool:
    """It ends in a full stop or a blank, or has two stops or blanks in a row."""
    return re.search(r"[.\s]$|(?<![.\s])\.\.(?!\.)|\S  |\.\.\.\.", each.text) is not None


def capitalised(each: Message) -> bool:
    """It begins like a sentence, but stands behind the name of an error, or behind ours."""
    text = each.text.removeprefix("lightning_echo: ")
    return re.match(r"[A-Z][a-z]", text) is not None and not re.match(NAMES, text)


def without_cause(each: Message) -> bool:
    """It says that something failed, and not what or why."""
    return re.search(r"\bfail(s|ed|ure)?\b", each.text) is not None and "{" not in each.text


def not_prefixed(each: Message) -> bool:
    """It does not say once whose it is. The summary begins with the name, see tests/integration/test_callback.py."""
    begins = each.text.startswith(("lightning_echo: ", "{summar"))
    return is_told(each) and (not begins or each.text.count("lightning_echo: ") > 1)


def prefixed_in_the_log(each: Message) -> bool:
    """The logger has our name, and the handler for programs without a set-up adds it."""
    return each.kind in LOGS and "lightning_echo:" in each.text


def without_category(each: Message) -> bool:
    """A warning has a category and points to the user's line."""
    has_level = any(word.arg == "stacklevel" for word in each.call.keywords)
    return each.kind == "warnings.warn" and (len(each.call.args) < 2 or not has_level)


RULES = (wordless, without_value, untidy, capitalised, without_cause, not_prefixed, prefixed_in_the_log, without_category)


@check
def messages_keep_their_rules() -> Iterator[str]:
    for each in all_messages():
        yield from (f"{rule.__name__}: {each.place}  {each.kind}: {each.text}" for rule in RULES if rule(each))
    caught = {
        word
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and node.type is not None
        for word in re.findall(r"\w+", ast.unparse(node.type))
    }
    yield from (f"{name} has no text, and nobody catches it" for name in CONTROL_FLOW - caught)


# ---------------------------------------------------------------------- CONTRIBUTING.md leads where it says

STORE = ("put", "get", "lengths_of", "counts", "freeze", "keys", "budget_bytes", "is_in_memory", "address", "attach")


def names_of(path: Path) -> set[str]:
    """What a file defines: functions, classes, methods, and the attributes that classes declare."""
    found = set()
    for node in tree_of(path).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        for inside in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(inside, ast.FunctionDef):
                found.add(f"{node.name}.{inside.name}")  # type: ignore[attr-defined]
            elif isinstance(inside, ast.AnnAssign) and isinstance(inside.target, ast.Name):
                found.add(f"{node.name}.{inside.target.id}")  # type: ignore[attr-defined]
    return found


@check
def ten_questions_are_answered_by_at_most_two_files_each() -> Iterator[str]:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Ten questions")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")][2:]
    if len(rows) != 10:
        yield f"{len(rows)} questions"
    for question, *cells in rows:
        places = re.findall(r"\[([\w/.]+)\]\((lightning_echo/[\w/.]+)\): `([\w.]+)`", "|".join(cells))
        if not question.strip().endswith("?") or not 1 <= len(places) <= 2 or len(places) != sum(bool(c.strip()) for c in cells):
            yield f"{question.strip()}: a question, and one or two places"
        for shown, path, name in places:
            if path != f"lightning_echo/{shown}" or name not in names_of(ROOT / path):
                yield f"{question.strip()} {path} has no {name}"
            elif len((ast.get_docstring(tree_of(ROOT / path)) or "").split()) <= 8:
                yield f"{path} does not say what it is for"


@check
def contributing_names_what_is_there() -> Iterator[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:lightning_echo|tests|docs|benchmarks|examples)/[\w./*-]+|\.(?:ci|github)/[\w./]+)`", text)
    yield from (f"{name} is not there" for name in {*named, *re.findall(r"\]\(([\w./]+)\)", text)} if not list(ROOT.glob(name)))
    methods = names_of(PACKAGE / "cache" / "arena.py")
    yield from (f"a store has no {name}" for name in STORE if f"`{name}`" not in text or f"Arena.{name}" not in methods)


# ---------------------------------------------------------------------- a release: one version, date and address everywhere

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST_PYTHON = PROJECT["requires-python"].removeprefix(">=")
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}


def minima_of(requirements: Iterable[str], python: str = OLDEST_PYTHON) -> dict[str, Version]:
    """The oldest versions that are declared for a version of Python, by name."""
    found = {}
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"python_version": python}):
            continue
        oldest = [Version(each.version) for each in requirement.specifier if each.operator == ">="]
        found |= dict.fromkeys([canonicalize_name(requirement.name)], oldest[0]) if oldest else {}
    return found


@check
def versions_and_dates_and_addresses_are_the_same_everywhere() -> Iterator[str]:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (\S+) - (\S+)$", changelog, flags=re.MULTILINE)  # the newest first
    code = re.search(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text(), flags=re.MULTILINE)
    versions = {PROJECT["version"], code and code[1], str(CITATION["version"]), *(version for version, _ in releases[:1])}
    if len(versions) > 1:
        yield f"different versions: {versions}"
    if CITATION.get("date-released") != (datetime.date.fromisoformat(releases[0][1]) if releases else None):
        yield "CITATION.cff has another date than the changelog"
    titles = re.findall(r"^## (.+)$", changelog, flags=re.MULTILINE)
    yield from (f"a section {title!r}" for title in set(titles) - {"Unreleased", *(f"{name} - {on}" for name, on in releases)})
    if [on for _, on in releases] != sorted((on for _, on in releases), reverse=True):
        yield "releases are not in order"
    kinds = re.findall(r"^### (.+)$", changelog.split("\n## ")[1], flags=re.MULTILINE)
    yield from (
        f"the newest section has {kinds.count(kind)} times {kind}"
        for kind in ("Added", "Changed", "Fixed")
        if kinds.count(kind) != 1
    )
    pairs = (
        (PROJECT["license"], CITATION["license"]),
        ([each["name"] for each in PROJECT["authors"]], [each["name"] for each in CITATION["authors"]]),
        (PROJECT["urls"]["Source"], CITATION["repository-code"]),
        (PROJECT["urls"]["Documentation"], CITATION["url"]),
    )
    yield from (f"{one} and {other}" for one, other in pairs if one != other)


@check
def the_citation_has_what_the_format_demands_and_each_paper_that_is_named() -> Iterator[str]:
    yield from {"cff-version", "message", "title", "authors"} - set(CITATION)
    for each in CITATION["references"]:
        yield from {"type", "title", "authors", "year", "url"} - set(each)
        yield from (f"author {name}" for name in each["authors"] if set(name) != {"given-names", "family-names"})
    pages = [*ROOT.glob("*.md"), *PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.md")]
    pages += [page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts]
    named = {paper for page in pages for paper in re.findall(r"\b\d{4}\.\d{5}\b", page.read_text())}
    cited = {each["url"].removeprefix("https://arxiv.org/abs/") for each in CITATION["references"] if "arXiv" in str(each)}
    # The evidence tests a finding that it only heard of, and says so.
    yield from (f"{paper} is named or cited only" for paper in named ^ (cited | {"2609.13922"}))


@check
def the_oldest_declared_versions_are_those_that_are_tested_and_told() -> Iterator[str]:
    extras = PROJECT["optional-dependencies"]
    declared = [*PROJECT["dependencies"], *extras["vision"], *extras["examples"]]
    lines = (TESTS / "oldest.txt").read_text().splitlines()
    pins = [line.replace("==", ">=", 1) for line in lines if line[0] != "#"]
    pythons = jobs_of(WORKFLOWS["ci"])["test"]["strategy"]["matrix"]["python"]
    for python in pythons:
        pinned, wanted = minima_of(pins, python), minima_of(declared, python)
        if pinned.pop(canonicalize_name("pytorch-lightning")) != pinned[canonicalize_name("lightning")] or pinned != wanted:
            yield f"tests/oldest.txt, Python {python}: {pinned}, declared: {wanted}"
    minima = minima_of(declared)
    page = (ROOT / "docs" / "about" / "versions.md").read_text()
    told = dict(re.findall(r"^\| (\w+)(?:, an extra)? \| ([\d.]+)", page, flags=re.MULTILINE))
    if f">={told.pop('Python')}" != PROJECT["requires-python"]:
        yield "versions.md has another Python"
    yield from {"torch", "lightning", "torchmetrics", "torchvision"} - set(told)
    yield from (f"versions.md: {name} {of}" for name, of in told.items() if Version(of) != minima[canonicalize_name(name)])
    classified = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in PROJECT["classifiers"]]
    if [each[1] for each in classified if each] != pythons or PROJECT["requires-python"] != f">={pythons[0]}":
        yield f"Python {pythons} is tested"


def jobs_of(workflow: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    return jobs


def targets_called_by(workflow: Path) -> Iterator[str]:
    """The targets of the Makefile that a workflow runs, also those that its matrix names."""
    for job in jobs_of(workflow).values():
        for step in job["steps"]:
            for target in re.findall(r"^make (\$\{\{ [a-z.]+ \}\}|\S+)", step.get("run", ""), flags=re.MULTILINE):
                yield from job["strategy"]["matrix"]["target"] if target == "${{ matrix.target }}" else [target]


@check
def workflows_call_targets_that_there_are_and_may_only_read() -> Iterator[str]:
    there = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    called = {target for workflow in WORKFLOWS.values() for target in targets_called_by(workflow)}
    yield from (f"make {target} is not there" for target in called - there)
    wanted = {"lint", "docs", "test", "test-all", "test-oldest", "test-ray", "dist", "links", "test-outside", "test-mosaic"}
    yield from (f"no workflow calls make {target}" for target in wanted - called)
    in_every_clone = set(re.findall(r"^make (\S+)$", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE))
    yield from (f"make {target} runs in .ci/run only" for target in in_every_clone - set(targets_called_by(WORKFLOWS["ci"])))
    for name, workflow in WORKFLOWS.items():
        text = workflow.read_text()
        if yaml.safe_load(text)["permissions"] != {"contents": "read"}:
            yield f"{name} may do more than read"
        if any(job["timeout-minutes"] > 120 for job in jobs_of(workflow).values()):
            yield f"{name} does not end in time"
        if re.search(r"twine|pypi-publish|secrets\.|gh release", text):
            yield f"{name} publishes"


@check
def issue_forms_have_what_github_demands() -> Iterator[str]:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[0-9]*.yml"))
    for form in forms:
        loaded = yaml.safe_load(form.read_text())
        asked = [field for field in loaded["body"] if field["type"] != "markdown"]
        is_whole = {"name", "description", "body"} <= set(loaded) and all(field["attributes"]["label"] for field in asked)
        has_kinds = {field["type"] for field in asked} <= {"textarea", "input", "dropdown", "checkboxes"}
        if not is_whole or not has_kinds or not len({field["id"] for field in asked}) == len(asked) > 0:
            yield f"{form.name} is not as it should be"
    doctor = {field.get("id"): field for field in yaml.safe_load(forms[0].read_text())["body"]}["doctor"]
    if "lightning-echo doctor" not in doctor["attributes"]["label"] or not doctor["validations"]["required"]:
        yield "whoever says that the accelerator waits is not asked for the doctor's output"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
