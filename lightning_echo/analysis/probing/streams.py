"""The phases of a loader that cannot be run in parts: a stream, or a data set that makes its batches itself.

The same examples cannot be read again from such a loader. So reading and preparation cannot be measured separately, and
``decode`` contains everything that the workers do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from lightning_echo.analysis.measured import Spread
from lightning_echo.analysis.probing.part_runs import FirstBatches, fewest_batches
from lightning_echo.analysis.probing.phases import LoaderPhases
from lightning_echo.analysis.probing.ranks import gathered
from lightning_echo.analysis.probing.steps import StepNumber
from lightning_echo.insertion import Needs, points_from

__all__ = ["measure_stream"]

_SKIPPED = (
    "skipped: fetch rate, preparation rate and single stages. The training loader goes over {what}, whose examples cannot be "
    "asked for a second time; only the loader as a whole was measured, and fetch stall and prep stall are not told apart"
)
_NO_TIME = Spread.exactly(0.0)


def measure_stream(
    loader: DataLoader[Any], steps: StepNumber, batch_size: int, most_seconds: float, say: Callable[[str], None]
) -> tuple[int, LoaderPhases]:
    """Measures the loader as a whole.

    Args:
        loader: The user's loader.
        steps: How many batches are measured. The stream may have fewer.
        batch_size: Number of examples in a batch.
        most_seconds: The phase ends with the first batch after this time, but not before `fewest_batches`.
        say: Gets a message for each phase.

    Returns:
        The number of steps of a phase, and what was measured.

    Raises:
        ValueError: The loader has too few batches.
        Exception: The data set raises it.
    """
    say("the loader: as a whole")
    seconds: list[float] = []
    ended = True
    begin = last = time.perf_counter()
    for _ in FirstBatches(loader, steps.most):
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
        if now - begin > most_seconds and len(seconds) >= fewest_batches(loader.num_workers):
            ended = False
            break
    most = steps.within(min(gathered(len(seconds) if ended else steps.most)))  # gathered, so that all ranks raise the error
    workers = max(loader.num_workers, 1)
    counted = seconds[min(workers, len(seconds) - 1) :]  # the workers start during the batches before
    per_example = workers / batch_size
    is_opaque = loader.batch_size is None or type(loader).__iter__ is not DataLoader.__iter__  # it yields no single examples
    return most, LoaderPhases(
        read=_NO_TIME,
        read_cached=_NO_TIME,
        decode=Spread.of([each * per_example for each in counted], period=workers),
        augment=_NO_TIME,
        collate=_NO_TIME,
        read_cpu_share=0.0,
        prepare_cpu_share=0.0,
        points=tuple(point.value for point in points_from(Needs.batches if is_opaque else Needs.examples)),
        read_sharing=0.0,
        prepare_sharing=0.0,
        takes_ahead=False,
        batch_size=batch_size,
        transforms={},
        files=(),
        real=FirstBatches(loader, min(gathered(len(seconds)))),
        in_memory=None,
        cut_after_reading=None,
        raw_items={},
        notes=(
            _SKIPPED.format(what=type(loader.dataset).__name__),
            "skipped: processor time. So a prediction may say that more workers than cores help",
        ),
    )
