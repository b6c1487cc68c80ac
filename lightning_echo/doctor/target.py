"""The user's data, found by name or built from a configuration, and the training loaders that it returns.

There are two kinds of errors. A `ValueError` says that the command is wrong: there is no such module, or no such file. A
`UserCodeError` says that the user's own code has raised an exception. That is a finding.
"""

from __future__ import annotations

import inspect
import sys
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import ArgumentParser
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_echo.datamodule import EchoDataModule
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.training.collection import leaves_of
from lightning_echo.training.refusals import refuse_other_package

__all__ = ["UserCodeError", "data_of", "said", "training_loaders", "users_code"]


class UserCodeError(Exception):
    """The user's code has raised an exception.

    Attributes:
        doing: What the code was doing, for people.
        error: The exception.
    """

    def __init__(self, doing: str, error: Exception) -> None:
        super().__init__(f"{doing} raised {said(error)}")
        self.doing, self.error = doing, error


def said(error: BaseException) -> str:
    """Returns the type and the message of an exception, in one line. Of a worker's traceback, only the last line is left.

    >>> said(KeyError("image"))
    "KeyError: 'image'"
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines) if len(lines) < 3 else f"{lines[0]} {lines[-1]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def users_code(doing: str) -> Iterator[None]:
    """Turns any exception of the user's code into a `UserCodeError`.

    Args:
        doing: What the code is doing, e.g. ``"setup('fit') of ImageData"``.
    """
    try:
        yield
    except Exception as error:  # the user's code may raise anything
        raise UserCodeError(doing, error) from error


def data_of(name: str | None, config: str | None = None) -> Any:
    """Returns the user's data: a data module, a loader, or a collection of loaders.

    Args:
        name: ``module:name`` of a LightningDataModule, of its class, of a loader, or of a function that returns one of these. The
            module may also be in the present folder. With a configuration: a class, whose arguments are under ``data:``.
        config: A YAML file of a LightningCLI. Only ``data:`` is used.

    Raises:
        ValueError: There is no such object.
        UserCodeError: The user's code has raised an exception.
    """
    found = None if name is None else _look_up(name)
    if config is not None:
        return _built(_section(config), config, found)
    if inspect.isclass(found) or inspect.isfunction(found):
        _check_needs_nothing(found, str(name))
        with users_code(f"{found.__name__}()"):
            found = found()
    if not (isinstance(found, pl.LightningDataModule) or hasattr(found, "__iter__")) or isinstance(found, str):
        _check_package(found)
        raise ValueError(
            f"{name!r} must be a LightningDataModule, its class, a loader, or a function that returns a loader, "
            f"got {type(found).__name__}"
        )
    return found


def training_loaders(data: Any) -> dict[str, Any]:
    """Returns the training loaders by name, without echoing. A single loader has the name ``""``.

    A data module is prepared and set up before.

    Raises:
        UserCodeError: The user's code has raised an exception.
    """
    data = data.datamodule if isinstance(data, EchoDataModule) else data
    if isinstance(data, pl.LightningDataModule):
        name = type(data).__name__
        with users_code(f"prepare_data() of {name}"):
            data.prepare_data()
        with users_code(f"setup('fit') of {name}"):
            data.setup("fit")
    if isinstance(data, pl.LightningDataModule | pl.LightningModule):
        with users_code(f"train_dataloader() of {type(data).__name__}"):
            data = data.train_dataloader()
    with users_code("looking for the loaders in what train_dataloader() returned"):
        leaves = leaves_of(data)
    return {name: leaf.loader if isinstance(leaf, EchoLoader) else leaf for name, leaf in leaves.items()}


# ---------------------------------------------------------------------- by name


def _look_up(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"the data must be given as module:name, e.g. my_data:ImageData, got {name!r}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with _missing_module_is_a_mistake(module), users_code(f"import of {module}"):
        found: Any = import_module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"module {module} has no {attribute!r}: give a name that it defines")
        found = getattr(found, part)
    return found


@contextmanager
def _missing_module_is_a_mistake(module: str) -> Iterator[None]:
    """Separates two cases: a module that does not exist, and a module whose own imports fail."""
    try:
        yield
    except UserCodeError as failed:
        error = failed.error
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(
                f"there is no module {module!r}: run the command in the folder that holds it, or give its full name"
            ) from error
        raise


def _check_needs_nothing(found: Any, name: str) -> None:
    try:
        signature = inspect.signature(found)
        signature.bind()
    except TypeError:
        raise ValueError(
            f"{name!r} needs arguments, {signature}: give a function that needs none, or a file that holds them under data: "
            "--config train.yaml"
        ) from None
    except ValueError:  # built in, without a signature
        return


def _check_package(found: Any) -> None:
    """Refuses a data module of ``pytorch_lightning``, or its class. The message says what to do."""
    try:
        refuse_other_package("data", found)
    except TypeError as error:
        raise ValueError(str(error)) from None


# ---------------------------------------------------------------------- by configuration


def _section(path: str) -> dict[str, Any]:
    """Returns the section ``data:``, with each ``${...}`` in it resolved."""
    try:
        document = OmegaConf.load(path)
        for key in ("data", "fit.data"):  # the second is for a file that holds the options of several subcommands
            found: Any = OmegaConf.select(document, key)
            if found is not None:
                found = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
                break
        else:
            raise ValueError(f"--config {path}: there is no data: in it, with the class_path and the init_args of a data module")
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read: {error.strerror}") from error
    except (YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"--config {path}: {said(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--config {path}: data: must be a mapping with class_path and init_args, got {found!r}")
    return found


def _built(section: dict[str, Any], path: str, known: Any) -> pl.LightningDataModule:
    """Builds a data module as a LightningCLI does. ``known`` is its class if the file does not name it."""
    arguments = section
    if known is None:
        module, _, name = str(section.get("class_path", "")).rpartition(".")
        if not module:
            raise ValueError(
                f"--config {path}: data: has no class_path such as my_data.ImageData: name the class of the data module, too, "
                f"lightning-echo doctor my_data:ImageData --config {path}"
            )
        known, arguments = _look_up(f"{module}:{name}"), section.get("init_args") or {}
    if not (inspect.isclass(known) and issubclass(known, pl.LightningDataModule)):
        _check_package(known)
        raise ValueError(f"--config {path}: the data must be of a class of LightningDataModule, got {known!r}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(known, "data")
    try:
        parsed = parser.parse_object({"data": arguments})
    except (ArgumentError, TypeError, KeyError) as error:
        raise ValueError(f"--config {path}: {' '.join(str(error).split())}") from error
    with users_code(f"making the data module of {path}"):
        instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name before jsonargparse 4.49
        built: pl.LightningDataModule = instantiate(parsed).data
    return built
