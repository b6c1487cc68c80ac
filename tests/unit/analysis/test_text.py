"""The report in a terminal and its tables: figures worked out by hand, questions in words, and lines that fit."""

import re
from dataclasses import replace

import pytest
from analyses import ANALYSIS, NOTHING, STREAM
from measured_stages import CACHED, MS, STAGES, uneven

from lightning_echo.analysis.measured import Pinning, Spread
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.report import milliseconds, questions, report, shares_of_step, tables
from lightning_echo.analysis.result import CheckedSetting, RankSeconds, StallAnalysis


def rows(analysis, title):
    """The cells of what stands under a title, without what is over its columns."""
    block = next(block for block in report(analysis).split("\n\n") if block.startswith(title))
    return [re.split(r"\s{2,}", line.strip()) for line in block.splitlines()[2:]]


def sentences(text):
    """Without the line breaks."""
    return re.sub(r"\s+", " ", text)


def table(analysis, title):
    return next(each for each in tables(analysis) if each.title.startswith(title))


def with_stages(**changes):
    return replace(ANALYSIS, stages=replace(ANALYSIS.stages, **changes))


def with_free(free_bytes, **changes):
    return replace(ANALYSIS, stages=replace(CACHED, free_bytes=free_bytes, **changes))


def test_it_begins_with_the_verdict_why_and_what_to_paste_and_goes_on_with_the_step_time():
    text = report(ANALYSIS)
    verdict, why, after, headline, step, *_ = text.split("\n\n")
    assert sentences(verdict) == "Verdict " + ANALYSIS.verdict.message
    assert why.splitlines() == [
        "Why",
        "  The accelerator is idle 75% of the time.",
        "  A step takes 80 ms; 20 ms if its batch is ready.",
        "  The loader takes 68 ms per batch, with 2 workers on 4 cores.",  # 8 * (10 + 4 + 2) + 8, by two
    ]
    assert after.splitlines() == ["Next", "  num_workers=4"]
    assert headline == "Stall analysis: the accelerator is busy 25% of the time"
    assert step.startswith("Step time")
    assert rows(ANALYSIS, "Step time") == [
        ["the real run, from step to step", "80", "72 to 88"],
        ["the same with its data in memory", "50", "50 to 50"],
        ["the step alone (ingestion)", "20", "20 to 20"],
        ["The accelerator is idle 75% of the time, with batch size 8, num_workers 2, cores 4."],
    ]
    assert "with factor 4 each step then has 25% as many fresh examples." in text
    absent = ("rank", "Notes", "Limited by cores", "beside the training", "EchoCallback")
    assert [word for word in absent if word in text] == []


def test_the_parts_of_the_step_time_have_bars_as_long_as_they_are():
    # 20 of 80 ms are 7.5 of 30 columns, rounded to even; 1 is 0.4, 29 are 10.9 and 30 are 11.25
    assert rows(ANALYSIS, "Where the step time goes") == [
        ["step", "20", "25%", "#" * 8],
        ["copy to the device", "1", "1%"],
        ["prep stall", "29", "36%", "#" * 11],
        ["fetch stall", "30", "38%", "#" * 11],
    ]
    assert [share for _, share in shares_of_step(ANALYSIS)] == pytest.approx([20 / 80, 1 / 80, 29 / 80, 30 / 80])
    noise = replace(ANALYSIS, real=Spread.exactly(19 * MS))  # faster than its steps
    assert [row[1:3] for row in rows(noise, "Where the step time goes")] == [["19", "100%"], *[["0", "0%"]] * 3]


def test_what_cannot_be_told_apart_is_one_part():
    # 80 - 20 - 1
    waiting = "waiting for input (prep and fetch stall together)"
    assert rows(STREAM, "Where the step time goes")[2:] == [[waiting, "59", "74%", "#" * 22]]
    assert [row[0] for row in rows(STREAM, "Step time")[:2]] == ["the real run, from step to step", "the step alone (ingestion)"]
    # two workers, 8 * (4 + 2) + 8 ms for a batch of 8
    assert rows(STREAM, "Rates")[2:] == [["preparation and fetch together: the most that the workers deliver", "286"]]


def test_rates_are_examples_per_second():
    assert rows(ANALYSIS, "Rates") == [
        ["the real run", "100"],  # 8 in 80 ms
        ["ingestion, G: the most that the accelerator takes", "400"],  # 8 in 20 ms
        ["preparation, P: the most that the workers prepare, without reading", "286"],  # 2 times 8 in 8 * (4 + 2) + 8 ms
        ["fetch, F: the most that the workers read", "200"],  # 2 times one in 10 ms
    ]
    assert rows(with_stages(read=NOTHING), "Rates")[-1] == ["fetch, F: the most that the workers read", "no limit"]


def test_what_if_has_the_predictions_with_their_range():
    found = rows(ANALYSIS, "What if")
    # as in test_predict; idle are all but the step's 20 ms
    for row in (
        ["as measured", "68", "68 to 68", "71%", "1.00x", "workers"],
        ["num_workers=1", "136", "136 to 136", "85%", "0.50x", "workers"],
        ["50% of the data set in a cache of raw items", "48", "48 to 48", "58%", "1.42x", "workers"],
        ["accelerator 2x as fast", "68", "68 to 68", "85%", "1.00x", "workers"],
        ["factor 4 at before_augmentation", "26", "26 to 26", "23%", "2.62x", "workers"],
        ["factor 8 at after_transfer", "20.1", "20.1 to 20.1", "1%", "3.38x", "step"],  # 20 + 1 / 8
    ):
        assert row in found
    # two workers, 8 * (9 + 6) + 8 and 8 * (12 + 6) + 8 ms
    assert rows(with_stages(read=Spread(10 * MS, 9 * MS, 12 * MS)), "What if")[0][:3] == ["as measured", "68", "64 to 76"]


def test_what_was_tried_stands_beside_what_was_predicted():
    tried = TrainingSetting(factor=4, insertion_point="before_augmentation"), TrainingSetting(4)
    measured = Spread(25 * MS, 24 * MS, 30 * MS), Spread.exactly(40 * MS)
    assert rows(replace(ANALYSIS, checked=tuple(map(CheckedSetting, tried, measured))), "Tried") == [
        ["the real run", "68", "80", "72 to 88", "-15%"],
        ["factor 4 at before_augmentation", "26", "25", "24 to 30", "+4%"],
        ["num_workers=4", "34", "40", "40 to 40", "-15%"],
    ]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (0.068, "Rank 1 is slow: its loader alone takes notably longer than the others', and all ranks wait for it."),
        (0.031, "No rank's loader is notably slower than the others'."),
    ],
)
def test_ranks_are_compared(second, said):
    found = replace(ANALYSIS, ranks=(RankSeconds(0.031, 0.08), RankSeconds(second, 0.081)))
    assert rows(found, "Ranks")[:3] == [["rank 0", "31", "80"], ["rank 1", f"{1000 * second:.0f}", "81"], [said]]


def test_no_line_is_longer_than_a_hundred_columns_and_nothing_is_lost():
    large = {name: Spread(3e6, 1e6, 9e6) for name in ("read", "decode", "step")}
    everything = TrainingSetting(64, 7.25, "before_augmentation", cached_fraction=0.8, storage_speedup=3, step_speedup=1.5)
    note = "fetch rate: " + "no file was seen to be opened, " * 10 + "so that caches may have been warm"
    found = StallAnalysis(
        replace(STAGES, **large),
        Spread(1e8, 1e8, 2e8),
        Spread.exactly(1e7),
        {"Q" * 300: 2e6, "a transform of many words " * 10: 1e6},
        ("N" * 250, note),
        tuple(RankSeconds(1e7, 1e8) for _ in range(3)),
        (CheckedSetting(everything, Spread(1e7, 1e6, 1e8)),),
    )
    text = report(found)
    assert max(map(len, text.splitlines())) <= 100
    assert note in sentences(text)
    assert text.count("N" * 90) >= 2
    costliest = next(block for block in text.split("\n\n") if block.startswith("What takes"))
    assert costliest.count("Q") == 300
    assert all(line == line.rstrip() for line in text.splitlines())
    assert (milliseconds(0.0123456), milliseconds(1.5)) == ("12.3", "1,500")


def test_what_memory_holds_stands_beside_what_it_would_bring():
    """A GB is free, three fourths of which hold 0.71 of 1.05 GB and 0.11 of 6.3.

    With two workers 8 * (10 * 0.29 + 6) + 8 = 79.2 ms and 8 * (14 * 0.89 + 2) + 8 = 123.7 ms of a batch, in place of 136.
    """
    found = table(with_free(10**9), "A cache: what memory holds")
    assert found.rows == (
        ("raw items (hold='raw')", "97.7", "1002MiB", "71%", "0", "39.6", "39.6", "1.72x"),
        ("loaded examples (hold='loaded')", "586", "5.9GiB", "11%", "0", "61.8", "61.8", "1.10x"),
    )
    assert found.remarks == ("0.931 GiB of memory were free; a cache may take three fourths of it.",)
    without = table(with_free(0), "A cache: what memory holds")
    assert [row[3:] for row in without.rows] == [("0%", "0", "68", "68", "1.00x")] * 2


def test_remedies_stand_in_their_order_each_with_those_before_it():
    """Memory holds 0.3 of the raw items. Then 56 / (4 * 21 / 0.95 - 56) * 1.07 = 1.85, and (56 / 1.85 + 56) / 4 = 21.57 ms."""
    found = table(with_free(424 * 10**6), "Remedies, in this order")
    cached = "num_workers=4, 30% of the data set in a cache of raw items"
    assert found.rows == (
        ("num_workers=4", "34", "41%", "no"),
        (cached, "28", "29%", "no"),
        (f"{cached}, factor 1.85 at after_read", "21.6", "7%", "yes"),
    )
    assert "as large a buffer_size as memory allows" in found.remarks[0]
    assert table(with_free(0, cores=16), "Remedies, in this order").remarks == ()
    fed = replace(ANALYSIS, real=Spread.exactly(21 * MS))
    assert "Remedies, in this order" not in [each.title for each in tables(fed)]


def words_of(analysis):
    return [words for words, _ in questions(analysis)]


@pytest.mark.parametrize(
    ("changes", "workers"),
    [({"cores": 1}, [1]), ({"cores": 3}, [1, 2, 3]), ({"cores": 9}, [1, 2, 4, 8, 9]), ({"can_have_workers": False}, [])],
)
def test_workers_are_powers_of_two_up_to_the_cores_unless_they_fail(changes, workers):
    assert [setting.workers for _, setting in questions(with_stages(**changes)) if setting.workers is not None] == workers


def test_prefetching_is_asked_about_where_batches_take_unequally_long_and_pinning_where_it_is_possible():
    assert not [words for words in words_of(ANALYSIS) if "prefetch" in words or "pin_memory" in words]
    steady = with_stages(batch_seconds=(136 * MS,) * 20)
    assert not [words for words in words_of(steady) if "prefetch" in words]
    found = with_stages(**uneven(), pinning=Pinning(Spread.exactly(1 * MS), Spread.exactly(1 * MS)))
    for words in ("prefetch_factor=4", "prefetch_factor=8", "pin_memory=True"):
        assert words in words_of(found)
    first, *_, remark = (row for row in rows(found, "What if"))
    assert (first[0], first[-1]) == ("as measured", "queue")
    assert "Limited by queue: single long batches are waited for." in sentences(report(found))
    assert remark != first


@pytest.mark.parametrize("unknown", [STREAM, replace(ANALYSIS, cached=None), with_stages(read=NOTHING, read_cached=NOTHING)])
def test_where_reading_was_not_measured_nothing_is_asked_of_storages(unknown):
    assert not [words for words in words_of(unknown) if "memory" in words or "storage" in words]
    assert "accelerator 2x as fast" in words_of(unknown)
    assert not [words for words in words_of(STREAM) if "cache" in words]
