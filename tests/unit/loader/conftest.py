"""Loaders read here; that another process does it otherwise: tests/unit/data."""

import pytest


@pytest.fixture(autouse=True)
def _read_here(read_here: None) -> None: ...
