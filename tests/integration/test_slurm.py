"""A job under Slurm whose time is over goes on exactly where it was: `examples/slurm.sh` with Lightning's own handler of signals.

Slurm is not there. Two small programs stand in for what the job asks of it: `srun` starts one task, and `scontrol requeue` notes
what was asked and ends the task, as Slurm ends a job that it will start again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.own_interpreter  # starts "python" of its folder

TESTS, EXAMPLES = Path(__file__).parent, Path(__file__).parents[2] / "examples"
OF_JOB = {"JOB_ID": "4711", "JOB_NAME": "waves", "NTASKS": "1", "NTASKS_PER_NODE": "1", "NNODES": "1", "NODELIST": "127.0.0.1"}
OF_TASK = {"PROCID": "0", "NODEID": "0", "LOCALID": "0"}
JOB = {f"SLURM_{name}": value for name, value in {**OF_JOB, **OF_TASK}.items()}
STEPS = 2 * 512 // 32  # two epochs
FIRST, SECOND = 7, 21  # steps in the middle of the first and of the second of them


class Slurm:
    """A folder with the programs that stand in for Slurm's, and a job that is started there again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, folder / "asked.txt"
        self._program("srun", 'exec "$@"')
        self._program("scontrol", f'echo "$@" >> "{self.asked}"\nkill -TERM $PPID')

    def _program(self, name: str, does: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f"#!/bin/bash\n{does}\n")
        path.chmod(0o755)

    def start(self, signal_after: int) -> list[str]:
        """Starts the job, whose time is over as in `slurm_runs.Ledger`; returns the lines that it has written."""
        ledger = self.folder / f"ledger-{signal_after}.txt"
        added = ["--trainer.callbacks+=slurm_runs.Ledger", f"--trainer.callbacks.path={ledger}"]
        added += [f"--trainer.callbacks.signal_after={signal_after}"]
        others = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PL_GLOBAL_"))}
        path = os.pathsep.join([str(self.folder / "bin"), str(Path(sys.executable).parent), others["PATH"]])
        modules = os.pathsep.join([str(EXAMPLES.parent), str(TESTS)])
        done = subprocess.run(
            ["bash", "slurm.sh", *added, f"--trainer.default_root_dir={self.folder / 'runs'}"],
            cwd=EXAMPLES,
            env={**others, **JOB, "PATH": path, "PYTHONPATH": modules},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]  # also where SIGTERM ends it: Lightning leaves by `SystemExit`
        return ledger.read_text().splitlines()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of a job that nobody interrupts."""
    whole = Slurm(tmp_path_factory.mktemp("whole"))
    lines = whole.start(signal_after=0)
    assert not whole.asked.exists()
    return lines


@pytest.mark.program
def test_a_job_that_is_requeued_in_mid_epoch_twice_ends_as_one_that_nobody_interrupts(
    tmp_path: Path, expected: list[str]
) -> None:
    assert len(expected) == STEPS + 1
    assert expected[-1].startswith("weights")
    assert len(set(expected)) == STEPS + 1, "no two batches are the same: each has noise of its own"

    requeued = Slurm(tmp_path / "requeued")
    found = [requeued.start(signal_after) for signal_after in (FIRST, SECOND, 0)]
    assert requeued.asked.read_text().splitlines() == ["requeue 4711"] * 2
    saved = sorted(path.name for path in (tmp_path / "requeued" / "runs").glob("*.ckpt"))
    assert saved == ["hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"]
    assert found == [expected[:FIRST], expected[FIRST:SECOND], expected[SECOND:]]
