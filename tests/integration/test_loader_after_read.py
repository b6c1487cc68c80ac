"""`after_read` where decoding is random, too: every run can be repeated."""

import random

import numpy as np
import pytest
import torch
from loader_cases import LoggedDataset, ReadLog, same, take
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader


class RandomlyDecoded(LoggedDataset):
    """An example is [index, number of the read, noise of decoding, noise of augmenting]; both draw from all three generators."""

    def decode(self, raw):
        return torch.cat([super().decode(raw), noise()])

    def augment(self, example):
        return torch.cat([example, noise()])


def noise():
    drawn = torch.randint(2**20, ()).item(), np.random.randint(2**20), random.randrange(2**20)
    return torch.tensor([drawn[0] << 40 | drawn[1] << 20 | drawn[2]])


class Numbered(RandomlyDecoded):
    def read(self, index):  # the number of the read is another one in another run
        return super().read(index)[:8] + bytes(8)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_with_random_decoding_is_repeated_and_resumed_exactly_and_leaves_random_states_alone(tmp_path, workers):
    def make():
        plain = DataLoader(Numbered(19, ReadLog(tmp_path / "reads")), batch_size=4, shuffle=True, num_workers=workers)
        return EchoLoader(plain, 2.37, insertion_point="after_read", seed=2)

    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    whole, states = take(make(), 20), [make().state_dict()]
    running = make()
    for _ in range(4):
        for batch in running:
            assert same(batch, whole[len(states) - 1])
            states.append(running.state_dict())
    for step in range(0, 20, 7):
        resumed = make()
        resumed.load_state_dict(states[step])
        assert same(take(resumed, 20 - step), whole[step:])
        assert (resumed.counts.refetched > 0) == (0 < step < 20)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
