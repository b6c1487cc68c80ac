"""An analysis as it might come out: steps of 80 ms, 20 of them the step's, 1 the copy's, and 50 when the data lies in memory."""

from dataclasses import replace

from measured_stages import MS, STAGES

from lightning_echo.analysis.measured import Spread
from lightning_echo.analysis.result import StallAnalysis

ANALYSIS = StallAnalysis(STAGES, Spread(80 * MS, 72 * MS, 88 * MS), Spread.exactly(50 * MS))
NOTHING = Spread.exactly(0.0)
STREAM = replace(
    ANALYSIS,
    stages=replace(STAGES, read=NOTHING, read_cached=NOTHING, points=("after_batching", "after_transfer")),
    cached=None,
    notes=("skipped: fetch rate, since its examples cannot be asked for a second time",),
)
