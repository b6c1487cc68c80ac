"""The doctor's command: all checks in a row, printed. An exception in the user's code is a finding, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any, cast

import lightning.pytorch as pl

from lightning_echo.doctor.machine import (
    SHARED_MEMORY,
    Finding,
    Machine,
    Status,
    as_document,
    as_text,
    check_load,
    check_resources,
    check_versions,
    error,
    memory_of,
    whole_cores,
    worst,
)
from lightning_echo.training.package import classes

# ---------------------------------------------------------------------- command

_MEND = "Mend it, or run the doctor where it works: a data module that needs its Trainer is built by 'python train.py doctor'."


def run(data: str | None = None, *, config: str | None = None, as_json: bool = False, machine: Machine | None = None) -> int:
    """Prints the findings about the machine and the user's data. Returns the exit status: 1 if there is an error, else 0.

    Args:
        data: ``module:name`` of the user's data, see `data_of`; a ValueError if there is none.
        config: A YAML file of a LightningCLI. If both are None, only the machine is checked.
        as_json: Whether to print a document for programs.
    """

    def get() -> Any:
        from lightning_echo.doctor.looking import data_of

        return data_of(data, config)

    return examine(None if data is None and config is None else get, as_json=as_json, machine=machine)


def examine(get: Callable[[], Any] | None, *, as_json: bool, machine: Machine | None = None) -> int:
    """Works as `run` for data that ``get`` returns; None: only the machine. Prints of the user's code go to stderr."""
    machine = Machine() if machine is None else machine
    machine.watch.look()
    findings: list[Finding] = [*check_versions(machine), *check_resources(machine)]
    if get is not None:
        with redirect_stdout(sys.stderr):
            findings += _of_data(get, machine)
    findings += check_load(machine)
    print(as_document(findings) if as_json else as_text(findings))
    return 1 if worst(findings) is Status.error else 0


def _of_data(get: Callable[[], Any], machine: Machine) -> list[Finding]:
    from lightning_echo.doctor.looking import UserCodeError, training_loaders
    from lightning_echo.doctor.traps import check_hooks

    try:
        data = get()
        loaders = training_loaders(data)
    except UserCodeError as failed:
        return [replace(error("data", f"{failed}.", _MEND), about="data")]
    found = [replace(finding, about="data") for finding in check_hooks(data)]
    for name, loader in loaders.items():
        about = f"data, loader {name!r}" if name else "data"
        found += [replace(finding, about=about) for finding in _of_loader(loader, machine)]
    return found


def _of_loader(loader: Any, machine: Machine) -> list[Finding]:
    from lightning_echo.doctor.looking import (
        UserCodeError,
        check_first_batch,
        check_loader,
        check_memory,
        check_queues,
        first_batch,
        look,
        users_code,
    )
    from lightning_echo.doctor.traps import Surroundings, check_traps

    try:
        with users_code("looking at the loader"):
            looked = look(loader)
    except UserCodeError as failed:
        reason = str(failed.error) if isinstance(failed.error, TypeError | ValueError) else str(failed)
        return [error("loader", f"This loader cannot be echoed: {reason}.", "Change it as the sentence says.")]
    found = [*check_loader(looked, whole_cores(machine)), *check_memory(looked, memory_of(machine)[1])]
    try:
        first = first_batch(loader)
    except UserCodeError as failed:
        return [*found, check_first_batch(failed), *check_traps(looked, None, Surroundings.of_this_process())]
    space = machine.space_of(SHARED_MEMORY) if machine.platform.startswith("linux") else None
    queues = check_queues(looked, first, None if space is None else space[1])
    found += [check_first_batch(first, getattr(loader, "batch_size", None)), *([] if queues is None else [queues])]
    return [*found, *check_traps(looked, first, Surroundings.of_this_process())]


# ---------------------------------------------------------------------- examining
# ``python train.py doctor``: the subcommand that `EchoCLI` adds, with the data of the same configuration as ``fit``.


class Examines:
    """A Trainer that can look at the data of a training without training."""

    def doctor(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        json: bool = False,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Says what on this machine, or of the data, would go wrong. The exit status is 1 if there is an error.

        Args:
            model: The model, whose training loader is looked at if there is no data module.
            datamodule: The data.
            json: Whether to print a document for programs.
            ckpt_path: Not used. A configuration that fit has saved may have it.
            weights_only: Not used, for the same reason.
        """
        source = model if datamodule is None else datamodule
        if isinstance(self, classes("Trainer")):  # a data module may ask its Trainer how many ranks there are
            source.trainer = cast(Any, self)
        if status := examine(lambda: source, as_json=json):
            sys.exit(status)


def examining(trainer_class: type[pl.Trainer]) -> type[pl.Trainer]:
    """Returns a subclass that can examine. It has the same name, so configurations and messages do not change."""
    if issubclass(trainer_class, Examines):
        return trainer_class
    names = {name: getattr(trainer_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(trainer_class.__name__, (Examines, trainer_class), names)
