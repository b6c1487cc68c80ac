"""What a run does, in the order of its worth, and how long each stage may take. It imports nothing that takes time."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STAGES", "Stage"]

CEILING, PLAIN, FACTOR, CACHE, AUTO = "batch on the device", "plain", "factor R", "cache of a quarter", "auto, cache of a quarter"
DECODES, PREDICTION, LARGE = "plain, decoded on the device", "prediction", ", large network"
RATES = {PLAIN: 0.1, FACTOR: 0.1, AUTO: 0.1}  # of stage "accuracy": see rates.py
ALONE, TENSORSOCKET, SHARED = "each by itself", "TensorSocket", "share"


NO_ECHO_BELOW = 2.0  # R


@dataclass(frozen=True)
class Stage:
    """A program of its own.

    Attributes:
        name: Of the stage.
        module: That is run with the names of parts as arguments.
        seconds: That the stage may take.
        parts: In the order of their worth. After an error or a part that takes too long, the next one runs.
        part_seconds: That one part may take.
        needs: The stage that must have run before.
        says: What it finds out.
    """

    name: str
    module: str
    seconds: float
    parts: tuple[str, ...]
    part_seconds: float
    needs: str = ""
    says: str = ""


STAGES = (
    Stage("tests", "gpu.checks", 90, ("tests marked gpu",), 90, says="Is it right on a GPU?"),
    Stage("data", "gpu.data", 100, ("R", "files"), 70, says="What does a batch cost, and what a step?"),
    Stage(
        "feed",
        "gpu.feed",
        225,
        (CEILING, PLAIN, FACTOR, DECODES, AUTO, CACHE, CEILING + LARGE, PLAIN + LARGE, AUTO + LARGE, PREDICTION),
        110,  # the prediction: of so many workers and so large batches it takes longer than it is told to
        "data",
        "All cores but one cannot feed this GPU: what cures it?",
    ),
    Stage("sharing", "gpu.sharing", 180, (SHARED, TENSORSOCKET, ALONE), 60, "data", "Several trainings on one card"),
    Stage(
        "accuracy",
        "gpu.accuracy",
        400,
        tuple(f"{arm}, seed {seed}" for seed in (1, 2) for arm in (PLAIN, FACTOR, AUTO)),
        75,
        "data",
        "Accuracy at equal time",
    ),
)
