"""The tables of a report as values: figures worked out by hand, from steps of 80 ms of which 20 are the step's."""

from dataclasses import replace

import pytest
from analyses import ANALYSIS, STREAM
from measured_stages import CACHED, MS

from lightning_echo.analysis.predict import Spread, TrainingSetting
from lightning_echo.analysis.report import headline, milliseconds, shares_of_step, tables
from lightning_echo.analysis.result import CheckedSetting


def table(analysis, title):
    return next(each for each in tables(analysis) if each.title == title)


def test_the_shares_of_a_step_are_one_together():
    assert dict(shares_of_step(ANALYSIS)) == {
        "step": pytest.approx(20 / 80),
        "copy to the device": pytest.approx(1 / 80),
        "prep stall": pytest.approx((50 - 20 - 1) / 80),
        "fetch stall": pytest.approx((80 - 50) / 80),
    }
    for analysis in (ANALYSIS, STREAM):
        assert sum(share for _, share in shares_of_step(analysis)) == pytest.approx(1.0)


def test_what_a_stream_waits_for_is_one_share():
    assert [words for words, _ in shares_of_step(STREAM)] == [
        "step",
        "copy to the device",
        "waiting for input (prep and fetch stall together)",
    ]


def test_only_parts_of_a_whole_have_bars():
    with_bars = [each.title for each in tables(ANALYSIS) if each.shares]
    assert with_bars == ["Where the step time goes"]
    each = table(ANALYSIS, with_bars[0])
    assert len(each.shares) == len(each.rows) == 4


def test_a_table_without_rows_is_left_out():
    assert "Ranks" not in [each.title for each in tables(ANALYSIS)]


def test_all_rows_have_a_cell_for_each_column():
    for each in tables(ANALYSIS):
        assert {len(row) for row in each.rows} == {len(each.columns)}, each.title


def test_what_was_tried_stands_beside_what_was_predicted():
    """With four workers 34 ms are predicted, see test_predict; 40 were measured."""
    tried = CheckedSetting(TrainingSetting(workers=4), Spread(40 * MS, 38 * MS, 44 * MS))
    rows = table(replace(ANALYSIS, checked=(tried,)), "Tried: predicted against measured").rows
    assert rows[1] == ("num_workers=4", "34", "40", "38 to 44", "-15%")


def test_the_headline_says_how_busy_the_accelerator_is():
    assert headline(ANALYSIS) == "Stall analysis: the accelerator is busy 25% of the time"


def test_times_are_told_in_milliseconds_with_three_digits():
    assert (milliseconds(0.0123456), milliseconds(1.5)) == ("12.3", "1,500")


def test_what_memory_holds_stands_beside_what_it_would_bring():
    """A GB is free, three fourths of which hold 0.71 of 1.05 GB and 0.11 of 6.3.

    With two workers 8 * (10 * 0.29 + 6) + 8 = 79.2 ms and 8 * (14 * 0.89 + 2) + 8 = 123.7 ms of a batch, in place of 136.
    """
    found = table(
        replace(ANALYSIS, stages=replace(CACHED, free_bytes=10**9)),
        "A cache: what memory holds of the data set, and what it would bring",
    )
    assert found.rows == (
        ("raw items (hold='raw')", "97.7", "1002MiB", "71%", "0", "39.6", "39.6", "1.72x"),
        ("loaded examples (hold='loaded')", "586", "5.9GiB", "11%", "0", "61.8", "61.8", "1.10x"),
    )
    assert found.remarks == ("0.931 GiB of memory were free; a cache may take three fourths of it.",)


def test_without_free_memory_a_cache_brings_nothing():
    found = table(replace(ANALYSIS, stages=CACHED), "A cache: what memory holds of the data set, and what it would bring")
    assert [row[3:] for row in found.rows] == [("0%", "0", "68", "68", "1.00x")] * 2


def test_remedies_stand_in_their_order_each_with_those_before_it():
    """Memory holds 0.3 of the raw items. Then 56 / (4 * 21 / 0.95 - 56) * 1.07 = 1.85, and (56 / 1.85 + 56) / 4 = 21.57 ms."""
    found = table(replace(ANALYSIS, stages=replace(CACHED, free_bytes=424 * 10**6)), "Remedies, in this order")
    cached = "num_workers=4, 30% of the data set in a cache of raw items"
    assert found.rows == (
        ("num_workers=4", "34", "41%", "no"),
        (cached, "28", "29%", "no"),
        (f"{cached}, factor 1.85 at after_read", "21.6", "7%", "yes"),
    )
    assert "as large a buffer_size as memory allows" in found.remarks[0]
    assert table(replace(ANALYSIS, stages=replace(CACHED, cores=16)), "Remedies, in this order").remarks == ()


def test_an_accelerator_that_does_not_wait_needs_no_remedies():
    fed = replace(ANALYSIS, real=Spread.exactly(21 * MS))
    assert "Remedies, in this order" not in [each.title for each in tables(fed)]
