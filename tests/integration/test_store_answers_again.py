"""A job's store that did not answer in time is asked again where an epoch begins, by a thread, while the training continues."""

import threading
import time

import pytest
from demand_cases import Serials, batches_of, on_demand
from loader_cases import until

from lightning_echo.loader import ranks
from lightning_echo.loader.ranks import JobStore, RankPlaces, to_bytes
from lightning_echo.loader.state import EchoCounts, Place
from lightning_echo.plan.demand import Booked

START = Place(0, 0, (), 0, 0)


class Slow:
    """A store that gives no answer before it is released. Then all have left the same place."""

    def __init__(self):
        self.is_released, self.left = threading.Event(), []

    def set(self, key, value):
        assert self.is_released.is_set(), "the training would wait for the store"
        self.left.append(value)

    def has_extended_api(self):
        return False

    def get(self, key):
        assert self.is_released.wait(60)
        return to_bytes(9, Booked(40), EchoCounts(40, 0))


@pytest.mark.timeout(60)
def test_where_an_epoch_begins_a_store_that_answers_again_is_used_again(monkeypatch):
    monkeypatch.setattr(ranks, "MOST_SECONDS", 0.05)
    monkeypatch.setattr(ranks, "_ANSWER_SECONDS", 1.0)
    loader, said, store = on_demand(Serials(4), workers=1, num_replicas=2, rank=0), [], Slow()
    batches = batches_of(loader)  # an epoch has one
    next(batches)
    places = RankPlaces(0, [START] * 2, JobStore(store), ["0", "1"])
    monkeypatch.setattr(loader._run, "_places", places)
    monkeypatch.setattr(loader._run.says, "inform", said.append)
    assert places.collect(Place(9, 8, (), 8, 10), said.append)[1] == START
    next(batches), next(batches)  # nobody waits for the thread that asks
    time.sleep(1.2)  # longer than an answer may take
    assert len(said) == 1
    assert "the job's store does not answer" in said[0]
    store.is_released.set()
    assert until(lambda: not any(thread.name == "lightning_echo store" for thread in threading.enumerate()))
    assert len(said) == 1, "an answer that comes too late is none"
    assert not store.left
    next(batches)
    assert until(lambda: len(said) == 2)
    assert said[1].startswith("the job's store answers again")
    next(batches)
    assert len(store.left) >= 1
    assert places.collect(Place(9, 8, (), 8, 10), said.append)[1].frontier == 40
    assert len(said) == 2
    loader.close()
