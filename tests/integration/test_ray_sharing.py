"""Sharing on a Ray cluster of several nodes: a reader for each, or one in all; readers and nodes that are lost; Ray Tune."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from lightning.pytorch import Trainer  # noqa: E402
from ray import tune  # noqa: E402
from ray_runs import Noted, Recording, cluster_of, reads, training  # noqa: E402
from sharing_cache_runs import Shots, cached_loader  # noqa: E402
from sharing_runs import Numbers, epochs_of, examples, indices, sleeps, wait_until  # noqa: E402
from torch.utils.data import DataLoader, Subset  # noqa: E402

from lightning_echo import EchoCallback  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

LENGTH = 240
SECONDS = 150  # nothing takes so long, unless it hangs
WINDOW = 2**17  # two passes of examples of 224 bytes: one that begins later finds a whole one
ONE = {"cluster": "ray", "join": "pass", "linger_seconds": 1}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with cluster_of(tmp_path_factory.mktemp("n"), {"a": 2, "b": 2, "c": 1}) as found:
        yield found


@pytest.fixture(autouse=True)
def _no_readers_left_behind(nodes):
    yield
    nodes.end_readers()


def check_exact(found: list[Any], epochs: int) -> None:
    """Each training has each example once per epoch, and trainings that have the same pass have it in one order, with one noise.

    A training that comes later begins with a later pass.
    """
    passes = {}
    for of_training in found:
        assert len(of_training) == epochs
        for epoch in of_training:
            assert sorted(indices(epoch)) == list(range(LENGTH))
            assert passes.setdefault(examples(epoch)[0], examples(epoch)) == examples(epoch)
    assert len(passes) < epochs * len(found), "some passes are common"


def reading_nodes(log: Path) -> set[str]:
    return {node for _, node in reads(log)}


def other_of(node: str) -> str:
    return {"a": "b", "b": "a"}[node]


@pytest.mark.parametrize("of", ["source", "relay"])
def test_one_node_reads_for_all_and_a_reader_that_is_killed_loses_nothing(nodes, tmp_path, of):
    name, gate = f"killed-{of}", tmp_path / "gate"
    data = Noted(LENGTH, tmp_path / "reads")
    sizes = [("a", 8), ("a", 5), ("b", 16), ("b", 7)]
    share = {"name": name, "window": WINDOW, "wait_for": 2, **ONE}
    started = [training(node, data, size, 6, pause=0.005, gate=gate, **share) for node, size in sizes]
    wait_until(lambda: nodes.written(name, "a", "b") > 60, "both nodes have examples")
    (source,) = reading_nodes(tmp_path / "reads")
    assert "this node reads for all nodes" in nodes.log(source, name)
    assert "reads for this node" in nodes.log(other_of(source), name)
    nodes.kill_reader(source if of == "source" else other_of(source), name)
    gate.touch()
    check_exact(ray.get(started, timeout=SECONDS), 6)


@pytest.mark.parametrize("of", ["source", "relay"])
def test_folds_on_several_nodes_each_get_their_part_also_if_a_reader_is_killed(nodes, tmp_path, of):
    name, gate = f"folds-{of}", tmp_path / "gate"
    data = Noted(LENGTH, tmp_path / "reads", 0.01)  # so that the node that comes later finds the next pass in the window
    folds = {
        node: [index for index in range(LENGTH) if index % 5 not in (left_out, 4)] for node, left_out in (("a", 0), ("b", 1))
    }
    share = {"name": name, "window": WINDOW, **ONE}
    started = [training(node, Subset(data, fold), 8, 6, pause=0.005, gate=gate, **share) for node, fold in folds.items()]
    wait_until(lambda: nodes.written(name, "a", "b") > 60, "both nodes have examples")
    (source,) = reading_nodes(tmp_path / "reads")
    nodes.kill_reader(source if of == "source" else other_of(source), name)
    gate.touch()
    for fold, epochs in zip(folds.values(), ray.get(started, timeout=SECONDS), strict=True):
        assert [sorted(indices(epoch)) for epoch in epochs] == [fold] * 6
    read = {index for index, _ in reads(tmp_path / "reads")}
    assert read == set(range(LENGTH)), "for another node all is read, also what nobody wants"


def test_without_restart_a_lost_reader_is_an_error_on_all_nodes(nodes):
    share = {"name": "once", "restart": False, **ONE}
    started = [training(node, Numbers(LENGTH), 8, 1000, pause=0.01, **share) for node in "ab"]
    wait_until(lambda: nodes.written("once", "a", "b") > 60, "both nodes have examples")
    source = next(node for node in "ab" if "this node reads for all nodes" in nodes.log(node, "once"))
    nodes.kill_reader(source, "once")
    for each in started:
        with pytest.raises(
            ray.exceptions.RayTaskError, match=r"(?s)the reader of share='once' has died.*, and share\.restart is False"
        ):
            ray.get(each, timeout=SECONDS)
    assert re.search(r"(?s) ends\n.* (is lost|says: the reader of share='once' has)", nodes.log(other_of(source), "once"))


def test_other_data_of_the_same_name_is_refused_on_another_node(nodes, tmp_path):
    gate = tmp_path / "gate"
    first = training("a", Numbers(LENGTH), 8, 1, gate=gate, name="other", **ONE)
    wait_until(lambda: nodes.written("other", "a") > 0, "the first one has come")
    with pytest.raises(ray.exceptions.RayTaskError, match=r"is the name of other data on .*dataset.length: 241 and 240"):
        ray.get(training("b", Numbers(LENGTH + 1), 8, 1, name="other", **ONE), timeout=SECONDS)
    gate.touch()
    check_exact([ray.get(first, timeout=SECONDS)] * 2, 1)


@ray.remote(num_cpus=0.5, max_retries=0)
def counts_of(dataset: Any, batch_size: int, epochs: int, share: dict[str, Any]) -> Any:
    """What a training with a cache in its reader delivers on a node, and the counts of that cache."""
    loader = cached_loader(dataset, batch_size, **share)
    try:
        return epochs_of(loader, epochs, sleeps(0.02)), loader.cache_counts
    finally:
        loader.close()


def test_the_node_that_reads_has_the_cache_and_all_nodes_see_its_counts(nodes):
    share, data, epochs = {"name": "cached", "window": WINDOW, **ONE}, Shots(), 5
    started = [counts_of.options(resources={node: 1}).remote(data, size, epochs, share) for node, size in (("a", 8), ("b", 5))]
    found, counted = zip(*ray.get(started, timeout=SECONDS), strict=True)
    check_exact(found, epochs)
    for counts in counted:
        assert counts.examples == 127, "examples of 8 KiB in a cache of 1 MiB"
        assert counts.hits in (127 * (epochs - 1), 127 * epochs), "the later one may begin with the second pass"
        assert counts.hits + counts.misses == epochs * LENGTH
    (source,) = [node for node in "ab" if "this node reads for all nodes" in nodes.log(node, "cached")]
    assert "cache: holds" in nodes.log(source, "cached")
    assert "cache: holds" not in nodes.log(other_of(source), "cached")


def trial(config: dict[str, Any]) -> None:
    """What each trial runs."""
    model = Recording()
    echo = EchoCallback(share=config["share"], summary=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=2, accelerator="cpu", callbacks=[echo], **quiet)
    data = Noted(LENGTH, config["folder"] / "reads")
    trainer.fit(model, DataLoader(data, config["batch_size"], shuffle=True, num_workers=1))
    found = {"epochs": model.epochs, "node": Path(os.environ["LIGHTNING_ECHO_SHARED"]).name}
    (config["folder"] / f"trial-{config['batch_size']}.json").write_text(json.dumps(found))
    tune.report({"loss": float(trainer.callback_metrics["loss"])})


@pytest.mark.parametrize("cluster", [None, "ray"], ids=["a reader per node", "one in all"])
def test_four_trials_of_ray_tune_on_two_nodes(nodes, tmp_path, cluster):
    name = f"sweep-{cluster}"
    share = {"name": name, "join": "pass", "linger_seconds": 3, "window": "1MiB", "cluster": cluster}
    space = {"batch_size": tune.grid_search([5, 7, 8, 16]), "share": share, "folder": tmp_path}
    tuner = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.9}),
        param_space=space,
        run_config=tune.RunConfig(storage_path=str(tmp_path / "storage"), verbose=0),
    )
    results = tuner.fit()
    assert [result.error for result in results] == [None] * 4
    found = [json.loads((tmp_path / f"trial-{size}.json").read_text()) for size in (5, 7, 8, 16)]
    assert [sorted(epoch) for each in found for epoch in each["epochs"]] == [list(range(LENGTH))] * 8
    on = Counter(each["node"] for each in found)
    assert len(on) >= 2
    assert len(reading_nodes(tmp_path / "reads")) == (1 if cluster else len(on))


# The last test: a node is gone then.
def test_when_the_reading_node_is_lost_the_others_go_on(nodes, tmp_path):
    data, share = Noted(LENGTH, tmp_path / "reads"), {"name": "lost", "window": WINDOW, **ONE}
    lost = training("c", data, 8, 1000, pause=0.1, **share)  # the others, which it holds, take three seconds for a pass
    wait_until(lambda: nodes.written("lost", "c") > 0, "the node reads")
    started = [training(node, data, size, 5, pause=0.005, **share) for node, size in (("a", 8), ("b", 5))]
    wait_until(lambda: nodes.written("lost", "a", "b") > 60, "the others have examples")
    assert reading_nodes(tmp_path / "reads") == {"c"}
    nodes.lose("c", "lost")
    check_exact(ray.get(started, timeout=SECONDS), 5)
    assert reading_nodes(tmp_path / "reads") > {"c"}
    with pytest.raises(ray.exceptions.RayError):
        ray.get(lost, timeout=SECONDS)
