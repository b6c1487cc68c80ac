"""The doctor's command: all checks in a row, printed."""

from __future__ import annotations

from lightning_echo.doctor.findings import Finding, Status, as_document, as_text, worst
from lightning_echo.doctor.machine import Machine
from lightning_echo.doctor.resources import check_resources
from lightning_echo.doctor.versions import check_versions

__all__ = ["run"]


def run(data: str | None = None, *, config: str | None = None, as_json: bool = False, machine: Machine | None = None) -> int:
    """Prints what is found.

    Args:
        data: ``module:name`` of the user's data; None: only the machine is looked at.
        config: A YAML file of a LightningCLI in its place.
        as_json: Whether to print a document for programs.
        machine: The machine; None: this one.

    Returns:
        The exit status: 1 if there is an error, else 0.
    """
    machine = Machine() if machine is None else machine
    findings: list[Finding] = [*check_versions(machine), *check_resources(machine)]
    print(as_document(findings) if as_json else as_text(findings))
    return 1 if worst(findings) is Status.error else 0
