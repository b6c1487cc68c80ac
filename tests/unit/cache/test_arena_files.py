"""Arenas in files: opened again by later processes, whatever has become of the file meanwhile."""

import errno
import multiprocessing
import os
import signal
import stat
import struct

import pytest

from lightning_echo.cache import arena as arena_file
from lightning_echo.cache.arena import Arena, ArenaError

MIB = 2**20
RECORDS_AT = 8192  # header and index of up to 512 keys, in whole pages


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "arena")


def written(path, count=3):
    """Makes a file with some records, and leaves it."""
    arena = Arena.create_file(path, 10, MIB, b"a note")
    for key in range(count):
        assert arena.put(key, [b"record %d" % key])


def change(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def word(path, key):
    with open(path, "rb") as file:
        file.seek(4096 + 8 * key)
        return int.from_bytes(file.read(8), "little")


class TestMaking:
    def test_a_note_is_found_again(self, path):
        written(path)
        assert Arena.open_file(path).note == b"a note"

    def test_a_note_too_long_is_refused_and_nothing_is_left(self, path, tmp_path):
        with pytest.raises(ValueError, match="at most 3960 bytes"):
            Arena.create_file(path, 10, MIB, bytes(3961))
        assert os.listdir(tmp_path) == []

    def test_a_file_that_exists_is_not_touched_and_nothing_is_left_beside_it(self, path, tmp_path):
        written(path)
        with pytest.raises(FileExistsError):
            Arena.create_file(path, 10, MIB)
        assert os.listdir(tmp_path) == ["arena"]
        assert Arena.open_file(path).counts.records == 3

    def test_on_a_file_system_that_has_no_nameless_files(self, path, tmp_path, monkeypatch):
        open_file = os.open

        def without(name, flags, *rest, **options):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "not here")
            return open_file(name, flags, *rest, **options)

        monkeypatch.setattr(os, "open", without)
        written(path)
        assert os.listdir(tmp_path) == ["arena"]
        assert Arena.open_file(path).counts.records == 3
        with pytest.raises(FileExistsError):
            Arena.create_file(path, 10, MIB)
        nameless = Arena.create_nameless(str(tmp_path), 10, MIB)
        assert nameless.put(0, [b"x"])
        assert os.listdir(tmp_path) == ["arena"]

    def test_a_folder_that_is_not_there(self, tmp_path):
        for make in (
            lambda: Arena.create_file(str(tmp_path / "no" / "arena"), 10, MIB),
            lambda: Arena.create_nameless(str(tmp_path / "no"), 10, MIB),
        ):
            with pytest.raises(FileNotFoundError):
                make()

    def test_in_the_present_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        written("arena")
        assert Arena.open_file("arena").counts.records == 3


class TestOthers:
    @pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
    def test_a_file_that_others_can_write_is_refused(self, path, mode):
        written(path)
        os.chmod(path, mode)
        with pytest.raises(ArenaError, match=r"can be written by other users.*remove it"):
            Arena.open_file(path)

    def test_a_pipe_is_refused_and_not_waited_for(self, path):
        os.mkfifo(path, 0o600)
        assert stat.S_ISFIFO(os.stat(path).st_mode)
        with pytest.raises(ArenaError, match="is not a file"):
            Arena.open_file(path)

    def test_a_refused_file_is_closed(self, path):
        os.mkfifo(path, 0o600)
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            with pytest.raises(ArenaError):
                Arena.open_file(path)
        assert os.listdir("/proc/self/fd") == before


class TestDamaged:
    @pytest.mark.parametrize("offset", [10, 16, 17, 24, 28, 128, 132, 136, 141])
    def test_a_changed_byte_of_the_header_is_noticed(self, path, offset):
        written(path)
        with open(path, "rb") as file:
            before = file.read(200)[offset]
        change(path, offset, bytes([before ^ 1]))
        with pytest.raises(ArenaError, match=r"damaged: its header is not what was written\. Remove it|not a cache"):
            Arena.open_file(path)

    @pytest.mark.parametrize("length", [1, 4096, RECORDS_AT, RECORDS_AT + MIB - 1])
    def test_a_file_that_was_copied_in_part_is_refused(self, path, length):
        written(path)
        os.truncate(path, length)
        with pytest.raises(ArenaError, match=r"damaged: it has|not a cache|header is not"):
            Arena.open_file(path)

    @pytest.mark.parametrize("offset", [2, 4096, RECORDS_AT + 1, RECORDS_AT + 32, 2**63])
    def test_an_index_that_leads_to_where_no_record_is(self, path, offset):
        written(path)
        change(path, 4096 + 8 * 5, struct.pack("<Q", offset))
        with pytest.raises(ArenaError, match="damaged: its index leads to where no record is"):
            Arena.open_file(path)

    def test_an_index_that_leads_past_the_last_record(self, path):
        written(path)
        change(path, 4096 + 8 * 5, struct.pack("<Q", RECORDS_AT + 64 * 3))
        with pytest.raises(ArenaError, match="damaged"):
            Arena.open_file(path)

    @pytest.mark.parametrize("taken", [0, 64, 128])
    def test_a_count_of_bytes_that_leaves_out_records(self, path, taken):
        written(path)
        change(path, 64, struct.pack("<Q", taken))
        with pytest.raises(ArenaError, match="damaged: its index leads to where no record is"):
            Arena.open_file(path)

    @pytest.mark.parametrize("taken", [129, 130, 135])
    def test_a_count_of_bytes_by_which_a_record_would_be_written_over(self, path, taken):
        written(path)
        change(path, 64, struct.pack("<Q", taken))
        with pytest.raises(ArenaError, match="damaged: a record is where there should be none"):
            Arena.open_file(path)

    def test_a_count_of_bytes_beyond_the_budget(self, path):
        written(path)
        change(path, 64, struct.pack("<Q", MIB + 1))
        with pytest.raises(ArenaError, match="damaged: it has more records than there is room for"):
            Arena.open_file(path)

    def test_a_length_that_leads_out_of_the_file_reads_no_further(self, path):
        written(path)
        arena = Arena.open_file(path)
        change(path, RECORDS_AT, struct.pack("<Q", 2**62))
        assert len(arena.get(0)) == MIB - 8

    @pytest.mark.parametrize("length", [0, 100, 4096 + 8, RECORDS_AT + 68])
    def test_a_file_that_is_cut_off_while_it_is_in_use_gives_less_and_kills_nobody(self, path, length):
        written(path)
        arena = Arena.open_file(path)
        os.truncate(path, length)
        found = [arena.get(key) for key in range(3)]
        assert all(each is None or b"record %d" % key != each or length > RECORDS_AT for key, each in enumerate(found))
        assert found[0] == (b"record 0" if length > RECORDS_AT else b"" if length > 4096 else None)
        assert arena.counts.records in (0, 3)

    def test_the_records_are_counted_anew(self, path):
        written(path)
        change(path, 72, struct.pack("<Q", 7))
        assert Arena.open_file(path).counts.records == 3


def claim_and_wait(arena, key, writer):
    write = arena_file.write

    def stop(fd, parts, offset):
        if offset >= arena._file.start:
            os.write(writer, b"x")
            signal.pause()
        write(fd, parts, offset)

    arena_file.write = stop
    arena.put(key, [b"never written"])


def kill_a_writer(arena, key):
    """A process claims a key, and is killed before the record is written."""
    reader, writer = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=claim_and_wait, args=(arena, key, writer))
    process.start()
    os.read(reader, 1)
    process.kill()
    process.join()
    os.close(reader)
    os.close(writer)


class TestClaims:
    def test_of_a_killed_process_are_free_when_the_file_is_opened_again(self, path):
        arena = Arena.create_file(path, 10, MIB)
        kill_a_writer(arena, 4)
        assert not arena.put(4, [b"lost for this job"])
        taken = arena.counts.bytes
        del arena
        again = Arena.open_file(path)
        assert again.counts == (taken, 0, False)
        assert again.put(4, [b"written"])
        assert again.get(4) == b"written"

    def test_stay_while_another_process_has_the_file(self, path):
        arena = Arena.create_file(path, 10, MIB)
        kill_a_writer(arena, 4)
        child = multiprocessing.get_context("spawn").Process(target=expect_claimed, args=(path, 4))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert word(path, 4) == 1

    def test_stay_while_a_worker_that_has_lost_its_parent_may_still_write(self, path):
        arena = Arena.create_file(path, 10, MIB)
        reader, writer = os.pipe()
        worker = multiprocessing.get_context("fork").Process(target=claim_and_wait, args=(arena, 4, writer))
        worker.start()
        os.read(reader, 1)
        del arena  # as if the parent had ended
        again = Arena.open_file(path)
        assert word(path, 4) == 1
        worker.kill()
        worker.join()
        del again
        assert Arena.open_file(path).put(4, [b"x"])
        os.close(reader)
        os.close(writer)

    def test_opening_it_twice_in_a_process_is_not_being_alone(self, path):
        arena = Arena.create_file(path, 10, MIB)
        kill_a_writer(arena, 4)
        again = Arena.open_file(path)
        assert again._file is arena._file
        assert word(path, 4) == 1


def expect_claimed(path, key):
    assert not Arena.open_file(path).put(key, [b"x"])
    assert word(path, key) == 1


class TestFrozen:
    def test_since_the_disk_was_full_it_goes_on_when_it_is_opened_again(self, path, monkeypatch):
        arena = Arena.create_file(path, 10, MIB)
        write = arena_file.write

        def full(fd, parts, offset):
            if offset >= RECORDS_AT:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(fd, parts, offset)

        with monkeypatch.context() as patched:
            patched.setattr(arena_file, "write", full)
            assert not arena.put(1, [b"does not fit"])
        assert arena.counts.is_frozen
        assert arena.shortage == "no more can be written: No space left on device"
        del arena
        again = Arena.open_file(path)
        assert not again.counts.is_frozen
        assert again.put(1, [b"fits now"])

    def test_since_it_is_full_it_stays_so(self, path):
        arena = Arena.create_file(path, 10, MIB)
        assert arena.put(0, [bytes(MIB - 100_000)])
        assert not arena.put(1, [bytes(100_000)])
        assert (arena.counts.is_frozen, arena.shortage) == (True, "")
        del arena
        assert Arena.open_file(path).counts.is_frozen

    def test_only_the_process_that_has_frozen_it_says_why(self, path):
        arena = Arena.create_file(path, 10, MIB)
        assert [arena.freeze(), arena.freeze()] == [True, False]


def put_there(arena, key):
    assert arena.put(key, [b"from there"])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_has_the_same_file_although_another_one_has_its_name_by_now(path, method):
    arena = Arena.create_file(path, 10, MIB)
    os.unlink(path)
    written(path)
    worker = multiprocessing.get_context(method).Process(target=put_there, args=(arena, 7))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    assert arena.get(7) == b"from there"
    assert Arena.open_file(path).get(7) is None


def test_the_lock_of_those_who_have_it_ends_with_them(path):
    written(path)
    fd = os.open(path, os.O_RDWR)
    assert arena_file.lock_alone(fd)
    os.close(fd)
    arena = Arena.open_file(path)
    fd = os.open(path, os.O_RDWR)
    assert not arena_file.lock_alone(fd)
    del arena  # before its other descriptor is closed, which would drop the lock of this process
    assert arena_file.lock_alone(fd)
    os.close(fd)
