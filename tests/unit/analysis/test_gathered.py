"""What ranks tell each other: with a process group, and without one."""

import pytest
import torch.distributed

from lightning_echo.analysis.phases import gathered

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")


def test_a_single_process_tells_itself():
    assert gathered({"seconds": 3}) == [{"seconds": 3}]


def test_in_a_process_group_each_rank_has_a_place(monkeypatch):
    """Two ranks, of which this process is the second one; the group itself is a fake."""

    def all_gather_object(found, value):
        assert len(found) == 2
        found[:] = ["of rank 0", value]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    assert gathered("of rank 1") == ["of rank 0", "of rank 1"]
