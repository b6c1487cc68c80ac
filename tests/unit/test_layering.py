"""Who may import whom: folders import one way, so do the files in each, and the method knows neither Lightning nor torchvision.

Imports at run time are seen in a process of its own; which file imports which is read from the source.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_echo

pytestmark = pytest.mark.own_interpreter  # what is imported is seen

ROOT = Path(lightning_echo.__file__).parent
# The folders, and the files beside them, from the bottom up: each imports what stands before it. lightning_echo/README.md.
LEVELS = (
    "log",
    "insertion",
    "plan",
    "schema",
    "data",
    "split",
    "cache",
    "ranks",
    "pipeline",
    "share",
    "config",
    "loader",
    "measure",
    "training",
    "datamodule",
    "analysis",
    "doctor",
    "attachment",
    "callback",
    "cli",
    "__main__",
)
MOST_FILES = 100
METHOD = LEVELS[: LEVELS.index("loader") + 1]  # data echoing itself
FOREIGN = (
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "torchvision",
    "torchmetrics",
    "jsonargparse",
    "omegaconf",
    "ray",
)


def loaded_by(statements):
    """Which of the foreign packages are loaded after the statements ran in a process of their own."""
    program = f"import sys\n{statements}\nprint(*sorted(set({FOREIGN!r}) & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT.parent, timeout=120
    )
    return result.stdout.split()


def files_of(level):
    """The files of a level: those of a folder and of all folders in it, or a file beside the folders."""
    return sorted((ROOT / level).rglob("*.py")) if (ROOT / level).is_dir() else [ROOT / f"{level}.py"]


def name_of(path):
    """The full name of a module."""
    return ".".join(("lightning_echo", *path.relative_to(ROOT).with_suffix("").parts))


def modules(package):
    """Names of the modules in a folder of the package, without ``__init__``."""
    return sorted(path.stem for path in (ROOT / package).glob("*.py") if path.stem != "__init__")


def imported_by(source):
    """Full names of the modules that a file imports anywhere, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def imports_within(package):
    """For each module of a folder: the modules of the same folder that it imports."""
    prefix, known = f"lightning_echo.{package}.".replace("/", ".").replace("..", "."), modules(package)
    return {
        name: {
            imported.removeprefix(prefix).split(".")[0]
            for imported in imported_by((ROOT / package / f"{name}.py").read_text())
            if imported.startswith(prefix)
        }
        & set(known)
        for name in known
    }


def a_cycle_in(graph):
    """Names along a cycle, or None."""
    done, on_the_way = set(), []

    def visit(name):
        if name in on_the_way:
            return [*on_the_way[on_the_way.index(name) :], name]
        if name not in done:
            on_the_way.append(name)
            for other in sorted(graph[name]):
                if cycle := visit(other):
                    return cycle
            on_the_way.pop()
            done.add(name)
        return None

    return next((cycle for name in sorted(graph) if (cycle := visit(name))), None)


def level_of(module):
    """Which level a module of the package is of; None: the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVELS else None


def test_each_file_is_of_a_level():
    beside = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert beside | folders == set(LEVELS)


def upward(level, source):
    """What a file of a level imports that does not stand before that."""
    allowed = {*LEVELS[: LEVELS.index(level) + 1], None} if level in LEVELS else set()
    names = {name for name in imported_by(source) if name.startswith("lightning_echo.")}
    return {name for name in names if level_of(name) not in allowed}


@pytest.mark.parametrize("level", LEVELS)
def test_a_folder_imports_only_those_before_it(level):
    for path in files_of(level):
        assert upward(level, path.read_text()) == set(), path


def test_the_check_of_levels_can_fail():
    assert upward("plan", "from lightning_echo.loader.loader import EchoLoader")
    assert upward("loader", "def f():\n    import lightning_echo.callback")
    assert not upward("callback", "from lightning_echo.loader import state")


def test_the_package_is_small_enough_to_be_known():
    assert len(list(ROOT.rglob("*.py"))) <= MOST_FILES


@pytest.mark.parametrize("level", [level for level in LEVELS if (ROOT / level).is_dir()])
def test_the_text_of_a_folder_is_short(level):
    assert 1 <= len((ROOT / level / "__init__.py").read_text().splitlines()) <= 3


def test_the_method_imports_neither_lightning_nor_torchvision():
    everything = "\n".join(f"import {name_of(path)}" for level in METHOD for path in files_of(level) if path.stem != "__init__")
    # The package itself imports Lightning for its data module; the method must not need it.
    alone = f"""
import types
package = types.ModuleType("lightning_echo")
package.__path__ = [{str(ROOT)!r}]
sys.modules["lightning_echo"] = package
{everything}
"""
    assert "loader.loader" in everything
    assert loaded_by(alone) == []


def test_the_package_imports_lightning_only_for_the_data_module():
    """A spawned worker imports the package for the loader's sake and must not pay for Lightning."""
    assert loaded_by("from lightning_echo import EchoConfig, EchoLoader, StagedDataset") == []


@pytest.mark.slow
def test_the_checks_above_can_fail():
    assert {"lightning", "torchvision"} <= set(loaded_by("from lightning_echo import EchoDataModule; import torchvision"))


@pytest.mark.parametrize("level", METHOD)
def test_no_file_of_the_method_imports_them_later_either(level):
    for path in files_of(level):
        imported = {module.split(".")[0] for module in imported_by(path.read_text())}
        allowed = {"ray"} if path.name == "ray.py" else set()  # to other nodes, and only there
        assert not (imported & set(FOREIGN)) - allowed, path
        sends = {"cloudpickle"} if level == "share" else set()  # parts of a loader, to the reader
        assert imported <= {"lightning_echo", "torch", "numpy"} | sends | allowed | set(sys.stdlib_module_names), path


def test_measuring_knows_neither_a_trainer_nor_the_method():
    for name in modules("measure"):
        imported = imported_by((ROOT / "measure" / f"{name}.py").read_text())
        roots = {module.split(".")[0] for module in imported}
        allowed = {"timing": {"torch", "torchmetrics"}, "page": {"matplotlib"}, "run_report": {"matplotlib"}}.get(name, set())
        assert roots <= {"lightning_echo"} | set(sys.stdlib_module_names) | allowed, name
        for module in imported:
            if module.startswith("lightning_echo."):
                assert module.split(".")[1] in ("insertion", "schema", "measure"), f"{name} imports {module}"


def test_in_an_analysis_only_what_trains_knows_lightning():
    trains = {"analyzer", "sources"}
    for path in files_of("analysis"):
        if path.stem in trains:
            continue
        imported = imported_by(path.read_text())
        assert not {module.split(".")[0] for module in imported} & set(FOREIGN), path
        for module in imported:
            if module.startswith("lightning_echo."):
                assert module.split(".")[1] in (*METHOD, "analysis", "measure"), f"{path} imports {module}"


def test_a_saved_analysis_is_read_without_lightning():
    assert loaded_by("from lightning_echo.__main__ import main") == []


@pytest.mark.parametrize("package", [*sorted({str(path.parent.relative_to(ROOT)) for path in ROOT.rglob("*.py")} - {"."}), ""])
def test_files_import_one_way(package):
    graph = imports_within(package)
    assert a_cycle_in(graph) is None
    assert any(graph.values()), "the check sees imports"


def test_the_check_for_cycles_can_fail():
    assert a_cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == ["a", "b", "c", "a"]
    assert a_cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def test_planning_is_arithmetic_without_torch_or_input_and_output():
    for path in files_of("plan"):
        imported = {module.split(".")[0] for module in imported_by(path.read_text())}
        allowed = {
            "__future__",
            "abc",
            "array",
            "base64",
            "bisect",
            "collections",
            "enum",
            "dataclasses",
            "fractions",
            "functools",
            "hashlib",
            "heapq",
            "itertools",
            "math",
            "zlib",
        }
        allowed |= {"random", "typing", "lightning_echo"}
        assert imported <= allowed | ({"numpy"} if path.stem == "order" else set()), path


def test_nothing_of_lightning_that_begins_with_an_underscore_is_used():
    for path in ROOT.rglob("*.py"):
        for imported in imported_by(path.read_text()):
            if imported.split(".")[0] in ("lightning", "pytorch_lightning"):
                assert not any(part.startswith("_") for part in imported.split(".")), f"{path.name} imports {imported}"


def test_each_word_of_the_glossary_is_used_in_the_code():
    """A word that nobody uses any more would be learned for nothing."""
    section = (ROOT / "README.md").read_text().split("## Words\n")[1].split("\n## ")[0]
    words = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(words) == len(set(words)) > 10
    text = " ".join(path.read_text() for level in METHOD for path in files_of(level))
    assert [word for word in words if not re.search(rf"\b{word.replace(' ', '[ _]')}s?\b", text)] == []


def test_the_map_in_the_readme_names_all_folders_and_files_in_their_order():
    section = (ROOT / "README.md").read_text().split("## The house\n")[1].split("\n## ")[0]
    named = [line.split("|")[1].strip().strip("`*") for line in section.splitlines() if line.startswith(("| `", "| **`"))]
    levels = list(dict.fromkeys(name.split("/")[0].removesuffix(".py") for name in named))
    assert tuple(levels) == LEVELS
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if path.stem != "__init__"]
    assert sorted(named) == sorted([*files, *(f"{level}/" for level in LEVELS if (ROOT / level).is_dir())])
