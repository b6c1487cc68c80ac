"""What an object is made of, where no copy shows it (test_copies.py)."""

import pytest
import torch
from own_states import Ends

from lightning_echo.protecting.holders import is_stateful


class Passes:
    def __iter__(self):
        return iter(())


class Wrong:
    def state_dict(self, num_workers):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("loader", "expected"),
    [(Ends(1), True), (Passes(), False), (Wrong(), False), ([torch.zeros(1)], False), (torch.nn.Linear(1, 1), True)],
)
def test_who_saves_a_state_is_seen_by_what_can_be_called(loader, expected):
    assert is_stateful(loader) is expected
