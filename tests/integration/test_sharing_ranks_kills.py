"""The reader of two ranks and of a training beside them is killed at random moments (sharing_ranks_kills_runs.py)."""

import os
import random
import subprocess
import sys
import time

import pytest
import sharing_ranks_kills_runs
import torch
from sharing_ranks_kills_runs import SHARE
from sharing_ranks_runs import BATCH_SIZE, LENGTH, RANKS, rounds_of
from sharing_runs import Numbers, epochs_of, examples, kill_reader, loader_of, places, together, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.program, pytest.mark.timeout(400), pytest.mark.usefixtures("own_folder")]

KILLS = 5
BETWEEN = 100  # items of each between two kills: more than the window holds, so another reader has read some of them


def runs_with_kills(tmp_path, behind):
    """What the training beside the ranks has had, and what each rank has."""
    launched = ("PL_GLOBAL_SEED", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    command = [sys.executable, sharing_ranks_kills_runs.__file__, str(tmp_path), behind]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    ranks = [subprocess.Popen([*command, str(rank)], **options) for rank in range(RANKS)]
    loader, generator = loader_of(Numbers(LENGTH), 7, **SHARE), random.Random(behind)

    def are_at_work():
        return len(places(SHARE["name"])) == 1 + RANKS or any(rank.poll() is not None for rank in ranks)

    def goes_on():
        before = min(places(SHARE["name"]), default=0)
        wait_until(lambda: are_at_work() and min(places(SHARE["name"]), default=0) > before + BETWEEN, "all go on")

    def attack():
        try:
            wait_until(are_at_work, "all have come")
            for _ in range(KILLS):
                goes_on()
                time.sleep(generator.random() * 0.3)
                kill_reader(SHARE["name"])
                wait_until(are_at_work, "the next reader has all of them")
            goes_on()
        finally:
            (tmp_path / "over").touch()

    def beside():
        epochs = []
        try:
            while any(rank.poll() is None for rank in ranks):
                epochs += epochs_of(loader, 1, lambda: time.sleep(0.005))
        finally:
            loader.close()
        return epochs

    try:
        epochs, _ = together(beside, attack)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
        printed = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(printed)[-6000:]
    return epochs, [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in range(RANKS)]


def test_ranks_that_are_waited_for_divide_each_pass_exactly_however_often_their_reader_is_killed(tmp_path):
    alone, ranks = runs_with_kills(tmp_path, "wait")
    assert len(ranks[0]["epochs"]) == len(ranks[1]["epochs"]) > KILLS * BETWEEN / LENGTH
    for whole, *parts in zip(alone, *(rank["epochs"] for rank in ranks), strict=False):
        stream = examples(whole)
        assert sorted(index for index, _ in stream) == list(range(LENGTH))
        for rank, part in enumerate(parts):
            share = stream[rank::RANKS]
            assert examples(part) == (share if len(share) == 31 else [*share, share[-1]])  # the last slot is filled up
            assert [len(batch) for batch in part] == [BATCH_SIZE] * 7 + [3]
    assert [rank["missed"] for rank in ranks] == [0, 0]


def test_ranks_that_skip_have_equal_steps_and_no_example_twice_in_a_pass_however_often_their_reader_is_killed(tmp_path):
    """The training beside has all: it says which round of the stream an example is of, and which rank's it is."""
    alone, ranks = runs_with_kills(tmp_path, "skip")
    for epoch in alone:
        assert sorted(index for index, _ in examples(epoch)) == list(range(LENGTH))
    assert [[len(epoch) for epoch in had["epochs"]] for had in ranks] == [[8] * len(ranks[0]["epochs"])] * RANKS
    rounds = rounds_of([example for epoch in alone for example in examples(epoch)], ranks)
    are_same = [number == other for number, other in zip(*rounds, strict=True)]
    assert are_same.count(False) < len(are_same) / 10, "a rank that is stopped takes a few later ones, then what the other takes"
    last = are_same[-len(examples(ranks[0]["epochs"][-1])) :]
    assert last.count(True) > len(last) / 2, "no shift lasts in the epoch that no kill disturbs"
