"""Which packages are loaded by what: the method knows neither Lightning nor torchvision. What files may import: tests/lint.py."""

import subprocess
import sys
from pathlib import Path

import pytest
from analyses import ANALYSIS

import lightning_echo

pytestmark = [pytest.mark.program, pytest.mark.own_interpreter]  # what is imported is seen

ROOT = Path(lightning_echo.__file__).parent
FOREIGN = (
    *("lightning", "pytorch_lightning", "lightning_fabric", "torchvision", "torchmetrics", "jsonargparse", "omegaconf", "ray"),
)
METHOD = ("plan", "data", "split", "cache", "pipeline", "share", "loader")


def ran(statements, packages=FOREIGN):
    """What a process of its own prints, and which of the packages are loaded after the statements ran there."""
    program = f"import sys\n{statements}\nprint('loaded:', *sorted(set({packages!r}) & set(sys.modules)))"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT.parent, timeout=120)
    shown, _, loaded = result.stdout.rpartition("loaded:")
    return shown, loaded.split()


def test_the_method_imports_neither_lightning_nor_torchvision():
    files = [path.relative_to(ROOT.parent) for folder in METHOD for path in (ROOT / folder).glob("[!_]*.py")]
    everything = "\n".join("import " + ".".join(path.with_suffix("").parts) for path in files)
    # The package itself imports Lightning for its data module; the method must not need it.
    alone = f"""
import types
package = types.ModuleType("lightning_echo")
package.__path__ = [{str(ROOT)!r}]
sys.modules["lightning_echo"] = package
{everything}
"""
    assert "loader.loader" in everything
    assert ran(alone)[1] == []


def test_the_package_imports_lightning_only_for_the_data_module():
    """A spawned worker imports the package for the loader's sake and must not pay for Lightning."""
    assert ran("from lightning_echo import EchoConfig, EchoLoader, StagedDataset")[1] == []


def test_version_and_help_need_neither_torch_nor_lightning():
    """The command begins at once."""
    program = """
from importlib.metadata import entry_points
from lightning_echo.__main__ import main
for arguments in (["--version"], ["--help"], ["doctor", "--help"], ["report", "--help"], ["shared", "--help"]):
    try:
        main(arguments)
    except SystemExit as ended:
        assert ended.code == 0
"""
    shown, loaded = ran(program, ("lightning", "torch", "numpy"))
    assert loaded == []
    assert shown.startswith(f"lightning-echo {lightning_echo.__version__}\n")
    assert shown.count("examples:") == 4


@pytest.mark.parametrize(("options", "loaded"), [([], []), (["--png", "figure.png"], ["matplotlib"])])
def test_a_report_needs_neither_lightning_nor_for_text_matplotlib(options, loaded, tmp_path):
    ANALYSIS.to_json(tmp_path / "analysis.json")
    arguments = ["report", str(tmp_path / "analysis.json"), *options[:1], *(str(tmp_path / name) for name in options[1:])]
    program = f"from lightning_echo.__main__ import main\nassert main({arguments!r}) == 0"
    assert ran(program, ("lightning", "matplotlib", "matplotlib.pyplot"))[1] == loaded
