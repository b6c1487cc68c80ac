"""NeuralForecast: copies model and callbacks before it trains, and draws windows from a batch of series in the training step."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from library_runs import QUIET, train_with_library
from project_runs import assert_right

neuralforecast = pytest.importorskip(
    "neuralforecast", reason="neuralforecast is not installed: pip install 'lightning-echo[test-outside]'"
)

import pandas  # noqa: E402
from neuralforecast.models import MLP  # noqa: E402

SERIES, TIMES, BATCH, STEPS = 22, 20, 4, 18


def see(batch: Any) -> Any:
    """A series is known by its first value, which is a hundred times its number, and seen with all values."""
    return [(int(values[0]) // 100, tuple(values)) for values in batch["temporal"][:, 0].tolist()]


@pytest.mark.parametrize("workers", [0, 2])
def test_series_come_as_they_are(workers: int) -> None:
    tables = [
        pandas.DataFrame({"unique_id": f"{one}", "ds": numpy.arange(TIMES), "y": 100.0 * one + numpy.arange(TIMES)})
        for one in range(SERIES)
    ]

    def fit(callbacks: Any) -> None:
        how = {"num_layers": 1, "hidden_size": 8, "dataloader_kwargs": {"num_workers": workers}, "val_check_steps": STEPS}
        model = MLP(h=1, input_size=4, max_steps=STEPS, batch_size=BATCH, callbacks=callbacks, **how, **QUIET)
        neuralforecast.NeuralForecast(models=[model], freq=1).fit(pandas.concat(tables))

    run = train_with_library(see, fit)
    plain = {one: tuple(100.0 * one + time for time in range(TIMES)) for one in range(SERIES)}
    assert_right(run, range(SERIES), point="after_augmentation", steps=-(-SERIES // BATCH), values=plain)
