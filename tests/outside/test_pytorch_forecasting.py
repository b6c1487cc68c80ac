"""PyTorch Forecasting: its data set of time series, which draws the length of the past, and the loaders that it makes."""

from __future__ import annotations

from typing import Any

import pytest
from project_runs import WAYS, assert_epochs, assert_exact, assert_repeatable, assert_unchanged, said, train

pytorch_forecasting = pytest.importorskip(
    "pytorch_forecasting", reason="pytorch_forecasting is not installed: pip install 'lightning-echo[test-outside]'"
)

import pandas  # noqa: E402

SERIES, STEPS, BATCH = 3, 12, 4
PAST, FUTURE = 4, 1
LENGTH = SERIES * (STEPS - PAST - FUTURE + 1)  # windows


def dataset(**options: Any) -> Any:
    options = {"min_encoder_length": PAST, **options}
    rows = [(series, step, float(100 * series + step)) for series in range(SERIES) for step in range(STEPS)]
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
        **options,
    )


def see(batch: Any) -> Any:
    """A window is known by what is to be predicted, and seen with what is not padding of its past."""
    x, (y, _) = batch
    columns = zip(y[:, 0].tolist(), x["encoder_target"].tolist(), x["encoder_lengths"].tolist(), strict=True)
    return [(int(number), tuple(past[:length])) for number, past, length in columns]


def past_of(number: int, length: int) -> tuple[float, ...]:
    return tuple(map(float, range(number - length, number)))


WINDOWS = [100 * series + step for series in range(SERIES) for step in range(PAST, STEPS)]


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_windows_come_as_they_are(workers: int, way: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run = train(lambda: dataset().to_dataloader(batch_size=BATCH, num_workers=workers), see, way=way)
    assert run.loader.insertion_point == "after_augmentation"
    assert "TimeSeriesDataSet has neither load(index) and augment(example) nor a transform" in said(caplog)
    assert_exact(run, WINDOWS)
    assert_epochs(run, LENGTH // BATCH)
    assert_unchanged(run, {number: past_of(number, PAST) for number in WINDOWS})


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_a_drawn_length_is_reused_with_its_window(workers: int, way: str) -> None:
    """Its data set draws how much of the past is seen; windows of several lengths are padded in its collate function."""
    data = dataset(min_encoder_length=1, randomize_length=(1.0, 1.0))
    run = train(lambda: data.to_dataloader(batch_size=SERIES, num_workers=workers), see, way=way)
    assert_exact(run, [number for batch in data.to_dataloader(train=False, batch_size=SERIES) for number, _ in see(batch)])
    assert len({len(use.value) for use in run.uses}) > 1
    assert all(use.value == past_of(use.index, len(use.value)) for use in run.uses)
    fresh = {(use.index, len(use.value)) for use in run.uses if use.fresh}
    assert {(use.index, len(use.value)) for use in run.uses} == fresh


def test_two_runs_with_the_same_seed_draw_the_same_lengths() -> None:
    def once(seed: int) -> Any:
        data = dataset(min_encoder_length=1, randomize_length=(1.0, 1.0))
        return train(lambda: data.to_dataloader(batch_size=BATCH, num_workers=2), see, epochs=2, seed=seed)

    assert_repeatable(once)


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_batches_of_the_same_time_stay_together(workers: int, way: str) -> None:
    """What its own batch sampler has put into a batch is not mixed anew."""

    def make() -> Any:
        return dataset().to_dataloader(batch_size=SERIES, batch_sampler="synchronized", num_workers=workers)

    run = train(make, see, way=way)
    assert run.loader.insertion_point == "after_batching"
    assert_exact(run, WINDOWS)
    assert_epochs(run, STEPS - PAST)
    assert all(len({use.index % 100 for use in batch}) == 1 for batch in run.model.batches)
    assert_unchanged(run, {number: past_of(number, PAST) for number in WINDOWS})
