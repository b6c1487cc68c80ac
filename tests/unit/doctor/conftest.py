"""What a loader looks like is read here; that another process does it otherwise: tests/integration/test_cli_doctor.py."""

import pytest


@pytest.fixture(autouse=True)
def _read_here(read_here: None) -> None: ...
