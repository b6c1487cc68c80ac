"""What a report asks: which settings, and in which words."""

from dataclasses import replace

import pytest
from analyses import ANALYSIS, NOTHING, STREAM

from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.report.questions import in_words, questions


def words_of(analysis):
    return [words for words, _ in questions(analysis)]


def test_each_question_has_its_words():
    assert questions(replace(ANALYSIS, stages=replace(ANALYSIS.stages, points=("after_read", "after_batching")))) == [
        ("as measured", TrainingSetting()),
        ("num_workers=1", TrainingSetting(workers=1)),
        ("num_workers=2", TrainingSetting(workers=2)),
        ("num_workers=4", TrainingSetting(workers=4)),
        ("50 % of the data set in memory", TrainingSetting(cached_fraction=0.5)),
        ("100 % of the data set in memory", TrainingSetting(cached_fraction=1)),
        ("storage 2x as fast", TrainingSetting(storage_speedup=2)),
        ("accelerator 2x as fast", TrainingSetting(step_speedup=2)),
        ("factor 2 at after_read", TrainingSetting(factor=2, insertion_point="after_read")),
        ("factor 4 at after_read", TrainingSetting(factor=4, insertion_point="after_read")),
        ("factor 8 at after_read", TrainingSetting(factor=8, insertion_point="after_read")),
        ("factor 2 at after_batching", TrainingSetting(factor=2, insertion_point="after_batching")),
        ("factor 4 at after_batching", TrainingSetting(factor=4, insertion_point="after_batching")),
        ("factor 8 at after_batching", TrainingSetting(factor=8, insertion_point="after_batching")),
    ]


@pytest.mark.parametrize(
    ("cores", "workers"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (9, [1, 2, 4, 8, 9])],
)
def test_workers_are_powers_of_two_up_to_the_cores_and_as_many_as_there_are(cores, workers):
    asked = questions(replace(ANALYSIS, stages=replace(ANALYSIS.stages, cores=cores)))
    assert [setting.workers for _, setting in asked if setting.workers is not None] == workers


def test_of_workers_that_fail_nothing_is_asked():
    asked = questions(replace(ANALYSIS, stages=replace(ANALYSIS.stages, can_have_workers=False)))
    assert [setting for _, setting in asked if setting.workers is not None] == []


@pytest.mark.parametrize(
    "unknown",
    [
        STREAM,
        replace(ANALYSIS, cached=None),
        replace(ANALYSIS, stages=replace(ANALYSIS.stages, read=NOTHING, read_cached=NOTHING)),
    ],
)
def test_where_reading_was_not_measured_nothing_is_asked_of_caches_and_storages(unknown):
    assert not [words for words in words_of(unknown) if "memory" in words or "storage" in words]
    assert "accelerator 2x as fast" in words_of(unknown)


def test_what_is_read_from_memory_only_can_be_cached():
    assert "50 % of the data set in memory" in words_of(replace(ANALYSIS, stages=replace(ANALYSIS.stages, read=NOTHING)))


def test_a_setting_is_said_by_all_that_differs():
    setting = TrainingSetting(0, 2.5, "after_transfer", cached_fraction=0.8, storage_speedup=3, step_speedup=0.5)
    assert in_words(setting) == (
        "num_workers=0, 80 % of the data set in memory, storage 3x as fast, accelerator 0.5x as fast, "
        "factor 2.5 at after_transfer"
    )
