"""The options of sharing: what is accepted, and what is refused with a hint, also where Ray or a cluster is missing."""

import re
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, IterableDataset

from lightning_echo import EchoLoader
from lightning_echo.share import config as share_config
from lightning_echo.share import ray as ray_cluster
from lightning_echo.share.config import ShareConfig, read_share_config
from lightning_echo.share.ray import check_ray, place_of_training


@pytest.mark.parametrize("make", [dict, lambda **given: OmegaConf.create(given), ShareConfig])
def test_it_may_be_a_name_a_mapping_or_a_share_config(make):
    assert read_share_config("sweep") == read_share_config(make(name="sweep")) == ShareConfig("sweep")
    assert read_share_config(make(name="sweep", cluster="ray")) == ShareConfig("sweep", cluster="ray")
    assert read_share_config(None) is None


@pytest.mark.parametrize("name", ["a/b", "", ".hidden", "n" * 65, "two words", "é"])
def test_names_that_are_no_file_names_are_refused(name):
    with pytest.raises(ValueError, match=r"share\.name must be 1 to 64 letters"):
        ShareConfig(name)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"behind": "hurry"}, ValueError, "share.behind must be 'wait' or 'skip', got 'hurry'"),
        ({"join": "later"}, ValueError, "share.join must be 'now' or 'pass', got 'later'"),
        ({"cluster": "dask"}, ValueError, "share.cluster must be None or 'ray', got 'dask'"),
        (
            {"cluster": "ray", "behind": "skip"},
            ValueError,
            "share.behind='skip' is impossible with share.cluster='ray'.* Use behind='wait', or leave cluster out",
        ),
        ({"wait_for": 0}, ValueError, "share.wait_for must be a number of trainings"),
        (
            {"workers": "all"},
            ValueError,
            "share.workers must be 'sum', 'starter' or a number of workers from 1 to 128, got 'all'",
        ),
        ({"workers": 0}, ValueError, "share.workers must be 'sum', 'starter' or a number of workers from 1 to 128, got 0"),
        ({"workers": 129}, ValueError, "share.workers must be .* from 1 to 128, got 129"),
        ({"workers": True}, ValueError, "share.workers must be .* from 1 to 128, got True"),
        *(
            (
                {"cluster": "ray", "cluster_workers": wanted},
                ValueError,
                r"share\.cluster_workers must be a number of workers from 1 to 96, or two, the first one not larger than the "
                rf"second, such as \(2, 16\), got {re.escape(repr(wanted))}$",
            )
            for wanted in (0, -1, 97, (8, 2), (0, 0), (-1, 2), (2, 97), (1, 2, 3), (), True, (True, 2), 1.5, (1, 2.5), "8", "12")
        ),
        (
            {"cluster_workers": 8},
            ValueError,
            r"share\.cluster_workers=8 needs share\.cluster='ray': these workers are Ray actors on other machines\. Add it",
        ),
        ({"cluster_resources": {"x": 1}}, ValueError, r"share\.cluster_resources=\{'x': 1\} needs share\.cluster='ray'"),
        (
            {"cluster": "ray", "cluster_resources": {"x": 1}},
            ValueError,
            r"share\.cluster_resources=\{'x': 1\} needs share\.cluster_workers, whose resources they are",
        ),
        *(
            (
                {"cluster": "ray", "cluster_workers": 8, "cluster_resources": resources},
                ValueError,
                r"share\.cluster_resources must be amounts by name, each more than 0.* got " + re.escape(repr(resources)),
            )
            for resources in ({"x": 0}, {"x": -1}, {"x": True}, {"x": float("inf")}, {"x": 1.5}, {"x": "1"}, {1: 1}, ["x"], "x")
        ),
        (
            {"cluster": "ray", "cluster_workers": 8, "cluster_resources": {"x": 0.5, "CPU": 2}},
            ValueError,
            "share.cluster_resources must be resources of your own, which mark machines, got CPU: each of these",
        ),
        ({"restart": 1}, TypeError, "share.restart must be True, False or 'pass'"),
        ({"linger_seconds": -1}, ValueError, "share.linger_seconds must be a number of seconds"),
        ({"window": 1.5}, ValueError, "share.window must be a string with a unit"),
        ({"window": 100}, ValueError, "share.window must be at least 4,096 bytes, got 100"),
        ({"window": True}, TypeError, "share.window must be a string with a unit"),
    ],
)
def test_impossible_values_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        ShareConfig("sweep", **options)


@pytest.mark.parametrize(
    ("wanted", "numbers"), [(None, (0, 0)), (1, (1, 1)), (96, (96, 96)), ((2, 16), (2, 16)), ([0, 1], (0, 1)), ((3, 3), (3, 3))]
)
def test_workers_on_other_machines_are_a_number_or_two(wanted, numbers):
    assert ShareConfig("sweep", cluster="ray", cluster_workers=wanted).cluster_range == numbers


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (3, TypeError, "share must be a name, a ShareConfig or a dict of its options, got 3"),
        ({"nam": "sweep"}, ValueError, "share has unknown options nam: known are name, behind"),
        ({"behind": "skip"}, ValueError, 'share needs a name, such as "sweep"'),
    ],
)
def test_other_forms_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        read_share_config(given)


def test_the_window_is_bytes_or_a_share_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(share_config, "free_memory_bytes", lambda: 1_000_000)
    assert ShareConfig("sweep", window="8KiB").window_bytes() == 8192
    assert ShareConfig("sweep", window=5000).window_bytes() == 5000
    assert ShareConfig("sweep", window=0.25).window_bytes() == 250_000
    monkeypatch.setattr(share_config, "free_memory_bytes", lambda: None)
    with pytest.raises(ValueError, match="which this system does not tell: give bytes"):
        ShareConfig("sweep", window=0.25).window_bytes()


SHARE = {"name": "sweep", "cluster": "ray"}


@pytest.fixture
def played(monkeypatch):
    """Ray, in a process that has joined a cluster."""
    environment = SimpleNamespace(serialize=lambda: "{}")
    context = SimpleNamespace(gcs_address="10.0.0.1:6379", get_node_id=lambda: "abc", runtime_env=environment)
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


def test_without_a_cluster_a_hint_is_said(played):
    played.is_initialized = lambda: False
    with pytest.raises(ValueError, match=r"this process is in no cluster\. Leave cluster out"):
        place_of_training("sweep")


def test_a_cluster_without_tokens_is_warned_of_with_what_to_set(played, monkeypatch):
    with pytest.warns(UserWarning, match=r"RAY_AUTH_MODE=token on all nodes, and RAY_AUTH_TOKEN_PATH .* \(chmod 600\)"):
        assert place_of_training("sweep") == {"address": "10.0.0.1:6379", "node": "abc", "runtime_env": "{}"}
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert place_of_training("sweep")["node"] == "abc"  # no warning, which would be an error


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize("loader", [DataLoader(Stream()), [[0, 1], [2, 3]]], ids=["stream", "batches"])
def test_what_is_not_read_by_index_is_refused(played, loader):
    with pytest.raises(ValueError, match=r"no other node could continue within a pass.* leave cluster out"):
        EchoLoader(loader, 1, share=SHARE)
