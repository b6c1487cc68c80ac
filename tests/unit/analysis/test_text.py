"""The report in a terminal: figures worked out by hand, and lines that fit."""

import re
from dataclasses import replace

import pytest
from analyses import ANALYSIS, NOTHING, STREAM
from measured_stages import CACHED, MS, STAGES

from lightning_echo.analysis.predict import Spread, TrainingSetting
from lightning_echo.analysis.report import report
from lightning_echo.analysis.result import CheckedSetting, RankSeconds, StallAnalysis


def rows(analysis: StallAnalysis, title: str) -> list[list[str]]:
    """The cells of what stands under a title, without what is over its columns."""
    block = next(block for block in report(analysis).split("\n\n") if block.startswith(title))
    return [re.split(r"\s{2,}", line.strip()) for line in block.splitlines()[2:]]


def sentences(text: str) -> str:
    """Without the line breaks."""
    return re.sub(r"\s+", " ", text)


def test_it_begins_with_the_verdict_why_and_what_to_paste_and_goes_on_with_the_step_time():
    verdict, why, after, headline, step, *_ = report(ANALYSIS).split("\n\n")
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


def test_it_is_said_where_workers_take_longer_beside_the_training():
    assert "beside the training" not in report(replace(ANALYSIS, stages=replace(STAGES, contention=1.1)))
    said = sentences(report(replace(ANALYSIS, stages=replace(STAGES, contention=1.63))))
    assert "Decoding and augmentation take 1.6 times as long during the training as alone" in said
    assert "Predictions for other settings are less certain then." in said


def test_the_parts_of_the_step_time_have_bars_as_long_as_they_are():
    # 20 of 80 ms are 7.5 of 30 columns, rounded to even; 1 is 0.4, 29 are 10.9 and 30 are 11.25
    assert rows(ANALYSIS, "Where the step time goes") == [
        ["step", "20", "25%", "#" * 8],
        ["copy to the device", "1", "1%"],
        ["prep stall", "29", "36%", "#" * 11],
        ["fetch stall", "30", "38%", "#" * 11],
    ]


def test_what_cannot_be_told_apart_is_one_part():
    # 80 - 20 - 1
    assert rows(STREAM, "Where the step time goes")[2:] == [
        ["waiting for input (prep and fetch stall together)", "59", "74%", "#" * 22]
    ]
    assert [row[0] for row in rows(STREAM, "Step time")[:2]] == ["the real run, from step to step", "the step alone (ingestion)"]
    # two workers, 8 * (4 + 2) + 8 ms for a batch of 8
    assert rows(STREAM, "Rates")[2:] == [["preparation and fetch together: the most that the workers deliver", "286"]]


def test_a_real_run_that_is_faster_than_its_steps_is_all_step():
    """Noise."""
    found = replace(ANALYSIS, real=Spread.exactly(19 * MS))
    assert rows(found, "Where the step time goes") == [
        ["step", "19", "100%", "#" * 30],
        ["copy to the device", "0", "0%"],
        ["prep stall", "0", "0%"],
        ["fetch stall", "0", "0%"],
    ]


def test_rates_are_examples_per_second():
    assert rows(ANALYSIS, "Rates") == [
        ["the real run", "100"],  # 8 in 80 ms
        ["ingestion, G: the most that the accelerator takes", "400"],  # 8 in 20 ms
        ["preparation, P: the most that the workers prepare, without reading", "286"],  # 2 times 8 in 8 * (4 + 2) + 8 ms
        ["fetch, F: the most that the workers read", "200"],  # 2 times one in 10 ms
    ]
    in_memory = replace(ANALYSIS, stages=replace(ANALYSIS.stages, read=NOTHING))
    assert rows(in_memory, "Rates")[-1] == ["fetch, F: the most that the workers read", "no limit"]


def test_the_costliest_are_named():
    found = replace(ANALYSIS, transforms={"RandomCrop": 1.5 * MS, "Normalize": 0.5 * MS})
    assert rows(found, "What takes a worker longest") == [
        ["read", "10"],
        ["decode and augment, without these transforms", "4"],  # 4 + 2 without 1.5 and 0.5
        ["RandomCrop", "1.5"],
    ]


@pytest.mark.parametrize(
    "row",
    [  # as in test_predict; idle are all but the step's 20 ms
        ["as measured", "68", "68 to 68", "71%", "1.00x", "workers"],
        ["num_workers=1", "136", "136 to 136", "85%", "0.50x", "workers"],
        ["num_workers=4", "34", "34 to 34", "41%", "2.00x", "workers"],
        ["50% of the data set in a cache of raw items", "48", "48 to 48", "58%", "1.42x", "workers"],
        ["storage 2x as fast", "48", "48 to 48", "58%", "1.42x", "workers"],
        ["accelerator 2x as fast", "68", "68 to 68", "85%", "1.00x", "workers"],
        ["factor 4 at after_read", "38", "38 to 38", "47%", "1.79x", "workers"],
        ["factor 4 at before_augmentation", "26", "26 to 26", "23%", "2.62x", "workers"],
        ["factor 2 at after_augmentation", "36", "36 to 36", "44%", "1.89x", "workers"],
        ["factor 8 at after_transfer", "20.1", "20.1 to 20.1", "1%", "3.38x", "step"],  # 20 + 1 / 8
    ],
)
def test_what_if(row):
    assert row in rows(ANALYSIS, "What if")


def test_the_range_is_that_of_what_was_measured():
    varied = replace(ANALYSIS, stages=replace(ANALYSIS.stages, read=Spread(10 * MS, 9 * MS, 12 * MS)))
    # two workers, 8 * (9 + 6) + 8 and 8 * (12 + 6) + 8 ms
    assert rows(varied, "What if")[0][:3] == ["as measured", "68", "64 to 76"]


def test_where_cores_are_the_limit_that_is_said():
    said = "Limited by cores: all processors are busy, so that more workers change nothing."
    assert said not in report(ANALYSIS)
    stages = replace(ANALYSIS.stages, prepare_cpu_share=1.0, read_cpu_share=0.5, cores=2, step_cpu_seconds=4 * MS, workers=8)
    busy = replace(ANALYSIS, stages=stages)
    # processors: 8 * (5 + 6) + 8 for the batch and 4 for the step, on two cores
    assert rows(busy, "What if")[0] == ["as measured", "50", "50 to 50", "60%", "1.00x", "cores"]
    assert said in report(busy)


def test_what_echoing_costs_is_said_beside_what_it_brings():
    assert "with factor 4 each step then has 25% as many fresh examples." in report(ANALYSIS)


def test_what_was_tried_stands_beside_what_was_predicted():
    tried = TrainingSetting(factor=4, insertion_point="before_augmentation"), TrainingSetting(4)
    found = replace(
        ANALYSIS,
        checked=(
            CheckedSetting(tried[0], Spread(25 * MS, 24 * MS, 30 * MS)),
            CheckedSetting(tried[1], Spread.exactly(40 * MS)),
        ),
    )
    assert rows(found, "Tried") == [
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


def test_one_rank_is_compared_with_none():
    assert "rank" not in report(ANALYSIS)


def test_notes_are_told_in_full():
    note = "fetch rate: " + "no file was seen to be opened, " * 10 + "so that caches may have been warm"
    assert note in sentences(report(replace(ANALYSIS, notes=(note,))))
    assert "Notes" not in report(ANALYSIS)


def test_no_line_is_longer_than_a_hundred_columns():
    """Whatever the names, however large the numbers."""
    large = replace(ANALYSIS.stages, **{name: Spread(3e6, 1e6, 9e6) for name in ("read", "decode", "step")})
    everything = TrainingSetting(64, 7.25, "before_augmentation", cached_fraction=0.8, storage_speedup=3, step_speedup=1.5)
    found = StallAnalysis(
        large,
        Spread(1e8, 1e8, 2e8),
        Spread.exactly(1e7),
        {"Q" * 300: 2e6, "a transform of many words " * 10: 1e6},
        ("N" * 250, "word " * 50),
        tuple(RankSeconds(1e7, 1e8) for _ in range(3)),
        (CheckedSetting(everything, Spread(1e7, 1e6, 1e8)),),
    )
    text = report(found)
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("N" * 90) >= 2
    costliest = next(block for block in text.split("\n\n") if block.startswith("What takes"))
    assert costliest.count("Q") == 300
    assert all(line == line.rstrip() for line in text.splitlines())


def test_the_line_to_paste_is_whole_if_something_is_echoed_or_cached():
    assert "EchoCallback" not in report(ANALYSIS), "the size of the cache is not known"
    cached = replace(
        ANALYSIS, stages=replace(CACHED, free_bytes=10**11)
    )  # 0.7 leave 1.07 * (136 - 80 * 0.7) / 4 = 21.4 ms, for 22 / 0.95
    lines = report(cached).splitlines()
    assert lines[lines.index("Next") :][1:3] == [
        "  num_workers=4",
        '  EchoCallback(factor=1, cache={"size": "701MiB", "hold": "raw"})',
    ]
    assert max(map(len, lines)) <= 100
