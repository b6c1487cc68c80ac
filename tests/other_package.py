"""Copies the tests, with ``pytorch_lightning`` wherever they say ``lightning``: ``python tests/other_package.py FOLDER``.

In the copy each import, and each class path in a text, names the other package. Everything else of the repository is linked. Run
pytest in the folder: ``make test-other``.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_COPIED = ("tests", "pyproject.toml")
# Not copied: they use both packages, start examples or build the repository, which are not copied.
_LEFT_OUT = ("test_packages.py", "test_built_package.py", "test_hydra_example.py", "test_slurm.py")
_OWN = (".git", ".venv")  # not linked: links to environments would be walked through
RULES = (
    (r"\blightning\.pytorch\b", "pytorch_lightning"),
    (r"\blightning\.fabric\b", "lightning_fabric"),
    (r"^(\s*)from lightning import fabric\b", r"\1import lightning_fabric as fabric"),
    (r"^(\s*)from lightning import ", r"\1from pytorch_lightning import "),
    (r"^(\s*)import lightning$", r"\1import pytorch_lightning as lightning"),
    # The class for a command line is the only one that there is once for each package.
    (
        r"^(\s*)(from lightning_echo import .*?)\b(?:EchoCLI, |, EchoCLI$)(.*)$",
        r"\1\2\3; from lightning_echo.pytorch_lightning import EchoCLI",
    ),
    (r"^(\s*)from lightning_echo import EchoCLI$", r"\1from lightning_echo.pytorch_lightning import EchoCLI"),
)


def rewritten(text: str) -> str:
    """Returns the source of a test with the other package.

    >>> print(rewritten("import lightning.pytorch as pl\\nfrom lightning_echo import A, EchoCLI, B"))
    import pytorch_lightning as pl
    from lightning_echo import A, B; from lightning_echo.pytorch_lightning import EchoCLI
    """
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def copy(folder: Path) -> None:
    """Makes the folder again from the start."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in ROOT.iterdir():
        if path.name not in (*_COPIED, *_OWN) and path != folder:
            (folder / path.name).symlink_to(path)
    for path in [ROOT / "pyproject.toml", *(ROOT / "tests").rglob("*")]:
        target = folder / path.relative_to(ROOT)
        if path.is_file() and "__pycache__" not in path.parts:
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix in (".py", ".yaml") and path.name not in _LEFT_OUT:
                target.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
            elif path.name == "pyproject.toml":  # of which only the filters of warnings are about the tests
                target.write_text(
                    path.read_text(encoding="utf-8").replace(":lightning.pytorch", ":pytorch_lightning"), encoding="utf-8"
                )
            elif path.name not in _LEFT_OUT:
                shutil.copy(path, target)


if __name__ == "__main__":
    copy(Path(sys.argv[1]).resolve())
