"""What is in ``echo_summary.json``. What is refused is tested where it is read: `FactorSchedule.from_summary`."""

import json

import pytest

from lightning_echo.measure.summary import VERSION, EpochReport, FactorUse, RunSummary, RunVerdict

REPORT = EpochReport(0, 10, 2.0, 40, 40, idle_fraction=0.25, reason="starved", message="idle 25%")
USES = [FactorUse(0, 0, 1.0), FactorUse(66, {"a": 72, "b": 66}, 3.0, "starved", "idle 67%"), FactorUse(None, 90, 2.0)]


def test_it_is_read_as_it_was_written():
    summary = RunSummary([REPORT], USES, {"torch": "2.9"})
    assert RunSummary.from_json(summary.to_json()) == summary


def test_other_programs_find_plain_names():
    found = json.loads(RunSummary([REPORT], USES, {"torch": "2.9"}).to_json())
    assert found == {
        "version": VERSION,
        "reports": [REPORT.state()],
        "decisions": [
            {"step": 0, "batch": 0, "factor": 1.0, "reason": "", "message": ""},
            {"step": 66, "batch": {"a": 72, "b": 66}, "factor": 3.0, "reason": "starved", "message": "idle 67%"},
            {"step": None, "batch": 90, "factor": 2.0, "reason": "", "message": ""},
        ],
        "packages": {"torch": "2.9"},
        "verdict": None,
    }


def test_the_verdict_is_read_as_it_was_written():
    verdict = RunVerdict("Echo with factor 2.", ("idle 50%", "6 of 8 cores are free"), "EchoCallback(factor=2)")
    summary = RunSummary([REPORT], USES, verdict=verdict)
    assert json.loads(summary.to_json())["verdict"] == {
        "message": "Echo with factor 2.",
        "why": ["idle 50%", "6 of 8 cores are free"],
        "next_line": "EchoCallback(factor=2)",
    }
    assert RunSummary.from_json(summary.to_json()) == summary


def test_a_file_of_an_older_version_has_no_verdict():
    older = json.loads(RunSummary([REPORT], USES).to_json())
    del older["verdict"]
    assert RunSummary.from_json(json.dumps(older)) == RunSummary([REPORT], USES)


def test_a_verdict_that_lacks_a_field_is_named_as_damage():
    damaged = json.loads(RunSummary([REPORT], USES).to_json()) | {"verdict": {"why": ["idle 50%"]}}
    with pytest.raises(ValueError, match=r"echo_summary\.json is damaged: verdict\.message is missing"):
        RunSummary.from_json(json.dumps(damaged))
