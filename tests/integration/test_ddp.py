"""Two ranks: each has its share of the data and its own noise, all agree on the rest. The runs are those of ddp_runs.py."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import ddp_runs
import node_launch
import pytest
from ddp_runs import LENGTH, bare
from torch.utils.data import DataLoader, DistributedSampler
from trainer_runs import Batch, chunks, first_uses, fit, fresh_stream

from lightning_echo.analysis.result import StallAnalysis

# All scenarios run once, in one job: three minutes on a slow machine with nothing beside them.
pytestmark = pytest.mark.timeout(410)
EACH = 31  # examples of a pass on each rank: DistributedSampler fills 61 up to 62


class Ranks:
    """What both ranks wrote, what they printed, and the folder with their checkpoints."""

    def __init__(self, folder: Path, printed: str, ranks: list[Any]) -> None:
        self.folder, self.printed, self._ranks = folder, printed, ranks

    def of(self, *names: str) -> tuple[Any, Any]:
        found = []
        for rank in self._ranks:
            for name in names:
                rank = rank[name]
            found.append(rank)
        return found[0], found[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    def run(folder: Path) -> Ranks:
        return Ranks(folder, *node_launch.with_ranks(2, folder, ddp_runs.__file__, patience=390))

    return node_launch.once(tmp_path_factory, "ddp", run)


def indices_of(batches: list[Batch]) -> set[int]:
    return {index for indices, _ in batches for index in indices}


def noises_of(batches: list[Batch]) -> set[float]:
    return {number for _, noises in batches for noise in noises for number in noise}


def assert_shares(of_ranks: Any, dataset: set[int], each: int = EACH) -> None:
    """Pass by pass, what is fresh on two ranks is disjoint and together complete, but for what fills the last place."""
    first, second = (chunks(fresh_stream(batches), each) for batches in of_ranks)
    passes = list(zip(first, second, strict=False))
    assert len(passes) >= 2
    for mine, others in passes:
        assert set(mine) | set(others) == dataset
        assert len(set(mine)) == len(set(others)) == each
        assert len(set(mine) & set(others)) == 2 * each - len(dataset)


SHARED = [("module",), ("resumed_bare", "whole"), ("passed", "whole")]


@pytest.mark.slow
@pytest.mark.parametrize("names", SHARED, ids=" ".join)
def test_fresh_examples_of_two_ranks_are_disjoint_and_together_complete_and_no_noise_is_shared(
    ranks: Ranks, names: tuple[str, ...]
) -> None:
    one, two = ranks.of(*names)
    assert_shares((one["batches"], two["batches"]), set(range(LENGTH)))
    noises = [noises_of(rank["batches"]) for rank in (one, two)]
    assert len(noises[0]) > 30
    assert not noises[0] & noises[1]
    sampler = DistributedSampler(range(LENGTH), num_replicas=2, rank=0)  # type: ignore[arg-type]
    assert one["steps"] == two["steps"] == [len(DataLoader(range(LENGTH), 4, sampler=sampler))] * 6  # type: ignore[arg-type]
    assert one["weights"] == two["weights"]
    for rank in (one, two):
        assert sum(rank["counts"]) == sum(len(indices) for indices, _ in rank["batches"])


@pytest.mark.slow
def test_a_users_sampler_that_knows_no_ranks_is_dealt_out_to_them(ranks: Ranks) -> None:
    assert_shares([rank["batches"] for rank in ranks.of("users_sampler")], set(range(0, 122, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("echo", ["callback", "module"])
def test_what_users_divide_themselves_is_not_divided_again(ranks: Ranks, echo: str) -> None:
    """``Trainer(use_distributed_sampler=False)``: 24 examples on each rank, in batches of 4."""
    for number, rank in enumerate(ranks.of("users_own_division", echo)):
        assert rank["steps"] == [6] * 4
        assert indices_of(rank["batches"]) == set(range(number, 48, 2))


@pytest.mark.slow
def test_unsharded_ranks_see_the_same_examples_with_noise_of_their_own(ranks: Ranks) -> None:
    one, two = ranks.of("unsharded")
    assert [indices for indices, _ in one["batches"]] == [indices for indices, _ in two["batches"]]
    assert indices_of(one["batches"]) == set(range(LENGTH))
    assert not noises_of(one["batches"]) & noises_of(two["batches"])
    assert one["steps"] == two["steps"] == [16] * 4


def assert_passes_of(batches: list[Batch], rank: int, seed: int) -> None:
    """The examples of each pass are those that a DistributedSampler gives which has heard the number of the pass."""
    sampler = DistributedSampler(range(LENGTH), num_replicas=2, rank=rank, seed=seed)  # type: ignore[arg-type]
    passes = chunks(fresh_stream(batches), EACH)
    assert len(passes) == 3
    for number, examples in enumerate(passes):
        sampler.set_epoch(number)
        assert set(examples) == set(sampler)


@pytest.mark.slow
def test_a_sampler_that_shards_is_not_sharded_again_and_hears_the_number_of_the_pass(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.of("own_sampler")):
        assert_passes_of(found["batches"], rank, 5)
        heard = list(dict.fromkeys(found["told"]))
        assert heard == sorted(heard)
        assert heard[:3] == [0, 1, 2]
        assert len(heard) <= 4  # the workers may have begun one more pass


@pytest.mark.slow
def test_a_loader_passed_to_fit_is_echoed_after_lightning_has_dealt_it_out_and_validation_is_as_without(ranks: Ranks) -> None:
    for rank in (0, 1):
        found = ranks.of("passed")[rank]
        assert_passes_of(found["whole"]["batches"], rank, 0)
        assert found["samplers"] == [("DistributedSampler", 2, rank)] * 2
        assert found["whole"]["validated"] == ranks.of("plain")[rank]["validated"] * 7  # six epochs and the sanity check
        for name in ("batches", "weights", "counts"):
            assert found["reloaded"][name] == found["whole"][name]


@pytest.mark.slow
def test_seeds_that_nobody_gave_are_drawn_for_each_loader_once_for_all_ranks_which_are_counted_together(ranks: Ranks) -> None:
    one, two = ranks.of("drawn_seeds")
    assert one["seeds"] == two["seeds"]
    assert len(set(one["seeds"])) == 4
    for name, fresh in one["counts"].items():
        assert one["logged"][name] == two["logged"][name] == fresh + two["counts"][name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resumed_bare", "passed"])
def test_two_ranks_resume_exactly_from_what_rank_zero_saved(ranks: Ranks, name: str) -> None:
    for found in ranks.of(name):
        whole, resumed, step = found["whole"], found["resumed"], found["step"]
        assert resumed["batches"] == whole["batches"][step:]
        assert len(resumed["batches"]) >= 5
        assert resumed["epochs"] == whole["epochs"][step:]
        assert resumed["counts"] == whole["counts"]
        assert resumed["weights"] == whole["weights"]


@pytest.mark.slow
def test_ranks_that_measure_differently_decide_alike(ranks: Ranks) -> None:
    first, second = ranks.of("controller")
    assert first["reports"] == second["reports"], "what is reported is of the job"
    # the metric is 0 and 1 on the ranks, 0.5 in the mean, and rank 0 decides: 1 + epoch + 0.5
    assert [report["next_factor"] for report in first["reports"]] == [1.5, 2.5, 3.5, 4.5]
    assert [report["message"] for report in second["reports"]] == ["of rank 0"] * 4
    assert first["shown"] == second["shown"] == [0.5] * 4
    steps = [16, 12, 20, 28]
    assert first["steps"] == second["steps"] == steps
    assert_shares((first["batches"], second["batches"]), set(range(LENGTH)))
    for epoch, report in enumerate(first["reports"]):  # the counts of all ranks
        until = sum(steps[: epoch + 1])
        delivered = sum(len(indices) for run in (first, second) for indices, _ in run["batches"][:until])
        fresh = sum(len(new) for run in (first, second) for new in first_uses(run["batches"])[:until])
        assert (report["fresh_examples"], report["echoed_examples"]) == (fresh, delivered - fresh)


@pytest.mark.slow
def test_validation_is_sharded_as_without_echoing(ranks: Ranks) -> None:
    plain, echoing = ranks.of("plain"), ranks.of("module")
    assert sorted(plain[0]["validated"] + plain[1]["validated"]) == list(range(6))
    assert all(rank["validated"] == mine["validated"] * 6 for rank, mine in zip(echoing, plain, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("factor", ["2.75", "2.25", "1.75"], ids=["sharded", "not sharded", "the user's own sampler"])
def test_what_was_chosen_is_said_once_for_all_ranks(ranks: Ranks, factor: str) -> None:
    assert ranks.printed.count(f"factor {factor}: reuse [") == 1
    assert len(re.findall(rf"epochs? x \d+ steps = .+ passes over the data at factor {factor}[,\n]", ranks.printed)) == 1


@pytest.mark.slow
def test_loaders_of_a_collection_are_dealt_out_echoed_or_not_share_no_noise_and_resume_exactly(ranks: Ranks) -> None:
    of_ranks = ranks.of("collection")
    for name in ("all", "half", "plain"):
        one, two = (chunks(fresh_stream(found["whole"]["batches"][name]), EACH) for found in of_ranks)
        assert one
        for mine, others in zip(one, two, strict=True):
            assert set(mine) | set(others) == set(range(LENGTH))
            assert len(set(mine) & set(others)) == 2 * EACH - LENGTH
    noises = [noises_of(found["whole"]["batches"][name]) for found in of_ranks for name in ("all", "half")]
    assert sum(map(len, noises)) == len(set().union(*noises)) > 300
    for rank, found in enumerate(of_ranks):
        assert found["whole"]["sampler"] == ("DistributedSampler", 2, rank)
        assert found["whole"]["steps"] == [8] * 4
        for name in ("all", "half"):
            assert found["resumed"]["batches"][name] == found["whole"]["batches"][name][11:]
            assert len(found["resumed"]["batches"][name]) == 32 - 11


@pytest.mark.slow
def test_an_analysis_of_two_ranks_is_that_of_the_slower_one_and_names_it(ranks: Ranks) -> None:
    analysis, same = (StallAnalysis.from_json(ranks.folder / f"analysis-{rank}.json") for rank in (0, 1))
    assert analysis == same
    host = [rank.host_seconds for rank in analysis.ranks]
    assert host[1] >= 4 * 0.02 > host[0]
    assert analysis.slow_rank == 1
    assert analysis.stages.decode.median + analysis.stages.read.median >= 0.02
    assert analysis.stages.cores == max(1, len(os.sched_getaffinity(0)) // 2)
    assert len(analysis.checked) == 1


@pytest.mark.slow
def test_ranks_analyze_examples_of_their_own_and_as_many_steps(ranks: Ranks) -> None:
    first, second = map(set, ranks.of("analysis", "indices"))
    assert len(first) == len(second) == 40
    assert not first & second
    short = ranks.of("analysis", "steps of a short one")
    assert short[0] == short[1]
    assert short[0][0] == 2
    assert 2 <= short[0][1] < 40


@pytest.mark.slow
def test_ranks_decide_within_an_epoch_at_the_same_step_and_alike_also_resumed(ranks: Ranks) -> None:
    one, two = ranks.of("early", "whole")
    assert one["shown"] == two["shown"], "both ranks are shown what is of the job"
    ahead, epoch = 2 * 2 + 2, 41  # 161 of 321 examples in batches of 4
    at = [(9, "early"), (18, "early"), (25, "within_epoch"), (epoch, "epoch_end")]
    at += [(epoch + 25, "within_epoch"), (2 * epoch, "epoch_end")]
    assert [tuple(each[:2]) for each in one["shown"]] == at
    factors = [1, *(1 + number / 2 for number in range(1, 7))]
    expected = [(step, step + ahead, factor) for (step, _), factor in zip(at, factors[1:], strict=True)]
    assert [use[:3] for use in one["uses"]] == [(0, 0, 1), *expected]
    assert one["uses"] == two["uses"]
    assert {use[3] for use in two["uses"][1:]} == {"of rank 0"}
    assert one["weights"] == two["weights"]
    assert one["counts"] == two["counts"]
    assert one["counts"][1] > 0
    for whole, resumed in zip((one, two), ranks.of("early", "resumed"), strict=True):
        assert resumed["batches"][: 25 + 6 - 24] == whole["batches"][24 : 25 + 6]
        assert resumed["uses"][:3] == whole["uses"][:3]


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_resumes_on_one_with_a_warning_and_leaves_nothing_out(ranks: Ranks) -> None:
    before = [batch for rank in ranks.of("resumed_bare", "whole") for batch in rank["batches"][:11]]
    with pytest.warns(UserWarning, match="saved with .*replicas=2 .now 1."):
        resumed = fit(bare(), ckpt_path=str(ranks.folder / "bare" / "step-11.ckpt"), max_epochs=4)
    fresh, rest = fresh_stream(before), fresh_stream(resumed.model.batches)
    needed = next(i for i in range(len(rest)) if set(fresh) | set(rest[:i]) == set(range(LENGTH)))
    assert needed <= LENGTH - len(set(fresh)) + resumed.loader.buffer_size  # the rest of the pass, and at most what was live
