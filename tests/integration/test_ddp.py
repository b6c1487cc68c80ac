"""Two ranks: each has its share of the data and its own noise, all agree on the rest. The runs are those of ddp_runs.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ddp_runs
import pytest
import torch
from ddp_runs import LENGTH, RESUMED, UNEVEN
from torch.utils.data import DataLoader, DistributedSampler
from trainer_runs import Batch, Killed, SaveAt, chunks, echoed, first_uses, fit, fresh_stream

from lightning_echo.analysis.result import StallAnalysis

# All scenarios run once, in one job: three minutes on a slow machine with nothing beside them.
pytestmark = pytest.mark.timeout(410)
EACH = 31  # examples of a pass on each rank: DistributedSampler fills 61 up to 62


class Ranks:
    """What both ranks wrote, what they printed, and the folder with their checkpoints."""

    def __init__(self, folder: Path, printed: str) -> None:
        self.folder, self.printed = folder, printed
        self._ranks = [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1)]

    def of(self, *names: str) -> tuple[Any, Any]:
        found = []
        for rank in self._ranks:
            for name in names:
                rank = rank[name]
            found.append(rank)
        return found[0], found[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("ddp")
    with pytest.raises(Killed):  # the checkpoint of a single process
        fit(echoed(2, **UNEVEN), callbacks=[SaveAt(folder, [8], dies=True)])
    environment = {name: value for name, value in os.environ.items() if name not in ("PL_GLOBAL_SEED", "LOCAL_RANK")}
    command = [sys.executable, ddp_runs.__file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=390, env=environment, check=False)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-4000:]
    return Ranks(folder, printed)


def indices_of(batches: list[Batch]) -> set[int]:
    return {index for indices, _ in batches for index in indices}


def noises_of(batches: list[Batch]) -> set[float]:
    return {number for _, noises in batches for noise in noises for number in noise}


def assert_shares(first: list[int], second: list[int], dataset: set[int], each: int) -> None:
    """Pass by pass, what is fresh on two ranks is disjoint and together complete, but for what fills the last place."""
    passes = list(zip(chunks(first, each), chunks(second, each), strict=False))
    assert len(passes) >= 2
    for mine, others in passes:
        assert set(mine) | set(others) == dataset
        assert len(set(mine)) == len(set(others)) == each
        assert len(set(mine) & set(others)) == 2 * each - len(dataset)


@pytest.mark.parametrize("scenario", ["module", "bare", "batches"])
def test_fresh_examples_of_two_ranks_are_disjoint_and_together_complete(ranks: Ranks, scenario: str) -> None:
    one, two = ranks.of(scenario)
    fresh = [fresh_stream(rank["batches"]) for rank in (one, two)]
    assert_shares(*fresh, set(range(LENGTH)), EACH)


def test_after_transfer_both_ranks_train_on_what_they_would_after_batching(ranks: Ranks) -> None:
    for batching, transfer in zip(ranks.of("batches"), ranks.of("device_batches"), strict=True):
        assert batching == transfer


def test_before_augmentation_too_the_first_pass_is_dealt_out_to_the_ranks(ranks: Ranks) -> None:
    one, two = ranks.of("before_augmentation")
    first_pass = 7 * 8  # of 31 examples each, fresh for half of the uses: steps in which it is not through
    sets = [indices_of(rank["batches"][: first_pass // 4 - 4]) for rank in (one, two)]
    assert not sets[0] & sets[1]
    assert indices_of(one["batches"]) | indices_of(two["batches"]) == set(range(LENGTH))


@pytest.mark.parametrize("echo", ["callback", "cache", "module"])
def test_what_users_divide_themselves_is_not_divided_again(ranks: Ranks, echo: str) -> None:
    """``Trainer(use_distributed_sampler=False)``: 24 examples on each rank, in batches of 4."""
    for number, rank in enumerate(ranks.of("users_own_division", echo)):
        assert rank["steps"] == [6] * 4
        assert indices_of(rank["batches"]) == set(range(number, 48, 2))


@pytest.mark.parametrize("name", ["with a generator", "without"])
def test_a_users_sampler_that_knows_no_ranks_is_dealt_out_to_them(ranks: Ranks, name: str) -> None:
    one, two = ranks.of("users_sampler", name)
    fresh = [fresh_stream(rank["batches"]) for rank in (one, two)]
    assert_shares(*fresh, set(range(0, 122, 2)), EACH)


def test_a_dropped_tail_is_dropped_on_both_ranks(ranks: Ranks) -> None:
    one, two = ranks.of("drop_last")
    for rank in (one, two):
        assert {len(indices) for indices, _ in rank["batches"]} == {4}
    fresh = [fresh_stream(rank["batches"]) for rank in (one, two)]
    for mine, others in zip(chunks(fresh[0], 28), chunks(fresh[1], 28), strict=True):
        assert len(set(mine) | set(others)) == 56  # 7 whole batches on each of two ranks


@pytest.mark.parametrize("scenario", ["module", "bare", "batches", "before_augmentation", "drop_last"])
def test_ranks_take_as_many_steps_as_the_plain_loader_and_end_with_equal_weights(ranks: Ranks, scenario: str) -> None:
    drop_last = scenario == "drop_last"
    sampler = DistributedSampler(range(LENGTH), num_replicas=2, rank=0)  # type: ignore[arg-type]
    plain = len(DataLoader(range(LENGTH), 4, sampler=sampler, drop_last=drop_last))  # type: ignore[arg-type]
    one, two = ranks.of(scenario)
    assert one["steps"] == two["steps"] == [plain] * 6
    assert one["weights"] == two["weights"]


@pytest.mark.parametrize("scenario", ["module", "bare", "batches", "before_augmentation"])
def test_no_two_ranks_share_augmentation_noise(ranks: Ranks, scenario: str) -> None:
    one, two = (noises_of(rank["batches"]) for rank in ranks.of(scenario))
    assert len(one) > 30
    assert not one & two


@pytest.mark.parametrize("kind", ["module", "bare"])
def test_unsharded_ranks_see_the_same_examples_with_noise_of_their_own(ranks: Ranks, kind: str) -> None:
    one, two = ranks.of("unsharded", kind)
    assert [indices for indices, _ in one["batches"]] == [indices for indices, _ in two["batches"]]
    assert indices_of(one["batches"]) == set(range(LENGTH))
    assert not noises_of(one["batches"]) & noises_of(two["batches"])
    assert one["steps"] == two["steps"] == [16] * 4


@pytest.mark.parametrize("kind", ["module", "bare", "factor 1"])
def test_a_sampler_that_shards_is_not_sharded_again_and_hears_the_number_of_the_pass(ranks: Ranks, kind: str) -> None:
    for rank, found in enumerate(ranks.of("own_sampler", kind)):
        sampler = DistributedSampler(range(LENGTH), num_replicas=2, rank=rank, seed=5)  # type: ignore[arg-type]
        fresh = chunks(fresh_stream(found["batches"]), EACH)
        assert len(fresh) == 3
        for number, examples in enumerate(fresh):
            sampler.set_epoch(number)
            assert set(examples) == set(sampler)
        heard = list(dict.fromkeys(found["told"]))
        assert heard == sorted(heard)
        assert heard[:3] == [0, 1, 2]
        assert len(heard) <= 4  # the workers may have begun one more pass


def test_at_factor_one_a_sampler_that_shards_gives_its_own_order(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.of("own_sampler", "factor 1")):
        sampler = DistributedSampler(range(LENGTH), num_replicas=2, rank=rank, seed=5)  # type: ignore[arg-type]
        order: list[int] = []
        for number in range(3):
            sampler.set_epoch(number)
            order += sampler
        assert [index for indices, _ in found["batches"] for index in indices] == order


def test_a_seed_that_nobody_gave_is_drawn_once_for_all_ranks_and_kept_in_the_state(ranks: Ranks) -> None:
    for name in ("drawn", "drawn again", "bare"):
        one, two = ranks.of("seeds", name)
        assert isinstance(one["seed"], int)
        assert one["seed"] == two["seed"] == one["state"]["seed"] == two["state"]["seed"]
        assert indices_of(one["batches"]) != indices_of(two["batches"])
    assert ranks.of("seeds", "drawn")[0]["seed"] != ranks.of("seeds", "drawn again")[0]["seed"]


def test_seed_everythings_seed_is_taken_where_there_is_one(ranks: Ranks) -> None:
    one, two = ranks.of("seeds", "everything")
    assert one["seed"] == two["seed"] == 11


@pytest.mark.parametrize("name", RESUMED)
def test_two_ranks_resume_exactly_from_what_rank_zero_saved(ranks: Ranks, name: str) -> None:
    for found in ranks.of("resume", name):
        whole, resumed, step = found["whole"], found["resumed"], found["step"]
        assert resumed["batches"] == whole["batches"][step:]
        assert len(resumed["batches"]) >= 8
        assert resumed["epochs"] == whole["epochs"][step:]
        assert resumed["counts"] == whole["counts"]
        assert resumed["weights"] == whole["weights"]


@pytest.mark.parametrize("kind", ["module", "own"])
def test_the_callback_gives_each_rank_the_same_as_an_echo_data_module(ranks: Ranks, kind: str) -> None:
    for through_callback, expected in zip(ranks.of("callback", kind), ranks.of("module"), strict=True):
        assert through_callback == expected


def test_two_ranks_resume_exactly_with_the_callback_too(ranks: Ranks) -> None:
    for resumed, whole in zip(ranks.of("callback", "resumed at 11"), ranks.of("module"), strict=True):
        assert resumed["batches"] == whole["batches"][11:]
        assert resumed["weights"] == whole["weights"]
        assert resumed["counts"] == whole["counts"]


def test_a_loader_passed_to_fit_is_echoed_after_lightning_has_dealt_it_out(ranks: Ranks) -> None:
    one, two = ranks.of("passed", "whole")
    fresh = [fresh_stream(rank["batches"]) for rank in (one, two)]
    assert_shares(*fresh, set(range(LENGTH)), EACH)
    assert not noises_of(one["batches"]) & noises_of(two["batches"])
    assert one["steps"] == two["steps"] == [8] * 6
    for rank, found in enumerate((one, two)):  # the sampler hears the number of the pass
        sampler = DistributedSampler(range(LENGTH), num_replicas=2, rank=rank)  # type: ignore[arg-type]
        for number, examples in enumerate(chunks(fresh[rank], EACH)):
            sampler.set_epoch(number)
            assert set(examples) == set(sampler)
        assert sum(found["counts"]) == 6 * EACH


def test_the_sampler_of_a_loader_passed_to_fit_is_lightnings_and_validation_is_as_without_echoing(ranks: Ranks) -> None:
    for rank in (0, 1):
        assert ranks.of("passed", "samplers")[rank] == [("DistributedSampler", 2, rank)] * 2
        validated = ranks.of("passed", "whole")[rank]["validated"]
        each = ranks.of("plain")[rank]["validated"]  # of one epoch
        assert validated == each * (len(validated) // len(each))
        assert len(validated) == 7 * len(each)  # one more for the sanity check
    assert ranks.of("passed", "left") == (False, False)


def test_at_factor_one_a_loader_passed_to_fit_has_the_order_of_lightnings_sampler(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.of("passed", "factor 1")):
        sampler = DistributedSampler(range(LENGTH), num_replicas=2, rank=rank)  # type: ignore[arg-type]
        order: list[int] = []
        for number in range(3):
            sampler.set_epoch(number)
            order += sampler
        assert [index for indices, _ in found["batches"] for index in indices] == order


def test_a_loader_passed_to_fit_goes_on_after_a_reload_and_a_resume_on_two_ranks(ranks: Ranks) -> None:
    for name, start in (("reloaded", 0), ("resumed at 11", 11)):
        for found, whole in zip(ranks.of("passed", name), ranks.of("passed", "whole"), strict=True):
            assert found["batches"] == whole["batches"][start:]
            assert found["weights"] == whole["weights"]
            assert found["counts"] == whole["counts"]


def test_a_loader_passed_to_fit_is_not_dealt_out_where_the_trainer_does_not(ranks: Ranks) -> None:
    one, two = ranks.of("passed", "unsharded")
    assert [indices for indices, _ in one["batches"]] == [indices for indices, _ in two["batches"]]
    assert indices_of(one["batches"]) == set(range(LENGTH))
    assert not noises_of(one["batches"]) & noises_of(two["batches"])


def test_a_users_sampler_of_a_loader_passed_to_fit_is_dealt_out_once(ranks: Ranks) -> None:
    one, two = ranks.of("passed", "users sampler")
    fresh = [fresh_stream(rank["batches"]) for rank in (one, two)]
    assert_shares(*fresh, set(range(0, 122, 2)), EACH)


def test_a_checkpoint_of_two_ranks_resumes_on_one_with_a_warning_and_leaves_nothing_out(ranks: Ranks) -> None:
    path = str(ranks.folder / "after_augmentation" / "step-8.ckpt")
    before = [batch for rank in ranks.of("resume", "after_augmentation") for batch in rank["whole"]["batches"][:8]]
    with pytest.warns(UserWarning, match="saved with .*replicas=2 .now 1."):
        resumed = fit(echoed(2, **UNEVEN), ckpt_path=path, max_epochs=4)
    assert indices_of(before) | indices_of(resumed.model.batches[: 2 * 16]) == set(range(LENGTH))
    fresh = fresh_stream(before)
    rest = fresh_stream(resumed.model.batches)
    needed = next(i for i in range(len(rest)) if set(fresh) | set(rest[:i]) == set(range(LENGTH)))
    assert needed <= LENGTH - len(set(fresh)) + 16  # the rest of the pass, and at most what was live


def test_a_checkpoint_of_one_rank_resumes_on_two_with_one_warning_and_leaves_nothing_out(ranks: Ranks) -> None:
    one, two = ranks.of("from_one_rank")
    before = fit(echoed(2, **UNEVEN), max_epochs=-1, max_steps=8).model.batches
    assert indices_of(before) | indices_of(one["batches"]) | indices_of(two["batches"]) == set(range(LENGTH))
    assert len(one["said"]) == 1
    assert two["said"] == []
    assert one["steps"] == two["steps"]


def test_ranks_change_factor_and_length_together(ranks: Ranks) -> None:
    one, two = ranks.of("changing_factor", "full_pass")
    assert one["steps"] == two["steps"] == [8, 24, 12, 12]
    fixed = ranks.of("changing_factor", "fixed")
    fresh = [[len(new) for new in first_uses(rank["batches"])] for rank in fixed]
    assert fixed[0]["steps"] == [8] * 4
    assert fresh[0] == fresh[1]


@pytest.mark.parametrize("epoch_length", ["fixed", "full_pass"])
def test_ranks_that_measure_differently_decide_alike(ranks: Ranks, epoch_length: str) -> None:
    first, second = ranks.of("controller", epoch_length)
    assert first["reports"] == second["reports"], "what is reported is of the job"
    # the metric is 0 and 1 on the ranks, 0.5 in the mean, and rank 0 decides: 1 + epoch + 0.5
    assert [report["next_factor"] for report in first["reports"]] == [1.5, 2.5, 3.5, 4.5]
    assert [report["message"] for report in second["reports"]] == ["of rank 0"] * 4
    for shown in (first["shown"], second["shown"]):
        assert [metrics["rank"] for metrics in shown] == [0.5] * 4
    steps = [8, 8, 8, 8] if epoch_length == "fixed" else [16, 12, 20, 28]
    assert first["steps"] == second["steps"] == steps
    assert_shares(fresh_stream(first["batches"]), fresh_stream(second["batches"]), set(range(LENGTH)), EACH)


@pytest.mark.parametrize("epoch_length", ["fixed", "full_pass"])
def test_counts_in_reports_are_those_of_all_ranks(ranks: Ranks, epoch_length: str) -> None:
    runs = ranks.of("controller", epoch_length)
    for epoch, report in enumerate(runs[0]["reports"]):
        delivered = fresh = 0
        for run in runs:
            until = sum(run["steps"][: epoch + 1])
            delivered += sum(len(indices) for indices, _ in run["batches"][:until])
            fresh += sum(map(len, first_uses(run["batches"])[:until]))
        assert (report["fresh_examples"], report["echoed_examples"]) == (fresh, delivered - fresh)


def test_counts_in_reports_go_on_after_a_resume_within_an_epoch(ranks: Ranks) -> None:
    for each in ranks.of("reports_resumed"):
        for whole, resumed in zip(each["whole"], each["resumed"], strict=True):
            for name in ("epoch", "fresh_examples", "echoed_examples", "effective_factor", "passes", "steps"):
                assert whole[name] == resumed[name], name


def test_validation_is_sharded_as_without_echoing(ranks: Ranks) -> None:
    plain, echoing = ranks.of("plain"), ranks.of("module")
    assert sorted(plain[0]["validated"] + plain[1]["validated"]) == list(range(6))
    assert all(rank["validated"] == mine["validated"] * 6 for rank, mine in zip(echoing, plain, strict=True))


@pytest.mark.parametrize("factor", ["2.75", "2.25", "1.75"], ids=["sharded", "not sharded", "the user's own sampler"])
def test_what_was_chosen_is_said_once_for_all_ranks(ranks: Ranks, factor: str) -> None:
    assert ranks.printed.count(f"factor {factor}: reuse [") == 1
    assert len(re.findall(rf"epochs x \d+ steps = .+ passes over the data at factor {factor}[,\n]", ranks.printed)) == 1


def test_the_fit_line_counts_the_steps_and_passes_of_a_rank(ranks: Ranks) -> None:
    # 24 examples on two ranks in batches of 4, five times over, each of them used 2.75 times, and 12 examples are a rank's pass
    said = re.search(r"5 epochs x 3 steps = 1.82 passes over the data at factor 2.75, ([\d.]+) with the fresh ex", ranks.printed)
    assert said is not None
    for rank in ranks.of("default_run"):
        fresh = sum(map(len, first_uses(rank["batches"])))  # of the first batches all are, and not one in 2.75
        assert float(said[1]) == pytest.approx(fresh / 12, abs=0.005)


def test_an_iterable_that_nobody_can_shard_has_all_its_batches_on_both_ranks(ranks: Ranks) -> None:
    for rank in ranks.of("batches_of_an_iterable"):
        assert rank["steps"] == [6, 6, 6]
        assert indices_of(rank["batches"]) == set(range(24))


@pytest.mark.parametrize("name", ["all", "half", "plain"])
def test_each_loader_of_a_collection_is_dealt_out_echoed_or_not(ranks: Ranks, name: str) -> None:
    one, two = (fresh_stream(rank["batches"][name]) for rank in ranks.of("collection", "whole"))
    for mine, others in zip(chunks(one, EACH), chunks(two, EACH), strict=True):
        assert set(mine) | set(others) == set(range(LENGTH))
        assert len(set(mine) & set(others)) == 2 * EACH - LENGTH
    assert len(one) >= EACH
    assert ranks.of("collection", "whole", "sampler") == (("DistributedSampler", 2, 0), ("DistributedSampler", 2, 1))
    assert ranks.of("collection", "whole", "steps") == ([8] * 4, [8] * 4)


def test_no_two_ranks_and_no_two_loaders_of_a_collection_share_noise(ranks: Ranks) -> None:
    noises = [noises_of(rank["batches"][name]) for rank in ranks.of("collection", "whole") for name in ("all", "half")]
    assert sum(map(len, noises)) == len(set().union(*noises)) > 300


def test_a_collection_resumes_exactly_on_two_ranks(ranks: Ranks) -> None:
    for found in ranks.of("collection"):
        for name in ("all", "half"):
            assert found["resumed"]["batches"][name] == found["whole"]["batches"][name][11:]
            assert len(found["resumed"]["batches"][name]) == 32 - 11


def test_loaders_of_a_collection_draw_a_seed_each_for_all_ranks_and_count_over_all_ranks(ranks: Ranks) -> None:
    one, two = ranks.of("collection_seeds")
    assert one["seeds"] == two["seeds"]
    assert len(set(one["seeds"])) == 3
    for name in ("all", "half", "plain"):
        for i, what in enumerate(("fresh", "echoed")):
            logged = {rank["logged"][f"echo/{name}/{what}_examples"] for rank in (one, two)}
            assert logged == {one["counts"][name][i] + two["counts"][name][i]}


def test_an_analysis_of_two_ranks_is_that_of_the_slower_one_and_names_it(ranks: Ranks) -> None:
    analysis, same = (StallAnalysis.from_json(ranks.folder / f"analysis-{rank}.json") for rank in (0, 1))
    assert analysis == same
    host = [rank.host_seconds for rank in analysis.ranks]
    assert host[1] >= 4 * 0.02 > host[0]
    assert analysis.slow_rank == 1
    assert analysis.stages.decode.median + analysis.stages.read.median >= 0.02
    assert analysis.stages.cores == max(1, len(os.sched_getaffinity(0)) // 2)
    assert len(analysis.checked) == 1


def test_ranks_analyze_examples_of_their_own_and_as_many_steps(ranks: Ranks) -> None:
    first, second = map(set, ranks.of("analysis", "indices"))
    assert len(first) == len(second) == 40
    assert not first & second
    short = ranks.of("analysis", "steps of a short one")
    assert short[0] == short[1]
    assert short[0][0] == 2
    assert 2 <= short[0][1] < 40


def test_hits_of_two_ranks_that_share_a_cache_count_once_and_both_log_the_same(ranks: Ranks) -> None:
    """Both ranks report the hits of their node. What each has read, its own data set has counted."""
    counts, reports = ranks.of("cache", "counts"), ranks.of("cache", "reports")
    before = (0, 0)
    for epoch, of_ranks in enumerate(zip(*counts, strict=True)):
        reads, fresh = (sum(rank[i] for rank in of_ranks) - before[i] for i in (0, 1))
        before = (before[0] + reads, before[1] + fresh)
        one, two = (rank[epoch] for rank in reports)
        figures = [(each["cache_hit_fraction"], each["cached_examples"], each["cache_bytes"]) for each in (one, two)]
        assert figures[0] == figures[1]
        hits = figures[0][0] * fresh
        assert hits == pytest.approx(round(hits))
        compared = 2 * 2 if epoch == 1 else 2  # each rank reads its 1st and its 10th hit again, and later ones less often
        assert fresh - reads <= round(hits) <= fresh - reads + compared
        assert one["cache_is_full"]
        assert 25 <= figures[0][1] < 2**20 / 2**15
    assert reports[0][0]["cache_hit_fraction"] == 0
    assert 0.3 < reports[0][-1]["cache_hit_fraction"] < 0.7


def test_ranks_decide_within_an_epoch_at_the_same_step_and_alike(ranks: Ranks) -> None:
    one, two = ranks.of("early", "whole")
    assert one["shown"] == two["shown"], "both ranks are shown what is of the job"
    ahead = 2 * 2 + 2
    epoch = 41  # 161 of 321 examples in batches of 4
    at = [
        (ahead + 10 + 3, "early"),
        (25, "within_epoch"),
        (epoch, "epoch_end"),
        (epoch + 25, "within_epoch"),
        (2 * epoch, "epoch_end"),
    ]
    assert [tuple(each[:2]) for each in one["shown"]] == at
    factors = [1, *(1 + number / 2 for number in range(1, 6))]
    assert [use[:3] for use in one["uses"]] == [
        (step, step + (ahead if step else 0), factor)
        for step, factor in zip([0, *(step for step, _ in at)], factors, strict=True)
    ]
    assert one["uses"] == two["uses"]
    assert {use[3] for use in two["uses"][1:]} == {"of rank 0"}
    assert one["weights"] == two["weights"]
    assert one["counts"] == two["counts"]
    assert one["counts"][1] > 0


def test_ranks_resumed_after_an_early_decision_get_the_same_batches(ranks: Ranks) -> None:
    for whole, resumed in zip(ranks.of("early", "whole"), ranks.of("early", "resumed"), strict=True):
        assert resumed["batches"][: 25 + 6 - 24] == whole["batches"][24 : 25 + 6]
        assert resumed["uses"][:2] == whole["uses"][:2]
