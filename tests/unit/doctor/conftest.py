"""What a loader looks like is read in this process; that another one does it otherwise: tests/integration/test_cli_doctor.py."""

import pytest


@pytest.fixture(autouse=True)
def _read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_echo.data.elsewhere._here_is_elsewhere", True)
