"""A reader in the foreground, and the command that shows what readers do."""

import os
import signal

import pytest
from sharing_runs import Numbers, end_readers, epochs_of, in_process, indices, loader_of, status, wait_until
from torch.utils.data import DataLoader

from lightning_echo import ShareConfig, serve
from lightning_echo.__main__ import main
from lightning_echo.sharing.serving import status_of


@pytest.fixture(autouse=True)
def own_folder(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("s")
    folder.chmod(0o700)
    monkeypatch.setenv("LIGHTNING_ECHO_SHARED", str(folder))
    yield
    end_readers()


def serving(connection, seconds=0.0):
    """A reader in a process of its own, which says how it ended."""
    serve(DataLoader(Numbers(48, seconds), shuffle=True, num_workers=2), ShareConfig("data", window="1MiB"))
    connection.send("over")


def test_a_reader_by_hand_serves_until_it_is_interrupted():
    with in_process(serving) as (process, other):
        wait_until(lambda: status_of("data") is not None, "the reader is there")
        for batch_size in (8, 5):  # one training after the other: it does not end in between
            loader = loader_of(Numbers(48), batch_size)
            epochs = epochs_of(loader, 2)
            loader.close()
            assert [sorted(indices(epoch)) for epoch in epochs] == [list(range(48))] * 2
        assert status()["pid"] == process.pid
        with pytest.raises(ValueError, match="there is a reader of share='data' already"):
            serve(DataLoader(Numbers(48), shuffle=True), "data")
        os.kill(process.pid, signal.SIGINT)
        assert other.poll(60)
        assert other.recv() == "over"
        process.join(30)
        assert process.exitcode == 0
    assert status_of("data") is None


def test_what_cannot_be_shared_is_refused_by_hand_too():
    with pytest.raises(ValueError, match="share='data' is impossible here: list does not tell which examples"):
        serve([1, 2], "data")
    with pytest.raises(TypeError, match="share must be a name or a ShareConfig, got None"):
        serve(DataLoader(range(4)), None)


def test_the_command_shows_readers_and_their_trainings(capsys):
    assert main(["shared"]) == 0
    assert capsys.readouterr().out == "nobody reads for several trainings\n"
    loader = loader_of(Numbers(48), 8)
    next(iter(loader))
    assert main(["shared"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    loader.close()
    assert first.startswith(f"data: process {status()['pid']} reads ")
    assert "Numbers of 48 for 1 training, " in first
    assert second.startswith("  ")
    assert "pass 0, " in second
    assert second.endswith('behind="wait"')
