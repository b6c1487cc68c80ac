"""What a training reckons with of the trainings that share its reading."""

from types import SimpleNamespace

import pytest

from lightning_echo.sharing.attachment import Attachment
from lightning_echo.sharing.share_config import ShareConfig


def attached(own, slowest, reader, trainings=2):
    """An attachment to a reader whose window says this; times per example in milliseconds."""
    attachment = Attachment(ShareConfig("a"), lambda: pytest.fail("a reader is started"), {})
    window = SimpleNamespace(slowest_need_nanoseconds=int(slowest * 1e6), seconds_per_example=reader / 1000, trainings=trainings)
    attachment._link = SimpleNamespace(window=window)
    attachment.need_nanoseconds = int(own * 1e6)
    return attachment


@pytest.mark.parametrize(
    ("own", "slowest", "reader", "seconds", "most"),
    [
        (1, 2, 0.1, 0.002, 2.0),  # twice as fast as the slowest
        (2, 2, 0.1, 0.0001, 1.0),  # the slowest itself: only the reader counts
        (1, 2, 4, 0.004, 4.0),  # the reader is slower than all
        (3, 3, 6, 0.006, 2.0),
    ],
)
def test_examples_come_as_fast_as_the_reader_or_the_slowest_other_training(own, slowest, reader, seconds, most):
    attachment = attached(own, slowest, reader)
    assert attachment.seconds_per_example == pytest.approx(seconds)
    assert attachment.most_factor == pytest.approx(most)


def test_alone_or_before_anything_is_known_no_factor_is_too_large():
    assert attached(1, 2, 1, trainings=1).most_factor is None
    assert attached(0, 2, 1).most_factor is None
    unattached = Attachment(ShareConfig("a"), lambda: pytest.fail("a reader is started"), {})
    assert (unattached.most_factor, unattached.seconds_per_example, unattached.trainings) == (None, 0.0, 0)
