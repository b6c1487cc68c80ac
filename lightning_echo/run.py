"""``lightning-echo run train.py ...``: a training program is measured, echoed, cached or shared without an edit."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

# The command checks the options, puts them into the environment, and replaces itself by ``python train.py ...``. So the program
# is the real main module, with its own exit status, signals and tracebacks. The processes that it starts for other ranks get the
# options, too.
#
# Each Trainer asks entry points for callbacks (`callbacks`). A Trainer of a program that was started otherwise imports this file
# and nothing else, so only the standard library is imported at its top.
#
# A program that makes no Trainer calls nothing of ours. So a small process waits until the program has ended, and then says what
# has not happened (`_watch`). It is not a child of the program, ignores the terminal, and prints at most a line.

VARIABLE = "LIGHTNING_ECHO_RUN"
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")  # as Lightning finds out its rank before a Trainer does
_SWITCHES, _YES_OR_NO = ("plot", "summary", "enabled", "tune"), ("true", "false", "yes", "no")
_TUNE, _TUNE_SECONDS, _BESIDE_TUNE = "--tune=", 60.0, ("--summary", "--plot")
_HELP = ("-h", "--help")
_FAILED = 2
_DESCRIPTION = (
    "Runs a training program. Its training is measured or, with these options, echoed, cached or shared. With --tune in their "
    "place, what would help is tried first, for about two minutes (--tune=30: 30 s for each half), and the training uses what "
    "has won."
)
USAGE = "lightning-echo run [options] train.py ..., or lightning-echo run [options] -m package.module ..."


def main(arguments: Sequence[str]) -> int:
    """Runs the command. It returns only if something is wrong with it: an exit status."""
    options, program = split(arguments)
    try:
        tune, options = read_tune(options)
        given = read_options(options)
    except ValueError as error:
        return _fail(str(error))
    if not program:
        return _fail(f"the program is missing: {USAGE}")
    if program[0] != "-m" and not os.path.isfile(program[0]):
        return _fail(f"there is no file {program[0]!r}: give the program's Python file, or its module as -m package.module")
    if program[0] == "-m" and len(program) == 1:
        return _fail(f"the module after -m is missing: {USAGE}")
    return _become(program, given, tune)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the options of this command, and the program with its own arguments.

    >>> split(["--factor", "4", "--plot", "--cache=8GiB", "train.py", "fit", "--factor", "2"])
    (['--factor=4', '--plot=true', '--cache=8GiB'], ['train.py', 'fit', '--factor', '2'])
    >>> split(["--buffer-size", "64", "-m", "my.training", "--fast"])
    (['--buffer_size=64'], ['-m', 'my.training', '--fast'])
    """
    options, rest = [], list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        name, has_value, value = rest.pop(0).partition("=")
        if name in _HELP:
            return [name], []
        if name == "--":
            break
        first, dot, inner = name.removeprefix("--").partition(".")
        if name.startswith("--"):
            name = f"--{first.replace('-', '_')}{dot}{inner}"
        if not has_value:
            is_switch = first in _SWITCHES and (not rest or rest[0].lower() not in _YES_OR_NO)
            value = "true" if is_switch else rest.pop(0) if rest else ""
        value = value.lower() if first in _SWITCHES else value
        options.append(f"{name}={value}")
    return options, rest


def read_tune(options: Sequence[str]) -> tuple[float | None, list[str]]:
    """Returns the seconds of ``--tune``, for the analysis and again for the proof (None: it is not given); the other options.

    Raises:
        ValueError: The seconds are impossible, or ``--tune`` stands beside options that it chooses itself.

    >>> read_tune(["--tune=true", "--plot=true"]), read_tune(["--tune=30"]), read_tune(["--factor=4"])
    ((60.0, ['--plot=true']), (30.0, []), (None, ['--factor=4']))
    """
    given = [option.removeprefix(_TUNE) for option in options if option.startswith(_TUNE)]
    others = [option for option in options if not option.startswith(_TUNE)]
    if not given or given[-1] in ("false", "no"):
        return None, others
    try:
        seconds = _TUNE_SECONDS if given[-1] in _YES_OR_NO else float(given[-1])
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"run: --tune must be alone, or have a number of seconds > 0 as in --tune=60, got {given[-1]!r}")
    if chosen := [each for each in others if not each.startswith((*_BESIDE_TUNE, *_HELP))]:
        raise ValueError(f"run: --tune finds the options itself: leave out {chosen[0].partition('=')[0]}, or leave out --tune")
    return seconds, others


def read_options(given: Sequence[str]) -> dict[str, Any]:
    """Returns the options of a command line that differ from their defaults, as plain values by name.

    Args:
        given: Such as ``["--factor=4", "--cache.size=8GiB"]``. ``--help`` prints the options, and ends the program.

    Raises:
        ValueError: There is no such option, or a value is impossible.
    """
    import difflib

    from jsonargparse import ArgumentError

    from lightning_echo.config import EchoOptions

    names = _names()
    for option in given:
        name = option.partition("=")[0].removeprefix("--").partition(".")[0]
        if name not in names and option not in _HELP:
            close = difflib.get_close_matches(name, [*names, "tune"], 1)
            meant = f"did you mean --{close[0]}? " if close else ""
            meant = "leave echo. out; " if name == "echo" else meant
            listed = ", ".join(f"--{each}" for each in (*names, "tune"))
            name = option.partition("=")[0]
            raise ValueError(f"run has no option {name}: {meant}It has {listed}. Options of the program come after its name")
        if option.endswith("="):
            raise ValueError(f"run: {option.removesuffix('=')} has no value")
    try:
        parsed = _parser().parse_args(list(given))
        options = _built(parsed)
    except (ArgumentError, TypeError, ValueError, ModuleNotFoundError) as error:
        raise ValueError(f"run: {' '.join(str(error).split())}") from None
    defaults, plain = EchoOptions(), parsed.as_dict()
    return {name: plain[name] for name in names if getattr(options, name) != getattr(defaults, name)}


def _names() -> list[str]:
    from dataclasses import fields

    from lightning_echo.config import EchoOptions

    return [field.name for field in fields(EchoOptions)]


def _parser() -> Any:
    from jsonargparse import ArgumentParser

    import lightning_echo.measure.guard  # noqa: F401  # the help lists controllers that are known
    from lightning_echo.config import EchoOptions

    parser = ArgumentParser(prog="lightning-echo run", usage=USAGE, description=_DESCRIPTION, exit_on_error=False)
    parser.add_class_arguments(EchoOptions, sub_configs=True)
    return parser


def _built(parsed: Any) -> Any:
    from lightning_echo.config import EchoOptions

    parser = _parser()
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name before jsonargparse 4.49
    values = instantiate(parsed).as_dict()
    return EchoOptions(**{name: values[name] for name in _names()})


def _become(program: list[str], given: dict[str, Any], tune: float | None = None) -> int:
    import json
    import tempfile
    from contextlib import suppress

    name = program[1] if program[0] == "-m" else program[0]
    seen = None
    if not any(os.environ.get(variable, "0") != "0" for variable in _RANKS):  # one rank says it
        with suppress(OSError):  # no place for temporary files: then nothing is said at the end
            handle, seen = tempfile.mkstemp(prefix="lightning-echo-run-")
            os.close(handle)
            _start_watching(seen, name, [each for each in program[1:] if each.partition("=")[0][2:] in (*_names(), "tune")])
    os.environ[VARIABLE] = json.dumps({"options": given, "program": name, "seen": seen, "tune": tune})
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # else it was closed
            stream.flush()
    os.execv(sys.executable, [sys.executable, *_interpreter_options(), *program])


def _interpreter_options() -> list[str]:
    """Returns the options that Python itself was started with, such as ``-X faulthandler``."""
    given = sys.orig_argv[1:]
    starts = [given.index(each) for each in (sys.argv[0], "-m") if each in given]  # a script, or this package as a module
    return given[: min(starts, default=0)]


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return _FAILED


# ---------------------------------------------------------------------- in the program


def callbacks() -> list[Any]:
    """Returns the callback that echoes a Trainer of a program that this command has started; else none. An entry point."""
    if package := sys.modules.get("lightning_echo.training.package"):
        package.join()  # the Trainer may be the first thing of pytorch_lightning that our objects meet
    sources = sys.modules.get("lightning_echo.analysis.sources")
    if VARIABLE not in os.environ or (sources is not None and sources.makes_trainer):  # an analysis measures by itself
        return []
    from lightning_echo.cli import RunCallback

    found = settings()
    note("trainer")
    options = _built(_parser().parse_object(found["options"]))
    return [RunCallback(found["program"], found["options"], options, note, found["tune"])]


def settings() -> dict[str, Any]:
    """Returns what the command has put into the environment."""
    import json

    found: dict[str, Any] = json.loads(os.environ[VARIABLE])
    return found


def note(what: str) -> None:
    """Notes for the end of the program that it has come this far."""
    from contextlib import suppress

    if seen := settings()["seen"]:
        with suppress(OSError):  # only a sentence depends on it; the file is gone if the program has ended and left a process
            file = os.open(seen, os.O_WRONLY | os.O_APPEND)
            os.write(file, f"{what}\n".encode())
            os.close(file)


# ---------------------------------------------------------------------- after the program


def _start_watching(seen: str, program: str, misplaced: list[str]) -> None:
    """Starts the process that waits for the end of this one. It is not a child, for which the program might wait."""
    watched = os.getpid()
    if child := os.fork():
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, str(watched), seen, program, *misplaced])


def _wait_for_end(pid: int) -> None:
    import select
    import time

    try:
        waiting = select.poll()
        waiting.register(os.pidfd_open(pid), select.POLLIN)
        waiting.poll()
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # a system without this call
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(0.1)


def _watch(pid: int, seen: str, program: str, misplaced: list[str]) -> None:
    """Waits for the end of a process, and says what it has not done."""
    _wait_for_end(pid)
    with open(seen, encoding="utf-8") as file:
        steps = file.read().split()
    os.remove(seen)
    if "fit" in steps:
        return
    missing = "called no fit" if "trainer" in steps else "made no Trainer of lightning or pytorch_lightning"
    hint = f". {misplaced[0]} belongs to {program}: options of run come before the program's name" if misplaced else ""
    print(f"lightning_echo: run: {program} {missing}, so nothing was measured{hint}", file=sys.stderr)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
