"""The benchmark of reads in flight: its server, what it requires of a row, and all of it in its quickest form."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import reads
from readers import READERS, HeavyTailed, close, our
from reads import Extent
from slow_server import answers_per_second, by_kept_connection, by_urllib, served
from workloads import Sleeping

TINY = Extent(rounds=1, seconds=0.2, pairs=1, files=64, read_seconds=0.002)
SLOW = 0.02


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(bytes([number]) * 70_000)
    return tmp_path


def test_a_server_answers_late_and_with_the_files(folder: Path) -> None:
    with served(folder, SLOW) as urls:
        for fetch in (by_urllib, by_kept_connection):
            begun = time.perf_counter()
            assert [fetch(url)[:1] for url in urls] == [b"\0", b"\1", b"\2"]
            assert time.perf_counter() - begun >= 3 * SLOW * 0.95  # the server's clock has steps of a millisecond
        assert 0 < answers_per_second(urls, by_urllib, threads=4, seconds=0.2) <= 1.5 * 4 / SLOW


def test_one_read_in_fifty_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    data = HeavyTailed(0.5)
    for index in range(200):
        data.read(index)
    assert (slept.count(25.0), slept.count(0.5)) == (4, 196)
    assert sum(slept) == pytest.approx(200 * data.mean_seconds)


NAME = our(64)


@pytest.mark.parametrize(
    ("batch_size", "rate", "passed"), [(32, 2900.0, "yes"), (32, 2400.0, "NO"), (4, 2400.0, "yes"), (4, 2300.0, "NO")]
)
def test_a_row_passes_if_it_meets_all_that_is_required(batch_size: int, rate: float, passed: str) -> None:
    found = {"bare": [95.0], "bare, many": [790.0], NAME: [rate], f"{NAME}, {reads._NO_TIME}": [5000.0]}
    row = reads._sleeping_row(batch_size, NAME, 0.02, found)
    assert row[-1] == passed
    assert row[-4] == pytest.approx(rate / 3200)  # the smaller bound


def test_what_is_not_installed_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READERS, "grain 16", reads.Reader("grain", print, 16, ("a-package-that-nobody-has",), 0))
    assert reads.there(["bare", "grain 16"]) == ["bare"]
    row = reads._sleeping_row(32, "grain 16", 0.02, {})
    assert row[:5] == (32, "grain", "not installed", 0, 16)
    assert set(row[6:]) == {"-"}


@pytest.mark.parametrize("name", ["bare", our(16), "torchdata 16", "grain 16"])
def test_a_reader_delivers_other_examples_in_each_batch(name: str) -> None:
    if not reads.there([name]):
        pytest.skip(f"{READERS[name].title} is not installed")
    loader = READERS[name].make(Sleeping(0.0, 1000), 8)
    batches = iter(loader)
    indices = [index for _ in range(4) for index in next(batches)[1].tolist()]
    assert len(set(indices)) == 32
    del batches
    close(loader)


@pytest.mark.program
@pytest.mark.slow
def test_all_of_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_BATCH_SIZES", (32,))
    monkeypatch.setattr(reads, "_SIZES", reads._SIZES[:1])
    monkeypatch.setattr(reads, "PEERS", ())
    tables = {table.name: table for table in reads.tables(TINY)}
    assert list(tables) == ["reads", "reads_served", "reads_local", "reads_tail"]
    for table in tables.values():
        assert {len(row) for row in table.rows} == {len(table.columns)}
        ours = [dict(zip(table.columns, row, strict=True)) for row in table.rows if "ours" in row]
        rates = [row.get("examples/s") or row["ms per example"] for row in ours]
        assert len(rates) >= 2
        assert all(0 < rate < 100_000 for rate in rates)
