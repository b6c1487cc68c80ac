"""One training on several nodes, with each strategy of the table in docs/nodes.md. The runs are those of nodes_runs.py.

The table is read, and each of its cells is checked: a "yes" by a run, a "not on a CPU" by what Lightning says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import node_launch
import nodes_runs
import pytest
import torch
import torch.distributed.fsdp
from lightning.pytorch import Trainer
from nodes_runs import BATCH_SIZE, EPOCHS, FACTORS, LENGTH, SAVED
from torch.utils.data import DataLoader, DistributedSampler
from trainer_runs import chunks, first_uses, fresh_stream

from lightning_echo.measure.summary import RunSummary

pytestmark = pytest.mark.program

TABLE = Path(__file__).parents[2] / "docs" / "nodes.md"
SCENARIOS = ("whole", "killed", "resumed", "cached")
COUNTED = ("epoch", "steps", "factor", "fresh_examples", "echoed_examples", "passes", "next_factor", "message")  # of a report
AUDITED = 3  # a rank reads its 1st, 10th and 100th hit again


class Row(NamedTuple):
    """What the first cells of a row of the table say."""

    strategy: str
    started_by: str
    shape: str


def table() -> tuple[list[str], dict[Row, list[str]]]:
    """The names of the checked columns, and the rows of the table in docs/nodes.md."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    return head[3:], {Row(*cells[:3]): cells[3:] for cells in rows}


COLUMNS, ROWS = table()
CELLS = [(row, column, said) for row, cells in ROWS.items() for column, said in zip(COLUMNS, cells, strict=True)]
DDP = Row("ddp", "torchrun", "2 x 2")
IN_OTHER_PROCESSES = [row for row in ROWS if row.strategy in ("ddp_spawn", "ddp_fork", "ddp_notebook")]
SEVERAL_NODES = [row for row in ROWS if row.strategy == "ddp" and row.shape == "2 x 2"]


class Job(NamedTuple):
    """A job that is over."""

    folder: Path
    printed: str

    def of(self, scenario: str) -> list[Any]:
        """What each rank has written."""
        ranks = len(list(self.folder.glob(f"{scenario}-rank-*.pt")))
        assert ranks
        return [torch.load(self.folder / f"{scenario}-rank-{rank}.pt", weights_only=True) for rank in range(ranks)]


class Jobs:
    """Runs each job once, when the first test asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._done, self._failed = folder, dict[Any, Job](), set[Any]()

    def of(self, row: Row) -> Job:
        """The job of a row of the table, with all scenarios."""
        if row.strategy.startswith("ModelParallel") and not hasattr(torch.distributed.fsdp, "fully_shard"):
            pytest.skip("this torch has no fully_shard")
        nodes, devices = map(int, row.shape.split(" x "))
        name = re.sub(r"ModelParallelStrategy\((\d), (\d)\)", r"model_parallel_\1x\2", row.strategy)
        scenarios = (*SCENARIOS, "slow_node") if row in SEVERAL_NODES else SCENARIOS

        def start(folder: Path) -> str:
            program = (nodes_runs.__file__, folder, name, nodes, devices, *scenarios)
            if row.started_by == "Lightning":
                return node_launch.alone(*program) if nodes == 1 else node_launch.lightning(nodes, *program)
            return {"torchrun": node_launch.torchrun, "Slurm": node_launch.slurm}[row.started_by](nodes, devices, *program)

        return self._run(row, start)

    def resumed(self, nodes: int, devices: int) -> Job:
        """A job that goes on from the checkpoint of `DDP`, in another shape."""
        before = self.of(DDP).folder

        def start(folder: Path) -> str:
            os.environ["CHECKPOINTS"] = str(before)
            try:
                return node_launch.torchrun(nodes, devices, nodes_runs.__file__, folder, "ddp", nodes, devices, "resumed")
            finally:
                del os.environ["CHECKPOINTS"]

        return self._run((nodes, devices), start)

    def _run(self, key: Any, start: Callable[[Path], str]) -> Job:
        if key in self._failed:
            pytest.fail(f"the job has failed already: {key}")
        if key not in self._done:
            folder = self._folder / str(len(self._done) + len(self._failed))
            folder.mkdir()
            self._failed.add(key)  # unless it succeeds
            self._done[key] = Job(folder, start(folder))
            self._failed.remove(key)
        return self._done[key]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("nodes"))


# ---------------------------------------------------------------------- the table


def by_share(ranks: list[Any]) -> list[Any]:
    """One rank for each share of the data; ranks with the same share must have seen the same."""
    found: dict[int, Any] = {}
    for rank in ranks:
        first = found.setdefault(rank["share"]["rank"], rank)
        assert rank["batches"] == first["batches"]
    assert sorted(found) == list(range(ranks[0]["share"]["num_replicas"]))
    return [found[share] for share in sorted(found)]


def assert_each_has_its_share(job: Job) -> None:
    """In each pass, the fresh examples of all shares are the data set; but for what fills the last places, none comes twice."""
    shares = by_share(job.of("whole"))
    each = -(-LENGTH // len(shares))
    fresh = [chunks(fresh_stream(share["batches"]), each) for share in shares]
    assert len({len(passes) for passes in fresh}) == 1
    assert len(fresh[0]) >= 3
    for of_shares in zip(*fresh, strict=True):
        assert set().union(*of_shares) == set(range(LENGTH))
        assert all(len(set(of_share)) == each for of_share in of_shares)
    noises = [{noise for _, of_batch in share["batches"] for noise in of_batch} for share in shares]
    assert len(set().union(*noises)) == sum(map(len, noises)), "no two ranks share random numbers"


def assert_same_steps(job: Job) -> None:
    """As many as a plain loader has, on all ranks, which end with the same weights."""
    ranks = job.of("whole")
    sampler = DistributedSampler(range(LENGTH), num_replicas=ranks[0]["share"]["num_replicas"], rank=0)  # type: ignore[arg-type]
    plain = len(DataLoader(range(LENGTH), BATCH_SIZE, sampler=sampler))  # type: ignore[arg-type]
    assert all(rank["steps"] == [plain] * EPOCHS for rank in ranks)
    assert all(rank["weights"] == ranks[0]["weights"] for rank in ranks)


def assert_one_factor(job: Job) -> None:
    """What rank 0 decides holds on all ranks, which are shown the same and have as many fresh examples in each batch."""
    ranks = job.of("whole")
    for rank in ranks:
        assert [report["next_factor"] for report in rank["reports"]] == [FACTORS[(epoch + 1) % 2] for epoch in range(EPOCHS)]
        assert {report["message"] for report in rank["reports"]} == {"of rank 0"}
        assert rank["reports"] == ranks[0]["reports"]
        assert rank["shown"] == ranks[0]["shown"]
        assert [len(new) for new in first_uses(rank["batches"])] == [len(new) for new in first_uses(ranks[0]["batches"])]
    assert len(ranks[0]["shown"]) == EPOCHS


def assert_goes_on_exactly(whole: list[Any], resumed: list[Any]) -> None:
    for before, after in zip(whole, resumed, strict=True):
        assert len(before["batches"]) > SAVED + 10
        assert after["batches"] == before["batches"][SAVED:]
        assert after["weights"] == before["weights"]
        assert after["fresh"] == before["fresh"]
        for expected, report in zip(before["reports"], after["reports"], strict=True):
            assert {name: report[name] for name in COUNTED} == {name: expected[name] for name in COUNTED}


def assert_exact_resume(job: Job) -> None:
    assert_goes_on_exactly(job.of("whole"), job.of("resumed"))


def assert_one_cache_per_node(job: Job) -> None:
    """The ranks of a node look at one cache, which has read what it holds once, and no batch differs from one without a cache."""
    whole, ranks = job.of("whole"), job.of("cached")
    assert [rank["batches"] for rank in ranks] == [rank["batches"] for rank in whole]
    nodes: dict[int, list[Any]] = {}
    for rank in ranks:
        nodes.setdefault(rank["place"][0], []).append(rank)
    assert sorted(nodes) == list(range(len(nodes)))
    assert {len(of_node) for of_node in nodes.values()} == {2}
    for of_node in nodes.values():
        examples, _, hits, misses = of_node[0]["cache"]
        assert all(rank["cache"] == of_node[0]["cache"] for rank in of_node)
        assert examples == len({index for rank in of_node for index in fresh_stream(rank["batches"])})
        assert hits + misses == sum(rank["fresh"] for rank in of_node)
        at_once = len(of_node) // len({rank["share"]["rank"] for rank in of_node})  # ranks that read the same at the same time
        reads = [sum(of_ranks) for of_ranks in zip(*(rank["reads"] for rank in of_node), strict=True)]
        assert sum(max(number - at_once, 0) for number in reads) <= AUDITED * len(of_node)


CHECKS: dict[str, Callable[[Job], None]] = {
    "a share for each": assert_each_has_its_share,
    "same steps": assert_same_steps,
    "one factor": assert_one_factor,
    "exact resume": assert_exact_resume,
    "cache per node": assert_one_cache_per_node,
}


@pytest.mark.parametrize(("row", "column", "said"), CELLS, ids=[f"{' '.join(row)}-{column}" for row, column, _ in CELLS])
def test_each_cell_of_the_table_of_strategies_says_what_a_run_shows(jobs: Jobs, row: Row, column: str, said: str) -> None:
    if said == "yes":
        CHECKS[column](jobs.of(row))
    elif said == "not on a CPU":
        with pytest.raises(ValueError, match="requires a GPU"):
            Trainer(strategy=row.strategy, accelerator="cpu", devices=2)
    else:
        assert (row.strategy, said) == ("deepspeed", "not tested")


# ---------------------------------------------------------------------- nodes


@pytest.mark.parametrize(
    ("row", "places", "environment"),
    [
        (DDP, [(0, 0), (0, 1), (1, 0), (1, 1)], "TorchElasticEnvironment"),
        (Row("ddp", "Slurm", "2 x 2"), [(0, 0), (1, 0), (0, 1), (1, 1)], "SLURMEnvironment"),
        (Row("ddp", "Lightning", "2 x 2"), [(0, 0), (0, 1), (1, 0), (1, 1)], "LightningEnvironment"),
    ],
)
def test_the_nodes_are_those_of_the_launcher(jobs: Jobs, row: Row, places: Any, environment: str) -> None:
    assert [rank["place"] for rank in jobs.of(row).of("whole")] == [(*place, environment) for place in places]


@pytest.mark.parametrize("row", SEVERAL_NODES, ids=" ".join)
def test_a_slow_node_is_named_and_one_of_its_ranks(jobs: Jobs, row: Row) -> None:
    job = jobs.of(row)
    of_node = {rank for rank, seen in enumerate(job.of("whole")) if seen["place"][0] == 1}
    said = re.findall(r"slowest rank (\d) \(node (\d)\)", job.printed)
    assert len(said) == 1, "by rank 0 alone"
    assert int(said[0][0]) in of_node
    assert said[0][1] == "1"
    for rank in job.of("slow_node"):
        assert (rank["reports"][-1]["slowest_rank"], rank["reports"][-1]["slowest_node"]) == (int(said[0][0]), 1)


@pytest.mark.parametrize("row", SEVERAL_NODES[1:], ids=" ".join)
def test_a_run_is_the_same_whoever_starts_it(jobs: Jobs, row: Row) -> None:
    for mine, other in zip(jobs.of(row).of("whole"), jobs.of(DDP).of("whole"), strict=True):
        assert mine["batches"] == other["batches"]
        assert mine["weights"] == other["weights"]


@pytest.mark.parametrize(("nodes", "devices"), [(1, 4), (4, 1)])
def test_as_many_ranks_on_another_number_of_nodes_go_on_exactly(jobs: Jobs, nodes: int, devices: int) -> None:
    resumed = jobs.resumed(nodes, devices).of("resumed")
    assert_goes_on_exactly(jobs.of(DDP).of("whole"), resumed)
    assert [rank["place"][0] for rank in resumed] == [rank // devices for rank in range(nodes * devices)]
    assert [rank["said"] for rank in resumed] == [[]] * (nodes * devices)


@pytest.mark.parametrize(("nodes", "devices"), [(1, 2), (2, 4)])
def test_another_number_of_ranks_goes_on_with_one_warning_and_leaves_nothing_of_the_pass_out(
    jobs: Jobs, nodes: int, devices: int
) -> None:
    ranks, each_before = nodes * devices, -(-LENGTH // 4)
    each, resumed = -(-LENGTH // ranks), jobs.resumed(nodes, devices).of("resumed")
    before = [fresh_stream(rank["batches"][:SAVED]) for rank in jobs.of(DDP).of("whole")]
    taken = len(before[0]) % each_before  # of the pass that was under way, by each rank
    assert taken > 0
    skipped = taken * 4 // ranks // BATCH_SIZE * BATCH_SIZE  # whole batches
    rest = {index for rank in resumed for index in fresh_stream(rank["batches"])[: each - skipped]}
    assert rest | {index for fresh in before for index in fresh[-taken:]} == set(range(LENGTH))
    following = [fresh_stream(rank["batches"])[each - skipped : 2 * each - skipped] for rank in resumed]
    assert set().union(*following) == set(range(LENGTH)), "the next pass, too"
    said = [rank["said"] for rank in resumed]
    assert re.search(rf"saved with .*replicas=4 .now {ranks}\)", "".join(said[0]))
    assert list(map(len, said)) == [1] + [0] * (ranks - 1)
    assert all(rank["steps"] == resumed[0]["steps"] for rank in resumed)
    assert all(rank["weights"] == resumed[0]["weights"] for rank in resumed)


# ---------------------------------------------------------------------- ranks that are processes of their own


@pytest.mark.parametrize("row", IN_OTHER_PROCESSES, ids=" ".join)
def test_of_ranks_in_other_processes_weights_and_metrics_come_back_and_the_reports_are_in_the_summary(
    jobs: Jobs, row: Row
) -> None:
    job = jobs.of(row)
    rank, parent = job.of("whole")[0], torch.load(job.folder / "whole-parent.pt", weights_only=True)
    assert parent["weights"] == rank["weights"]
    last = rank["reports"][-1]
    assert parent["metrics"]["echo/fresh_examples"] == last["fresh_examples"]
    assert parent["metrics"]["echo/factor"] == last["factor"]
    assert (parent["reports"], parent["batches"]) == ([], [])
    summary = RunSummary.from_json((job.folder / "logs" / "echo_summary.json").read_text())
    assert [report.state() for report in summary.reports] == rank["reports"]
