"""What is in ``echo_summary.json``. What is refused is tested where it is read: `FactorSchedule.from_summary`."""

import json

from lightning_echo.measuring.echo_summary import VERSION, FactorUse, RunSummary
from lightning_echo.measuring.report import EpochReport
from lightning_echo.measuring.summary import RunVerdict

REPORT = EpochReport(0, 10, 2.0, 40, 40, idle_fraction=0.25, reason="starved", message="idle 25 %")
USES = [FactorUse(0, 0, 1.0), FactorUse(66, {"a": 72, "b": 66}, 3.0, "starved", "idle 67 %"), FactorUse(None, 90, 2.0)]


def test_it_is_read_as_it_was_written():
    for verdict in (None, RunVerdict("Echo.", ("idle 67 %", "b"), "EchoCallback(factor=2)")):
        summary = RunSummary([REPORT], USES, {"torch": "2.9"}, verdict)
        assert RunSummary.from_json(summary.to_json()) == summary


def test_a_file_of_before_has_no_verdict():
    older = json.loads(RunSummary([REPORT], USES).to_json())
    del older["verdict"]
    assert RunSummary.from_json(json.dumps(older)).verdict is None


def test_other_programs_find_plain_names():
    found = json.loads(
        RunSummary([REPORT], USES, {"torch": "2.9"}, RunVerdict("Echo.", ("idle 67 %",), "EchoCallback()")).to_json()
    )
    assert found == {
        "version": VERSION,
        "reports": [REPORT.state()],
        "decisions": [
            {"step": 0, "batch": 0, "factor": 1.0, "reason": "", "message": ""},
            {"step": 66, "batch": {"a": 72, "b": 66}, "factor": 3.0, "reason": "starved", "message": "idle 67 %"},
            {"step": None, "batch": 90, "factor": 2.0, "reason": "", "message": ""},
        ],
        "packages": {"torch": "2.9"},
        "verdict": {"message": "Echo.", "why": ["idle 67 %"], "next_line": "EchoCallback()"},
    }
