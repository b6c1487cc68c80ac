"""On demand, a sampler that blocks holds up the training no longer than ``DataLoader(timeout=...)``, and no state at all."""

import threading
import time
from contextlib import closing

import pytest
import torch
from demand_cases import Serials
from loader_cases import take
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler

from lightning_echo import EchoLoader

LENGTH, BATCH = 200, 4


class Blocks(list):
    """Indices that torch's sampler asks for in the thread that fetches. After ``many`` of them it waits for ``opens``."""

    def __init__(self, many):
        super().__init__(range(LENGTH))
        self.opens, self.many, self.is_asked = threading.Event(), many, threading.Event()

    def __getitem__(self, place):
        self.many -= 1
        if self.many < 0 and not self.opens.is_set():
            self.is_asked.set()
            self.opens.wait()
        return super().__getitem__(place)


def on_demand(indices, timeout):
    plain = DataLoader(Serials(LENGTH), BATCH, num_workers=1, timeout=timeout, sampler=SubsetRandomSampler(indices))
    return EchoLoader(plain, "demand", max_factor=1, insertion_point="after_augmentation", seed=3)


@pytest.mark.timeout(60)
def test_the_time_out_ends_the_waiting_and_the_loader_continues_where_it_was():
    indices = Blocks(80)
    loader, delivered = on_demand(indices, timeout=1), []
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 1 seconds: .* is not read"):  # noqa: PT012
        for batch in loader:
            delivered += batch[:, 0].tolist()
            waits_since = time.monotonic()
    assert time.monotonic() - waits_since < 20  # it took for ever
    state = loader.state_dict()
    assert 0 < len(delivered) < LENGTH
    indices.opens.set()
    again = on_demand(list(range(LENGTH)), timeout=1)
    again.load_state_dict(state)
    for found in (loader, again):
        rest = [index for batch in found for index in batch[:, 0].tolist()]
        assert sorted([*delivered, *rest][:LENGTH]) == list(range(LENGTH))
        found.close()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_state_and_a_bound_do_not_wait_for_it():
    indices = Blocks(80)
    loader, delivered = on_demand(indices, timeout=0), []
    batches = iter(loader)
    while not indices.is_asked.wait(1):  # the thread that fetches asks, some batches ahead
        delivered += next(batches)[:, 0].tolist()
    loader.set_factor(2)
    state = loader.state_dict()
    again = on_demand(list(range(LENGTH)), timeout=0)
    again.load_state_dict(state)
    assert again.factor == 2
    first = next(iter(again))[:, 0].tolist()
    assert len({*delivered, *first}) == len(delivered) + BATCH
    indices.opens.set()
    loader.close(), again.close()


@pytest.mark.filterwarnings("ignore:lightning_echo. the place of rank 1")  # without a job, ranks know nothing of each other
def test_a_state_of_a_resumed_rank_has_the_passes_of_a_slower_one():
    def loader(rank):
        sampler = RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(4))
        plain = DataLoader(Serials(LENGTH), BATCH, num_workers=1, sampler=sampler)
        return EchoLoader(plain, "demand", max_factor=1, insertion_point="after_augmentation", num_replicas=2, rank=rank)

    with closing(loader(0)) as quick:
        take(quick, 3 * LENGTH // BATCH // 2)
        state = quick.state_dict()
    with closing(loader(0)) as quick:
        quick.load_state_dict(state)
        take(quick, 5)
        state = quick.state_dict()
    generator = torch.Generator().manual_seed(4)
    order = list(RandomSampler(range(LENGTH), generator=generator))
    with closing(loader(1)) as slow:  # it has delivered nothing yet
        slow.load_state_dict(state)
        found = take(slow, LENGTH // BATCH // 2)
    assert [index for batch in found for index in batch[:, 0].tolist()] == order[1::2]
