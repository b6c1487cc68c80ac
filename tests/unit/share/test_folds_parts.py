"""Parts of a data set: which one a loader reads, which items are its members, what travels, and what is read for whom."""

import fcntl
import os
import tempfile
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, Subset, SubsetRandomSampler

from lightning_echo import StagedDataset
from lightning_echo.pipeline.ahead import AheadOrder
from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.pipeline.pipelines import Layout
from lightning_echo.plan.memory import make_plan
from lightning_echo.plan.plan import PlanShape, Reuse
from lightning_echo.share.parts import (
    Dealing,
    Items,
    Part,
    PartItems,
    Wanted,
    base_of,
    bits_in,
    count_of,
    part_of,
    read_in_chunks,
    sealed,
    union_of,
)
from lightning_echo.share.pipeline import item_at, shared_shape
from lightning_echo.share.reading import distance_of, order_of
from lightning_echo.share.window import CHUNK

LENGTH, PASSES = 97, 5
BASE = list(range(LENGTH))


class FirstTwo(Subset):
    """Has fewer examples than indices."""

    def __len__(self):
        return 2


def base_order(length=LENGTH, seed=7):
    return order_of(kind_of(DataLoader(range(length), shuffle=True)), seed)


def stream(length=LENGTH, passes=PASSES, seed=7):
    """The indices of the items of a reader, one after the other."""
    order = base_order(length, seed)
    order.seek(0)
    return order.take(passes * length)


def bits_of(indices, length=LENGTH):
    return Part.of(range(length), np.array(sorted(indices))).bits


subsets = st.sets(st.integers(0, LENGTH - 1), min_size=1)


@pytest.mark.parametrize(
    ("dataset", "options", "expected"),
    [
        (BASE, {"shuffle": True}, None),
        (Subset(BASE, [3, 1]), {"shuffle": True}, [1, 3]),
        (Subset(Subset(BASE, [9, 3, 1]), np.array([2, 0])), {"shuffle": True}, [1, 9]),
        (BASE, {"sampler": SubsetRandomSampler(torch.tensor([4, 2]))}, [2, 4]),
        (Subset(BASE, [9, 3, 1]), {"sampler": SubsetRandomSampler([2, 1])}, [1, 3]),
        (Subset(BASE, [3, 1]), {"shuffle": False}, None),
        (Subset(BASE, [3, 1]), {"sampler": RandomSampler(range(2), replacement=True)}, None),
        (Subset(BASE, [3, 3, 1]), {"shuffle": True}, None),
        (BASE, {"sampler": SubsetRandomSampler([3, 3])}, None),
        (Subset(Subset(BASE, [3, 3]), [0, 1]), {"shuffle": True}, None),
        (Subset(BASE, [-1, 1]), {"shuffle": True}, None),
        (Subset(BASE, [LENGTH, 1]), {"shuffle": True}, None),
        (Subset(BASE, [1.0, 2.0]), {"shuffle": True}, None),
        (ConcatDataset([Subset(BASE, [1])]), {"shuffle": True}, None),
        (FirstTwo(BASE, [9, 3, 1]), {"shuffle": True}, None),
        (StagedDataset.of(Subset(BASE, [9, 3, 1]), augment=str), {"shuffle": True}, [1, 3, 9]),
        (Subset(StagedDataset.of(Subset(BASE, [9, 3, 1]), augment=str), [2, 0]), {"shuffle": True}, [1, 9]),
        (StagedDataset.of(BASE, augment=str), {"shuffle": True}, None),
        (StagedDataset.of(Subset(BASE, [3, 3]), augment=str), {"shuffle": True}, None),
    ],
    ids=range(19),
)
def test_a_part_is_what_subsets_and_samplers_choose_at_random_once_each(dataset, options, expected):
    part = part_of(kind_of(DataLoader(dataset, 2, **options)))
    assert (None if part is None else sorted(part.indices.tolist())) == expected
    assert part is None or part.base is BASE or list(part.base) == list(map(str, BASE))


def test_the_base_has_the_named_cuts_that_are_around_subsets():
    cut = StagedDataset.of(StagedDataset.of(Subset(BASE, [5, 7]), augment=lambda number: -number), decode=float, augment=str)
    part = part_of(kind_of(DataLoader(Subset(cut, [1]), 1, shuffle=True)))
    assert (len(part.base), part.base[3], part.indices.tolist()) == (LENGTH, "-3.0", [7])
    whole = StagedDataset.of(BASE, augment=str)
    assert base_of(whole) is whole


def test_a_part_does_not_change_if_its_base_grows():
    base = [0] * 9
    part = part_of(kind_of(DataLoader(Subset(base, [8]), 1, shuffle=True)))
    base += [0] * 9
    assert part.bits.tolist() == [0, 1]


@given(subsets)
def test_the_members_of_a_part_are_the_items_of_the_reader_whose_index_is_in_it(chosen):
    items = PartItems(Part.of(range(LENGTH), np.array(sorted(chosen))), base_order())
    expected = [item for item, index in enumerate(stream()) if index in chosen]
    assert [items.item(member) for member in range(len(expected))] == expected
    for item in range(PASSES * LENGTH - LENGTH):
        assert items.member_from(item) == next(member for member, own in enumerate(expected) if own >= item)


@given(subsets)
def test_the_distance_of_a_part_is_the_least_number_of_its_members_between_two_uses(chosen):
    items = PartItems(Part.of(range(LENGTH), np.array(sorted(chosen))), base_order())
    own = [index for index in stream() if index in chosen]
    for number in range(1, PASSES):
        places = range(number * len(chosen), (number + 1) * len(chosen))
        before = {own[place - len(chosen)]: place - len(chosen) for place in places}
        assert items.distances(number) == min(place - before[own[place]] for place in places)


def test_the_order_of_the_base_filtered_to_a_part_is_uniform_over_the_part():
    """Of four members each of the 24 orders comes equally often: chi-squared with 23 degrees of freedom, 0.999 quantile 49.7."""
    counts, tries = Counter(), 2400
    for seed in range(tries):
        order = base_order(seed=seed)
        order.seek(0)
        counts[tuple(index for index in order.take(LENGTH) if index in (3, 40, 41, 90))] += 1
    assert sum((counts[orders] - tries / 24) ** 2 / (tries / 24) for orders in counts) < 49.7
    assert len(counts) == 24


@pytest.mark.parametrize("reuse", list(Reuse))
@pytest.mark.parametrize(("replicas", "drop_last"), [(1, False), (1, True), (2, True)])
def test_what_is_live_holds_no_index_twice_in_a_part_whose_uses_come_closer_in_some_passes(reuse, replicas, drop_last):
    chosen = np.random.default_rng(0).permutation(1000)[:205]
    items, size = PartItems(Part.of(range(1000), chosen), base_order(1000)), 6
    here = -(-205 // replicas)
    batches = here // size if drop_last else -(-here // size)
    layout = Layout(205, replicas, size, size if drop_last else here - (batches - 1) * size, batches)
    shape = PlanShape(
        batch_size=size, last_batch_size=layout.last_batch_size, batches_per_pass=batches, workers=1, buffer_size=400, seed=0,
        reuse=reuse,
    )  # fmt: skip
    plan = make_plan(shared_shape(shape, 0, layout, items), 3.0)
    indices = stream(1000, 60)
    assert len({items.distances(number) for number in range(1, 50)}) > 5
    while plan.position < 50 * layout.pass_length:
        taken = [indices[items.item(item_at(layout, 0, position))] for position in plan.next_batch().positions]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(chosen.tolist())


def test_without_a_part_the_examples_that_drop_last_leaves_out_count_in_the_distance():
    layout = Layout(1000, 1, 90, 90, 11)
    shape = PlanShape(batch_size=90, last_batch_size=90, batches_per_pass=11, workers=1, buffer_size=900, seed=0)
    kind = kind_of(DataLoader(range(1000), 90, shuffle=True, drop_last=True))
    assert kind.layout(1) == layout
    assert shared_shape(shape, 0, layout, Items()).most_distance == distance_of(1000) - 10


@pytest.mark.parametrize("size", [2, 20, 200, 1000, 2000])
def test_how_much_is_read_of_data_that_is_read_in_whole_chunks(size):
    chosen, passes = set(np.random.default_rng(0).permutation(2000)[:size].tolist()), 40
    indices = stream(2000, passes)
    chunks = [indices[first : first + CHUNK] for first in range(0, len(indices), CHUNK)]
    really = sum(len(chunk) for chunk in chunks if chosen & set(chunk)) / passes
    assert read_in_chunks(size, 2000) == pytest.approx(really, rel=0.05)


# ---------------------------------------------------------------------- bits


@given(subsets, subsets)
def test_bits_travel_as_they_are(one, other):
    for chosen in (one, other):
        with sealed(bits_of(chosen)) as descriptor:
            found = bits_in(descriptor, LENGTH)
        assert np.flatnonzero(np.unpackbits(found, bitorder="little")).tolist() == sorted(chosen)
        assert count_of(found) == len(chosen)
    assert count_of(union_of([bits_of(one), bits_of(other)])) == len(one | other)


def test_nobody_can_change_bits_that_were_sent_and_what_can_be_changed_is_refused():
    with sealed(bits_of([1])) as descriptor:
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"\xff", 0)
        with pytest.raises(ValueError, match="a part of 105 examples has 14 bytes, got 13"):
            bits_in(descriptor, 105)
    with sealed(np.full(13, 255, np.uint8)) as descriptor, pytest.raises(ValueError, match="not among the 97"):
        bits_in(descriptor, LENGTH)
    with tempfile.TemporaryFile() as file, pytest.raises((OSError, ValueError)):
        bits_in(file.fileno(), LENGTH)
    descriptor = os.memfd_create("part", os.MFD_ALLOW_SEALING)
    os.write(descriptor, bits_of([1]).tobytes())
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(ValueError, match="must be sealed"):
        bits_in(descriptor, LENGTH)
    os.close(descriptor)


# ---------------------------------------------------------------------- wanted


def test_what_a_chunk_reads_is_settled_when_it_is_handed_out_and_who_wants_more_comes_after_that():
    indices, wanted = stream(), Wanted(40)
    wanted.change(bits_of(range(50)))
    reader = Dealing(AheadOrder(base_order(), LENGTH, crosses=True), wanted, 40).chunks_of(0)
    found = [item for chunk in islice(reader, 2) for item in chunk.wanted]
    assert found == [item for item in range(40, 96) if indices[item] < 50]
    assert wanted.first_for(bits_of(range(50)), 0) == wanted.first_for(bits_of([3]), 0) == 40
    wanted.change(bits_of([3, 90]))
    assert (wanted.first_for(bits_of([3]), 0), wanted.first_for(bits_of([90]), 0)) == (40, 96)
    assert wanted.first_for(bits_of([50]), 0) == 96, "though nobody has asked for it yet"
    found = [item for chunk in islice(reader, 3) for item in chunk.wanted]
    assert found == [item for item in range(96, 192) if indices[item] in (3, 90)]
    wanted.change(None)
    assert wanted.first_for(bits_of([90]), 0) == 96
    assert wanted.first_for(bits_of(range(LENGTH)), 0) == 192
    assert [item for chunk in islice(reader, 1) for item in chunk.wanted] == list(range(192, 224))
    assert wanted.first_for(bits_of([3]), 150) == 96, "what is before an item that nobody needs is forgotten"


def test_a_worker_is_told_what_it_will_not_be_asked_for_although_it_was_told_so_and_every_chunk_goes_to_its_worker():
    wanted = Wanted(0)
    wanted.change(bits_of(range(60)))
    dealing = Dealing(AheadOrder(base_order(), LENGTH, crosses=True), wanted, 0, 1)
    one, other = dealing.chunks_of(0), dealing.chunks_of(1)
    first, second = next(one), next(other)
    wanted.change(bits_of([3]))
    third, fourth, fifth = next(one), next(other), next(one)
    assert [chunk.first // CHUNK for chunk in (first, second, third, fourth, fifth)] == [0, 2, 1, 3, 4]
    for told, chunk in ((first, third), (second, fourth)):
        assert sorted(told.ahead) == sorted(index for index in chunk.indices if index < 60)
        assert sorted(chunk.dropped) == sorted(index for index in chunk.indices if index < 60 and index != 3)
    assert third.ahead == [index for index in stream()[4 * CHUNK : 5 * CHUNK] if index == 3]
    assert fifth.dropped == []


def test_who_wants_more_comes_behind_the_last_chunk_that_was_settled_without_that_in_whichever_order_workers_get_them():
    wanted = Wanted(0)
    wanted.change(bits_of(range(50)))
    dealing = Dealing(AheadOrder(base_order(), LENGTH, crosses=True), wanted, 0, 1)
    one, other = dealing.chunks_of(0), dealing.chunks_of(1)
    assert [next(one).first, next(other).first, next(other).first] == [0, 2 * CHUNK, 3 * CHUNK]
    wanted.change(bits_of(range(60)))
    assert wanted.first_for(bits_of([55]), 0) == 4 * CHUNK
    late = next(one)
    assert late.first == CHUNK
    assert [late.index_of(item) for item in late.wanted] == [index for index in stream()[CHUNK : 2 * CHUNK] if index < 60]
    assert wanted.first_for(bits_of([55]), 0) == 4 * CHUNK
    assert wanted.first_for(bits_of([70]), 0) == 4 * CHUNK
    next(other)
    assert wanted.first_for(bits_of([55]), 0) == 4 * CHUNK
    assert wanted.first_for(bits_of([70]), 0) == 5 * CHUNK
