"""Which packages are loaded by what: the method knows neither Lightning nor torchvision. What files may import: tests/lint.py."""

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_echo

pytestmark = pytest.mark.own_interpreter  # what is imported is seen

ROOT = Path(lightning_echo.__file__).parent
FOREIGN = (
    *("lightning", "pytorch_lightning", "lightning_fabric", "torchvision", "torchmetrics", "jsonargparse", "omegaconf", "ray"),
)
METHOD = ("plan", "data", "split", "cache", "pipeline", "share", "loader")


def loaded_by(statements):
    """Which of the foreign packages are loaded after the statements ran in a process of their own."""
    program = f"import sys\n{statements}\nprint(*sorted(set({FOREIGN!r}) & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT.parent, timeout=120
    )
    return result.stdout.split()


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
    assert loaded_by(alone) == []


def test_the_package_imports_lightning_only_for_the_data_module():
    """A spawned worker imports the package for the loader's sake and must not pay for Lightning."""
    assert loaded_by("from lightning_echo import EchoConfig, EchoLoader, StagedDataset") == []


def test_a_saved_analysis_is_read_without_lightning():
    assert loaded_by("from lightning_echo.__main__ import main") == []


@pytest.mark.slow
def test_the_checks_above_can_fail():
    assert {"lightning", "torchvision"} <= set(loaded_by("from lightning_echo import EchoDataModule; import torchvision"))
