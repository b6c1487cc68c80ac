"""A run as it might come out: two epochs of 50 batches, a factor that changed in the middle of the first one and after it."""

from dataclasses import replace

from lightning_echo.measure.summary import EpochReport, FactorUse, RunSummary, RunVerdict

VERDICT = RunVerdict("Echo with factor 2.", ("idle 40% of the time", "6 of 8 cores are free"), "EchoCallback(factor=2)")
FIRST = EpochReport(0, 50, 2.0, 160, 40, 160, 40, passes=0.8, idle_fraction=0.5, data_wait_seconds=0.01, step_seconds=0.01)
SECOND = EpochReport(1, 50, 4.0, 210, 190, 50, 150, passes=1.05, idle_fraction=0.1, data_wait_seconds=0.003, step_seconds=0.027)
USES = (
    FactorUse(0, 0, 1.0),
    FactorUse(20, 25, 2.0, "starved", "idle 67%"),
    FactorUse(50, 60, 4.0, "starved", "idle 50%"),
)
RUN = RunSummary((FIRST, SECOND), USES, verdict=VERDICT)
SHARED = replace(
    RUN,
    reports=(
        replace(FIRST, cache_hit_fraction=0.0, missed_examples=3),
        replace(SECOND, cache_hit_fraction=0.75, missed_examples=8),
    ),
)
