"""`Setting`: what one run is given, by environment: where it writes, on which device, how large everything is."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.rows import Cell, add_row

__all__ = ["FULL", "TINY", "Scale", "Setting", "run_parts"]


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        small: Network of all stages.
        large: Network of the last arms of stage "feed".
        sizes: Width and height of the files; the later ones if R is below `ENOUGH` with those before.
        sample: Number of files with which R is measured.
        train: Number of files to train on.
        held_out: Number of files to evaluate on.
        resize: Pixels of the shorter edge.
        crop: Pixels of an edge of what is trained on.
        batch_size: Images in a batch.
        steps: Of an epoch of stage "feed", and of a pass there.
        shared_steps: Of a pass of stage "sharing".
        trainings: That share.
        window_seconds: For which trainings that share are measured.
        clock_seconds: Of a training of stage "accuracy".
        evaluate_seconds: From evaluation to evaluation.
        analysis_seconds: That ``StallAnalyzer`` may take.
        analysis_steps: Of each of its phases; None: as many as the time allows.
        seeds: Of stage "accuracy".
    """

    small: str
    large: str
    sizes: tuple[tuple[int, int], ...]
    sample: int
    train: int
    held_out: int
    resize: int
    crop: int
    batch_size: int
    steps: int
    shared_steps: int
    trainings: int
    window_seconds: float
    clock_seconds: float
    evaluate_seconds: float
    analysis_seconds: float
    analysis_steps: int | None
    seeds: tuple[int, ...]


FULL = Scale(
    **{"small": "resnet18", "large": "resnet50", "sizes": ((800, 600), (1024, 768))},
    **{"sample": 2560, "train": 14_000, "held_out": 2_000, "resize": 256, "crop": 224, "batch_size": 256},
    **{"steps": 40, "shared_steps": 16, "trainings": 4, "window_seconds": 8.0},
    **{"clock_seconds": 45.0, "evaluate_seconds": 5.0, "analysis_seconds": 30.0, "analysis_steps": None, "seeds": (1, 2)},
)
TINY = Scale(
    **{"small": "tiny", "large": "tiny", "sizes": ((80, 60), (96, 72))},
    **{"sample": 40, "train": 80, "held_out": 40, "resize": 40, "crop": 32, "batch_size": 4},
    **{"steps": 8, "shared_steps": 5, "trainings": 2, "window_seconds": 0.5},
    **{"clock_seconds": 0.6, "evaluate_seconds": 0.3, "analysis_seconds": 3.0, "analysis_steps": 4, "seeds": (1,)},
)


@dataclass(frozen=True)
class Setting:
    """What the processes of a run know of it.

    Attributes:
        out: Folder of the files that are kept.
        data: Folder of the images.
        scratch: Folder for what stages tell each other.
        is_tiny: Whether everything is as small as can be, on the processor: no evidence.
    """

    out: Path
    data: Path
    scratch: Path
    is_tiny: bool

    @classmethod
    def of_environment(cls) -> Setting:
        """Returns the setting that `environment` of another process has written."""
        names = {name: os.environ[f"LIGHTNING_ECHO_GPU_{name.upper()}"] for name in ("out", "data", "scratch", "is_tiny")}
        return cls(Path(names["out"]), Path(names["data"]), Path(names["scratch"]), names["is_tiny"] == "1")

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a process of the run gets."""
        values = {"out": self.out, "data": self.data, "scratch": self.scratch, "is_tiny": int(self.is_tiny)}
        return {f"LIGHTNING_ECHO_GPU_{name.upper()}": str(value) for name, value in values.items()}

    @property
    def scale(self) -> Scale:
        return TINY if self.is_tiny else FULL

    @property
    def device(self) -> str:
        return "cpu" if self.is_tiny else "cuda"

    @property
    def workers(self) -> int:
        """All cores but one, in every arm."""
        return max(len(os.sched_getaffinity(0)) - 1, 1)

    def images_of(self, size: tuple[int, int]) -> Path:
        """The folder of the images of a size, width and height in pixels."""
        return self.data / f"{size[0]}x{size[1]}"

    def add(self, table: str, **cells: Cell) -> None:
        """Writes a row."""
        add_row(self.out, table, **cells)

    def note(self, name: str, **values: Any) -> None:
        """Tells later stages something."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        (self.scratch / f"{name}.json").write_text(json.dumps(values))

    def noted(self, name: str) -> dict[str, Any]:
        """Returns what an earlier stage has told.

        Raises:
            FileNotFoundError: It has not come so far.
        """
        file = self.scratch / f"{name}.json"
        if not file.exists():
            raise FileNotFoundError(f"no {name} is known: the stage that finds it out has not come so far")
        noted: dict[str, Any] = json.loads(file.read_text())
        return noted


def run_parts(setting: Setting, parts: Mapping[str, Callable[[], None]], chosen: list[str]) -> None:
    """Runs the parts of a stage one after another, and tells the driver how far it is. An error ends the process.

    Args:
        setting: The run's.
        parts: By name.
        chosen: Names, in their order.
    """
    setting.scratch.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        (setting.scratch / "part").write_text(name)
        began = time.monotonic()
        print(f"  ... {name}", flush=True)
        parts[name]()
        with (setting.scratch / "done").open("a") as file:
            file.write(f"{name}\t{time.monotonic() - began:.1f}\n")
