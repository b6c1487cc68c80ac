"""How much was fresh in each batch, as the journals of a folder have it: against lists, and where they cannot be read."""

import os
import random

import pytest

from lightning_echo.pipeline import journal as journals
from lightning_echo.pipeline.journal import FreshCounts, JournalFile, fresh_counts, journal_path
from lightning_echo.plan.demand import Booked
from lightning_echo.plan.journal import Begin, JournalError


def write(folder, sizes, rank=0, before=None, at=0, saves_at=0, **conditions):
    """Writes the journal of a rank, in which batches have so many fresh positions, from batch ``at`` on.

    Returns what a checkpoint names that is saved before batch ``saves_at``.
    """
    file = JournalFile(journal_path(str(folder), "", rank), before, pytest.fail)
    first = sum(sizes[:at])
    file.begin(Begin(number=at, booked=Booked(first), max_factor=8.0, conditions={"workers": 2, **conditions}))
    saved = file.written()
    for number, size in enumerate(sizes[at:], at):
        fresh = list(range(first, first + size))
        file.book(fresh, fresh, 8.0)
        first += size
        if number + 1 == saves_at:
            saved = file.written()
    file.close()
    return saved


def test_each_batch_has_its_number_of_fresh_examples(tmp_path):
    sizes = random.Random(0).choices(range(9), k=300)
    write(tmp_path, sizes)
    assert fresh_counts(str(tmp_path)) == FreshCounts(0, sizes, 1, are_batches=False)


def test_examples_of_all_ranks_are_added_and_whole_batches_are_told(tmp_path):
    write(tmp_path, [4, 0, 2], batches_held=3)
    write(tmp_path, [1, 1, 1, 4], rank=1, batches_held=3)
    assert fresh_counts(str(tmp_path)) == FreshCounts(0, [5, 1, 3, 4], 2, are_batches=True)


@pytest.mark.parametrize("at", [0, 1, 70, 200])
def test_what_a_resumed_run_repeated_is_counted_once(tmp_path, at):
    """The first life has written 200 batches; a checkpoint names those up to ``at``. In the second life other examples came."""
    chance = random.Random(at)
    first = chance.choices(range(9), k=200)
    second = first[:at] + chance.choices(range(9), k=260 - at)
    write(tmp_path, second, before=write(tmp_path, first, saves_at=at), at=at)
    assert fresh_counts(str(tmp_path)).counts == second


def test_a_run_that_begins_later_has_the_number_of_its_first_batch(tmp_path):
    write(tmp_path, [0] * 7 + [3, 1], at=7)
    assert fresh_counts(str(tmp_path)) == FreshCounts(7, [3, 1], 1, are_batches=False)


def test_where_there_is_no_journal_or_one_that_cannot_be_read_it_says_why(tmp_path, monkeypatch):
    path = journal_path(str(tmp_path), "", 0)
    with pytest.raises(JournalError, match=r"echo_journal_rank0\.bin is not there"):
        fresh_counts(str(tmp_path))
    with pytest.raises(JournalError, match="is not there"):
        fresh_counts("s3://bucket/runs")
    os.mkfifo(path)  # whoever opens it would wait for a writer
    with pytest.raises(JournalError, match="is not there"):
        fresh_counts(str(tmp_path))
    os.remove(path)
    write(tmp_path, [4] * 100)
    data = bytearray((tmp_path / "echo_journal_rank0.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "echo_journal_rank0.bin").write_bytes(data)
    with pytest.raises(JournalError, match="is damaged"):
        fresh_counts(str(tmp_path))
    write(tmp_path, [4] * 100, rank=1)
    os.remove(path)
    write(tmp_path, [4] * 100)
    both = sum(map(os.path.getsize, (path, journal_path(str(tmp_path), "", 1))))
    monkeypatch.setattr(journals, "_MOST_BYTES", both - 1)
    with pytest.raises(JournalError, match=r"has 0 MiB with those of other ranks: more than 0"):
        fresh_counts(str(tmp_path))
    monkeypatch.setattr(journals, "_MOST_BYTES", both)
    assert fresh_counts(str(tmp_path)).counts == [8] * 100


def test_an_empty_journal_has_no_batches(tmp_path):
    write(tmp_path, [])
    assert fresh_counts(str(tmp_path)).counts == []
