"""The cores that a process may use: those that it sees, unless its container gives it less time."""

import pytest

from lightning_echo.data import machine as cores


@pytest.mark.parametrize(
    ("quota", "usable"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)]
)
def test_a_quota_of_the_container_counts(tmp_path, monkeypatch, quota, usable):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/job\n")
    (tmp_path / "cgroups" / "job").mkdir(parents=True)
    (tmp_path / "cgroups" / "job" / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(cores, "visible_cores", lambda: 8)
    monkeypatch.setattr(cores.cores_within_quota, "__defaults__", (tmp_path / "proc", tmp_path / "cgroups"))
    assert cores.usable_cores() == usable
