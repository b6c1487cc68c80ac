"""The way of a batch through the package is short: `benchmarks/crossings.py` counts it."""

from __future__ import annotations

from crossings import crossings


def test_with_workers_the_training_thread_crosses_between_files_eight_times_at_most() -> None:
    with_workers = [row for row in crossings(True).rows if row[1]]
    assert len(with_workers) == 2
    for _, _, count, files, which, *_ in with_workers:
        assert 0 < count <= 8, which
        assert files > 1, which
