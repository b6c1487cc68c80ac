"""The coding of a journal against lists of positions; damage of each byte; and what a replay deals against what was delivered."""

import random
from dataclasses import replace

import pytest

from lightning_echo.plan.demand import Arrived, Booked, Dealing, DemandRule
from lightning_echo.plan.journal import (
    MAGIC,
    Begin,
    Ends,
    Journal,
    JournalError,
    Records,
    ReplayedDealing,
    checksum,
    first_digest,
    frame,
)


def begin(number=0, booked=None, workers=2, continues=-1, **conditions):
    conditions = {"workers": workers, "seed": 7, **conditions}
    return Begin(number=number, booked=booked or Booked(0), max_factor=8.0, conditions=conditions, continues=continues)


def framed(*groups):
    """A file with a frame for each group of records."""
    data, digest = MAGIC, first_digest()
    for group in groups:
        made, digest = frame(b"".join(map(bytes, group)), digest)
        data += made
    return data


def random_batches(chance, workers, size, count):
    """Fresh positions of batches, as workers deliver them: in blocks, by turns, some early and some late."""
    waiting = [[] for _ in range(workers)]
    position, batches = 0, []
    for number in range(count):
        mine = waiting[number % workers]
        while len(mine) < size + chance.choice((0, 3, 40)):
            mine.extend(range(position, position + size))
            position += size
        few = chance.randint(0, size)
        batches.append(sorted(chance.sample(mine[: few + 4], few)))
        for each in batches[-1]:
            mine.remove(each)
    return batches


@pytest.mark.parametrize("seed", range(20))
def test_what_is_written_is_read(seed):
    chance = random.Random(seed)
    workers, size = chance.randint(1, 4), chance.randint(1, 40)
    batches = random_batches(chance, workers, size, 150)
    factors = [chance.choice((8.0, 1.0, 2.37)) for _ in batches]
    records, groups = Records(), [[]]
    groups[-1].append(records.begin(begin(workers=workers)))
    in_force, checked = 8.0, {}
    for number, (fresh, factor) in enumerate(zip(batches, factors, strict=True)):
        if factor != in_force:
            groups[-1].append(records.factor(factor))
            in_force = factor
        groups[-1].append(records.batch(fresh))
        if chance.random() < 0.1:
            checked[number] = checksum(fresh)
            groups[-1].append(records.check(checked[number]))
            groups.append([])
    groups[-1].append(records.end())
    journal = Journal(framed(*groups), "run")
    (stretch,) = journal.stretches
    assert [stretch.fresh_in(number) for number in range(stretch.end)] == batches
    assert [stretch.factor_of(number) for number in range(stretch.end)] == factors
    assert stretch.checks == checked
    assert stretch.begin == begin(workers=workers)
    assert journal.has_ended


def test_the_ends_of_streams_and_passes_are_read_and_a_stretch_is_cut_where_the_next_one_continues_it():
    records = Records()
    ends = {1: Ends(0, True), 2: Ends(1, False), 4: Ends(2, True)}
    written = [records.begin(begin())]
    for number, fresh in enumerate([[0, 1], [2], [3, 4], [], [5]]):
        if number in ends:
            written.append(records.ends(ends[number]))
        written.append(records.batch(fresh))
        if number == 2:
            written.append(records.pass_over())
    written += [records.pass_over(), records.end()]
    (stretch,) = Journal(framed(written), "run").stretches
    assert stretch.ends == ends
    assert stretch.passes == [3, 5]
    for number, passes, kept in ((2, 0, []), (3, 0, []), (3, 1, [3]), (5, 1, [3]), (5, 2, [3, 5])):
        cut = stretch.up_to(replace(begin(number), passes=passes))
        assert (cut.end, cut.passes) == (number, kept)
        assert cut.ends == {each: found for each, found in ends.items() if each < number}


def test_where_a_pass_had_ended_a_replay_does_not_begin_before_its_end():
    first, later = begin(), replace(begin(), passes=1)
    records = Records()
    journal = Journal(framed([records.begin(first), records.pass_over(), records.begin(replace(later, continues=0))]), "run")
    assert [each.passes for each in journal.stretches] == [[0], []]
    assert journal.stretch_of(first) is journal.stretches[0]
    assert journal.stretch_of(later) is journal.stretches[1]


def test_a_batch_takes_a_few_bytes():
    records = Records()
    records.begin(begin(workers=1))
    assert len(records.batch(range(16))) == 3  # the number of runs; where the first one begins; how long it is
    assert len(records.batch([])) == 1
    assert len(records.batch([16, 18, 20])) == 4


def journal_of(*stretches):
    """Each stretch: its `Begin`, and its batches."""
    groups = []
    for first, batches in stretches:
        records = Records()
        groups.append([records.begin(first), *map(records.batch, batches)])
    return framed(*groups)


BATCHES = [[0, 1], [2, 3], [4], [5, 7], [6, 8]]


def test_each_changed_byte_is_noticed_and_none_is_read():
    data = journal_of((begin(), BATCHES), (begin(5, Booked(9), continues=0), [[9, 10]]))
    whole = Journal(data, "run")
    for place in range(len(data)):
        damaged = data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]
        try:
            found = Journal(damaged, "run")
        except JournalError:
            continue
        # The size of a frame now points behind the end: what is before it is read, as of a killed run.
        assert found.whole < whole.whole
        assert not found.has_ended


def test_a_file_that_is_cut_off_has_the_batches_of_its_whole_frames():
    data = journal_of((begin(), BATCHES), (begin(5, Booked(9), continues=0), [[9, 10]]))
    places = sorted(Journal(data, "run").places)
    for end in range(len(MAGIC), len(data)):
        found = Journal(data[:end], "run")
        assert found.whole == max(place for place in places if place <= end)
        batches = [each.fresh_in(number) for each in found.stretches for number in range(each.begin.number, each.end)]
        assert batches == [[], BATCHES, [*BATCHES, [9, 10]]][places.index(found.whole)]
    with pytest.raises(JournalError, match="run is not a journal of this version"):
        Journal(data[: len(MAGIC) - 1], "run")


def test_a_resume_from_an_earlier_batch_takes_the_place_of_what_came_after_it():
    journal = Journal(
        journal_of(
            (begin(), BATCHES), (begin(2, Booked(4), continues=0), [[4, 5], [6]]), (begin(3, Booked(6), continues=1), [[6]])
        ),
        "run",
    )
    assert [(each.begin.number, each.end) for each in journal.stretches] == [(0, 2), (2, 3), (3, 4)]
    assert journal.stretches[0].fresh_in(1) == [2, 3]
    assert journal.stretches[1].fresh_in(2) == [4, 5]


def test_a_resume_from_before_a_resume_drops_both():
    journal = Journal(
        journal_of((begin(), BATCHES), (begin(3, Booked(5), continues=0), [[5]]), (begin(1, Booked(2), continues=0), [[2]])),
        "run",
    )
    assert [(each.begin.number, each.end) for each in journal.stretches] == [(0, 1), (1, 2)]


def test_a_new_pass_that_was_begun_early_drops_nothing():
    """Data that has grown: the number of the next batch is that of a pass, and may have been there before."""
    journal = Journal(journal_of((begin(), BATCHES), (begin(3, Booked(40), continues=0), [[40]])), "run")
    assert [(each.begin.number, each.end) for each in journal.stretches] == [(0, 5), (3, 4)]


def test_a_replay_of_another_run_is_refused_and_told_why():
    journal = Journal(journal_of((begin(), BATCHES), (begin(3, Booked(5), continues=0), [[5]])), "run")
    with pytest.raises(JournalError, match=r"^run is of another run: workers=2 \(here 3\), seed=7 \(here 8\)\. Replay repeats"):
        journal.stretch_of(begin(workers=3, seed=8))
    with pytest.raises(JournalError, match=r"a Replay cannot begin at batch 2: .* only before these batches: 0, 3"):
        journal.stretch_of(begin(2, Booked(4)))
    with pytest.raises(JournalError, match="before batch 3, other examples were delivered"):
        journal.stretch_of(begin(3, Booked(4, frozenset({5}))))
    assert journal.stretch_of(begin()).end == 3
    assert journal.why_over(journal.stretch_of(begin())) == ""
    assert "run ends before batch 4: that run was killed" in journal.why_over(journal.stretch_of(begin(3, Booked(5))))


# ---------------------------------------------------------------------- replaying


def lived(chance, *, pass_length, block, workers, count, reads_blocks):
    """Simulates a run on demand: returns its batches by what was handed out, and the rule of each worker."""
    window = 3 * block + 5
    dealing = Dealing(Booked(0), pass_length=pass_length, block=block, workers=workers, window=window)
    rules = [DemandRule(1, 4.0, 12) for _ in range(workers)]
    todo, arrived, batches, calls = [[] for _ in rules], [[] for _ in rules], [], []
    for number in range(count):
        worker = number % workers
        rule = rules[worker]
        todo[worker] += dealing.deal(worker)
        while True:
            is_full = len(rule.fresh_in(block, arrived[worker])) == block
            if is_full or (chance.random() < 0.5 and rule.may_hand_out(block, arrived[worker])):
                may_repeat = False
                break
            if not todo[worker]:
                may_repeat = True
                break
            read = todo[worker].pop(0 if reads_blocks else chance.randrange(len(todo[worker])))
            calls.append(tuple(read))
            arrived[worker] += [Arrived(each, each % pass_length, each // pass_length) for each in read]
        handed = rule.hand_out(number, block, arrived[worker], may_repeat=may_repeat)
        fresh = [each.position for each in handed.fresh]
        arrived[worker] = [each for each in arrived[worker] if each.position not in fresh]
        dealing.book(fresh)
        batches.append((fresh, handed.echoes))
    return batches, set(calls)


@pytest.mark.parametrize("reads_blocks", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_a_replay_hands_out_the_batches_of_the_run(seed, reads_blocks):
    chance = random.Random(seed)
    sizes = {"pass_length": chance.choice((3, 17, 40)), "block": chance.randint(1, 8), "workers": chance.randint(1, 3)}
    batches, calls = lived(chance, count=90, reads_blocks=reads_blocks, **sizes)
    first = begin(workers=sizes["workers"])
    stretch = Journal(journal_of((first, [fresh for fresh, _ in batches])), "run").stretches[0]
    pass_length, block = sizes["pass_length"], sizes["block"]
    dealing = ReplayedDealing(stretch, pass_length=pass_length, block=block, window=2 * block, reads_blocks=reads_blocks)
    rules = [DemandRule(1, 4.0, 12) for _ in range(first.workers)]
    read = [set() for _ in rules]
    for number, (fresh, echoes) in enumerate(batches):
        worker = number % first.workers
        for told in dealing.deal(worker):
            assert not reads_blocks or tuple(told) in calls or number > 60  # the run had not begun to read its last blocks
            read[worker].update(told)
        assert stretch.fresh_in(number) == fresh
        assert read[worker] >= set(fresh)  # it can be answered
        arrived = [Arrived(each, each % pass_length, each // pass_length) for each in stretch.fresh_in(number)]
        handed = rules[worker].hand_out(number, block, arrived, may_repeat=True)
        assert [each.position for each in handed.fresh] == fresh
        assert handed.echoes == echoes
        dealing.book(fresh)


def test_a_replay_of_a_resumed_run_deals_the_blocks_of_its_resume():
    """What was missed before the resume was read in calls of their own."""
    booked = Booked(3, frozenset({5, 6, 9}))
    records = Records()
    first = begin(2, booked, workers=1)
    data = framed([records.begin(first), records.batch([3, 4, 7]), records.batch([8, 10, 11])])
    stretch = Journal(data, "run").stretches[0]
    resumed = Dealing(booked, pass_length=100, block=4, workers=1, window=6)
    expected = [list(block) for block in resumed.deal(0)]
    replayed = ReplayedDealing(stretch, pass_length=100, block=4, window=6, reads_blocks=True)
    assert expected == [[3, 4, 7, 8], [10, 11]]
    assert [list(block) for block in replayed.deal(0)] == expected
