"""The places of the ranks of a job: what one leaves in the store, another finds there, and nothing of another batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from lightning_echo.loader import ranks
from lightning_echo.loader.ranks import KEPT, JobStore, RankPlaces, from_bytes, late_ranks, prepare, to_bytes
from lightning_echo.loader.state import EchoCounts, Place, Run
from lightning_echo.plan.demand import Booked

START = Place(0, 0, (), 0, 0)


def place(number: int, frontier: int | None = None, *ahead: Run) -> Place:
    """The place of a rank after ``number`` batches of four."""
    frontier = 2 * number if frontier is None else frontier
    fresh = frontier + sum(run.size for run in ahead)
    return Place(number, frontier, ahead, fresh, 4 * number - fresh)


def leave(rank: RankPlaces, its: Place) -> None:
    rank.leave(its.number, Booked.of(its.frontier, its.ahead), EchoCounts(its.fresh, its.echoed))


class Job:
    """The ranks of a job in one process, and what they have said."""

    def __init__(self, size: int = 3, store: Any = None) -> None:
        store, names = store or HashStore(), [f"run/{rank}" for rank in range(size)]
        for name in names:
            prepare(store, name)
        jobs = [JobStore(store) for _ in names]  # one in each process
        self.ranks = [RankPlaces(rank, [START] * size, job, names) for rank, job in enumerate(jobs)]
        self.store, self.said = store, list[str]()

    def collect(self, rank: int, own: Place) -> tuple[Place, ...]:
        return self.ranks[rank].collect(own, self.said.append)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MOST_SECONDS", 0.05)


@pytest.mark.parametrize("found", [place(5), place(9, 7, Run(9, 2), Run(40, 1)), Place(2**40, 2**41, (), 2**41, 3)])
def test_a_place_stands_in_the_store_as_bytes(found: Place) -> None:
    booked = Booked.of(found.frontier, found.ahead)
    assert from_bytes(to_bytes(found.number, booked, EchoCounts(found.fresh, found.echoed))) == found


STORES = {
    "of a process": lambda folder: HashStore(),
    "a file": lambda folder: FileStore(str(folder / "store"), 3),
    "a server": lambda folder: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
}


@pytest.mark.parametrize("kind", STORES)
def test_each_rank_finds_the_places_of_all_after_the_same_batch(tmp_path: Path, kind: str) -> None:
    job = Job(store=STORES[kind](tmp_path))
    assert job.collect(0, START) == (START,) * 3  # before any of them has left one
    places = [place(7, 10), place(7, 20, Run(22, 3)), place(7, 5)]
    for one, its in zip(job.ranks, places, strict=True):
        leave(one, its)
    assert [job.collect(rank, places[rank]) for rank in range(3)] == [tuple(places)] * 3
    assert [one.slowest for one in job.ranks] == [5] * 3
    assert job.said == []


def test_a_rank_that_is_ahead_is_known_after_the_batch_that_is_asked_for() -> None:
    job = Job(2)
    for number in range(3 + KEPT):
        leave(job.ranks[1], place(number, number))
    assert job.collect(0, place(3))[1] == place(3, 3)
    assert job.said == []


def test_a_rank_that_comes_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MOST_SECONDS", 60.0)
    monkeypatch.setattr(ranks, "_ANSWER_SECONDS", 60.0)
    job = Job(2)
    leave(job.ranks[1], place(6))
    asked: list[Any] = []
    thread = threading.Thread(target=lambda: asked.append(job.collect(0, place(7))))
    thread.start()
    leave(job.ranks[1], place(7, 9))
    thread.join(60)
    assert asked == [(place(7), place(7, 9))]
    assert job.said == []


@pytest.mark.usefixtures("quick")
def test_the_place_after_another_batch_is_said_to_be_that_and_the_last_one_before_is_taken() -> None:
    job = Job()
    for number in (4, 5, 6):
        leave(job.ranks[1], place(number))
        leave(job.ranks[2], place(number + 2, number))
    assert job.collect(0, place(8, 16)) == (place(8, 16), place(6), place(8, 6))
    assert len(job.said) == 1
    assert job.said[0].startswith("the place of rank 1 (known after batch 6) is not known after batch 8")


@pytest.mark.usefixtures("quick")
def test_a_rank_that_is_too_far_ahead_is_known_from_where_the_run_began() -> None:
    job = Job(2)
    for number in range(5, 5 + KEPT):
        leave(job.ranks[1], place(number))
    assert job.collect(0, place(4))[1] == START
    assert "rank 1 (known after batch 0)" in job.said[0]


@pytest.mark.usefixtures("quick")
def test_what_is_known_from_a_later_batch_is_not_taken_for_an_earlier_one() -> None:
    job = Job(2)
    leave(job.ranks[1], place(7))
    assert job.collect(0, place(7))[1] == place(7)
    assert job.collect(0, place(6))[1] == START


@pytest.mark.usefixtures("quick")
def test_a_batch_that_was_taken_back_does_not_count() -> None:
    job = Job(2)
    leave(job.ranks[1], place(6))
    leave(job.ranks[1], place(7))
    job.ranks[1].take_back(7)
    assert job.collect(0, place(7))[1] == place(6)


@pytest.mark.usefixtures("quick")
def test_a_batch_that_was_taken_back_while_the_store_was_lost_does_not_count_once_it_answers() -> None:
    job = Job(2)
    leave(job.ranks[1], place(6))
    leave(job.ranks[1], place(7))
    lost = job.ranks[1]._job
    assert lost is not None
    lost.lose("for a while")
    job.ranks[1].take_back(7)
    lost.why_lost = ""
    leave(job.ranks[1], place(20))
    assert job.collect(0, place(8))[1] == place(6)


@pytest.mark.usefixtures("quick")
def test_a_checkpoint_that_saves_a_state_twice_waits_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(2)
    first = job.collect(0, place(3))
    monkeypatch.setattr(ranks, "MOST_SECONDS", 1000.0)
    assert job.collect(0, place(3)) == first == (place(3), START)
    assert len(job.said) == 1
    leave(job.ranks[1], place(3))
    assert job.collect(0, place(3)) == (place(3), place(3))


def test_another_run_of_the_same_job_has_places_of_its_own(quick: None) -> None:
    one = Job(2, store=HashStore())
    other = Job(2, store=PrefixStore("another run", one.store))
    leave(one.ranks[1], place(3, 12))
    assert other.collect(0, place(3))[1] == START
    assert len(other.said) == 1


# ---------------------------------------------------------------------- a store that fails


class Stuck:
    """A store that stops to answer, as one whose process is stopped."""

    def __init__(self) -> None:
        self.is_stuck, self.release, self.calls = False, threading.Event(), 0

    def set(self, key: str, value: bytes) -> None:
        assert not self.is_stuck, "the training would wait for the store"

    def has_extended_api(self) -> bool:
        return False

    def get(self, key: str) -> bytes:
        self.calls += 1
        self.release.wait(60)
        return b""


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    store = Stuck()
    yield store
    store.release.set()


@pytest.mark.usefixtures("quick")
def test_a_store_that_does_not_answer_stops_nobody_and_is_not_asked_again(stuck: Stuck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_ANSWER_SECONDS", 0.05)
    places, said = RankPlaces(0, [START] * 2, JobStore(stuck), ["0", "1"]), list[str]()
    stuck.is_stuck = True
    assert places.collect(place(3), said.append) == (place(3), START)
    assert "the job's store does not answer" in said[0]
    leave(places, place(4))
    assert places.collect(place(4), said.append) == (place(4), START)
    assert (len(said), stuck.calls) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("answers", [True, False])
def test_the_states_of_several_loaders_wait_together_for_less_than_five_seconds(stuck: Stuck, answers: bool) -> None:
    job, said = JobStore(HashStore() if answers else stuck), list[str]()
    for name in "012345" if answers else "":
        prepare(job.store, name)
    loaders = [RankPlaces(0, [START] * 2, job, names) for names in ("01", "23", "45")]
    started = time.monotonic()
    for places in loaders:  # the other rank has not come so far, or the store does not answer
        assert places.collect(place(3), said.append) == (place(3), START)
    assert time.monotonic() - started < 5
    assert len(said) == 3


def test_the_next_checkpoint_waits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MOST_SECONDS", 0.2)
    job = Job(2)
    for number in (3, 4):
        started = time.monotonic()
        leave(job.ranks[0], place(number))
        job.collect(0, place(number))
        assert time.monotonic() - started > 0.2
    assert len(job.said) == 2


class Gone:
    """A store whose process has ended."""

    def __init__(self) -> None:
        self.is_gone = False

    def set(self, key: str, value: bytes) -> None:
        if self.is_gone:
            raise RuntimeError("connection reset by peer")

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        raise RuntimeError("connection reset by peer")


@pytest.mark.parametrize("notices_when", ["leaving", "collecting"])
def test_a_store_that_is_gone_is_said_where_a_state_is_saved(notices_when: str) -> None:
    store, said = Gone(), list[str]()
    places = RankPlaces(1, [START] * 2, JobStore(store), ["0", "1"])
    store.is_gone = notices_when == "leaving"
    leave(places, place(3))
    started = time.monotonic()
    assert places.collect(place(3), said.append) == (START, place(3))
    assert time.monotonic() - started < ranks.MOST_SECONDS
    assert len(said) == 1
    assert "connection reset by peer" in said[0]


def test_ranks_that_are_no_job_know_only_themselves() -> None:
    said: list[str] = []
    places = RankPlaces.join(3, 1, place(5))
    assert places.collect(place(6), said.append) == (START, place(6), START)
    assert said == []


def test_late_ranks_are_named() -> None:
    places = place(9), place(7), START
    assert (
        late_ranks(places, 9) == "the place of ranks 1 (known after batch 7), 2 (known after batch 0) is not known after batch 9"
    )
    assert late_ranks(places, 9, 0) == ""
    assert late_ranks(places, 9, 1) == "the place of rank 1 (known after batch 7) is not known after batch 9"
