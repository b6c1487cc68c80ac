"""Two ranks are one training to the reader: they divide each pass, beside a training of one rank (sharing_ranks_runs.py)."""

import os
import subprocess
import sys
import time

import pytest
import sharing_ranks_runs
import torch
from sharing_ranks_runs import (
    BATCH_SIZE,
    BESIDE,
    EPOCHS,
    IN_PARTS,
    LATE,
    LATE_PART,
    LENGTH,
    OTHER_PART,
    PART,
    RANKS,
    SKIPPING,
    rounds_of,
)
from sharing_runs import Numbers, end_readers, epochs_of, examples, in_process, loader_of, places, rows, wait_until
from torch.utils.data import DataLoader, Subset

from lightning_echo import ShareConfig, serve
from lightning_echo.share import places as places_module
from lightning_echo.share.sharing import status_of

pytestmark = pytest.mark.program


def holding(connection):
    """A reader that keeps what ranks have agreed on, however long one of them is stopped on a busy machine."""
    places_module.HOLD_SECONDS = 3600
    name, window = SKIPPING["name"], SKIPPING["window"]
    serve(DataLoader(Numbers(LENGTH), BATCH_SIZE, shuffle=True, num_workers=1), ShareConfig(name, window=window))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("r")
    folder.chmod(0o700)
    launched = ("PL_GLOBAL_SEED", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    command = [sys.executable, sharing_ranks_runs.__file__, str(folder)]
    environment["LIGHTNING_ECHO_SHARED"] = str(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_ECHO_SHARED", str(folder))
        with in_process(holding):
            wait_until(lambda: status_of(SKIPPING["name"]) is not None, "the reader is there")
            ranks = [
                subprocess.Popen(
                    [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
                )
                for rank in range(RANKS)
            ]
            loader = loader_of(Numbers(LENGTH), 7, **BESIDE)
            try:
                alone = epochs_of(loader, EPOCHS)
                loader.close()
                loader = loader_of(Subset(Numbers(LENGTH), OTHER_PART), 7, **IN_PARTS)
                other = epochs_of(loader, EPOCHS)
                loader.close()
                loader = loader_of(Numbers(LENGTH), 7, **SKIPPING)
                every = epochs_of(loader, 40, lambda: time.sleep(0.005))
                loader.close()
                before = []
                for share in (LATE, LATE_PART):
                    loader = loader_of(Numbers(LENGTH), 7, **share)
                    epoch = iter(loader)
                    epochs = [[rows(next(epoch)) for _ in range(4)]]
                    wait_until(lambda: len(places(share["name"])) == 1 + RANKS, "the ranks have joined")  # noqa: B023
                    epochs[0] += [rows(batch) for batch in epoch]
                    before.append(epochs + epochs_of(loader, EPOCHS - 1))
                    loader.close()
            finally:
                loader.close()
                printed = [rank.communicate(timeout=240)[0] for rank in ranks]
                end_readers()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(printed)[-6000:]
    return alone, [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(RANKS)], every, other, before


def test_the_ranks_divide_each_pass_and_have_equally_many_steps(runs):
    alone, ranks, *_ = runs
    for number, whole in enumerate(alone):
        stream = examples(whole)
        assert sorted(index for index, _ in stream) == list(range(LENGTH))
        parts = [rank["beside"][number] for rank in ranks]
        for rank, part in enumerate(parts):
            share = stream[rank::RANKS]
            filled = share if len(share) == 31 else [*share, share[-1]]  # the last slot has what the rank had before
            assert [tuple(example) for example in examples(part)] == filled
            assert [len(batch) for batch in part] == [BATCH_SIZE] * 7 + [3]


def test_ranks_on_a_part_divide_that_part_and_the_training_beside_has_its_own(runs):
    _, ranks, _, other, _ = runs
    for number, whole in enumerate(other):
        assert sorted(index for index, _ in examples(whole)) == list(OTHER_PART)
        shares = [[index for index, _ in examples(rank["part"][number])] for rank in ranks]
        assert [len(share) for share in shares] == [21, 21]
        assert set(shares[0]) | set(shares[1]) == set(PART)
        assert len(set(shares[0])) == 21
        assert shares[1][-1] == shares[1][-2]  # of 41, the last slot has what the rank had before
        drawn = {tuple(example) for rank in ranks for example in examples(rank["part"][number])}
        both = set(PART) & set(OTHER_PART)
        assert {each for each in drawn if each[0] in both} == {tuple(each) for each in examples(whole) if each[0] in both}


@pytest.mark.parametrize(("case", "part", "slots"), [(0, range(LENGTH), 31), (1, PART, 21)], ids=["all", "part"])
def test_ranks_that_come_late_get_whole_passes_each_its_share(runs, case, part, slots):
    _, ranks, *_, before = runs
    late = [run[("late", "late part")[case]] for run in ranks]
    for number, whole in enumerate(before[case]):
        assert sorted(index for index, _ in examples(whole)) == list(range(LENGTH))
        stream = [tuple(example) for example in examples(whole) if example[0] in part]
        for rank, share in enumerate(examples(run["epochs"][number]) for run in late):
            expected = stream[rank::RANKS]
            assert [tuple(example) for example in share] == expected + expected[-1:] * (slots - len(expected))
    assert all(0 < run["again"] < slots for run in late)


def test_a_run_goes_on_exactly_from_each_of_its_batches_also_where_a_pass_is_filled_up(runs):
    for rank in runs[1]:
        assert rank["anywhere"] == [True] * 8


def test_the_ranks_skip_together_and_count_what_they_miss(runs):
    """The training beside has all: it says which round of the stream an example is of, and which rank's it is."""
    of_ranks = [run["skipping"] for run in runs[1]]
    assert [[len(epoch) for epoch in had["epochs"]] for had in of_ranks] == [[8] * 3] * RANKS
    rounds = rounds_of([example for epoch in runs[2] for example in examples(epoch)], of_ranks)
    assert rounds[0] == rounds[1]
