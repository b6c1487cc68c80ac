"""The folder of readers: whose it is, where it is, and its locks."""

import os
import stat

import pytest

from lightning_echo.share.config import StarterLock, names, shared_folder, socket_of


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.delenv("LIGHTNING_ECHO_SHARED", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_it_is_made_for_the_user_alone_without_a_runtime_folder_among_the_temporary_files(runtime, monkeypatch):
    folder = shared_folder()
    assert (folder, stat.S_IMODE(folder.stat().st_mode)) == (runtime / "lightning_echo", 0o700)
    for name in ("b.sock", "a.sock", "c.lock"):
        (shared_folder() / name).touch()
    assert names() == ["a", "b"]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(runtime))
    assert shared_folder() == runtime / f"lightning_echo-{os.getuid()}"


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_that_others_may_use_and_a_link_are_refused(runtime, tmp_path, is_link):
    (runtime / ("elsewhere" if is_link else "lightning_echo")).mkdir(mode=0o700 if is_link else 0o755)
    if is_link:
        (runtime / "lightning_echo").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="must be a folder of yours alone"):
        shared_folder()


def test_a_path_too_long_for_a_socket_is_refused_with_the_way_out(monkeypatch, tmp_path):
    folder = tmp_path / ("f" * 100)
    monkeypatch.setenv("LIGHTNING_ECHO_SHARED", str(folder))
    with pytest.raises(ValueError, match="take a shorter name, or set LIGHTNING_ECHO_SHARED"):
        socket_of("sweep")


def test_a_lock_has_one_holder_also_among_threads(runtime):
    one, other = StarterLock("sweep"), StarterLock("sweep")
    assert one.try_to_hold()
    assert one.try_to_hold()
    assert not other.try_to_hold()
    with one:
        pass
    assert not one.is_held
    assert other.try_to_hold()
    other.release()
    other.release()
