"""Predictions against hand-worked figures: a batch of 8, two workers, a step of 20 ms."""

import math
from dataclasses import replace

import pytest
from measured_stages import CACHED, LATENCY, MS, RARE_MILLISECONDS, STAGES, ahead, uneven
from ticking_loader import ticked

from lightning_echo.analysis.measured import CachedExample, Pinning, Spread
from lightning_echo.analysis.predict import (
    TrainingSetting,
    ahead_contention,
    contention,
    costs_of,
    fits_point,
    fitting_fraction,
    possible_holds,
    predict,
    queue_fits,
    size_for,
)
from lightning_echo.cache.kept import CacheConfig

RAW, LOADED = ({"cached_fraction": 0.5, "hold": hold} for hold in ("raw", "loaded"))


@pytest.mark.parametrize(
    ("setting", "milliseconds"),
    [
        (TrainingSetting(), 68),  # (8 * (10 + 4 + 2) + 8) / 2
        (TrainingSetting(workers=0), 157),  # 136, and 20 + 1 in turn: nothing is handed over
        (TrainingSetting(storage_speedup=2, cached_fraction=0.5), 40),  # of 1 and 5 ms in turn: (8 * 9 + 8) / 2
        (TrainingSetting(**RAW), 48),  # reads of 5 ms, all decoded: (8 * (5 + 4 + 2) + 8) / 2
        (TrainingSetting(**LOADED), 40),  # half are read and decoded: (8 * (5 + 2 + 2) + 8) / 2
        (TrainingSetting(cached_fraction=1.0, hold="loaded"), 21),  # 12 of the host; step and copy are longer
        (TrainingSetting(None, 2, "before_augmentation", **RAW), 30),  # (8 * (9 / 2 + 2) + 8) / 2
        (TrainingSetting(None, 2, "before_augmentation", **LOADED), 26),  # (8 * (7 / 2 + 2) + 8) / 2
        (TrainingSetting(factor=2, cached_fraction=0.25, hold="loaded"), 27),  # (8 * (14 * 0.75 + 2) + 8) / 2 / 2
        (TrainingSetting(factor=4, insertion_point="after_read"), 38),  # (8 * (10 / 4 + 4 + 2) + 8) / 2
        (TrainingSetting(factor=2, insertion_point="after_augmentation"), 36),  # (8 * 16 / 2 + 8) / 2
        (TrainingSetting(factor=4, insertion_point="after_batching"), 21),
        (TrainingSetting(factor=4, insertion_point="after_transfer"), 20.25),  # a copy once in four steps
        (TrainingSetting(factor=4, step_speedup=2), 17),  # the host again
        (TrainingSetting(workers=0, factor=4, insertion_point="after_transfer"), 54.25),  # 136 / 4 + 20 + 1 / 4
    ],
)
def test_a_setting_takes_as_long_as_anyone_would_work_out(setting, milliseconds):
    found = predict(STAGES, setting)
    assert found.step_seconds == pytest.approx(milliseconds * MS)
    assert found.idle_fraction == pytest.approx(1 - 20 / setting.step_speedup / milliseconds)
    assert found.speedup == pytest.approx(68 / milliseconds)
    assert found.step_seconds_range == (pytest.approx(milliseconds * MS), pytest.approx(milliseconds * MS))


IN_FLIGHT = [
    ({}, {"reads_in_flight": 2}, 40),  # 8 * 5: as many as there are workers
    ({}, {"reads_in_flight": 16}, 28),  # the rest of the workers' work: (8 * (4 + 2) + 8) / 2
    ({}, {"reads_in_flight": 16, "workers": 4}, 21),  # the step and its copy: 14 are left of the host
    ({}, {"reads_in_flight": 16, "workers": 0}, 77),  # 56 and 20 + 1 in turn
    (
        {"batch_size": 40},
        {"reads_in_flight": 4, "workers": 16},
        100,
    ),  # 40 * 5 / 2: half way from 2 to 16, as powers of 2, is 1.77
    ({"batch_size": 40}, {"reads_in_flight": 300, "workers": 16}, 21),  # 40 * 0.5 = 20, and no more than that is promised
    ({"batch_size": 80}, {"reads_in_flight": 300, "workers": 80}, 40),  # 80 * 0.5
    ({}, {"reads_in_flight": 2, "storage_speedup": 2}, 28),  # reads of 20
    ({"batch_size": 16}, {"reads_in_flight": 2, "workers": 8, **RAW}, 40),  # half of 16 are read
    ({}, {"reads_in_flight": 2, "workers": 8, "cached_fraction": 0.5}, 21),  # 20 to read
    ({}, {"reads_in_flight": 2, "factor": 4, "insertion_point": "after_batching", "step_speedup": 4}, 10),  # 8 * 5 / 4
    ({}, {"reads_in_flight": 16, "factor": 4, "insertion_point": "after_read"}, 28),
    ({}, {"reads_in_flight": 16, "shared_by": 2}, 24),  # the reader decodes and augments: 8 * (4 + 2) / 2
    ({}, {"reads_in_flight": 2, "shared_by": 2}, 40),
    ({"read_ahead": "reading files into the page cache"}, {"reads_in_flight": 16}, 32),  # and 1 ms from there
    ({"read_ahead": "loading"}, {"reads_in_flight": 16, "step_speedup": 2}, 12),  # the threads decode, too: (8 * 2 + 8) / 2
    ({"read_ahead": "loading"}, {"reads_in_flight": 16, **RAW}, 21),  # half are decoded from a cache: (8 * (2 + 2) + 8) / 2 = 20
    (ahead((2, 5), (16, 0.625), cpu=1.0), {"reads_in_flight": 16}, 32),  # the threads' work takes turns with the worker's
    ({"ahead_contention": 1.5}, {"reads_in_flight": 16}, 42),
    ({"ahead_contention": 1.5, "contention": 2.0}, {"reads_in_flight": 16}, 84),
    ({"ahead_contention": 1.5}, {}, 68),
    ({"takes_ahead": False}, {"reads_in_flight": 16}, 33),  # one after the other, in each worker: (8 * (2 * 0.625 + 6) + 8) / 2
    ({"takes_ahead": False}, {"reads_in_flight": 64}, 33),  # no more than two batches of 8
]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "setting", "milliseconds"), IN_FLIGHT)
def test_reads_in_flight_run_beside_the_rest_and_the_slower_one_counts(changes, setting, milliseconds):
    found = predict(replace(STAGES, **{**LATENCY, **changes}), TrainingSetting(**setting))
    assert found.step_seconds == pytest.approx(milliseconds * MS)


def test_what_limits_reads_in_flight_is_named_and_their_processor_time_counts():
    latency = replace(STAGES, **LATENCY)
    limits = [predict(latency, TrainingSetting(4, reads_in_flight=reads)).limit for reads in (1, 2, 16)]
    assert limits == ["workers", "storage", "step"]
    working = replace(STAGES, **ahead((2, 5), (16, 3), cpu=4), cores=1)
    found = predict(working, TrainingSetting(8, reads_in_flight=16))
    assert (found.step_seconds, found.limit) == (pytest.approx(8 * 4 * MS), "cores")


@pytest.mark.parametrize(
    ("milliseconds", "times"),
    [
        (42, 1.5),  # of a batch, for which 28 ms were expected
        (20, 1.0),
        (1000, 10.0),
    ],
)
def test_what_threads_cost_the_worker_s_own_thread_follows_from_the_loader_alone(milliseconds, times):
    latency = replace(STAGES, **LATENCY, contention=1.3)  # by the training, which does not run here
    assert ahead_contention(latency, 16, milliseconds * MS) == pytest.approx(times)
    slow = replace(STAGES, **ahead((2, 5.0), (16, 4.8)))
    assert ahead_contention(slow, 16, 42 * MS) == 1.0, "38.4 of 42 ms were reading"


def test_reads_in_flight_that_are_not_possible_are_refused():
    reason = "read of Mine is code of the user's"
    with pytest.raises(ValueError, match=f"reads_in_flight=4 is not possible here: {reason}"):
        predict(replace(STAGES, no_reads_ahead=reason), TrainingSetting(reads_in_flight=4))
    for wrong in (0, 2.0, True, 5000):
        with pytest.raises(ValueError, match="reads_in_flight must be a number of reads from 1 to 4,096, got"):
            TrainingSetting(reads_in_flight=wrong)


def of_clock(workers, prefetch_factor, step, series=RARE_MILLISECONDS):
    """Milliseconds from step to step, after a while, by a clock that counts them one by one."""
    taken = ticked(series, workers, prefetch_factor, step, 1000)
    return (taken[-1] - taken[339]) / 660  # twenty times the series


@pytest.mark.parametrize(
    ("setting", "milliseconds", "limit"),
    [
        ({}, of_clock(2, 2, 20), "queue"),
        ({"prefetch_factor": 2}, of_clock(2, 2, 20), "queue"),
        ({"prefetch_factor": 1}, of_clock(2, 1, 20), "queue"),
        ({"prefetch_factor": 8}, 20, "step"),
        ({"workers": 8}, 20, "step"),  # sixteen batches, too
        ({"workers": 1, "prefetch_factor": 4}, of_clock(1, 4, 20), "queue"),
        ({"factor": 2}, of_clock(2, 2, 40) / 2, "step"),  # a fresh batch for two steps; the queue lasts 160 ms
        ({"step_speedup": 2}, of_clock(2, 2, 10), "queue"),
        ({"workers": 0}, 39.1, "workers"),  # everything in turn
        ({"shared_by": 2}, 20, "step"),  # of a reader's queue nothing is known
    ],
)
def test_steps_wait_behind_long_batches_unless_the_queue_lasts_as_long(setting, milliseconds, limit):
    found = predict(replace(STAGES, **uneven()), TrainingSetting(**setting))
    assert found.step_seconds == pytest.approx(milliseconds * MS, rel=0.03)
    assert found.limit == limit
    assert found.idle_fraction == pytest.approx(1 - 20 / setting.get("step_speedup", 1) / milliseconds, abs=0.03)


def test_a_steady_source_is_predicted_as_without_its_single_batches():
    steady = replace(STAGES, batch_seconds=(136 * MS,) * 33)
    for setting in ({}, {"workers": 4}, {"factor": 4}, {"factor": 2, "insertion_point": "after_read"}):
        assert predict(steady, TrainingSetting(**setting)) == predict(STAGES, TrainingSetting(**setting))
    assert predict(steady, TrainingSetting(prefetch_factor=16)).speedup == 1.0


def test_a_queue_fits_if_the_batches_of_all_workers_of_all_ranks_do():
    stages = replace(STAGES, **uneven(free_bytes=10 * 16 * 2**20, free_shared_bytes=2**40))
    assert queue_fits(stages, TrainingSetting(prefetch_factor=8))
    assert not queue_fits(stages, TrainingSetting(prefetch_factor=9))
    assert not queue_fits(stages, TrainingSetting(4, prefetch_factor=8))
    assert not queue_fits(replace(stages, ranks=2), TrainingSetting(prefetch_factor=8))
    assert not queue_fits(replace(stages, free_shared_bytes=2**20), TrainingSetting(prefetch_factor=8))


PINNED = replace(STAGES, copy=Spread.exactly(6 * MS), pinning=Pinning(Spread.exactly(3 * MS), Spread.exactly(2 * MS)), workers=8)


@pytest.mark.parametrize(
    ("changes", "setting", "milliseconds", "limit"),
    [
        ({}, {}, 23, "step"),  # 17 of the host; step, copy and hand-over
        ({}, {"workers": 0}, 161, "workers"),  # 136, and 20 + 2 + 3 in turn
        ({"pinning": Pinning(Spread.exactly(30 * MS), Spread.exactly(0.0))}, {}, 30, "pinning"),
        ({"workers": 4}, {}, 34, "workers"),
        ({}, {"factor": 4, "insertion_point": "after_transfer"}, 20.5, "step"),  # a copy once in four steps
        ({"workers": 0}, {"factor": 4, "insertion_point": "after_transfer"}, 55.25, "workers"),  # 136 / 4 + 20 + (2 + 3) / 4
    ],
)
def test_a_pinned_batch_is_copied_faster_and_a_thread_pins_it_meanwhile(changes, setting, milliseconds, limit):
    found = predict(replace(PINNED, **changes), TrainingSetting(**setting, pin_memory=True))
    assert (found.step_seconds, found.limit) == (pytest.approx(milliseconds * MS), limit)


@pytest.mark.parametrize(
    ("stages", "setting", "message"),
    [
        (STAGES, {"prefetch_factor": 4}, r"prefetch_factor=4 is not possible here: .*were not measured \(that takes 16 of them"),
        (replace(STAGES, workers=0), {"prefetch_factor": 4}, "prefetch_factor=4 is not possible here, since the loader has no w"),
        (STAGES, {"pin_memory": True}, "pin_memory=True is not possible here: copies from pinned memory were not measured"),
        (replace(STAGES, no_pinning="it pins"), {"pin_memory": True}, "pin_memory=True is not possible here: it pins"),
    ],
)
def test_options_of_a_loader_that_are_not_possible_are_refused(stages, setting, message):
    with pytest.raises(ValueError, match=message):
        predict(stages, TrainingSetting(**setting))


def test_what_a_cache_of_loaded_examples_leaves_is_one_less_its_share_of_the_ratio():
    """Two workers read 8 examples of 10 ms in 40 ms, and a step takes 10: R = 4."""
    nothing = dict.fromkeys(("decode", "augment", "collate", "hand_over", "copy"), Spread.exactly(0.0))
    four = replace(STAGES, step=Spread.exactly(10 * MS), **nothing)
    for share, left in ((0.25, 3.0), (0.5, 2.0), (0.625, 1.5), (0.75, 1.0)):
        for hold in ("raw", "loaded"):  # nothing is decoded
            cached = TrainingSetting(cached_fraction=share, hold=hold)
            assert costs_of(four, cached).feeding_factor() == pytest.approx(left)
            assert predict(four, cached).speedup == pytest.approx(1 / (1 - share))
            echoed = replace(cached, factor=left, insertion_point="before_augmentation")
            assert predict(four, echoed).step_seconds == pytest.approx(10 * MS)


@pytest.mark.parametrize(
    ("setting", "milliseconds"),
    [
        (TrainingSetting(**RAW), 50),  # (8 * (0.5 * 1 + 5 + 4 + 2) + 8) / 2
        (TrainingSetting(**LOADED), 44),  # (8 * (0.5 * 2 + 5 + 2 + 2) + 8) / 2
        (TrainingSetting(None, 2, "before_augmentation", **LOADED), 28),  # (8 * ((0.5 * 2 + 5 + 2) / 2 + 2) + 8) / 2
    ],
)
def test_a_hit_takes_time_too(setting, milliseconds):
    hits = {"raw": CachedExample(1000, Spread.exactly(1 * MS)), "loaded": CachedExample(5000, Spread.exactly(2 * MS))}
    assert predict(replace(STAGES, in_cache=hits), setting).step_seconds == pytest.approx(milliseconds * MS)


def test_a_cache_that_is_not_possible_is_refused():
    late = replace(STAGES, points=("after_batching",))
    with pytest.raises(ValueError, match=r"hold='raw' is not possible here: a cache cannot hold .* are possible: none"):
        predict(late, TrainingSetting(cached_fraction=0.5, hold="raw"))
    with pytest.raises(ValueError, match=r"hold='loaded' is not possible here.* are possible: none"):
        predict(replace(STAGES, in_cache={}), TrainingSetting(cached_fraction=0.5, hold="loaded"))


def test_a_setting_says_which_options_it_stands_for():
    assert (TrainingSetting(4).options, TrainingSetting(4).line) == ({}, "")
    assert TrainingSetting(cached_fraction=0.5).options == {}, "the storage's memory is no cache of ours"
    cached = TrainingSetting(cached_fraction=0.5, hold="raw", cache_size="8GiB")
    assert cached.options == {"factor": 1.0, "cache": {"size": "8GiB", "hold": "raw"}}
    assert cached.line == 'EchoCallback(factor=1, cache={"size": "8GiB", "hold": "raw"})'
    reads = TrainingSetting(reads_in_flight=16)
    assert reads.options == {"factor": 1.0, "reads_in_flight": 16}
    assert reads.line == "EchoCallback(factor=1, reads_in_flight=16)"
    loader = TrainingSetting(4, prefetch_factor=8, pin_memory=True, reads_in_flight=16)
    assert loader.options == reads.options, "the others are the loader's"
    assert loader.lines == ["num_workers=4, prefetch_factor=8, pin_memory=True", reads.line]
    assert (TrainingSetting(prefetch_factor=8).lines, TrainingSetting().lines) == (["prefetch_factor=8"], [])
    both = replace(cached, factor=2.12, insertion_point="after_read")
    assert both.options == {"factor": 2.12, "insertion_point": "after_read", "cache": {"size": "8GiB", "hold": "raw"}}
    assert both.line == 'EchoCallback(factor=2.12, insertion_point="after_read", cache={"size": "8GiB", "hold": "raw"})'


def test_what_limits_is_named():
    assert predict(STAGES, TrainingSetting()).limit == "workers"
    assert predict(STAGES, TrainingSetting(factor=8)).limit == "step"
    busy = replace(STAGES, prepare_cpu_share=1.0, read_cpu_share=0.5, cores=2, step_cpu_seconds=4 * MS)
    found = predict(busy, TrainingSetting(workers=8))  # 8 * (5 + 6) + 8 = 96 ms and 4 ms of processor time on two cores
    assert (found.step_seconds, found.limit) == (pytest.approx(50 * MS), "cores")
    echoed = predict(busy, TrainingSetting(workers=8, factor=4, insertion_point="after_read"))  # 8 * (5 / 4 + 6) + 8 = 66 and 4
    assert (echoed.step_seconds, echoed.limit) == (pytest.approx(35 * MS), "cores")


def test_the_range_is_that_of_all_that_was_measured():
    varied = replace(STAGES, read=Spread(10 * MS, 9 * MS, 12 * MS), decode=Spread(4 * MS, 3 * MS, 5 * MS))
    low, high = predict(varied, TrainingSetting()).step_seconds_range
    assert (low, high) == (pytest.approx((8 * (9 + 3 + 2) + 8) / 2 * MS), pytest.approx((8 * (12 + 5 + 2) + 8) / 2 * MS))


def test_beside_the_training_preparation_takes_longer_and_reading_as_far_as_it_needs_a_processor():
    """1.5 times 4, 2 and 8 ms; of the 10 ms to read, a fifth."""
    beside = replace(STAGES, contention=1.5, read_cpu_share=0.2)
    found = predict(beside, TrainingSetting())
    assert found.step_seconds == pytest.approx((8 * (11 + 6 + 3) + 12) / 2 * MS)
    busy = replace(beside, prepare_cpu_share=1.0, cores=2, workers=8)  # 8 * (2 + 4 + 2) + 8 ms of work, whatever else runs
    found = predict(busy, TrainingSetting())
    assert (found.step_seconds, found.limit) == (pytest.approx(36 * MS), "cores")


@pytest.mark.parametrize(
    ("sharing", "workers", "milliseconds", "limit"),
    [
        ({"read_sharing": 1.0}, 4, 54, "workers"),  # twice as many workers read half as fast: (8 * (20 + 4 + 2) + 8) / 4
        ({"read_sharing": 1.0}, 16, 43.5, "storage"),  # (8 * (80 + 6) + 8) / 16, and with twice as many 41.75
        ({"read_sharing": 0.5}, 8, 27, "workers"),  # four times as many, each half as fast: (8 * (20 + 4 + 2) + 8) / 8
        ({"read_sharing": 1.0, "prepare_sharing": 1.0}, 4, 68, "cores"),
        ({"prepare_sharing": 1.0}, 1, 108, "workers"),  # a half of what they take beside another: 8 * (10 + 2 + 1) + 4
    ],
)
def test_workers_may_share_what_there_is(sharing, workers, milliseconds, limit):
    found = predict(replace(STAGES, cores=64, **sharing), TrainingSetting(workers=workers))
    assert (found.step_seconds, found.limit) == (pytest.approx(milliseconds * MS), limit)


@pytest.mark.parametrize(
    ("workers", "milliseconds", "expected"),
    [
        (2, 42, 1.5),  # (8 * (4 + 2) + 8) / 2 = 28 ms alone
        (2, 24.1, 1.0),  # 20 + 1 + 1 with everything ready: nothing is waited for
        (2, 26.6, 0.95),
        (2, 24.5, 1.0),  # 0.875: it does not get faster, so that something else was slow
        (0, 105, 1.5),  # 56 ms alone, and 21 of the step
        (2, 100, 1.0),  # no processor is that short: it has another reason
    ],
)
def test_contention_is_what_a_training_takes_longer_whose_data_lies_in_memory(workers, milliseconds, expected):
    assert contention(replace(STAGES, workers=workers), milliseconds * MS) == pytest.approx(expected)
    long = replace(STAGES, **uneven(workers=2))
    long = replace(long, decode=long.read, read=Spread.exactly(0.0))
    assert contention(long, of_clock(2, 2, 20) * MS) == 1.0, "what is waited for are the long batches"
    nothing = dict.fromkeys(("decode", "augment", "collate"), Spread.exactly(0.0))
    assert contention(replace(STAGES, **nothing), milliseconds * MS) == 1.0


def test_without_echoing_the_point_makes_no_difference():
    only_batches = replace(STAGES, points=("after_batching",))
    assert predict(only_batches, TrainingSetting(insertion_point="after_read")).step_seconds == pytest.approx(68 * MS)
    with pytest.raises(ValueError, match="insertion_point='after_read' is not possible here; these are: after_batching"):
        predict(only_batches, TrainingSetting(factor=2, insertion_point="after_read"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": -1}, "workers must be a number >= 0, got -1"),
        ({"factor": 0.5}, "factor must be a number >= 1, got 0.5"),
        ({"insertion_point": "nowhere"}, "insertion_point must be one of 'after_read', .*'after_transfer', got 'nowhere'"),
        ({"cached_fraction": 1.5}, "cached_fraction must be a share in"),
        ({"cached_fraction": "half"}, "cached_fraction must be a number >= 0, got 'half'"),
        ({"cached_fraction": 0.5, "hold": "cooked"}, "hold must be 'raw' or 'loaded' or None, got 'cooked'"),
        ({"hold": "raw"}, "hold='raw' needs a share that is held: give cached_fraction, too"),
        (
            {"cached_fraction": 0.5, "hold": "loaded", "factor": 2, "insertion_point": "after_read"},
            "hold='loaded' does not fit insertion_point='after_read', .* use hold='raw', or a later insertion point",
        ),
        ({"shared_by": 0}, "shared_by must be a number of trainings, 1 or more, got 0"),
        ({"shared_by": 2, **RAW}, "shared_by=2 and hold='raw' are impossible together"),
        (
            {"shared_by": 2, "factor": 2, "insertion_point": "after_read"},
            "shared_by=2 does not fit insertion_point='after_read'.*use one of 'after_augmentation', 'after_batching'",
        ),
        ({"storage_speedup": 0}, "storage_speedup must be > 0, got 0; 2 is twice as fast"),
        *(
            ({"prefetch_factor": wrong}, f"prefetch_factor must be a number of batches for each worker, 1 or .*, got {wrong}")
            for wrong in (0, 2.0, True)
        ),
        ({"prefetch_factor": 4, "workers": 0}, "prefetch_factor=4 needs workers that prefetch: give workers=1 or more, or None"),
        ({"pin_memory": 1}, "pin_memory must be True or False, got 1"),
    ],
)
def test_an_impossible_setting_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TrainingSetting(**options)


@pytest.mark.parametrize(
    ("setting", "milliseconds", "limit"),
    [
        ({}, 64, "workers"),  # 8 * (10 + 4 + 2) / 2; collation beside it
        ({"workers": 8}, 21, "step"),  # 16 of the reader; step and copy, and no hand-over
        ({"step_speedup": 10, "workers": 64}, 8, "cores"),  # one thread collates, however many workers the reader has
        ({"factor": 8, "step_speedup": 10, "insertion_point": "after_batching"}, 8, "workers"),  # 128 / 8 / 2; collation 1
        ({"factor": 4, "insertion_point": "after_transfer"}, 20.25, "step"),  # a copy once in four steps
    ],
)
def test_trainings_that_share_wait_for_one_reader_and_not_for_as_many_as_they_are(setting, milliseconds, limit):
    found = predict(STAGES, TrainingSetting(shared_by=100, **setting))
    assert found.step_seconds == pytest.approx(milliseconds * MS)
    assert found.speedup == pytest.approx(68 / milliseconds)  # 1: each is as fast as one alone
    assert found.limit == limit


@pytest.mark.parametrize(("trainings", "milliseconds"), [(1, 50), (8, 92)])
def test_the_processors_prepare_once_and_collate_and_step_for_each_training(trainings, milliseconds):
    # 8 * (10 / 2 + 4 + 2) = 88 ms for all, 8 of collation and 4 of the step for each, on two cores
    busy = replace(STAGES, prepare_cpu_share=1.0, read_cpu_share=0.5, cores=2, step_cpu_seconds=4 * MS)
    found = predict(busy, TrainingSetting(workers=8, shared_by=trainings))
    assert (found.step_seconds, found.limit) == (pytest.approx(milliseconds * MS), "cores")


def test_a_spread_is_that_of_blocks_of_whole_periods():
    """Twenty measurements, ten blocks of two: their means are 0.5, 2.5, ... 18.5."""
    assert Spread.of(list(range(20))) == Spread(9.5, 2.5, 16.5)
    assert Spread.of([4.0, 1.0, 3.0]) == Spread(3.0, 1.0, 4.0)
    bursts = [3.0, 1.0] * 15  # of two workers that deliver together
    assert Spread.of(bursts, period=2) == Spread.exactly(2.0)
    assert Spread.of([9.0, *bursts], period=2) == Spread.exactly(2.0), "a rest at the beginning does not count"
    assert Spread.of([5.0], period=2) == Spread.exactly(5.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Spread.of([]), "at least one measurement, got none"),
        (lambda: Spread(-1.0, 0.0, 0.0), "median must be a number >= 0, got -1.0"),
        (lambda: Spread(0.0, math.nan, 0.0), "low must be a number >= 0, got nan"),
        (lambda: CachedExample(0, Spread.exactly(0.0)), "bytes must be a number >= 1, got 0"),
        (lambda: replace(STAGES, batch_size=0), "batch_size must be a number >= 1, got 0"),
        (lambda: replace(STAGES, contention=math.nan), "contention must be a number >= 0, got nan"),
        (lambda: replace(STAGES, step=Spread.exactly(0.0)), "step must take time"),
        (lambda: replace(STAGES, prefetch_factor=0), "prefetch_factor must be a number >= 1, got 0"),
        (lambda: replace(STAGES, batch_seconds=(0.1, -0.1)), "batch_seconds must be a number >= 0, got -0.1"),
        (lambda: replace(STAGES, batch_bytes=-1), "batch_bytes must be a number >= 0, got -1"),
        (lambda: replace(STAGES, points=("after_batching", "nowhere")), "points must be insertion points, got 'nowhere'"),
    ],
)
def test_impossible_measurements_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_forms_of_a_cache_are_those_measured_else_those_of_the_points():
    assert possible_holds(STAGES) == ("raw", "loaded")
    assert possible_holds(replace(STAGES, points=("after_read", "after_augmentation"))) == ("raw",)
    assert possible_holds(replace(STAGES, points=("after_augmentation",))) == ()
    assert possible_holds(replace(CACHED, points=("after_batching",))) == ("raw", "loaded"), "its batches are its own"
    assert possible_holds(replace(CACHED, in_cache={})) == ()
    assert [fits_point("loaded", point) for point in CACHED.points] == [False, True, True, True, True]
    assert all(fits_point("raw", point) for point in CACHED.points)


@pytest.mark.parametrize(
    ("free", "raw", "loaded"),  # 1.05 and 6.3 GB for all
    [(10**9, 0.71, 0.11), (1.4 * 10**9, 1.0, 0.16), (10**7, 0.0, 0.0)],
)
def test_what_fits_is_said_in_whole_percent(free, raw, loaded):
    stages = replace(CACHED, free_bytes=free)
    assert (fitting_fraction(stages, "raw"), fitting_fraction(stages, "loaded")) == (raw, loaded)


@pytest.mark.parametrize(
    ("hold", "fraction", "size", "least"),
    [
        ("raw", 0.5, "501MiB", 0.525e9),
        ("raw", 0.0001, "1MiB", 105_000),
        ("loaded", 1.0, "5.9GiB", 6.3e9),
    ],
)
def test_a_size_is_one_that_a_cache_accepts_and_no_smaller_than_what_is_held(hold, fraction, size, least):
    assert size_for(CACHED, hold, fraction) == size
    assert 0 <= CacheConfig(size).bytes_of() - least < 0.1 * 2**30
    assert size_for(replace(CACHED, examples=None), hold, fraction) is None
