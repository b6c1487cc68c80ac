"""Property tests are the same in every run, and never fail because a machine is slow. Ctrl-C interrupts, as at a terminal."""

import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from multiprocessing import spawn
from stat import S_ISFIFO
from typing import NoReturn

import fast_python
import pytest
import torch
from grids import covering, values_of
from huge_pages import prepare_forks
from hypothesis import HealthCheck, settings
from torch.utils.data import DataLoader

from lightning_echo.data.machine import CoreWatch

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


_REAL_PYTHON, _FAST_PYTHON = sys.executable, "LIGHTNING_ECHO_FAST_PYTHON"


def _use_python(path: str) -> None:
    sys.executable = path
    spawn.set_executable(path)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Where tests run in parallel, programs that they start are forks with torch and Lightning loaded: see fast_python.py."""
    config = session.config
    if hasattr(config, "workerinput"):
        _use_python(os.environ[_FAST_PYTHON])
    elif config.getoption("numprocesses", None):
        running = ExitStack()
        os.environ[_FAST_PYTHON] = running.enter_context(fast_python.start())
        config.add_cleanup(running.close)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests marked `own_interpreter`, and their fixtures, start programs with the real interpreter."""
    before = sys.executable
    if item.get_closest_marker("own_interpreter"):
        _use_python(_REAL_PYTHON)
    try:
        return (yield)
    finally:
        _use_python(before)


@pytest.hookimpl(trylast=True)  # pytest's own plugins make copies of standard error
def pytest_configure(config: pytest.Config) -> None:
    """Lets no forked process hold the pipes between a process of pytest-xdist and the one that has started it.

    Those who wait for tests learn that their process has ended by the end of its pipe. A process that a test has forked, and that
    outlives it, would hold that open: they would wait forever, and say nothing.
    """
    if not hasattr(config, "workerinput"):
        return
    found = {
        int(fd): os.stat(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
    }
    pipes = {fd: status.st_ino for fd, status in found.items() if fd > 2 and S_ISFIFO(status.st_mode)}
    nothing = os.open(os.devnull, os.O_RDWR)

    def let_go() -> None:
        for fd, inode in pipes.items():
            if os.fstat(fd).st_ino == inode:
                os.dup2(nothing, fd, inheritable=False)

    os.register_at_fork(after_in_child=let_go)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases of full grids that `make test` leaves out (`rest_of_grid`), and those that CI leaves out (`rest_of_pairs`).

    `make test` runs each value of each argument at least once, CI each pair of values. A dictionary is as many arguments.
    """
    grids: dict[str, dict[pytest.Item, list[tuple[str, int]]]] = {}
    for item in items:
        if item.get_closest_marker("grid") and hasattr(item, "callspec"):
            grids.setdefault(item.nodeid.partition("[")[0], {})[item] = values_of(item.callspec.params)
    for grid in grids.values():
        lean = covering(grid, 1)
        pairs = covering(grid, 2, lean)
        for item in grid:
            if item not in lean:
                item.add_marker("rest_of_grid")
            if item not in pairs:
                item.add_marker("rest_of_pairs")


# A shell starts background jobs with interrupts ignored, and Python leaves it at that, also in the programs that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    prepare_forks()


@pytest.fixture(autouse=True)
def _no_seed_left_behind() -> Iterator[None]:
    """``seed_everything`` leaves its seed in the environment, where the next test's loaders would take it."""
    names = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
    before = {name: os.environ[name] for name in names if name in os.environ}
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _data_loader_as_it_was() -> Iterator[None]:
    """Lightning patches ``DataLoader`` while it asks for loaders, and does not undo that where the user's hook raises."""
    before = dict(vars(DataLoader))
    yield
    for name in vars(DataLoader).keys() - before.keys():
        delattr(DataLoader, name)
    for name in ("__init__", "__setattr__", "__delattr__"):
        if name in before and vars(DataLoader)[name] is not before[name]:
            setattr(DataLoader, name, before[name])


@pytest.fixture(autouse=True)
def _no_silence_left_behind() -> Iterator[None]:
    """Benchmarks silence the loggers of their process, which the next test may want to hear."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning_echo")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples are read in this process, since a fork for each loader would take most of the time of some tests."""
    monkeypatch.setattr("lightning_echo.data.elsewhere._here_is_elsewhere", True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads of a small model wait for each other actively: beside other tests that takes many times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _hides_the_cores(watch: CoreWatch) -> NoReturn:
    raise OSError("in tests, nobody looks for CPU contention")


@pytest.fixture(autouse=True)
def nobody_looks_at_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run beside each other: what is said about a busy machine would be chance. Files that test it replace this fixture."""
    monkeypatch.setattr(CoreWatch, "_see", _hides_the_cores)


@pytest.fixture(autouse=True)
def nobody_looks_for_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same is true of other runs of the tests."""
    monkeypatch.setattr("lightning_echo.data.machine._program_of", lambda process_id, proc: None)
