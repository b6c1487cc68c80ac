"""What a reader's process reports when it fails."""

import io
import sys

import pytest

from lightning_echo.share import process


def test_the_log_has_the_error_before_the_training_hears_of_the_failure(monkeypatch):
    log, seen = io.StringIO(), []
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(process.os, "write", lambda descriptor, data: seen.append((descriptor, data, log.getvalue())))
    with pytest.raises(SystemExit) as ended, process.telling_of_failure(7):
        raise ValueError("no such sampler")
    assert ended.value.code == 1
    ((descriptor, data, logged),) = seen
    assert (descriptor, data) == (7, process.FAILED)
    assert "ValueError: no such sampler" in logged
    with process.telling_of_failure(7):
        pass
    assert len(seen) == 1, "a process that does not fail reports nothing"
