"""Two ranks are one training to the reader: they divide each pass, beside a training of one rank (sharing_ranks_runs.py)."""

import os
import subprocess
import sys

import pytest
import sharing_ranks_runs
import torch
from sharing_ranks_runs import BATCH_SIZE, BESIDE, EPOCHS, LENGTH, RANKS
from sharing_runs import Numbers, end_readers, epochs_of, examples, loader_of

pytestmark = pytest.mark.program


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("r")
    folder.chmod(0o700)
    launched = ("PL_GLOBAL_SEED", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    command = [sys.executable, sharing_ranks_runs.__file__, str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_ECHO_SHARED", str(folder))
        environment["LIGHTNING_ECHO_SHARED"] = str(folder)
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
            for rank in range(RANKS)
        ]
        loader = loader_of(Numbers(LENGTH), 7, **BESIDE)
        try:
            alone = epochs_of(loader, EPOCHS)
        finally:
            loader.close()
            printed = [rank.communicate(timeout=240)[0] for rank in ranks]
            end_readers()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(printed)[-6000:]
    return alone, [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(RANKS)]


def test_the_ranks_divide_each_pass_and_have_equally_many_steps(runs):
    alone, ranks = runs
    for number, whole in enumerate(alone):
        stream = examples(whole)
        assert sorted(index for index, _ in stream) == list(range(LENGTH))
        parts = [rank["beside"][number] for rank in ranks]
        for rank, part in enumerate(parts):
            share = stream[rank::RANKS]
            filled = share if len(share) == 31 else [*share, share[-1]]  # the last slot has what the rank had before
            assert [tuple(example) for example in examples(part)] == filled
            assert [len(batch) for batch in part] == [BATCH_SIZE] * 7 + [3]


def test_a_resumed_run_goes_on_exactly_on_both_ranks(runs):
    for rank in runs[1]:
        found, rest = rank["resumed"]["found"], rank["resumed"]["rest"]
        assert rest == found[11:]


def test_a_run_goes_on_exactly_from_each_of_its_batches_also_where_a_pass_is_filled_up(runs):
    for rank in runs[1]:
        assert rank["anywhere"] == [True] * 8


def test_skip_is_refused_with_the_way_out(runs):
    for rank in runs[1]:
        assert "share.behind='skip' is impossible with 2 ranks" in rank["refused"]
        assert "Use behind='wait'" in rank["refused"]
