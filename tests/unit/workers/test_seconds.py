"""Seconds of source, rest and collate are added up over the batches for which something ran."""

from lightning_echo.workers.seconds import Report, StageSeconds


def test_what_was_read_is_counted_with_what_it_took():
    seconds = StageSeconds()
    seconds.add(Report(3, 0, 0, 3.0, 0.75, 0.125))
    seconds.add(Report(1, 2, 0, 1.0, 0.75, 0.125))
    assert seconds == StageSeconds(source=4.0, rest=1.5, collate=0.25, examples=4, batches=2)


def test_examples_read_again_count_since_reading_them_took_time():
    seconds = StageSeconds()
    seconds.add(Report(1, 2, 2, 3.0, 0.0, 0.125))
    assert seconds.examples == 3


def test_an_echoed_whole_batch_counts_for_nothing():
    seconds = StageSeconds()
    seconds.add(Report(0, 8, 0, 0.0, 0.0, 0.0))
    assert seconds == StageSeconds()


def test_what_an_epoch_took_is_a_difference():
    before, after = StageSeconds(1.0, 2.0, 3.0, 4, 5), StageSeconds(1.5, 4.0, 3.25, 10, 7)
    assert after - before == StageSeconds(0.5, 2.0, 0.25, 6, 2)
