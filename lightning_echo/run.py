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
# has not happened (`_watch`). It is no child of the program, ignores the terminal, and prints at most a line.

VARIABLE = "LIGHTNING_ECHO_RUN"
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")  # as Lightning finds out its rank before a Trainer does
_SWITCHES = ("plot", "summary", "enabled")
_HELP = ("-h", "--help")
_FAILED = 2
USAGE = "lightning-echo run [options] train.py ..., or lightning-echo run [options] -m package.module ..."


def main(arguments: Sequence[str]) -> int:
    """Runs the command. It returns only if something is wrong with it: an exit status."""
    options, program = split(arguments)
    if not program and not any(option in _HELP for option in options):
        return _fail(f"the program is missing: {USAGE}")
    try:
        given = _read(options)
    except ValueError as error:
        return _fail(str(error))
    if program[0] != "-m" and not os.path.isfile(program[0]):
        return _fail(f"there is no file {program[0]!r}: give the program's Python file, or its module as -m package.module")
    if program[0] == "-m" and len(program) == 1:
        return _fail(f"the module after -m is missing: {USAGE}")
    return _become(program, given)


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
        name = f"--{first.replace('-', '_')}{dot}{inner}"
        if not has_value and first in _SWITCHES and rest[:1] not in (["true"], ["false"]):
            value = "true"
        elif not has_value and rest:
            value = rest.pop(0)
        options.append(f"{name}={value}")
    return options, rest


def _read(options: list[str]) -> dict[str, Any]:
    """Returns the options that were given, as plain values by name; raises a ValueError if they are impossible."""
    from lightning_echo.cli import read_options

    return read_options(options, USAGE)


def _become(program: list[str], given: dict[str, Any]) -> int:
    import json
    import tempfile

    name = program[1] if program[0] == "-m" else program[0]
    seen = None
    if not any(os.environ.get(variable, "0") != "0" for variable in _RANKS):  # one rank says it
        handle, seen = tempfile.mkstemp(prefix="lightning-echo-run-")
        os.close(handle)
        _start_watching(seen, name, [each for each in program[1:] if each.partition("=")[0][2:] in _names()])
    os.environ[VARIABLE] = json.dumps({"options": given, "program": name, "seen": seen})
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *_interpreter_options(), *program])


def _names() -> list[str]:
    from lightning_echo.cli import NAMES

    return NAMES


def _interpreter_options() -> list[str]:
    """Returns the options that Python itself was started with, such as ``-X faulthandler``."""
    given = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    return given[: given.index("-m")] if "-m" in given else given


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return _FAILED


# ---------------------------------------------------------------------- in the program


def callbacks() -> list[Any]:
    """Returns the callback that echoes a Trainer of a program that this command has started; else none. An entry point."""
    if package := sys.modules.get("lightning_echo.training.package"):
        package.join()  # the Trainer may be the first thing of pytorch_lightning that our objects meet
    if VARIABLE not in os.environ:
        return []
    from lightning_echo.cli import RunCallback

    found = settings()
    note("trainer")
    return [RunCallback(found["program"], found["options"], note)]


def settings() -> dict[str, Any]:
    """Returns what the command has put into the environment."""
    import json

    found: dict[str, Any] = json.loads(os.environ[VARIABLE])
    return found


def note(what: str) -> None:
    """Notes for the end of the program that it has come this far."""
    from contextlib import suppress

    if seen := settings()["seen"]:
        with suppress(OSError), open(seen, "a", encoding="utf-8") as file:  # only a sentence depends on it
            file.write(f"{what}\n")


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


def _watch(pid: int, seen: str, program: str, misplaced: list[str]) -> None:
    """Waits for the end of a process, and says what it has not done."""
    import select
    import time

    try:
        if hasattr(os, "pidfd_open"):
            waiting = select.poll()
            waiting.register(os.pidfd_open(pid), select.POLLIN)
            waiting.poll()
        else:
            while True:
                os.kill(pid, 0)
                time.sleep(0.1)
    except ProcessLookupError:
        pass
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
