"""Seconds of source, rest and collate."""

from lightning_echo.pipeline.worker import StageSeconds


def test_what_an_epoch_took_is_a_difference():
    before, after = StageSeconds(1.0, 2.0, 3.0, 4, 5), StageSeconds(1.5, 4.0, 3.25, 10, 7)
    assert after - before == StageSeconds(0.5, 2.0, 0.25, 6, 2)
