"""Whole batches are kept while uses are left, handed out so that edits do no harm, and read again where they are lost."""

import weakref
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batch_cases import batches_shape

from lightning_echo.pipeline.batches import BatchEcho, count_examples, size_of
from lightning_echo.pipeline.requests import BatchedOrder, BatchRequests, Step
from lightning_echo.pipeline.worker import Report
from lightning_echo.plan.each import EachPlan
from lightning_echo.plan.order import SequentialOrder


class Steps:
    """Stands in for `BatchRequests`: says what it was told to."""

    def __init__(self, *steps):
        self._steps = iter(steps)

    def step(self):
        return next(self._steps)


def step(position, *, read=False, fresh=False, stays_live=False, size=4, forget=()):
    return Step(position, read or fresh, fresh, stays_live, size, forget)


SECONDS = {"source": 0.5, "rest": 0.25, "collate": 0.125}


def with_seconds(read):
    return SimpleNamespace(read=lambda position: (read(position), Report(**SECONDS)))


def echo(*steps, read=lambda position: torch.full((4,), float(position))):
    return BatchEcho(Steps(*steps), with_seconds(read))


def requests(factor, batches_per_pass=9):
    return BatchRequests(EachPlan(batches_shape(batches_per_pass), factor), BatchedOrder(SequentialOrder(35, 35), 4, 3, 9))


def counted_batches():
    """Returns a function that reads batches, and all of them and of their copies that are alive."""
    held = weakref.WeakSet()

    class Batch(list):
        __hash__ = object.__hash__

        def __init__(self):
            super().__init__([0] * 4)
            held.add(self)

        def __deepcopy__(self, memo):
            return Batch()

    return lambda position: Batch(), held


class TestEchoingBatches:
    @pytest.mark.parametrize("factor", [1, 1.5, 2, 4])
    def test_each_batch_is_read_once_and_counted_by_its_examples(self, factor):
        asked, plain = requests(factor), [list(range(start, min(start + 4, 35))) for start in range(0, 35, 4)]
        batches = BatchEcho(asked, with_seconds(lambda position: [(position, index) for index in next(asked).indices]))
        seen = []
        for _ in range(90):
            batch, counts = next(batches)
            ((position,), indices) = {position for position, _ in batch}, [index for _, index in batch]
            assert indices == plain[position % 9]
            assert counts == (Report(0, len(batch)) if position in seen else Report(len(batch), **SECONDS))
            seen += [] if position in seen else [position]
        assert seen == list(range(len(seen)))
        assert len(seen) == pytest.approx(90 / factor, abs=4)

    def test_what_reading_looked_up_counts_for_fresh_examples_and_what_it_says_always_reaches_the_user(self):
        steps = step(0, fresh=True, stays_live=True), step(0), step(1, read=True, stays_live=True), step(1)
        source = SimpleNamespace(read=lambda position: (torch.zeros(4), Report(note=f"about {position}", hits=3, misses=1)))
        batches = BatchEcho(Steps(*steps), source)
        reports = [report for _, report in (next(batches) for _ in steps)]
        assert [report.note for report in reports] == ["about 0", "", "about 1", ""]
        assert [(report.hits, report.misses) for report in reports] == [(3, 1), (0, 0), (0, 0), (0, 0)]

    def test_the_first_use_is_what_was_read_and_the_last_one_what_was_kept(self):
        copies = []

        class Batch:
            def __deepcopy__(self, memo):
                copies.append(Batch())
                return copies[-1]

        original = Batch()
        steps = step(0, fresh=True, stays_live=True), step(0, stays_live=True), step(0), step(1, fresh=True)
        first, second, last, only = [next(batches)[0] for batches in [echo(*steps, read=lambda _: original)] for _ in steps]
        assert first is only is original
        assert [second, last] == copies[::-1]

    def test_a_loader_may_use_its_memory_again(self):
        """As one with a ring of slots does."""
        slot = torch.zeros(2)
        fresh = [step(number, fresh=True, stays_live=number < 2) for number in range(3)]
        steps = fresh[0], fresh[1], step(0, stays_live=True), step(1), fresh[2], step(0)
        batches = echo(*steps, read=lambda position: slot.fill_(position))
        assert [batch.tolist() for batch, _ in (next(batches) for _ in range(6))] == [[i] * 2 for i in (0, 1, 0, 1, 2, 0)]

    def test_only_live_batches_are_held(self):
        read, held = counted_batches()
        asked, live = requests(3), set()
        steps = requests(3)
        batches = BatchEcho(asked, with_seconds(read))
        for _ in range(80):
            next(batches)
            now = steps.step()
            (live.add if now.stays_live else live.discard)(now.position)
            assert len(held) == len(live) <= 4
        batches = echo(step(0, fresh=True, stays_live=True), step(1, fresh=True, forget=(0,)), read=read)
        next(batches)
        assert len(held) == 1
        next(batches)
        assert len(held) == 0, "what is to be forgotten is let go"

    def test_a_live_batch_that_is_held_nowhere_is_read_again_and_counted(self):
        batches = echo(step(5, read=True, stays_live=True), step(5))
        assert [next(batches)[1] for _ in range(2)] == [Report(0, 4, 4, **SECONDS), Report(0, 4)]

    def test_examples_are_counted_in_the_batch_where_nobody_knows_them_beforehand(self):
        batches = echo(step(0, fresh=True, stays_live=True, size=-1), step(0, size=-1), read=lambda position: torch.zeros(5, 2))
        assert [next(batches)[1] for _ in range(2)] == [Report(5, **SECONDS), Report(0, 5)]

    def test_of_a_rebuilt_loader_the_batches_come_in_the_order_in_which_they_were_asked_for(self):
        read = ("a", Report(4, 0, 0, 1, 2, 3)), ("b", Report(4, 0, 0, 4, 5, 6))
        batches = BatchEcho(Steps(step(0, fresh=True), step(1, fresh=True)), iter(read))
        assert (next(batches), next(batches)) == read


@dataclass
class Pairs:
    images: torch.Tensor
    labels: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(7, 3), 7),
        (torch.zeros(()), 1),
        ([torch.zeros(3, 2), torch.zeros(5)], 3),
        ((torch.zeros(3), "words"), 3),
        ({"name": ["a", "b", "c", "d"], "x": torch.zeros(4, 2)}, 4),
        ({"im_file": ["a", "b"], "cls": torch.zeros(5, 1), "img": torch.zeros(2, 3, 8, 8), "shape": ((8, 8), (8, 8))}, 2),
        ({"boxes": torch.zeros(7, 4), "sizes": [8, 8], "img": torch.zeros(3, 8)}, 7),  # nothing says more than the first tensor
        (UserDict(x=torch.zeros(4)), 4),
        (tuple(zip(*[(torch.zeros(3, 8, 8), {"boxes": torch.zeros(9, 4)})] * 5, strict=True)), 5),
        (([torch.zeros(6, 3)] * 2, torch.zeros(6)), 6),
        ("text", 1),
        (None, 1),
        (SimpleNamespace(batch_size=np.int64(7)), 7),
        (SimpleNamespace(batch_size=torch.Size([5, 2])), 5),
        (SimpleNamespace(batch_size=None, num_nodes=90), 90),
        (
            SimpleNamespace(
                node_stores=[SimpleNamespace(batch_size=4), SimpleNamespace(), SimpleNamespace(batch_size=2)], num_nodes=9
            ),
            6,
        ),
        ({"graph": SimpleNamespace(batch_size=7), "labels": torch.zeros(9)}, 7),
        ({"labels": torch.zeros(9), "graph": SimpleNamespace(batch_size=7)}, 9),
        ([SimpleNamespace(num_nodes=7)] * 3, 3),  # a list of graphs
        (UserDict(batch_size=torch.zeros(3), x=torch.zeros(4)), 3),
        (Pairs(torch.zeros(5, 2), torch.zeros(5)), 5),
    ],
)
def test_examples_of_an_unknown_batch_are_counted_as_collate_functions_usually_lay_them_out(batch, expected):
    assert count_examples(batch) == expected


def test_attributes_that_are_not_fields_of_a_dataclass_count_too():
    """Other code adds its tensors to a batch."""
    batch = Pairs("scans", None)
    batch.x = torch.zeros(5, 3)
    assert count_examples(batch) == 5


def test_a_batch_that_cannot_be_asked_has_no_size_and_counts_as_one_example():
    class Lazy:
        @property
        def batch_size(self):
            raise OSError

    assert (size_of(Lazy()), count_examples(Lazy())) == (None, 1)
