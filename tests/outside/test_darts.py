"""Darts: forecasting models that make loader and ``pytorch_lightning.Trainer`` themselves, from a series of numbers."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from library_runs import QUIET, train_with_library
from project_runs import assert_right

darts = pytest.importorskip("darts", reason="darts is not installed: pip install 'lightning-echo[test-outside]'")

from darts.models import NBEATSModel  # noqa: E402

PAST, TIMES, BATCH = 4, 40, 4
WINDOWS = range(PAST, TIMES)  # known by what is to be predicted


def see(batch: Any) -> Any:
    columns = zip(batch.future_target[:, 0, 0].tolist(), batch.past_target[:, :, 0].tolist(), strict=True)
    return [(int(number), tuple(past)) for number, past in columns]


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")  # Darts has no validation loader there
@pytest.mark.parametrize("workers", [0, 2])
def test_windows_come_as_they_are(workers: int) -> None:
    def fit(callbacks: Any) -> None:
        model = NBEATSModel(
            input_chunk_length=PAST,
            output_chunk_length=1,
            num_stacks=1,
            num_blocks=1,
            num_layers=1,
            layer_widths=8,
            batch_size=BATCH,
            n_epochs=3,
            pl_trainer_kwargs={**QUIET, "callbacks": callbacks},
        )
        series = darts.TimeSeries.from_values(numpy.arange(TIMES, dtype=numpy.float32))
        model.fit(series, dataloader_kwargs={"num_workers": workers, "pin_memory": False})

    run = train_with_library(see, fit)
    plain = {number: tuple(map(float, range(number - PAST, number))) for number in WINDOWS}
    assert_right(run, WINDOWS, point="after_augmentation", steps=len(WINDOWS) // BATCH, values=plain)
