"""What several files of these tests use."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder for the readers of one test. They end with it."""
    from sharing_runs import end_readers

    folder = tmp_path_factory.mktemp("s")
    folder.chmod(0o700)
    monkeypatch.setenv("LIGHTNING_ECHO_SHARED", str(folder))
    yield
    end_readers()
