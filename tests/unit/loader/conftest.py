"""Examples are read in this process, since a fork for each loader takes most of the time: another one is for tests/unit/data."""

import pytest


@pytest.fixture(autouse=True)
def _read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_echo.data.elsewhere._here_is_elsewhere", True)
