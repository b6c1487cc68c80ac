"""Stage "tests": all tests marked ``gpu`` in one process. Each outcome is a row as soon as it is known."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpu.setting import Setting, run_parts

__all__ = ["Writes", "main"]

ROOT = Path(__file__).parents[2]
# Another machine has other versions, which deprecate other things: only our own warnings are errors there.
_WARNINGS = ("-W", "default", "-W", "error:lightning_echo")
_LONGEST_SECONDS = 40  # of a test


class Writes:
    """A plugin of pytest that writes a row for each test.

    Args:
        setting: The run's.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        said = "" if report.passed else str(getattr(report.longrepr, "reprcrash", report.longrepr))
        outcome = report.outcome if report.when == "call" or report.skipped else f"failed in {report.when}"
        self._setting.add("tests", test=report.nodeid, outcome=outcome, seconds=report.duration, said=said[-300:])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._setting.add("tests", test=report.nodeid, outcome="failed in collection", said=str(report.longrepr)[-300:])


def main(setting: Setting) -> None:
    """Runs them. Failures are rows and no error of the stage.

    Raises:
        RuntimeError: pytest could not run, or found no test.
    """
    if setting.is_tiny:
        os.environ["LIGHTNING_ECHO_GPU_STAND_IN"] = "cpu"  # on the processor, as far as they can
    os.environ["LIGHTNING_ECHO_SHARED"] = str(setting.scratch / "shared")
    options = [
        "-m",
        "gpu",
        "-q",
        *_WARNINGS,
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        f"--confcutdir={ROOT / 'tests' / 'gpu'}",  # the conftest.py above needs packages that may not be there
        f"--timeout={_LONGEST_SECONDS}",
        "-o",
        "minversion=7",
    ]
    files = sorted(
        (ROOT / "tests" / "gpu").glob("test_*.py"), key=lambda file: ("compiled" in file.name, file.name)
    )  # slow ones last
    status = pytest.main([*map(str, files), *options], plugins=[Writes(setting)])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {pytest.ExitCode(status).name}: see the lines above")


if __name__ == "__main__":
    _setting = Setting.of_environment()
    run_parts(_setting, {"tests marked gpu": lambda: main(_setting)}, sys.argv[1:])
