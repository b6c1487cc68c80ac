"""An epoch's report: what is logged under which name, and what of it goes into a checkpoint."""

import re
from dataclasses import fields

import pytest
import torch

from lightning_echo import EchoCallback
from lightning_echo.measure.summary import LOGGED, EpochReport

BARE = {"epoch": 3, "steps": 10, "factor": 2.0, "fresh_examples": 80, "echoed_examples": 81}
FULL = {
    **BARE,
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
    "cache_hit_fraction": 0.0,
    "cached_examples": 40,
    "cache_bytes": 4096,
    "slowest_node": 1,
    "cache_received_fraction": 0.0,
    "exchange_fraction": 0.125,
    "cache_hold": "loaded",
    "cache_is_full": True,
    "shared_trainings": 3,
    "peer_wait_fraction": 0.25,
    "missed_examples": 0,
    "saved_cpu_seconds": 12.5,
    "slowest_training": "b.py (process 7)",
    "speedup": 1.2,
    "next_factor": 1.25,
    "reason": "starved",
    "message": "idle 30%",
}


def keys_in_the_documentation():
    """Of the table in the docstring of `EchoCallback`: name and whether it is marked as logged every some steps."""
    rows = re.findall(r"^ *``echo/(\w+)`` *(\*?) ", EchoCallback.__doc__, flags=re.MULTILINE)
    assert rows
    return rows


def test_what_is_logged_is_what_the_documentation_lists_in_its_order():
    assert [name for name, _ in keys_in_the_documentation()] == list(LOGGED)


def test_each_is_described_in_the_report_too():
    for name in LOGGED:
        assert re.search(rf"^ +{name}: \S", EpochReport.__doc__, flags=re.MULTILINE), name


def test_everything_measured_is_logged_zeros_too():
    logged = EpochReport(**FULL).logged()
    assert logged == {f"echo/{name}": FULL[name] for name, _ in keys_in_the_documentation()}
    assert {type(value) for value in logged.values()} == {float}


def test_what_could_not_be_measured_is_left_out():
    assert EpochReport(**BARE).logged() == {"echo/factor": 2, "echo/fresh_examples": 80, "echo/echoed_examples": 81}


@pytest.mark.parametrize("values", [BARE, FULL])
def test_the_state_goes_through_a_checkpoint_and_makes_the_same_report(values, tmp_path):
    report = EpochReport(**values)
    torch.save(report.state(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert EpochReport(**loaded) == report
    assert set(loaded) == {field.name for field in fields(EpochReport)}
    assert {type(value) for value in loaded.values()} <= {int, float, bool, str, type(None)}
