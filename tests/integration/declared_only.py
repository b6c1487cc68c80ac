"""An environment that has this package as a wheel, what it declares, and nothing else."""

import email
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required_by_wheel(wheel: Path) -> list[str]:
    """Returns what a wheel declares."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(files.read(name)).get_all("Requires-Dist") or []


def chosen(requirements: Iterable[str], extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """Yields those of a distribution's requirements that count here, with these extras of it."""
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def closure(requirements: Iterable[str]) -> dict[str, Distribution]:
    """Returns the distributions that are required without extras, directly or not, by name.

    Raises:
        PackageNotFoundError: One of them is not installed.
    """
    found: dict[str, Distribution] = {}
    seen: set[str] = set()
    waiting = list(chosen(requirements))
    while waiting:
        requirement = waiting.pop()
        if (key := f"{canonicalize_name(requirement.name)} {sorted(requirement.extras)}") not in seen:
            seen.add(key)
            installed = found[canonicalize_name(requirement.name)] = distribution(requirement.name)
            waiting += chosen(installed.requires or (), requirement.extras)
    return found


def _show(entry: Path, at: Path) -> None:
    """Links a file or a package. A folder without ``__init__.py`` may belong to several distributions: its content is linked."""
    if entry.is_dir() and not entry.name.endswith(".dist-info") and not (entry / "__init__.py").exists():
        at.mkdir(exist_ok=True)
        for inside in entry.iterdir():
            if not (at / inside.name).exists():
                (at / inside.name).symlink_to(inside)
    elif not at.exists():
        at.symlink_to(entry)


def show(distributions: Iterable[Distribution], folder: Path) -> None:
    """Fills a folder with links to what these distributions have installed beside each other."""
    folder.mkdir()
    for each in distributions:
        for top in {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")}:
            _show(Path(str(each.locate_file(top))), folder / top)


def make_environment(folder: Path, wheel: Path) -> Path:
    """Makes an environment with a wheel of this package and what it declares; returns the folder of its programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    programs = folder / "bin"
    install = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    show(closure(required_by_wheel(wheel)).values(), folder / "declared")
    purelib = sysconfig.get_path("purelib", "venv", vars={"base": str(folder)})
    (Path(purelib) / "declared.pth").write_text(f"{folder / 'declared'}\n")
    return programs
