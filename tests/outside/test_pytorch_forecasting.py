"""PyTorch Forecasting: its data set of time series, which draws the length of the past, and the loaders that it makes."""

from __future__ import annotations

from typing import Any

import pytest
from project_runs import WAYS, assert_right, said, train

pytorch_forecasting = pytest.importorskip(
    "pytorch_forecasting", reason="pytorch_forecasting is not installed: pip install 'lightning-echo[test-outside]'"
)

import pandas  # noqa: E402

SERIES, TIMES, BATCH = 3, 12, 4
PAST, FUTURE = 4, 1
WINDOWS = [100 * series + time for series in range(SERIES) for time in range(PAST, TIMES)]


def dataset(**options: Any) -> Any:
    rows = [(series, step, float(100 * series + step)) for series in range(SERIES) for step in range(TIMES)]
    frame = pandas.DataFrame(rows, columns=["series", "step", "value"])
    frame["series"] = frame["series"].astype(str).astype("category")
    return pytorch_forecasting.TimeSeriesDataSet(
        frame,
        time_idx="step",
        target="value",
        group_ids=["series"],
        max_encoder_length=PAST,
        max_prediction_length=FUTURE,
        time_varying_unknown_reals=["value"],
        **{"min_encoder_length": PAST, **options},
    )


def see(batch: Any) -> Any:
    """A window is known by what is to be predicted, and seen with what is not padding of its past."""
    x, (y, _) = batch
    columns = zip(y[:, 0].tolist(), x["encoder_target"].tolist(), x["encoder_lengths"].tolist(), strict=True)
    return [(int(number), tuple(past[:length])) for number, past, length in columns]


def past_of(number: int, length: int = PAST) -> tuple[float, ...]:
    return tuple(map(float, range(number - length, number)))


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_windows_come_as_they_are(workers: int, way: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run = train(lambda: dataset().to_dataloader(batch_size=BATCH, num_workers=workers), see, way=way)
    assert "TimeSeriesDataSet has neither load(index) and augment(example) nor a transform" in said(caplog)
    plain = {number: past_of(number) for number in WINDOWS}
    assert_right(run, WINDOWS, point="after_augmentation", steps=len(WINDOWS) // BATCH, values=plain)
