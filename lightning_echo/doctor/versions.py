"""The checks of versions: what is installed, and which versions must not be used together, or not at all."""

from __future__ import annotations

from lightning_echo.doctor.findings import Finding, error, ok, warning
from lightning_echo.doctor.machine import Machine

__all__ = ["check_versions"]

_MALICIOUS = ("2.6.2", "2.6.3")  # GHSA-w37p-236h-pfx3
_OLDEST_LIGHTNING, _OLDEST_TORCH, _OLDEST_PYTHON = (2, 5), (2, 4), (3, 10)
# The first release of each Python whose fork() takes the interpreter's lock of threads first (CPython's issue 112275).
_FORK_MENDED = {10: 15, 11: 10}


def check_versions(machine: Machine) -> list[Finding]:
    """Returns the findings about Python and the packages."""
    return [_python(machine), _torch(machine), _torchvision(machine), _lightning(machine), _package(machine)]


def _python(machine: Machine) -> Finding:
    text = ".".join(map(str, machine.python))
    major, minor, micro = machine.python
    if machine.python < _OLDEST_PYTHON:
        return error("python", f"Python {text} is older than 3.10.", "Use Python 3.10 or later.", version=text)
    mended = _FORK_MENDED.get(minor) if major == 3 else None
    if mended is not None and micro < mended:
        return warning(
            "python",
            f"Python {text} has CPython's issue 112275: with several ranks on gloo, a forked worker now and then hangs for good.",
            f"Use Python 3.{minor}.{mended} or later, or DataLoader(..., multiprocessing_context='forkserver').",
            version=text,
        )
    return ok("python", f"Python {text}.", version=text)


def _torch(machine: Machine) -> Finding:
    return _at_least(machine, "torch", _OLDEST_TORCH)


def _torchvision(machine: Machine) -> Finding:
    version = machine.version_of("torchvision")
    if version is None:
        return ok("torchvision", "torchvision is not installed, and is not needed.", version=None)
    try:
        machine.import_operators()
    except (RuntimeError, ImportError, AttributeError, OSError) as problem:  # operators of another torch, or missing libraries
        return error(
            "torchvision",
            f"torchvision {version} does not fit torch {machine.version_of('torch')}: {problem}.",
            "Install torch and torchvision together, from the same source, in a fresh environment.",
            version=version,
        )
    return ok("torchvision", f"torchvision {version} fits torch.", version=version)


def _lightning(machine: Machine) -> Finding:
    version = machine.version_of("lightning")
    for package in ("lightning", "pytorch-lightning"):
        if (found := machine.version_of(package)) in _MALICIOUS:
            return error(
                "lightning",
                f"{package} {found} was a malicious release (GHSA-w37p-236h-pfx3).",
                "Treat the secrets of this machine as stolen, and install another release in a fresh environment: "
                "pip install 'lightning!=2.6.2,!=2.6.3'.",
                version=found,
            )
    if version is None and (other := machine.version_of("pytorch-lightning")) is not None:
        return error(
            "lightning",
            f"pytorch-lightning {other} is installed, and the package lightning is not.",
            "Install lightning, and import lightning.pytorch in place of pytorch_lightning.",
            version=None,
        )
    return _at_least(machine, "lightning", _OLDEST_LIGHTNING)


def _package(machine: Machine) -> Finding:
    version = machine.version_of("lightning-echo")
    if version is None:
        return ok("lightning_echo", "lightning-echo runs from a folder, and is not installed.", version=None)
    return ok("lightning_echo", f"lightning-echo {version}.", version=version)


def _at_least(machine: Machine, package: str, oldest: tuple[int, int]) -> Finding:
    version, needed = machine.version_of(package), ".".join(map(str, oldest))
    if version is None:
        return error(package, f"{package} is not installed.", f"Install it: pip install '{package}>={needed}'.", version=None)
    if _release(version) < oldest:
        way_out = f"Install a later one: pip install --upgrade '{package}>={needed}'."
        return error(package, f"{package} {version} is older than {needed}.", way_out, version=version)
    return ok(package, f"{package} {version}.", version=version)


def _release(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version.

    >>> _release("2.15.0+cpu"), _release("2.5rc1")
    ((2, 15), (2, 5))
    """
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(digit for digit in part.split("rc")[0] if digit.isdigit()) or 0) for part in parts)
