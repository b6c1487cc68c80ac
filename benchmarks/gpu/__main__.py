"""Runs the stages in the order of their worth until the time is over. README.md beside this file says what they need.

Each stage is a process, so that none takes another one with it. A part that raises, or that takes too long, is reported in
``stages.csv`` and ``log.txt``; the next part runs. All rows are written at once: whatever ends the run leaves what it found.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gpu.page import write_page
from gpu.plan import STAGES, Stage
from gpu.rows import COLUMNS, add_row
from gpu.setting import Setting

__all__ = ["Run", "describe_machine", "main"]

_LEAST_SECONDS = 5.0  # with less time left nothing is started
_GRACE_SECONDS = 3.0  # that a process gets to end
_PACKAGES = (
    *("torch", "torchvision", "lightning", "torchmetrics", "numpy", "pillow", "omegaconf", "jsonargparse", "cloudpickle"),
    *("tensorsocket", "pyzmq", "pytest"),
)


class Run:
    """The stages, one after another.

    Args:
        setting: Where it writes, and how large everything is.
        seconds: That it may take.
        command: Begins the command of a stage, whose module and parts follow; empty: this interpreter with ``-m``.
    """

    def __init__(self, setting: Setting, seconds: float, command: Sequence[str] = ()) -> None:
        self._setting, self._end = setting, time.monotonic() + seconds
        self._command = list(command or (sys.executable, "-m"))
        setting.out.mkdir(parents=True, exist_ok=True)
        setting.scratch.mkdir(parents=True, exist_ok=True)
        self._log = setting.out / "log.txt"
        self._incomplete: set[str] = set()  # stages of which some part did not run

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def stage(self, stage: Stage) -> None:
        """Runs a stage; whatever happens to its parts is written."""
        if stage.needs in self._incomplete:
            self._incomplete.add(stage.name)
            for part in stage.parts:
                self._say(stage, part, "not run", said=f"it needs stage {stage.needs}, which did not come to its end")
            return
        print(f"{stage.name}: {stage.says} (at most {min(stage.seconds, max(self.seconds_left, 0)):.0f} s)", flush=True)
        end, parts = time.monotonic() + stage.seconds, list(stage.parts)
        while parts:
            left = min(end - time.monotonic(), self.seconds_left)
            if left < _LEAST_SECONDS:
                for part in parts:
                    why = "the run's time was over" if self.seconds_left < _LEAST_SECONDS else "the stage's time was over"
                    self._say(stage, part, "not run", said=why)
                return
            parts = self._process(stage, parts, left)

    def _process(self, stage: Stage, parts: list[str], seconds: float) -> list[str]:
        """Runs parts in one process until it ends, and returns those that are left."""
        done, current = self._setting.scratch / "done", self._setting.scratch / "part"
        done.unlink(missing_ok=True)
        current.write_text(parts[0])
        end, part_began, counted = time.monotonic() + seconds, time.monotonic(), 0
        outcome = "failed"
        with self._log.open("a") as log:
            print(f"\n=== {stage.name}: {', '.join(parts)}", file=log, flush=True)
            process = subprocess.Popen(
                [*self._command, stage.module, *parts],
                env={**os.environ, **self._setting.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while process.poll() is None:
                    time.sleep(0.05)
                    now = time.monotonic()
                    if (found := len(_lines(done))) > counted:
                        counted, part_began = found, now
                    if now > end or now - part_began > stage.part_seconds:
                        outcome = "too long"
                        break
            finally:
                _end_group(process)
        ended = [line.rpartition("\t") for line in _lines(done)]
        for part, _, took in ended:
            self._say(stage, part, "ran", seconds=float(took))
        left = parts[len(ended) :]
        if not left:
            return []
        said = f"exit status {process.returncode}: {_last_line(self._log)}" if outcome == "failed" else "see log.txt"
        self._say(stage, left[0], outcome, seconds=time.monotonic() - part_began, said=said)
        return left[1:]

    def _say(self, stage: Stage, part: str, outcome: str, *, seconds: float | None = None, said: str = "") -> None:
        if outcome != "ran":
            self._incomplete.add(stage.name)
        add_row(self._setting.out, "stages", stage=stage.name, part=part, outcome=outcome, seconds=seconds, said=said)
        took = "" if seconds is None else f", {seconds:.1f} s"
        print(f"  {part}: {outcome}{took}{f' ({said})' if said else ''}", flush=True)


def describe_machine(setting: Setting) -> None:
    """Writes card, driver, versions and cores."""

    def add(what: str, value: str | int | float) -> None:
        add_row(setting.out, "machine", what=what, value=value)

    add("date", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"))
    add("scale", "--tiny, on the processor: no evidence" if setting.is_tiny else "full")
    add("card", _of_card("name"))
    add("driver", _of_card("driver_version"))
    add("device memory", _of_card("memory.total"))
    add("processor", _processor())
    add("cores", len(os.sched_getaffinity(0)))
    add("memory (GiB)", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30)
    add("load average before", f"{os.getloadavg()[0]:.2f}")
    add("system", f"{platform.system()} {platform.release()}")
    add("python", platform.python_version())
    for package in _PACKAGES:
        try:
            add(package, version(package))
        except PackageNotFoundError:
            add(package, "not installed")


def main() -> int:
    """Runs all; how many parts failed."""
    options = _parse_arguments()
    if not options.tiny and not has_card():
        print("No GPU here: nothing was measured. --tiny runs all of it on the processor.")
        return 0
    out = options.out or Path(os.environ.get("OUT") or "runs/gpu")
    names = options.only or [stage.name for stage in STAGES]
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data" if options.tiny else options.data
        setting = Setting(out.absolute(), data.absolute(), Path(scratch).absolute(), options.tiny)
        for name in (*(f"{table}.csv" for table in COLUMNS), "log.txt", "gpu.md"):  # of a run before
            (out / name).unlink(missing_ok=True)
        run = Run(setting, options.seconds)
        describe_machine(setting)
        for stage in chosen_stages(names):
            run.stage(_tiny(stage) if options.tiny else stage)
            write_page(out, out / "gpu.md")
        if not options.keep:
            for size in setting.scale.sizes:  # nothing else that may lie there
                shutil.rmtree(setting.images_of(size), ignore_errors=True)
    print(f"rows, log and table: {out}", flush=True)
    failed = [line for line in _lines(out / "stages.csv")[1:] if ",ran," not in line]
    print(f"{len(failed)} parts failed or did not run" if failed else "every part ran", flush=True)
    return len(failed)


def has_card() -> bool:
    """Whether torch sees a GPU. It is asked in another process, so that this one takes nothing of the card."""
    asked = [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    return subprocess.run(asked, check=False).returncode == 0


def chosen_stages(names: Sequence[str]) -> list[Stage]:
    """Returns the stages with these names and those that they need, in their order."""
    needed = {stage.needs for stage in STAGES if stage.name in names}
    return [stage for stage in STAGES if stage.name in names or stage.name in needed]


def _tiny(stage: Stage) -> Stage:
    """Only the first seed, and time for a slow processor that does other work, too."""
    parts = tuple(part for part in stage.parts if not part.endswith("seed 2"))
    return replace(stage, parts=parts, seconds=3 * stage.seconds, part_seconds=3 * stage.part_seconds)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--tiny", action="store_true", help="all of it in miniature on the processor: no evidence")
    parser.add_argument("--only", nargs="+", choices=names, help="these stages, and what they need")
    seconds = float(os.environ.get("GPU_SECONDS") or 480)
    parser.add_argument("--seconds", type=float, default=seconds, help="that the run may take (GPU_SECONDS; 480)")
    parser.add_argument("--out", type=Path, help="folder of the rows (OUT; runs/gpu)")
    parser.add_argument("--data", type=Path, default=Path("runs/gpu-images"), help="folder of the images (runs/gpu-images)")
    parser.add_argument("--keep", action="store_true", help="keep the images, so that a second run need not make them")
    return parser.parse_args()


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it has started; kills what does not end."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def _of_card(what: str) -> str:
    """What nvidia-smi says of the first card."""
    if shutil.which("nvidia-smi") is None:
        return "none"
    asked = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        lines = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False).stdout.splitlines()
    except subprocess.TimeoutExpired:
        return "not known"
    return lines[0].strip() if lines else "not known"


def _processor() -> str:
    names = [line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
