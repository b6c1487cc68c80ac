"""A journal on a disk that stands still: what each step needs does not wait for it, and no batch is noted twice or not at all."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from demand_cases import Serials, batches_of, booked, on_demand

from lightning_echo.pipeline.journal import JournalFile, journal_path, read_journal


@pytest.mark.timeout(60)
def test_the_place_of_a_rank_does_not_wait_for_a_write_and_the_journal_is_whole(tmp_path, monkeypatch):
    goes_on, is_writing, write = threading.Event(), threading.Event(), JournalFile._write

    def stands_still(file, data):
        if threading.current_thread().name == "lightning_echo-prefetch":
            is_writing.set()
            assert goes_on.wait(50)
        write(file, data)

    monkeypatch.setattr(JournalFile, "_write", stands_still)
    with closing(on_demand(Serials(1000), workers=1, num_replicas=2, rank=0, journal=tmp_path)) as loader:
        batches, taken = batches_of(loader), 0
        while not is_writing.is_set():
            next(batches)
            taken += 1
            is_writing.wait(0.01)
        with ThreadPoolExecutor() as threads:
            number, _ = threads.submit(loader._run._pipeline.started.place).result(5)
        assert number == taken
        next(batches)  # it was fetched before
        goes_on.set()
        for _ in range(100):
            next(batches)
        state = loader.state_dict()
    (stretch,) = read_journal(journal_path(tmp_path, "", 0)).stretches
    assert stretch.end == taken + 101
    fresh = [position for number in range(stretch.end) for position in stretch.fresh_in(number)]
    assert sorted(fresh) == booked(state)
