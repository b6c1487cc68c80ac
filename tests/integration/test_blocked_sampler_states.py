"""With a constant factor, a state does not wait for a sampler that blocks, and is that of the batch in use all the same."""

import time
from contextlib import closing
from itertools import chain

import pytest
from demand_cases import ReadAndDecode
from loader_cases import take
from test_demand_blocked_sampler import LENGTH, Blocks
from torch.utils.data import DataLoader, SubsetRandomSampler

from lightning_echo import EchoLoader


def indices_of(batches):
    return [batch[:, 0].tolist() for batch in batches]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("point", "reads", "asked"),
    [
        ("after_augmentation", None, 60),
        ("after_batching", None, 60),
        ("before_augmentation", 4, 150),  # what comes is looked at ahead
    ],
)
def test_a_state_and_a_factor_do_not_wait_for_a_sampler_that_blocks(point, reads, asked):
    def loader_of(indices):
        plain = DataLoader(ReadAndDecode(LENGTH), 4, num_workers=1, sampler=SubsetRandomSampler(indices))
        return EchoLoader(plain, 2, insertion_point=point, seed=3, reads_in_flight=reads)

    with closing(loader_of(list(range(LENGTH)))) as whole:
        expected = indices_of(take(whole, LENGTH))
    assert sorted(set(chain.from_iterable(expected))) == list(range(LENGTH))
    indices = Blocks(asked)
    with closing(loader_of(indices)) as loader:
        batches, delivered = iter(loader), []
        while not indices.is_asked.wait(0.2):  # the thread that fetches asks, some batches ahead
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
            else:
                delivered += indices_of([batch])
        started = time.monotonic()
        state = loader.state_dict()
        assert time.monotonic() - started < 5
        loader.set_factor(3)
        assert time.monotonic() - started < 5
        changed = loader.state_dict()
        indices.opens.set()
    assert expected[: len(delivered)] == delivered
    with closing(loader_of(list(range(LENGTH)))) as resumed:
        resumed.load_state_dict(state)
        assert indices_of(take(resumed, 40)) == expected[len(delivered) : len(delivered) + 40]
    with closing(loader_of(list(range(LENGTH)))) as resumed:
        resumed.load_state_dict(changed)
        assert resumed.factor == 3
        assert indices_of(take(resumed, 1)) == expected[len(delivered) : len(delivered) + 1]
