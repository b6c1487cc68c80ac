"""Arenas in files: opened again by later processes, whatever has become of the file meanwhile."""

import errno
import multiprocessing
import os
import signal
import struct

import pytest

from lightning_echo.cache import arena as arena_module
from lightning_echo.cache.arena import Arena, ArenaError

MIB = 2**20
RECORDS_AT = 8192  # header and index of up to 512 keys, in whole pages


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "arena")


@pytest.fixture
def written(path):
    """The path of a file with three records of 64 bytes each, that nobody has open."""
    arena = Arena.create_file(path, 10, MIB, b"a note")
    for key in range(3):
        assert arena.put(key, [b"record %d" % key])
    return path


def change(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path, offset):
    with open(path, "rb") as file:
        before = file.read(offset + 1)[offset]
    change(path, offset, bytes([before ^ 1]))


def word(path, key):
    with open(path, "rb") as file:
        file.seek(4096 + 8 * key)
        return int.from_bytes(file.read(8), "little")


def test_it_is_opened_again_with_all_that_it_holds_its_note_and_counts_rebuilt(written):
    change(written, 72, struct.pack("<Q", 7))  # the number of records
    again = Arena.open_file(written)
    assert (again.keys, again.budget_bytes, again.note, again.counts.records) == (10, MIB, b"a note", 3)
    assert [again.get(key) for key in range(4)] == [b"record 0", b"record 1", b"record 2", None]
    assert again.put(5, [b"more"])


def test_a_file_that_exists_is_not_touched_and_nothing_is_left_beside_it(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (written, "arena"):
        with pytest.raises(FileExistsError):
            Arena.create_file(path, 10, MIB)
    with pytest.raises(ValueError, match="at most 3960 bytes"):
        Arena.create_file("other", 10, MIB, bytes(3961))
    assert os.listdir(tmp_path) == ["arena"]
    assert Arena.open_file("arena").counts.records == 3


def test_on_a_file_system_that_has_no_nameless_files(path, tmp_path, monkeypatch):
    open_file = os.open

    def without(name, flags, *rest, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return open_file(name, flags, *rest, **options)

    monkeypatch.setattr(os, "open", without)
    assert Arena.create_file(path, 10, MIB).put(0, [b"x"])
    with pytest.raises(FileExistsError):
        Arena.create_file(path, 10, MIB)
    assert Arena.create_nameless(str(tmp_path), 10, MIB).put(0, [b"x"])
    assert os.listdir(tmp_path) == ["arena"]
    assert Arena.open_file(path).counts.records == 1


def test_it_is_for_this_user_alone(written, monkeypatch):
    assert os.stat(written).st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(written).st_uid + 1)
    with pytest.raises(ArenaError, match="belongs to another user"):
        Arena.open_file(written)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(written, mode):
    os.chmod(written, mode)
    with pytest.raises(ArenaError, match=r"can be written by other users.*remove it"):
        Arena.open_file(written)


def test_a_pipe_is_refused_not_waited_for_and_closed_and_a_link_is_not_followed(path, tmp_path):
    os.mkfifo(path, 0o600)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(ArenaError, match="is not a file"):
            Arena.open_file(path)
    assert os.listdir("/proc/self/fd") == before
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        Arena.open_file(str(tmp_path / "link"))


@pytest.mark.parametrize("content", [b"", b"something else", b"lightecho0" + bytes(5000)], ids=["empty", "text", "version"])
def test_something_else_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "arena"
    path.write_bytes(content)
    with pytest.raises(ArenaError, match="not a cache of lightning_echo, or one of another version: give another path or name"):
        Arena.open_file(str(path))
    assert path.read_bytes() == content


def lead_index_to(path, offset):
    change(path, 4096 + 8 * 5, struct.pack("<Q", offset))


def count_bytes(path, taken):
    change(path, 64, struct.pack("<Q", taken))


NO_RECORD, PARTLY = "damaged: its index leads to where no record is", r"damaged: it has|not a cache|header is not"
DAMAGES = [
    *((flip, at, "damaged: its header is not what was written") for at in (10, 16, 24, 128, 132, 141)),
    *((os.truncate, length, PARTLY) for length in (1, 4096, RECORDS_AT, RECORDS_AT + MIB - 1)),
    *((lead_index_to, at, NO_RECORD) for at in (2, 4096, RECORDS_AT + 1, RECORDS_AT + 32, RECORDS_AT + 64 * 3, 2**63)),
    *((count_bytes, taken, NO_RECORD) for taken in (0, 64, 128)),
    *((count_bytes, taken, "damaged: a record is where there should be none") for taken in (129, 135)),
    (count_bytes, MIB + 1, "damaged: it has more records than there is room for"),
]


@pytest.mark.parametrize(("damage", "value", "said"), DAMAGES)
def test_a_damaged_file_is_refused(written, damage, value, said):
    damage(written, value)
    with pytest.raises(ArenaError, match=said):
        Arena.open_file(written)


def test_a_length_that_leads_out_of_the_file_reads_no_further(written):
    arena = Arena.open_file(written)
    change(written, RECORDS_AT, struct.pack("<Q", 2**62))
    assert len(arena.get(0)) == MIB - 8


@pytest.mark.parametrize(("length", "found"), [(0, None), (100, None), (4096 + 8, b""), (RECORDS_AT + 68, b"record 0")])
def test_a_file_that_is_cut_off_while_it_is_in_use_gives_less_and_kills_nobody(written, length, found):
    arena = Arena.open_file(written)
    os.truncate(written, length)
    assert arena.get(0) == found
    assert arena.get(2) in (None, b"")
    assert arena.counts.records in (0, 3)


def claim_and_wait(arena, key, writer):
    write = arena_module.write

    def stop(fd, parts, offset):
        if offset >= arena._file.start:
            os.write(writer, b"x")
            signal.pause()
        write(fd, parts, offset)

    arena_module.write = stop
    arena.put(key, [b"never written"])


@pytest.fixture
def claiming(path):
    """An arena, and a process that has claimed key 4 of it and writes nothing."""
    arenas, (reader, writer) = [Arena.create_file(path, 10, MIB)], os.pipe()
    process = multiprocessing.get_context("fork").Process(target=claim_and_wait, args=(arenas[0], 4, writer))
    process.start()
    os.read(reader, 1)
    yield arenas, process
    process.kill()
    process.join()
    os.close(reader)
    os.close(writer)


class TestAClaimOfAKilledProcess:
    def test_is_free_when_the_file_is_opened_again_by_whoever_is_alone(self, path, claiming):
        arenas, process = claiming
        process.kill()
        process.join()
        assert not arenas[0].put(4, [b"lost for this job"])
        taken = arenas[0].counts.bytes
        assert Arena.open_file(path)._file is arenas[0]._file, "opening it twice is not being alone"
        arenas.clear()
        again = Arena.open_file(path)
        assert again.counts == (taken, 0, False)
        assert again.put(4, [b"written"])
        assert again.get(4) == b"written"

    def test_stays_while_a_worker_that_has_lost_its_parent_may_still_write(self, path, claiming):
        claiming[0].clear()  # as if the parent had ended
        again = Arena.open_file(path)
        assert word(path, 4) == 1
        claiming[1].kill()
        claiming[1].join()
        del again
        assert Arena.open_file(path).put(4, [b"x"])


class TestFrozen:
    def test_since_the_disk_was_full_it_goes_on_when_it_is_opened_again(self, path):
        arena = Arena.create_file(path, 10, MIB)
        assert arena.put(0, [b"x"])
        assert [arena.freeze(), arena.freeze()] == [True, False], "only who has frozen it says why"
        del arena
        again = Arena.open_file(path)
        assert not again.counts.is_frozen
        assert again.put(1, [b"fits now"])

    def test_since_it_is_full_it_stays_so(self, path):
        arena = Arena.create_file(path, 10, MIB)
        assert [arena.put(0, [bytes(MIB - 100_000)]), arena.put(1, [bytes(100_000)])] == [True, False]
        assert (arena.counts.is_frozen, arena.shortage) == (True, "")
        del arena
        assert Arena.open_file(path).counts.is_frozen
