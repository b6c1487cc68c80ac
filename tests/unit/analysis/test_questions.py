"""What a report asks: which settings, and in which words."""

from dataclasses import replace

import pytest
from analyses import ANALYSIS, NOTHING, STREAM
from measured_stages import CACHED

from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.report import in_words, questions


def words_of(analysis):
    return [words for words, _ in questions(analysis)]


def test_each_question_has_its_words():
    assert questions(replace(ANALYSIS, stages=replace(ANALYSIS.stages, points=("after_read", "after_batching")))) == [
        ("as measured", TrainingSetting()),
        ("num_workers=1", TrainingSetting(workers=1)),
        ("num_workers=2", TrainingSetting(workers=2)),
        ("num_workers=4", TrainingSetting(workers=4)),
        ("storage 2x as fast", TrainingSetting(storage_speedup=2)),
        ("50% of the data set in a cache of raw items", TrainingSetting(cached_fraction=0.5, hold="raw")),
        ("100% of the data set in a cache of raw items", TrainingSetting(cached_fraction=1, hold="raw")),
        ("4 such trainings that share the reading", TrainingSetting(shared_by=4)),
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
def test_where_reading_was_not_measured_nothing_is_asked_of_storages(unknown):
    assert not [words for words in words_of(unknown) if "memory" in words or "storage" in words]
    assert "accelerator 2x as fast" in words_of(unknown)


def test_of_a_stream_no_cache_is_asked_about():
    assert not [words for words in words_of(STREAM) if "cache" in words]


def test_a_data_set_that_cannot_be_cut_may_be_in_the_memory_of_the_storage():
    uncut = replace(ANALYSIS, stages=replace(ANALYSIS.stages, points=("after_augmentation", "after_batching")))
    asked = [words for words in words_of(uncut) if "data set" in words]
    assert asked == ["50% of the data set in memory", "100% of the data set in memory"]
    from_memory = replace(uncut, stages=replace(uncut.stages, read=NOTHING))  # opening and reading the file take time
    assert "50% of the data set in memory" in words_of(from_memory)


@pytest.mark.parametrize(
    ("free", "raw", "loaded"),  # of 1.05 and 6.3 GB
    [(10**9, ["71%", "100%"], ["11%", "100%"]), (2 * 10**9, ["100%"], ["23%", "100%"]), (0, ["100%"], ["100%"])],
)
def test_of_each_form_what_memory_holds_is_asked_about(free, raw, loaded):
    words = words_of(replace(ANALYSIS, stages=replace(CACHED, free_bytes=free)))
    assert [each for each in words if "cache" in each] == [
        *(f"{share} of the data set in a cache of raw items" for share in raw),
        *(f"{share} of the data set in a cache of loaded examples" for share in loaded),
    ]


def test_a_setting_is_said_by_all_that_differs():
    setting = TrainingSetting(0, 2.5, "after_transfer", cached_fraction=0.8, storage_speedup=3, step_speedup=0.5)
    assert in_words(setting) == (
        "num_workers=0, 80% of the data set in memory, storage 3x as fast, accelerator 0.5x as fast, factor 2.5 at after_transfer"
    )
    both = TrainingSetting(None, 2, "before_augmentation", 0.3, hold="loaded", cache_size="8GiB")
    assert in_words(both) == "30% of the data set in a cache of loaded examples, factor 2 at before_augmentation"
