"""An epoch's report and a run's summary: what is logged under which name, and what goes into checkpoints and files."""

import json
import re
from dataclasses import fields

import pytest
import torch

from lightning_echo.measure.summary import LOGGED, VERSION, EpochReport, FactorUse, RunSummary, RunVerdict

BARE = {"epoch": 3, "steps": 10, "factor": 2.0, "fresh_examples": 80, "echoed_examples": 81}
FULL = {
    **BARE,
    "fresh_in_epoch": 20,
    "echoed_in_epoch": 0,
    "slices": ((0.5, 2.0), (0.0, 1.5)),
    "passes": 1.5,
    "effective_factor": 2.25,
    "idle_fraction": 0.0,
    "slowest_rank": 0,
    "data_wait_seconds": 0.0,
    "step_seconds": 0.02,
    "upstream_seconds": 0.03,
    "examples_per_second": 800.0,
    "recommended_factor": 1.25,
    "first_batch_seconds": 0.0,
    "stalls_bridged_seconds": 0.0,
    "cache_hit_fraction": 0.0,
    "cached_examples": 40,
    "cache_bytes": 4096,
    "slowest_node": 1,
    "cache_received_fraction": 0.0,
    "exchange_fraction": 0.125,
    "reads_in_flight": 0.0,
    "worker_wait_fraction": 0.0,
    "cache_hold": "loaded",
    "cache_is_full": True,
    "shared_trainings": 3,
    "peer_wait_fraction": 0.25,
    "missed_examples": 0,
    "read_again_examples": 0,
    "saved_cpu_seconds": 12.5,
    "slowest_training": "b.py (process 7)",
    "fresh_step_seconds": (0.03, 0.04),
    "speedup": (1.2, 1.4),
    "max_factor": 8.0,
    "next_factor": 1.25,
    "reason": "starved",
    "message": "idle 30%",
}


def test_everything_measured_is_logged_zeros_too_and_has_its_line_in_the_docstring():
    for name in LOGGED:
        assert re.search(rf"^ +{name}: \S", EpochReport.__doc__, flags=re.MULTILINE), name
    logged = EpochReport(**FULL).logged()
    assert logged == {f"echo/{name}": FULL[name] for name in LOGGED}
    assert {type(value) for value in logged.values()} == {float}
    assert EpochReport(**BARE).logged() == {"echo/factor": 2, "echo/fresh_examples": 80, "echo/echoed_examples": 81}


@pytest.mark.parametrize("values", [BARE, FULL])
def test_the_state_goes_through_a_checkpoint_and_makes_the_same_report(values, tmp_path):
    report = EpochReport(**values)
    torch.save(report.state(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert EpochReport(**loaded) == report
    assert set(loaded) == {field.name for field in fields(EpochReport)}
    assert {type(value) for value in loaded.values()} <= {int, float, bool, str, tuple, type(None)}


USES = [FactorUse(0, 0, 1.0), FactorUse(66, {"a": 72, "b": 66}, 3.0, "starved", "idle 67%"), FactorUse(None, 90, 2.0)]
VERDICT = RunVerdict("Echo with factor 2.", ("idle 50%", "6 of 8 cores are free"), "EchoCallback(factor=2)")


def test_a_summary_is_read_as_it_was_written_and_other_programs_find_plain_names():
    report = EpochReport(**FULL)
    summary = RunSummary([report], USES, {"torch": "2.9"}, VERDICT, "train.py", "logs/version_3", "2026-01-31T09:05:00+01:00")
    assert RunSummary.from_json(summary.to_json()) == summary
    assert json.loads(summary.to_json()) == {
        "version": VERSION,
        "reports": [
            {**report.state(), "fresh_step_seconds": [0.03, 0.04], "speedup": [1.2, 1.4], "slices": [[0.5, 2.0], [0.0, 1.5]]}
        ],
        "decisions": [
            {"step": 0, "batch": 0, "factor": 1.0, "reason": "", "message": ""},
            {"step": 66, "batch": {"a": 72, "b": 66}, "factor": 3.0, "reason": "starved", "message": "idle 67%"},
            {"step": None, "batch": 90, "factor": 2.0, "reason": "", "message": ""},
        ],
        "packages": {"torch": "2.9"},
        "verdict": {"message": VERDICT.message, "why": list(VERDICT.why), "next_line": VERDICT.next_line, "others": []},
        "program": "train.py",
        "name": "logs/version_3",
        "began": "2026-01-31T09:05:00+01:00",
    }


def test_a_damaged_verdict_is_named():
    bare = json.loads(RunSummary([], USES).to_json())
    with pytest.raises(ValueError, match=r"echo_summary\.json is damaged: verdict\.message is missing"):
        RunSummary.from_json(json.dumps(bare | {"verdict": {"why": ["idle 50%"]}}))
