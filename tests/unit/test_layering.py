"""Who may import whom: the method knows neither Lightning nor torchvision, and its files import one way.

Imports at run time are seen in a process of its own; which file imports which is read from the source.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_echo

ROOT = Path(lightning_echo.__file__).parent
FOREIGN = ("lightning", "pytorch_lightning", "lightning_fabric", "torchvision", "torchmetrics", "jsonargparse", "omegaconf")


def loaded_by(statements):
    """Which of the foreign packages are loaded after the statements ran in a process of their own."""
    program = f"import sys\n{statements}\nprint(*sorted(set({FOREIGN!r}) & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT.parent, timeout=120
    )
    return result.stdout.split()


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
    prefix, known = f"lightning_echo.{package}.".replace("..", "."), modules(package)
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


def test_the_method_imports_neither_lightning_nor_torchvision():
    everything = "\n".join(f"import lightning_echo.echoing.{name}" for name in modules("echoing"))
    # The package itself imports Lightning for its data module; the method must not need it.
    alone = f"""
import types
package = types.ModuleType("lightning_echo")
package.__path__ = [{str(ROOT)!r}]
sys.modules["lightning_echo"] = package
{everything}
"""
    assert loaded_by(alone) == []


def test_the_package_imports_lightning_only_for_the_data_module():
    """A spawned worker imports the package for the loader's sake and must not pay for Lightning."""
    assert loaded_by("from lightning_echo import EchoConfig, EchoLoader, StagedDataset") == []


def test_the_checks_above_can_fail():
    assert {"lightning", "torchvision"} <= set(loaded_by("from lightning_echo import EchoDataModule; import torchvision"))


def test_no_file_of_the_method_imports_them_later_either():
    for name in modules("echoing"):
        imported = {module.split(".")[0] for module in imported_by((ROOT / "echoing" / f"{name}.py").read_text())}
        assert not imported & set(FOREIGN), name
        assert imported <= {"lightning_echo", "torch", "numpy"} | set(sys.stdlib_module_names), name


def test_the_method_imports_nothing_of_the_package_outside_itself():
    for name in modules("echoing"):
        for imported in imported_by((ROOT / "echoing" / f"{name}.py").read_text()):
            if imported.startswith("lightning_echo"):
                assert imported.startswith("lightning_echo.echoing"), f"{name} imports {imported}"


def test_measuring_knows_neither_a_trainer_nor_the_method():
    for name in modules("measuring"):
        imported = imported_by((ROOT / "measuring" / f"{name}.py").read_text())
        roots = {module.split(".")[0] for module in imported}
        allowed = {"torch", "torchmetrics"} if name == "metrics" else set()
        assert roots <= {"lightning_echo"} | set(sys.stdlib_module_names) | allowed, name
        for module in imported:
            if module.startswith("lightning_echo"):
                assert module.startswith("lightning_echo.measuring"), f"{name} imports {module}"


def test_in_an_analysis_only_what_trains_knows_lightning():
    trains = {"analyzer", "checks", "command", "data", "fits"}
    for name in set(modules("analysis")) - trains:
        imported = imported_by((ROOT / "analysis" / f"{name}.py").read_text())
        assert not {module.split(".")[0] for module in imported} & set(FOREIGN), name
        for module in imported:
            if module.startswith("lightning_echo"):
                assert module.split(".")[1] in ("analysis", "echoing", "measuring"), f"{name} imports {module}"


def test_a_saved_analysis_is_read_without_lightning():
    assert loaded_by("from lightning_echo.__main__ import main") == []


@pytest.mark.parametrize(
    ("package", "top"), [("echoing", "loader"), ("measuring", "target_idle"), ("analysis", "command"), ("", "callback")]
)
def test_files_import_one_way(package, top):
    graph = imports_within(package)
    assert a_cycle_in(graph) is None
    assert graph[top], "the check sees imports"


def test_the_check_for_cycles_can_fail():
    assert a_cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == ["a", "b", "c", "a"]
    assert a_cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        # design.md, section 7: insertion, plan <- stages, splits, dataset <- batches, prefetch <- loader
        (("insertion", "plan", "buffer"), ("stages", "splits", "dataset", "batches", "prefetch", "requests", "run", "loader")),
        (("stages", "splits", "dataset"), ("batches", "prefetch", "run", "loader")),
        (("batches", "prefetch"), ("run", "loader")),
    ],
)
def test_files_import_only_what_comes_before_them_in_the_data_flow(lower, higher):
    graph = imports_within("echoing")

    def reached(name):
        return {name}.union(*(reached(other) for other in graph[name]))

    for name in lower:
        assert not reached(name) & set(higher), name


def test_the_plan_is_arithmetic_without_torch_numpy_or_input_and_output():
    for name in ("plan", "buffer"):
        imported = {module.split(".")[0] for module in imported_by((ROOT / "echoing" / f"{name}.py").read_text())}
        allowed = {"__future__", "collections", "dataclasses", "fractions", "math", "random", "typing", "lightning_echo"}
        assert imported <= allowed | {"itertools"}, name


def test_nothing_of_lightning_that_begins_with_an_underscore_is_used():
    for path in ROOT.rglob("*.py"):
        for imported in imported_by(path.read_text()):
            if imported.split(".")[0] in ("lightning", "pytorch_lightning"):
                assert not any(part.startswith("_") for part in imported.split(".")), f"{path.name} imports {imported}"
