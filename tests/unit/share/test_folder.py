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


def test_it_is_made_for_the_user_alone(runtime):
    folder = shared_folder()
    assert folder == runtime / "lightning_echo"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert shared_folder() == folder


def test_without_a_runtime_folder_it_lies_among_the_temporary_files(runtime, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert shared_folder() == tmp_path / f"lightning_echo-{os.getuid()}"


def test_a_folder_that_others_may_use_is_refused(runtime):
    (runtime / "lightning_echo").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="must be a folder of yours alone"):
        shared_folder()


def test_a_link_in_its_place_is_refused(runtime, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (runtime / "lightning_echo").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="must be a folder of yours alone"):
        shared_folder()


def test_a_path_too_long_for_a_socket_is_refused_with_the_way_out(monkeypatch, tmp_path):
    folder = tmp_path / ("f" * 100)
    monkeypatch.setenv("LIGHTNING_ECHO_SHARED", str(folder))
    with pytest.raises(ValueError, match="take a shorter name, or set LIGHTNING_ECHO_SHARED"):
        socket_of("sweep")


def test_names_are_those_of_sockets(runtime):
    for name in ("b.sock", "a.sock", "c.lock"):
        (shared_folder() / name).touch()
    assert names() == ["a", "b"]


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
