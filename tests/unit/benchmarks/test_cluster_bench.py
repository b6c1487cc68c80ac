"""The tables of workers on other machines: what passes, what is said where another one has no rate, and who is run."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import cluster
import pytest
import run
from cluster import Jpegs, rows_of, tensorflow_rate
from workloads import IMAGE_BYTES


def named(cells: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(cluster._COLUMNS, cells, strict=True))


def test_rates_are_divided_by_those_of_two_workers_alone_in_the_same_round_and_the_median_counts() -> None:
    alone, four = map(named, rows_of({0: [100, 50, 80], 4: [270, 150, 236]}, {4: [180, 70, 160]}, {4: [200, 100, 120]}))
    assert (alone["actors"], alone["workers in all"], alone["examples/s"], alone["of linear"]) == (0, 2, 80, 1)
    assert (alone["required"], alone["passed"], alone["Ray Data, examples/s"]) == ("", "yes", "")
    assert (four["actors"], four["workers in all"], four["examples/s"]) == (4, 6, 236)
    shares = [270 / 300, 150 / 150, 236 / 240]
    assert (four["of linear"], four["lowest"]) == (statistics.median(shares), min(shares))
    assert (four["required"], four["passed"]) == (">= 0.9", "yes")
    assert (four["Ray Data, examples/s"], four["Ray Data, of linear"]) == (160, 0.9)  # four workers, and not six
    assert (four["tf.data service, examples/s"], four["tf.data service, of linear"]) == (120, 1.0)


@pytest.mark.parametrize(("rate", "passed"), [(809, "NO"), (810, "yes")])
def test_less_than_nine_tenths_of_linear_has_not_passed(rate: float, passed: str) -> None:
    _, cells = rows_of({0: [100], 16: [rate]})
    assert cells[-1] == passed


def test_another_one_without_a_rate_says_why_and_nothing_is_required_of_it() -> None:
    table = [named(cells) for cells in rows_of({0: [100, 100], 4: [300, 300]}, {4: [1, 1]}, {4: [200, "hung"]})]
    assert (table[1]["Ray Data, of linear"], table[1]["passed"]) == (1 / 200, "yes")
    assert (table[1]["tf.data service, examples/s"], table[1]["tf.data service, of linear"]) == ("hung", "")


def test_an_example_of_the_jpeg_files_has_as_many_bytes_as_the_others(tmp_path: Path) -> None:
    files = Jpegs(str(tmp_path), files=2)
    image = files[3]
    assert image.numel() * image.element_size() == IMAGE_BYTES == 150_528
    assert image.equal(files[1])
    assert not image.equal(files[0])


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that has TensorFlow by name, and this Python."""
    (tmp_path / "lib/python3/site-packages/tensorflow_cpu-2.21.0.dist-info").mkdir(parents=True)
    (tmp_path / "lib/python3/site-packages/tensorflow_cpu-2.21.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: tensorflow-cpu\nVersion: 2.21.0\n"
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    monkeypatch.setattr(cluster, "_PEERS", tmp_path)
    monkeypatch.setattr(cluster, "_HERE", tmp_path)
    return tmp_path


@pytest.mark.own_interpreter
@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("print('a line of a library'); print(197.5)", 197.5),
        ("raise RuntimeError('no port is free')", "died: RuntimeError: no port is free"),
        ("raise SystemExit(3)", "died: without a word"),
        ("import time; time.sleep(60)", "hung"),
    ],
)
def test_tensorflow_has_a_rate_or_its_last_words(
    peers: Path, monkeypatch: pytest.MonkeyPatch, program: str, found: float | str
) -> None:
    monkeypatch.setattr(cluster, "_MOST_TENSORFLOW_SECONDS", 0.5 if found == "hung" else 60)
    (peers / "cluster_tf.py").write_text(program)
    assert tensorflow_rate(4, 0.5) == found


def test_tensorflow_that_is_not_there_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_PEERS", tmp_path)
    assert tensorflow_rate(4, 0.5) == "not installed"


def test_a_run_of_all_leaves_out_what_needs_ray_and_says_so_where_ray_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "find_spec", lambda name: name)
    everything = run.chosen([])
    assert "cluster" in everything
    assert run.chosen(["cluster"]) == ["cluster"]
    assert capsys.readouterr().err == ""

    monkeypatch.setattr(run, "find_spec", lambda name: None)
    assert run.chosen([]) == [name for name in everything if name != "cluster"]
    said = "`cluster` needs Ray, which is not installed: pip install 'lightning-echo[ray]'"
    assert capsys.readouterr().err == f"  ... left out: {said}\n"
    assert run.chosen(["planning"]) == ["planning", "planning_memory"]
    with pytest.raises(SystemExit) as ended:
        run.chosen(["planning", "cluster"])
    assert ended.value.code == said
