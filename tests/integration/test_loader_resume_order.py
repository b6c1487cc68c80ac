"""A resumed run with another order: within a pass it is refused by name; where a pass has ended, the next has the new order."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_echo import EchoLoader, EchoStateError

LENGTH = 24
DATA = torch.arange(LENGTH)


class Backwards:
    def __iter__(self):
        return iter(range(LENGTH - 1, -1, -1))

    def __len__(self):
        return LENGTH


def dealt(ranks, shuffle=True):
    return DistributedSampler(DATA, num_replicas=ranks, rank=0, shuffle=shuffle)


ORDERS = {
    "shuffle=True": {"shuffle": True},
    "shuffle=False": {},
    "Backwards": {"sampler": Backwards()},
    "RandomSampler\\(replacement=True\\)": {"sampler": RandomSampler(DATA, replacement=True)},
    "WeightedRandomSampler\\(replacement=True\\)": {"sampler": WeightedRandomSampler(torch.ones(LENGTH), LENGTH)},
}
NAMES = list(ORDERS)
PAIRS = list(zip(NAMES[1:], NAMES[2:] + NAMES[:1], strict=True))


def echo(order, factor=1, **options):
    loader = DataLoader(DATA, **({} if "batch_sampler" in order else {"batch_size": 4}), **order)
    return EchoLoader(loader, factor, insertion_point="auto", seed=0, **options)


def after(batches, order, factor=1):
    loader = echo(order, factor)
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return loader.state_dict()


@pytest.mark.parametrize(("before", "now"), PAIRS)
def test_within_a_pass_another_order_is_refused_by_name(before, now):
    state = after(2, ORDERS[before])
    with pytest.raises(EchoStateError, match=rf"within a pass, with an order by {before}.* \(now by {now}"):
        echo(ORDERS[now]).load_state_dict(state)
    echo(ORDERS[before]).load_state_dict(state)
    state = after(LENGTH // 4, ORDERS[before], factor=4)  # an epoch has ended, which is not a whole pass
    with pytest.raises(EchoStateError, match=f"within a pass, with an order by {before}"):
        echo(ORDERS[now], 4).load_state_dict(state)


@pytest.mark.parametrize(("before", "now"), [("shuffle=True", "shuffle=False"), ("Backwards", "shuffle=True")])
def test_where_a_pass_has_ended_the_next_one_has_the_new_order_and_that_is_said(before, now):
    state = after(LENGTH // 4, ORDERS[before])
    resumed = echo(ORDERS[now])
    resumed.load_state_dict(state)
    with pytest.warns(UserWarning, match=f"order by {before}.* .now by {now}"):
        found = [batch.tolist() for batch in resumed]
    whole = echo(ORDERS[now])
    list(whole)
    assert found == [batch.tolist() for batch in whole]  # its second pass
    assert sorted(index for batch in found for index in batch) == list(range(LENGTH))


def test_what_a_sampler_of_torchs_chooses_from_is_part_of_its_order_and_weights_are_not():
    sampler, other = ({"sampler": SubsetRandomSampler(indices)} for indices in (range(12), range(12, 24)))
    state = after(1, sampler)
    with pytest.raises(EchoStateError, match="within a pass, with an order by SubsetRandomSampler"):
        echo(other).load_state_dict(state)
    echo({"sampler": SubsetRandomSampler(list(range(12)))}).load_state_dict(state)
    ones, others = ({"sampler": WeightedRandomSampler(weights, LENGTH)} for weights in (torch.ones(LENGTH), torch.rand(LENGTH)))
    resumed = echo(others)
    resumed.load_state_dict(after(1, ones))
    assert resumed.delivered_batches == 1


@pytest.mark.parametrize("by_batches", [False, True])
def test_a_distributed_sampler_for_another_number_of_ranks_is_refused_within_a_pass_and_goes_on_with_the_next(by_batches):
    def order(ranks):
        return {"batch_sampler": BatchSampler(dealt(ranks), 4, False)} if by_batches else {"sampler": dealt(ranks)}

    state = after(1, order(2))
    with pytest.raises(
        EchoStateError, match=r"DistributedSampler\(num_replicas=2.* \(now by .*num_replicas=3.*any number of ranks"
    ):
        echo(order(3)).load_state_dict(state)
    ended = after(LENGTH // 2 // 4, order(2))
    resumed = echo(order(3))
    resumed.load_state_dict(ended)
    with pytest.warns(UserWarning, match="num_replicas=2"):
        found = [index for batch in resumed for index in batch.tolist()]
    second_pass = dealt(3)
    second_pass.set_epoch(1)
    assert found == list(second_pass)
