"""A folder in which a run was resumed from several of its checkpoints: the journal is that of the run that was written last."""

import random

import pytest

from lightning_echo.pipeline.journal import JournalFile, Written, journal_path, read_journal
from lightning_echo.plan.demand import Booked
from lightning_echo.plan.journal import Begin


class Run:
    """Writes a journal, and knows what it must hold: the fresh positions of each batch, and where memory was empty."""

    def __init__(self, path, before=None, *, knows_digest=True):
        batches, begins, written = before or ([], [], None)
        if written is not None and not knows_digest:  # as a rank has it whose state is that of rank 0
            written = Written(path, 0, "", written.begins)
        self.batches, self.said = list(batches), []
        self.begins = [*(number for number in begins if number < len(batches)), len(batches)]
        self.booked = Booked(0).with_more(position for fresh in batches for position in fresh)
        self.file = JournalFile(path, written, self.said.append)
        conditions = {"workers": 2, "seed": 7}
        self.file.begin(Begin(number=len(batches), booked=self.booked, max_factor=8.0, conditions=conditions))

    def train(self, *sizes):
        """Delivers batches with so many fresh positions, the next ones."""
        for size in sizes:
            first = self.booked.frontier
            fresh = list(range(first, first + size))
            self.file.book(fresh, fresh, 8.0)
            self.booked = self.booked.with_more(fresh)
            self.batches.append(fresh)

    def save(self):
        return list(self.batches), list(self.begins), self.file.written()

    def die(self):
        """What was not written yet is lost."""
        self.file._file.close()


def found_in(path):
    stretches = read_journal(path).stretches
    batches = [each.fresh_in(number) for each in stretches for number in range(each.begin.number, each.end)]
    return batches, [each.begin.number for each in stretches]


@pytest.fixture
def path(tmp_path):
    return journal_path(str(tmp_path), "", 0)


@pytest.mark.parametrize("knows_digest", [True, False])
def test_a_resume_from_the_older_of_two_branches_continues_that_one(path, knows_digest):
    first = Run(path)
    first.train(2, 2, 2)
    early = first.save()
    first.train(2, 2, 2)
    late = first.save()
    first.train(2)
    first.file.close()
    second = Run(path, early, knows_digest=knows_digest)
    second.train(1, 1, 1, 1, 1, 1)
    second.file.close()
    third = Run(path, late, knows_digest=knows_digest)
    third.train(1, 2)
    third.file.close()
    assert not third.said
    assert found_in(path) == ([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12], [13, 14]], [0, 6])


@pytest.mark.parametrize("knows_digest", [True, False])
def test_of_two_branches_with_the_same_fresh_examples_so_far_the_right_one_is_continued(path, knows_digest):
    """The second branch had an empty memory from batch 1 on, so its echoes were other ones."""
    first = Run(path)
    first.train(2)
    early = first.save()
    first.train(1, 2)
    late = first.save()
    first.file.close()
    second = Run(path, early, knows_digest=knows_digest)
    second.train(2, 1)
    assert second.booked == first.booked
    second.file.close()
    third = Run(path, late, knows_digest=knows_digest)
    third.train(1)
    third.file.close()
    assert found_in(path) == ([[0, 1], [2], [3, 4], [5]], [0, 3])


@pytest.mark.parametrize("seed", range(40))
def test_however_often_a_run_is_killed_and_resumed_the_journal_is_that_of_its_last_life(tmp_path, seed):
    chance = random.Random(seed)
    saved = [None]
    for _ in range(12):
        path = journal_path(str(tmp_path / chance.choice(("a", "b"))), "", 0)
        run = Run(path, chance.choice(saved))
        places = []
        for _ in range(chance.randint(0, 5)):
            run.train(*chance.choices((0, 1, 2), k=chance.choice((1, 3, 40))))
            places.append(run.save())
        run.train(*chance.choices((0, 1, 2), k=chance.choice((0, 3, 70))))
        if is_killed := chance.random() < 0.5:
            run.die()
        else:
            run.file.close()
            places.append(run.save())
        if any("is not the journal of this run" in each for each in run.said):
            continue  # a new run has taken the folder since the checkpoint
        saved += places
        batches, begins = found_in(path)
        assert batches == run.batches[: len(batches)]
        assert len(batches) >= len(run.batches) - 64 * is_killed
        assert begins == [number for number in run.begins if number <= len(batches)]
