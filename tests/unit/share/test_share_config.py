"""The options of sharing: what is accepted, and what is refused with the way out."""

import pytest
from omegaconf import OmegaConf

from lightning_echo import EchoConfig
from lightning_echo.share import config as share_config
from lightning_echo.share.config import ShareConfig, read_share_config


@pytest.mark.parametrize(
    "given",
    ["sweep", {"name": "sweep"}, OmegaConf.create({"name": "sweep"}), ShareConfig("sweep")],
    ids=["name", "dict", "DictConfig", "ShareConfig"],
)
def test_it_may_be_given_in_four_forms(given):
    assert read_share_config(given) == ShareConfig("sweep")
    assert read_share_config(None) is None


@pytest.mark.parametrize("given", [{"name": "sweep", "cluster": "ray"}, OmegaConf.create({"name": "sweep", "cluster": "ray"})])
def test_a_cluster_may_be_given_in_a_mapping(given):
    assert read_share_config(given) == ShareConfig("sweep", cluster="ray")
    assert EchoConfig(share=given).share == {"name": "sweep", "cluster": "ray"}


@pytest.mark.parametrize("name", ["a/b", "", ".hidden", "n" * 300, "two words", "é", "a\0b"])
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
        ({"wait_for": True}, ValueError, "share.wait_for must be a number of trainings"),
        ({"restart": "yes"}, TypeError, "share.restart must be True, False or 'pass'"),
        ({"restart": 1}, TypeError, "share.restart must be True, False or 'pass'"),
        ({"linger_seconds": -1}, ValueError, "share.linger_seconds must be a number of seconds"),
        ({"linger_seconds": float("inf")}, ValueError, "share.linger_seconds must be a number of seconds"),
        ({"window": "much"}, ValueError, "share.window must be a string with a unit"),
        ({"window": 1.5}, ValueError, "share.window must be a string with a unit"),
        ({"window": 100}, ValueError, "share.window must be at least 4,096 bytes, got 100"),
        ({"window": True}, TypeError, "share.window must be a string with a unit"),
    ],
)
def test_impossible_values_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        ShareConfig("sweep", **options)


def test_other_forms_are_refused():
    with pytest.raises(TypeError, match="share must be a name, a ShareConfig or a dict of its options, got 3"):
        read_share_config(3)
    with pytest.raises(ValueError, match="share has unknown options nam: known are name, behind"):
        read_share_config({"nam": "sweep"})
    with pytest.raises(ValueError, match='share needs a name, such as "sweep"'):
        read_share_config({"behind": "skip"})


def test_the_window_is_bytes_or_a_share_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(share_config, "free_memory_bytes", lambda: 1_000_000)
    assert ShareConfig("sweep", window="8KiB").window_bytes() == 8192
    assert ShareConfig("sweep", window=5000).window_bytes() == 5000
    assert ShareConfig("sweep", window=0.25).window_bytes() == 250_000
    monkeypatch.setattr(share_config, "free_memory_bytes", lambda: None)
    with pytest.raises(ValueError, match="which this system does not tell: give bytes"):
        ShareConfig("sweep", window=0.25).window_bytes()
