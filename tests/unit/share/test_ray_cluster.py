"""What is said where Ray is missing, where there is no cluster, and where the cluster asks for no token. Ray is played here."""

import sys
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader, IterableDataset

from lightning_echo import EchoLoader
from lightning_echo.share import ray as ray_cluster
from lightning_echo.share.ray import check_ray, place_of_training

SHARE = {"name": "sweep", "cluster": "ray"}


@pytest.fixture
def played(monkeypatch):
    """Ray, in a process that has joined a cluster."""
    context = SimpleNamespace(gcs_address="10.0.0.1:6379", get_node_id=lambda: "abc")
    module = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: name)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    return module


def test_ray_that_is_missing_names_the_extra(monkeypatch):
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-echo\[ray\]'"):
        check_ray("sweep")
    with pytest.raises(ModuleNotFoundError, match=r"share='sweep' .* needs Ray, which is not installed"):
        EchoLoader(DataLoader(range(4)), 1, share=SHARE)


def test_without_a_cluster_the_way_out_is_said(played):
    played.is_initialized = lambda: False
    with pytest.raises(ValueError, match=r"this process is in no cluster\. Leave cluster out"):
        place_of_training("sweep")


def test_a_cluster_without_tokens_is_warned_of_with_what_to_set(played, monkeypatch):
    with pytest.warns(UserWarning, match=r"RAY_AUTH_MODE=token on all nodes, and RAY_AUTH_TOKEN_PATH .* \(chmod 600\)"):
        assert place_of_training("sweep") == {"address": "10.0.0.1:6379", "node": "abc"}
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert place_of_training("sweep")["node"] == "abc"  # no warning, which would be an error


class Stream(IterableDataset):
    """Four numbers."""

    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize("loader", [DataLoader(Stream()), [[0, 1], [2, 3]]], ids=["stream", "batches"])
def test_what_is_not_read_by_index_is_refused(played, loader):
    with pytest.raises(ValueError, match=r"no other node could continue within a pass.* leave cluster out"):
        EchoLoader(loader, 1, share=SHARE)
