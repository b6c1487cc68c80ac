"""The package as people get it: built, installed where there is nothing else than what it declares, and used there."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

import lightning_echo

pytest.importorskip("build")  # `make test-oldest` does not install it
from declared_only import chosen, make_environment, required_by_wheel

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_echo"
VERSION = lightning_echo.__version__
RAW = "https://raw.githubusercontent.com/lightning-echo/lightning-echo/main"
EXTRAS_OF_PACKAGE = ("vision", "ray", "report")  # the others are of tests, examples and benchmarks
EXTRAS_ALONE = ("matplotlib", "torchvision", "ray", "sklearn", "tensorboard", "pytest", "sphinx")
TRAINING = """
import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_echo import EchoCallback


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, shuffle=True, num_workers=2)
echo = EchoCallback(factor=2, cache={"size": "16MiB", "hold": "whole"})
Trainer(max_epochs=2, accelerator="cpu", callbacks=[echo], enable_checkpointing=False).fit(Model(), loader)
print("fresh", echo.reports[-1].fresh_examples, "echoed", echo.reports[-1].echoed_examples)
"""

pytestmark = [pytest.mark.program, pytest.mark.slow, pytest.mark.own_interpreter]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Returns the source archive, and the wheel that is built from it, in a copy where `make test-other` has left its folder."""
    folder, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source") / "repository"
    not_of_it = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", ".pytorch_lightning", "__pycache__", "_build")
    shutil.copytree(ROOT, source, symlinks=True, ignore=not_of_it)
    (source / ".pytorch_lightning").mkdir()
    for name in ("lightning_echo", "examples", "docs"):
        (source / ".pytorch_lightning" / name).symlink_to(source / name)
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source], check=True, capture_output=True)
    return folder / f"lightning_echo-{VERSION}.tar.gz", folder / f"lightning_echo-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def programs(built, tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("environment") / "venv", built[1])


@pytest.fixture
def run(programs, tmp_path):
    """Returns a function that runs a program of the environment in an empty folder."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_", "PYTEST"))}

    def run(program, *arguments):
        command = [programs / program, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=240)

    return run


def test_the_source_archive_has_what_people_build_and_test_and_cite_from(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {
        *("LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff"),
        *("Makefile", "pyproject.toml", ".ci/run", ".github/workflows/ci.yml", "docs/conf.py", "docs/index.md"),
        *("lightning_echo/py.typed", "tests/lint.py", "examples/digits.py", "benchmarks/run.py"),
    }
    assert [name for name in names if re.search(r"(^|/)(_build|__pycache__|\.venv|\.git|lightning_logs)(/|$)", name)] == []


def test_the_wheel_has_the_package_its_types_its_licence_and_a_description_with_whole_addresses(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = set(wheel.namelist())
        description = wheel.read(f"lightning_echo-{VERSION}.dist-info/METADATA").decode()
    assert {name.split("/")[0] for name in names} == {"lightning_echo", f"lightning_echo-{VERSION}.dist-info"}
    assert names >= {"lightning_echo/py.typed", f"lightning_echo-{VERSION}.dist-info/licenses/LICENSE"}
    assert {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")} <= names
    assert {"License-Expression: Apache-2.0", "License-File: LICENSE", f"Version: {VERSION}"} <= set(description.splitlines())
    links = re.findall(r"\]\(([^)]+)\)", description)
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()))
    assert [link for link in links if not link.startswith("https://")] == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", description)
    assert [link for link in pictures if link.startswith(RAW)] == [f"{RAW}/docs/time_to_target.svg"]
    assert [link for link in links if link.startswith(RAW)] == [f"{RAW}/docs/time_to_target.svg"], "pages are not raw files"


def imports_of(path):
    """Yields the packages that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_each_import_of_the_package_is_declared_by_name(built):
    declared = {canonicalize_name(each.name) for each in chosen(required_by_wheel(built[1]), EXTRAS_OF_PACKAGE)}
    imported = {name for path in PACKAGE.rglob("*.py") for name in imports_of(path)}
    of_programs = {"pytorch_lightning"}  # only where the program has imported it
    foreign = imported - set(sys.stdlib_module_names) - {"lightning_echo"} - of_programs
    assert foreign > {"torch", "lightning", "numpy", "yaml"}
    installed = packages_distributions()  # what is not installed here has the name of its package
    of = {name: {canonicalize_name(each) for each in installed.get(name, [name])} for name in foreign}
    assert [name for name, distributions in of.items() if declared.isdisjoint(distributions)] == []


def test_the_environment_has_no_extra_and_each_module_and_each_public_name_is_imported_there(run):
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in sorted(PACKAGE.rglob("*.py"))
    ]
    program = f"""
import importlib, importlib.util, lightning_echo
print([name for name in {EXTRAS_ALONE!r} if importlib.util.find_spec(name) is not None])
for name in {modules!r}:
    importlib.import_module(name)
for name in lightning_echo.__all__:
    getattr(lightning_echo, name)
print(lightning_echo.__file__)
"""
    ended = run("python", "-c", program)
    assert ended.returncode == 0, ended.stderr
    extras, file = ended.stdout.splitlines()
    assert extras == "[]"
    assert "site-packages/lightning_echo" in file
    assert run("lightning-echo", "--version").stdout.split()[-1:] == [VERSION]
    assert '"findings"' in run("lightning-echo", "doctor", "--json").stdout


def test_a_training_echoes_and_caches_and_its_report_is_read_without_the_extras(run, tmp_path):
    ended = run("python", "-c", TRAINING)
    assert ended.returncode == 0, ended.stderr
    fresh, echoed = re.search(r"fresh (\d+) echoed (\d+)", ended.stdout).groups()
    assert int(fresh) + int(echoed) == 2 * 64  # of the run
    assert int(echoed) > 0
    (summary,) = tmp_path.rglob("echo_summary.json")
    told = run("lightning-echo", "report", str(summary.parent))
    assert told.returncode == 0, told.stderr
    assert "fresh" in told.stdout
    drawn = run("lightning-echo", "report", str(summary.parent), "--png", "figure.png")
    assert drawn.returncode != 0
    assert "pip install 'lightning-echo[report]'" in drawn.stderr
