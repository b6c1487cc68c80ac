"""``reuse="memory"``: an `EchoLoader` draws echoes from all that its buffer holds, exactly and resumably.

The model beside it is a list: of each worker the examples that it has read last, as many as it may hold. At ``after_batching``
one process holds whole batches.
"""

from fractions import Fraction

import pytest
import torch
from loader_cases import POINTS, LoggedDataset, Noisy, ReadLog, assert_goes_on, case_id, pairwise, take
from torch.utils.data import DataLoader, SubsetRandomSampler

from lightning_echo import EchoLoader

BATCH = 4
CASES = pairwise(point=POINTS, factor=(2.37, 16), workers=(0, 2))  # 1.5 and 4: test_every_way.py


def echo(dataset, factor, workers=0, point="before_augmentation", reuse="memory", buffer_size=None, seed=3, **options):
    plain = DataLoader(dataset, BATCH, num_workers=workers, **{"shuffle": True, **options})
    size = buffer_size or (6 if point == "after_batching" else 8 * BATCH * max(workers, 1))
    return EchoLoader(plain, factor, insertion_point=point, buffer_size=size, reuse=reuse, seed=seed)


def items_of(batch, point):
    """What is reused: (index, number of its read) of each example, or all of these of a batch."""
    examples = [tuple(row) for row in batch[:, :2].tolist()]
    return [tuple(examples)] if point == "after_batching" else examples


def check_share(sizes, fresh, factor):
    """Of all items that one process delivers, ``1 / factor`` are fresh. The first batch is all fresh, and counts for none."""
    exact, delivered, read = Fraction(str(factor)), 0, 0
    assert fresh[0] == sizes[0]
    for size, new in zip(sizes[1:], fresh[1:], strict=True):
        delivered, read = delivered + size, read + new
        assert abs(read - delivered / exact) < 1


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_echoes_are_among_what_was_read_last_and_the_share_of_fresh_examples_is_exact(case, tmp_path):
    dataset, point, factor = LoggedDataset(1000, ReadLog(tmp_path / "reads")), case["point"], case["factor"]
    loader = echo(dataset, factor, case["workers"], point)
    holders = 1 if point == "after_batching" else max(case["workers"], 1)
    most = loader.buffer_size // holders
    held, sizes, fresh = ([[] for _ in range(holders)] for _ in range(3))
    for number, batch in enumerate(take(loader, 70)):
        holder, items = number % holders, items_of(batch, point)
        assert len(set(items)) == len(items), "nothing is in a batch twice"
        new = [item for item in items if not any(item in others for others in held)]
        assert set(items) - set(new) <= set(held[holder][-most:]), "echoes are what this worker has read last"
        assert loader.last_batch_counts is not None
        held[holder] += new
        sizes[holder].append(len(items))
        fresh[holder].append(len(new))
    loader.close()
    for of_holder in zip(sizes, fresh, strict=True):
        check_share(*of_holder, factor)
    counts = loader.counts
    assert counts.fresh == sum(map(sum, fresh)) * (BATCH if point == "after_batching" else 1)
    assert counts.refetched == 0


class Doubled(Noisy):
    """Reads whole batches: an example depends on with which others it was read."""

    def __getitems__(self, indices):
        noise = torch.rand(1)
        return [torch.cat([torch.tensor([float(index)]), noise, torch.rand(1)]) for index in indices]


@pytest.mark.parametrize("reuse", ["memory", "each"])
def test_a_data_set_that_reads_whole_batches_is_read_again_by_whole_calls(reuse):
    assert_goes_on(lambda: echo(Doubled(23), 2.37, 0, "after_augmentation", reuse, buffer_size=8), 3, 4)
    assert_goes_on(lambda: echo(Doubled(23), 2.37, 2, "after_augmentation", reuse, buffer_size=12), 3, 8)


@pytest.mark.parametrize("point", ["before_augmentation", "after_batching"])
def test_what_a_users_sampler_gave_in_an_earlier_pass_is_found_again(point):
    """The buffer holds examples of the pass before."""

    def make():
        sampler = SubsetRandomSampler(range(23), torch.Generator().manual_seed(3))
        return echo(Noisy(23), 1.5, 0, point, buffer_size=4 if point == "after_batching" else 8, shuffle=None, sampler=sampler)

    assert_goes_on(make, 4, 7)
