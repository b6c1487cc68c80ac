"""A journal whose batches are noted in the thread that trains: Ctrl-C may come within it."""

import sys

from lightning_echo.pipeline.journal import JournalFile
from lightning_echo.plan.demand import Booked
from lightning_echo.plan.journal import Begin

BATCHES = [([0, 1, 4], 8.0), ([2, 3], 8.0), ([], 4.0), ([5, 9, 10], 4.0), ([7], 4.0)]


class Interrupt:
    """Raises a KeyboardInterrupt where the call of a function begins, the one after ``calls`` others."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self, frame, event, argument):
        if event == "call" and frame.f_code.co_filename.endswith("journal.py"):
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt


def written(path, interrupted=None):
    """Returns the bytes of a journal, and whether it was interrupted. Who notes a batch in vain notes it again."""
    journal = JournalFile(str(path), None, print)
    journal.begin(Begin(number=3, booked=Booked(0), max_factor=8.0, conditions={"workers": 2}))
    came = False
    for number, (fresh, factor) in enumerate(BATCHES, 3):
        for _ in range(2):
            if interrupted is not None and not came:
                sys.settrace(interrupted)
            try:
                journal.book(fresh, [10 * each for each in fresh], factor, number=number)
            except KeyboardInterrupt:
                came = True
            finally:
                sys.settrace(None)
    journal.close()
    return path.read_bytes(), came


def test_wherever_it_is_interrupted_each_batch_is_noted_once(tmp_path):
    expected, _ = written(tmp_path / "whole")
    calls, came = 0, True
    while came:
        found, came = written(tmp_path / f"{calls}", Interrupt(calls))
        assert found == expected, f"after {calls} calls"
        calls += 1
    assert calls > 5 * len(BATCHES), "the test tests something"
