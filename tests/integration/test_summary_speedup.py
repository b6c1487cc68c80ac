"""The speed-up that the summary of a real training claims. How right it is, `make bench ARGS="--only claims"` measures."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from callback_cases import echo
from trainer_runs import Data, fit

pytestmark = pytest.mark.usefixtures("read_here", "one_thread")
CLAIM = "times as fast as with fresh examples alone"


def claimed(
    caplog: pytest.LogCaptureFixture, factor: float, steps: int, **options: Any
) -> tuple[tuple[float, float] | None, str]:
    """Returns the claim of a training of two epochs with a source that sleeps, and what was logged."""
    callback = echo(factor, **options)
    data = Data(1, batch_size=2, length=steps, delay=0.002)
    with caplog.at_level(logging.INFO):
        fit(data, callbacks=[callback], max_epochs=2)
    assert sum(report.steps for report in callback.reports) == steps
    return callback.reports[-1].speedup, caplog.text


@pytest.mark.parametrize("point", ["before_augmentation", "after_batching"])
def test_a_training_that_echoed_claims_an_interval_that_its_uses_bound(point: str, caplog: pytest.LogCaptureFixture) -> None:
    claim, said = claimed(caplog, 4, 120, insertion_point=point)
    assert claim is not None
    low, high = claim
    assert 0 < low <= high <= 4
    assert f"{low:.1f} to {high:.1f} {CLAIM}" in said


@pytest.mark.parametrize(
    ("factor", "steps", "options"),
    [
        (1, 120, {}),  # nothing is echoed
        (4, 5 * 2, {}),
        (4, 120, {"cache": "1MiB"}),  # at factor 1 other examples would have been in it by then
        (4, 120, {"reads_in_flight": 8}),  # threads that read ahead are not timed
        ("demand", 120, {}),
    ],
)
def test_without_echoes_from_few_steps_and_where_fresh_examples_cannot_be_timed_it_claims_nothing(
    factor: Any, steps: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    claim, said = claimed(caplog, factor, steps, **options)
    assert claim is None
    assert "lightning_echo: " in said
    assert CLAIM not in said
