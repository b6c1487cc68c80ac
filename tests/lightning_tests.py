"""Runs Lightning's own tests with an `EchoCallback` in every Trainer: ``make lightning-tests DIR=...``.

``DIR`` is the folder ``tests`` of Lightning's repository, at the installed release. It is not part of this repository. The
tests run once as they are, once with ``EchoCallback()``, once with factor 1, once with factor 2. A test whose outcome differs
must be in ``lightning_differences.txt``, with the reason.

    python tests/lightning_tests.py DIR [tests_pytorch/loops ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

SETTINGS: dict[str, dict[str, float] | None] = {  # the options of the callback; None: there is none
    "plain": None,
    "measured": {},
    "factor 1": {"factor": 1.0},
    "factor 2": {"factor": 2.0},
}
FOLDERS = ("tests_pytorch/loops", "tests_pytorch/trainer", "tests_pytorch/tuner")
REASONS = Path(__file__).with_name("lightning_differences.txt")


def outcomes(folder: Path, tests: list[str], options: dict[str, float] | None) -> dict[str, str]:
    """Runs tests, and returns the outcome of each: passed, failed, error or skipped."""
    environment = dict(os.environ)
    if options is not None:  # as `lightning-echo run` sets it
        environment["LIGHTNING_ECHO_RUN"] = json.dumps({"options": options, "program": "pytest", "seen": None})
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["--timeout=120", f"--junitxml={report}", "-o", "addopts=", "-o", "filterwarnings=", *tests]
        subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False)
        cases = ElementTree.parse(report).iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": outcome(case) for case in cases}


def outcome(case: ElementTree.Element) -> str:
    """Returns what a ``testcase`` of a report says.

    >>> outcome(ElementTree.fromstring('<testcase><failure/></testcase>')), outcome(ElementTree.fromstring('<testcase/>'))
    ('failed', 'passed')
    """
    words = {"failure": "failed", "error": "error", "skipped": "skipped"}
    return next((words[child.tag] for child in case if child.tag in words), "passed")


def reasons() -> dict[tuple[str, str], str]:
    """Returns the reasons, by setting and test. One that begins with "sometimes" is of a test that need not differ."""
    lines = [line for line in REASONS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    rows = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    return {(setting, test): reason for settings, test, reason in rows for setting in settings.split(", ")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder tests of Lightning's repository")
    parser.add_argument("tests", nargs="*", default=list(FOLDERS), help=f"what to run in it; default: {', '.join(FOLDERS)}")
    arguments = parser.parse_args()
    plain: dict[str, str] = {}
    unexplained, known = 0, reasons()
    for setting, options in SETTINGS.items():
        print(f"{setting} ...", flush=True)
        found = outcomes(arguments.folder, arguments.tests, options)
        counts = {word: list(found.values()).count(word) for word in ("passed", "failed", "error", "skipped")}
        print(", ".join(f"{number} {word}" for word, number in counts.items()), flush=True)
        plain = plain or found
        for test in sorted(plain.keys() | found.keys()):
            before, now = plain.get(test, "missing"), found.get(test, "missing")
            reason = known.get((setting, test))
            if before != now:
                unexplained += reason is None
                print(f"{setting} | {test} | {before} -> {now}: {reason or 'NO REASON'}")
            elif reason is not None and not reason.startswith("sometimes"):
                unexplained += 1
                print(f"{setting} | {test} | no longer differs: remove it from {REASONS.name}")
    print(f"{unexplained} differences without a reason")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
