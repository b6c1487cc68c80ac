"""Verdicts: each is the cheapest setting by the figures worked out beside it. A step takes 20 ms, so that 21.05 ms are fed."""

from dataclasses import replace

import pytest
from measured_stages import CACHED, MS

from lightning_echo.analysis.predict import Spread, TrainingSetting, costs_of, predict
from lightning_echo.analysis.verdict import VerdictKind, judge
from lightning_echo.measure.control import Observation
from lightning_echo.measure.summary import advise
from lightning_echo.measure.target_idle import LARGE_FACTOR, recommend

NONE = Spread.exactly(0.0)
STARVED = replace(CACHED, hand_over=NONE, copy=NONE, cores=2)  # 136 ms of worker time per batch, 68 ms with two of them
PLENTY = 100 * 10**9
ONLY_RAW, ONLY_LOADED = ({hold: CACHED.in_cache[hold]} for hold in ("raw", "loaded"))


def test_an_accelerator_that_does_not_wait_needs_nothing():
    verdict = judge(STARVED, 21 * MS, {})
    assert (verdict.kind, verdict.setting) == (VerdictKind.not_starved, TrainingSetting())
    assert verdict.message == "Do nothing: the accelerator is busy 95% of the time."


def test_workers_come_first_and_no_more_of_them_than_needed():
    verdict = judge(replace(STARVED, cores=16), 68 * MS, {})  # 136 / 7 = 19.4 ms, 136 / 6 = 22.7 ms
    assert (verdict.kind, verdict.setting) == (VerdictKind.more_workers, TrainingSetting(workers=7))
    assert verdict.message == "Set num_workers to 7: the accelerator is busy only 29% of the time, and would be 100%."


def test_more_workers_than_cores_can_feed_are_not_advised():
    busy = replace(STARVED, cores=16, prepare_cpu_share=1.0, step_cpu_seconds=320 * MS)  # 376 ms on 16 cores
    assert judge(busy, 68 * MS, {}).kind is not VerdictKind.more_workers


def test_a_cache_comes_next_with_the_workers_that_help():
    """With four workers 0.8 of the raw items leave (136 - 80 * 0.8) / 4 = 18 ms; 80 kB an example.

    0.7 leave 20 ms, which is enough, but not for a host that takes 1.07 times as long. 0.6 of the loaded examples would be
    enough, too, but take 360 kB an example.
    """
    verdict = judge(replace(STARVED, cores=4, free_bytes=PLENTY), 68 * MS, {})
    assert verdict.kind is VerdictKind.cache
    assert verdict.setting == TrainingSetting(4, cached_fraction=0.8, hold="raw", cache_size="802MiB")  # 840e6 / 2**20 = 801.1
    assert verdict.setting.options == {"factor": 1.0, "cache": {"size": "802MiB", "hold": "raw"}}
    assert verdict.message == (
        "Set num_workers to 4 and keep 80% of the data set in a cache with hold='raw' and size='802MiB': the accelerator is "
        "busy only 29% of the time, and would be 100%."
    )


def test_a_cache_alone_where_workers_are_as_many_as_help():
    """(136 - 112 x) / 2 with two workers: 0.9 of the loaded examples leave 17.6 ms, 0.8 leave 23.2. All raw items leave 28."""
    verdict = judge(replace(STARVED, free_bytes=PLENTY), 68 * MS, {})
    assert verdict.kind is VerdictKind.cache
    assert verdict.setting == TrainingSetting(cached_fraction=0.9, hold="loaded", cache_size="5.3GiB")  # 5.67e9 / 2**30 = 5.28
    assert verdict.message.startswith("Keep 90% of the data set in a cache with hold='loaded' and size='5.3GiB': ")


def test_a_cache_that_just_suffices_is_as_large_as_memory_allows():
    """1.01 GB are free, three fourths of which hold 0.72 of the raw items: (136 - 57.6) / 4 = 19.6 ms, 0.7 leave 20."""
    verdict = judge(replace(STARVED, cores=4, free_bytes=1_015 * 10**6), 68 * MS, {})
    assert (verdict.kind, verdict.setting.cached_fraction) == (VerdictKind.cache, 0.72)


def test_what_memory_does_not_hold_is_echoed():
    """Three fourths of 424 MB hold 0.30 of the raw items and 0.05 of the loaded examples.

    With four workers: the raw items leave (136 - 24) / 4 = 28 ms, the loaded examples (136 - 5.6) / 4 = 32.6. Then 56 ms are
    reused after reading, and 56 redone: 56 / (4 * 20 / 0.95 - 56) = 1.985. At 2.13, (56 / 2.13 + 56) / 4 = 20.57 ms.
    """
    verdict = judge(replace(STARVED, cores=4, free_bytes=424 * 10**6), 68 * MS, {})
    assert verdict.kind is VerdictKind.cache_and_echo
    factor = verdict.setting.factor
    assert factor == pytest.approx(1.985 * 1.07, abs=0.01)
    assert verdict.setting == TrainingSetting(4, factor, "after_read", 0.3, hold="raw", cache_size="301MiB")  # 315e6 / 2**20
    assert verdict.message == (
        "Set num_workers to 4, keep 30% of the data set in a cache with hold='raw' and size='301MiB' and echo for what is left "
        "at insertion_point='after_read' with factor 2.13: the accelerator is busy only 29% of the time, and would be 97%; "
        "each step then has 47% as many fresh examples. Memory does not hold more."
    )


def test_the_factor_is_for_what_the_cache_leaves_of_the_ratio():
    """Two workers read 8 examples in 40 ms, a step takes 10: R = 4. Three fourths of 840 MB hold 0.6 of 1.05 GB: 1.6 are left."""
    nothing = dict.fromkeys(("decode", "augment", "collate"), NONE)
    reading = replace(STARVED, step=Spread.exactly(10 * MS), in_cache=ONLY_RAW, free_bytes=840 * 10**6, **nothing)
    verdict = judge(replace(reading, points=("after_read", "after_augmentation", "after_batching")), 40 * MS, {})
    assert (verdict.kind, verdict.setting.cached_fraction) == (VerdictKind.cache_and_echo, 0.6)
    assert verdict.setting.factor == pytest.approx(4 * (1 - 0.6) * 0.95 * 1.07, abs=0.01)


def test_a_cache_that_holds_all_and_is_not_enough_is_part_of_the_advice():
    """With two workers 24 ms of augmentation and collation are left of 80: 80 / (2 * 20 / 0.95) = 1.9 at after_batching."""
    slow = replace(STARVED, augment=Spread.exactly(9 * MS), free_bytes=PLENTY, points=("before_augmentation", "after_batching"))
    verdict = judge(slow, 96 * MS, {})
    assert (verdict.kind, verdict.setting.insertion_point) == (VerdictKind.cache_and_echo, "after_batching")
    assert (verdict.setting.cached_fraction, verdict.setting.cache_size) == (1.0, "5.9GiB")  # 6.3e9 / 2**30 = 5.87
    assert verdict.setting.factor == pytest.approx(1.9 * 1.07, abs=0.01)
    assert verdict.message.endswith("The rest takes too long even then.")


def test_with_loaded_examples_in_the_cache_nothing_earlier_is_echoed():
    """As before, with all points: 72 ms of augmentation are reused, 8 of collation redone, 72 / (2 * 20 / 0.95 - 8) = 2.11."""
    verdict = judge(replace(STARVED, augment=Spread.exactly(9 * MS), free_bytes=PLENTY), 96 * MS, {})
    assert (verdict.setting.hold, verdict.setting.insertion_point) == ("loaded", "after_augmentation")
    assert verdict.setting.factor == pytest.approx(2.11 * 1.07, abs=0.01)


def test_a_cache_that_hardly_helps_is_left_out():
    """0.05 of the loaded examples save 5.6 of 136 ms."""
    little = replace(STARVED, free_bytes=424 * 10**6, points=STARVED.points[1:], in_cache=ONLY_LOADED)
    verdict = judge(little, 68 * MS, {})
    assert (verdict.kind, verdict.setting.cached_fraction) == (VerdictKind.echo, 0.0)


def test_of_a_data_set_that_cannot_be_cut_a_share_may_be_read_from_memory():
    """(136 - 72 x) / 4 with four workers, reads of 1 ms from memory: 0.7 of the data set leave 21.4 ms, 0.8 leave 19.6."""
    verdict = judge(replace(STARVED, cores=4, points=STARVED.points[2:], in_cache={}), 68 * MS, {})
    assert (verdict.kind, verdict.setting) == (VerdictKind.cache, TrainingSetting(4, cached_fraction=0.8))
    assert verdict.message == (
        "Set num_workers to 4 and keep 80% of the data set in memory: the accelerator is busy only 29% of the time, and would "
        "be 100%. The data set cannot be cut before its augmentation, so that a cache can hold its examples only whole "
        "(hold='whole'), if it returns the same each time."
    )
    echoed = judge(replace(STARVED, points=STARVED.points[2:], in_cache={}), 68 * MS, {})
    assert echoed.kind is VerdictKind.echo
    assert "Neither more workers nor a cache are enough. The data set cannot be cut before its augmentation" in echoed.message


def test_where_sizes_were_not_measured_the_cache_has_none():
    """As in an analysis of an older version."""
    unknown = replace(STARVED, cores=4, in_cache=None, examples=None, free_bytes=None)
    verdict = judge(unknown, 68 * MS, {})
    assert (verdict.kind, verdict.setting) == (VerdictKind.cache, TrainingSetting(4, cached_fraction=0.6, hold="loaded"))
    assert verdict.setting.options == {}
    assert verdict.message.endswith("The size of that cache is not known from this analysis: analyze again.")


def test_echoing_comes_last_at_the_earliest_point_whose_factor_is_not_large():
    """Per batch 256 ms reused and 24 redone before the augmentation: 15.1; 272 and 8 after it: 8.53; 280 and 0: 7.12."""
    slower = replace(STARVED, read=Spread.exactly(28 * MS))
    verdict = judge(slower, 140 * MS, {})
    assert verdict.kind is VerdictKind.echo
    assert verdict.setting.insertion_point == "after_batching"
    assert verdict.setting.factor == pytest.approx(280 / (2 * 20 / 0.95) * 1.07, abs=0.01)
    assert predict(slower, verdict.setting).idle_fraction <= 0.05
    assert verdict.message == (
        "Echo at insertion_point='after_batching' with factor 7.12: the accelerator is busy only 14% of the time, and would "
        "be 100%; each step then has 14% as many fresh examples. Neither more workers nor a cache are enough."
    )
    verdict = judge(STARVED, 68 * MS, {})  # 112 / (42.1 - 24) * 1.07; 4.02 and 3.46 would do at later points
    assert (verdict.setting.insertion_point, verdict.setting.factor) == ("before_augmentation", pytest.approx(6.62, abs=0.01))
    faster = replace(STARVED, read=Spread.exactly(4 * MS), read_cached=Spread.exactly(4 * MS))  # 64 / (42.1 - 24) = 3.54 * 1.07
    verdict = judge(faster, 68 * MS, {})
    assert (verdict.setting.insertion_point, verdict.setting.factor) == ("before_augmentation", pytest.approx(3.79, abs=0.01))


@pytest.mark.parametrize("point", ["before_augmentation", "after_augmentation", "after_batching"])
def test_the_advice_at_the_end_of_a_training_is_the_same(point):
    """EchoCallback has measured the same pipeline at factor 1; its source is fast enough for factors up to 4."""
    stages = replace(STARVED, read=Spread.exactly(4 * MS), read_cached=Spread.exactly(4 * MS), points=(point,))
    costs = costs_of(stages, TrainingSetting(insertion_point=point))
    waited = Observation(0, 1.0, 100, idle_fraction=1 - 20 / 44, step_seconds=44 * MS, costs=costs)  # (8 * 10 + 8) / 2
    told, verdict = recommend(waited), judge(stages, 44 * MS, {})
    assert 1 < told.factor == verdict.setting.factor < 4
    assert "the accelerator is busy only 45% of the time" in verdict.message
    assert "the accelerator is busy only 45% of the time" in advise(waited, told).message


def test_a_large_factor_is_advised_with_a_warning():
    slow = replace(STARVED, read=Spread.exactly(60 * MS), read_cached=Spread.exactly(60 * MS))
    verdict = judge(slow, 200 * MS, {})
    assert verdict.setting.factor > LARGE_FACTOR
    assert "so large a factor seldom pays in learning" in verdict.message


def test_without_workers_they_are_part_of_the_advice():
    verdict = judge(replace(STARVED, workers=0), 100 * MS, {})
    assert (verdict.kind, verdict.setting.workers) == (VerdictKind.echo, 2)
    assert verdict.message.startswith("Set num_workers to 2 and echo at insertion_point=")


def test_a_transform_that_starves_the_accelerator_by_itself_is_named():
    """48 ms of a batch are RandAugment's: 24 ms with two workers, more than a step.

    Before the augmentation 64 ms are redone, too many; after it 168 ms are reused and 8 redone: 168 / (42.1 - 8) * 1.07 = 5.27.
    """
    heavy = replace(STARVED, augment=Spread.exactly(7 * MS))
    verdict = judge(heavy, 100 * MS, {"Normalize": 1 * MS, "RandAugment": 6 * MS})
    assert verdict.kind is VerdictKind.transform
    assert verdict.message.startswith(
        "RandAugment alone starves the accelerator. Move it to the device, for whole batches at once, or echo at "
        "insertion_point='after_augmentation' with factor 5.28: "
    )
    light = judge(heavy, 100 * MS, {"Normalize": 1 * MS, "RandAugment": 4 * MS})
    assert light.kind is VerdictKind.echo


def test_where_nothing_is_enough_that_is_said():
    hopeless = replace(STARVED, collate=Spread.exactly(100 * MS), points=("before_augmentation", "after_augmentation"))
    verdict = judge(hopeless, 100 * MS, {})
    assert (verdict.kind, verdict.setting) == (VerdictKind.not_enough, TrainingSetting())
    assert verdict.message == (
        "Nothing that was tried is enough: the accelerator is busy only 20% of the time. What helps is a faster source."
    )


def test_where_only_copying_takes_time_nothing_is_to_be_done():
    """4 ms of 25 are the copy: no loader helps."""
    copying = replace(STARVED, copy=Spread.exactly(4 * MS), hand_over=Spread.exactly(1 * MS), workers=8)
    verdict = judge(copying, 25 * MS, {})
    assert (verdict.kind, verdict.setting) == (VerdictKind.not_starved, TrainingSetting())
    assert verdict.message.startswith("Do nothing: the accelerator is busy 80% of the time, and the rest is spent on taking")
    slow_copy = replace(STARVED, copy=Spread.exactly(4 * MS))  # 136 / (24 / 0.95) = 5.4
    assert judge(replace(slow_copy, cores=16), 68 * MS, {}).setting == TrainingSetting(workers=6)


def test_where_the_stages_do_not_explain_what_was_measured_there_is_no_advice():
    """With eight workers the host needs 17 ms, a step 20: 40 ms are not explained by either."""
    verdict = judge(replace(STARVED, workers=8), 40 * MS, {})
    assert (verdict.kind, verdict.setting) == (VerdictKind.not_enough, TrainingSetting())
    assert "the stages by themselves explain 20 of 40 ms" in verdict.message


def test_cores_are_said_to_be_the_limit():
    """136 ms on two cores; 68 ms with two workers, no less with more of them."""
    busy = replace(STARVED, read_cpu_share=1.0, prepare_cpu_share=1.0, step_cpu_seconds=20 * MS)
    verdict = judge(busy, 78 * MS, {})
    assert verdict.setting.factor == pytest.approx(136 / (2 * 20 / 0.95 - 20) * 1.07, abs=0.02)
    message = verdict.message
    assert "The 2 cores are the limit, so that neither more workers nor a cache are enough" in message


def test_workers_that_fail_are_to_be_mended_first():
    alone = replace(STARVED, workers=0, cores=16, can_have_workers=False)
    verdict = judge(alone, 157 * MS, {})
    assert (verdict.kind, verdict.setting) == (VerdictKind.not_enough, TrainingSetting())
    assert verdict.message.startswith("Make the data set work in worker processes first")
    assert "busy only 13% of the time" in verdict.message
    assert judge(alone, 20 * MS, {}).kind is VerdictKind.not_starved


def test_without_workers_they_are_the_first_advice():
    """(136 ms) / 8 = 17."""
    verdict = judge(replace(STARVED, workers=0, cores=16), 157 * MS, {})
    assert (verdict.kind, verdict.setting) == (VerdictKind.more_workers, TrainingSetting(workers=7))
    assert verdict.message.startswith("Set num_workers to 7 or more first, since with 0 loading and training take turns: ")
