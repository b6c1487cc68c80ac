"""Verdicts: each is the cheapest setting by the figures worked out beside it. A step takes 20 ms, so that 21.05 ms are fed."""

from dataclasses import replace

import pytest
from measured_stages import CACHED, LATENCY, MS, ahead, uneven

from lightning_echo.analysis.measured import Pinning, Spread
from lightning_echo.analysis.predict import TrainingSetting, costs_of, predict
from lightning_echo.analysis.verdict import VerdictKind, judge
from lightning_echo.measure.advice import advise
from lightning_echo.measure.control import Observation
from lightning_echo.measure.target_idle import LARGE_FACTOR, recommend

NONE = Spread.exactly(0.0)
STARVED = replace(CACHED, hand_over=NONE, copy=NONE, cores=2)  # 136 ms of worker time per batch, 68 ms with two of them
PLENTY, LITTLE = 100 * 10**9, 424 * 10**6
ONLY_LOADED = {"loaded": CACHED.in_cache["loaded"]}
RAW, LOADED = {"hold": "raw"}, {"hold": "loaded"}


def reading(milliseconds):
    """From the storage and from memory."""
    return dict.fromkeys(("read", "read_cached"), Spread.exactly(milliseconds * MS))


CASES = {
    "no waiting": ({}, 21, "not_starved", 1, {}, "Do nothing: the accelerator is busy 95% of the time."),
    # 136 / 7 = 19.4 ms, 136 / 6 = 22.7 ms
    "no more workers than needed": (
        *({"cores": 16}, 68, "more_workers", 1, {"workers": 7}),
        "Set num_workers to 7: the accelerator is busy only 29% of the time, and would be 100%.",
    ),
    # 136 / 8 = 17
    "workers where there are none": (
        *({"cores": 16, "workers": 0}, 157, "more_workers", 1, {"workers": 7}),
        "Set num_workers to 7 or more first, since with 0 loading and training take turns: ",
    ),
    # With four workers 0.8 of the raw items leave (136 - 80 * 0.8) / 4 = 18 ms; 80 kB an example. 0.7 leave 20 ms, which is
    # enough, but not for a host that takes 1.07 times as long. 0.6 of the loaded examples would do, but take 360 kB an example.
    "a cache with the workers that help": (
        *({"cores": 4, "free_bytes": PLENTY}, 68, "cache", 1),
        {"workers": 4, "cached_fraction": 0.8, "cache_size": "802MiB", **RAW},  # 840e6 / 2**20 = 801.1
        "Set num_workers to 4 and keep 80% of the data set in a cache with hold='raw' and size='802MiB': the accelerator is "
        "busy only 29% of the time, and would be 100%.",
    ),
    # (136 - 112 x) / 2 with two workers: 0.9 of the loaded examples leave 17.6 ms, 0.8 leave 23.2. All raw items leave 28.
    "a cache alone": (
        *({"free_bytes": PLENTY}, 68, "cache", 1),
        {"cached_fraction": 0.9, "cache_size": "5.3GiB", **LOADED},  # 5.67e9 / 2**30 = 5.28
        "Keep 90% of the data set in a cache with hold='loaded' and size='5.3GiB': ",
    ),
    # Three fourths of 424 MB hold 0.30 of the raw items and 0.05 of the loaded examples. With four workers: the raw items leave
    # (136 - 24) / 4 = 28 ms, the loaded examples (136 - 5.6) / 4 = 32.6. Then 56 ms are reused after reading, and 56 redone:
    # 56 / (4 * 20 / 0.95 - 56) = 1.985. At 2.13, (56 / 2.13 + 56) / 4 = 20.57 ms.
    "what memory does not hold is echoed": (
        *({"cores": 4, "free_bytes": LITTLE}, 68, "cache_and_echo", 1.985 * 1.07),
        {"workers": 4, "insertion_point": "after_read", "cached_fraction": 0.3, "cache_size": "301MiB", **RAW},  # 315e6 / 2**20
        "Set num_workers to 4, keep 30% of the data set in a cache with hold='raw' and size='301MiB' and echo for what is left "
        "at insertion_point='after_read' with factor 2.13: the accelerator is busy only 29% of the time, and would be 97%; "
        "each step then has 47% as many fresh examples. Memory does not hold more.",
    ),
    # With two workers 24 ms of augmentation and collation are left of 80: 80 / (2 * 20 / 0.95) = 1.9 at after_batching.
    "a cache that holds all and is not enough": (
        {"augment": Spread.exactly(9 * MS), "free_bytes": PLENTY, "points": ("before_augmentation", "after_batching")},
        *(96, "cache_and_echo", 1.9 * 1.07),
        {"insertion_point": "after_batching", "cached_fraction": 1.0, "cache_size": "5.9GiB", **LOADED},  # 6.3e9 / 2**30 = 5.87
        "The rest takes too long even then.",
    ),
    # 0.05 of the loaded examples save 5.6 of 136 ms; 112 / (42.1 - 24) * 1.07.
    "a cache that hardly helps": (
        *({"free_bytes": LITTLE, "points": STARVED.points[1:], "in_cache": ONLY_LOADED}, 68, "echo", 6.62),
        *({"insertion_point": "before_augmentation"}, "Neither more workers nor a cache are enough."),
    ),
    # 128 of 136 ms are reused after the augmentation: 128 / (4 * 20 / 0.95 - 8) = 1.68. A cache can hold nothing.
    "not to be cut": (
        {"cores": 4, "points": STARVED.points[2:], "in_cache": {}, "free_bytes": PLENTY},
        *(68, "echo", 1.68 * 1.07, {"workers": 4, "insertion_point": "after_augmentation"}),
        "56% as many fresh examples. More workers are not enough. The data set cannot be cut before its augmentation, so that a "
        "cache can hold its examples only whole (hold='whole'), if it returns the same each time.",
    ),
    # (8 * (1 + 2) + 8) / 2 = 16 ms are left. Four reads under way take 8 * 2.5 = 20 ms, too much for a margin; eight take 10.
    "reads in flight alone": (
        *({**LATENCY, "decode": Spread.exactly(1 * MS), "free_bytes": PLENTY}, 56, "reads_in_flight", 1, {"reads_in_flight": 8}),
        "Set reads_in_flight to 8: the accelerator is busy only 36% of the time, and would be 100%. Reading is latency, not "
        "bandwidth: an example takes 5 ms with 2 reads under way, and 1.25 ms with 8.",
    ),
    # (8 * (10 + 1 + 2) + 8) / 4 = 28 ms with four workers.
    "reads in flight with the workers that help": (
        {**LATENCY, "decode": Spread.exactly(1 * MS), "cores": 4, "free_bytes": PLENTY},
        *(56, "reads_in_flight", 1, {"workers": 4, "reads_in_flight": 8}, "Set num_workers to 4 and set reads_in_flight to 8: "),
    ),
    # 28 ms are left, as with any number from four on. 0.6 of the loaded examples leave (8 * (4 * 0.4 + 2) + 8) / 2 = 18.4.
    "reads in flight before a cache": (
        *({**LATENCY, "free_bytes": PLENTY}, 68, "cache", 1),
        {"reads_in_flight": 4, "cached_fraction": 0.6, "cache_size": "3.6GiB", **LOADED},  # 3.78e9 / 2**30 = 3.52
        "Set reads_in_flight to 4 and keep 60% of the data set in a cache with hold='loaded' and size='3.6GiB': ",
    ),
    # (32 / e + 24) / 2 before the augmentation: 32 / (2 * 20 / 0.95 - 24) = 1.767.
    "reads in flight before echoing": (
        *(LATENCY, 68, "echo", 1.767 * 1.07, {"reads_in_flight": 4, "insertion_point": "before_augmentation"}),
        "Set reads_in_flight to 4 and echo at insertion_point='before_augmentation' with factor 1.9: ",
    ),
    # 40 ms of reading, as with two reads under way; half of it is saved by 0.5 of the data set. 0.6 leave 16 ms to read.
    "bandwidth, that threads only put beside the rest": (
        {**ahead((2, 5), (8, 4.9), (16, 4.9)), "decode": Spread.exactly(1 * MS), "free_bytes": PLENTY},
        *(56, "cache", 1, {"reads_in_flight": 2, "cached_fraction": 0.6, "cache_size": "601MiB", **RAW}),  # 630e6 / 2**20
        "Threads then read while the workers do the rest. More hardly help: the storage's bandwidth is the limit.",
    ),
    # (8 * 10 + 2) / 2 = 41 ms, and hardly less with threads: 0.6 of the raw items leave 17, 0.5 leave 21.
    "bandwidth": (
        {**ahead((2, 5), (8, 4.9)), "decode": NONE, "augment": NONE, "collate": Spread.exactly(2 * MS), "free_bytes": PLENTY},
        *(41, "cache", 1, {"cached_fraction": 0.6, "cache_size": "601MiB", **RAW}),
        "Reads in flight bring too little: the storage's bandwidth is the limit, not its latency.",
    ),
    # 19.1 ms on average for two workers: it is the long batches that are waited for. Eight steps last as long as one of them.
    "prefetching alone": (
        *(uneven(cores=16, free_bytes=PLENTY), 26, "prefetching", 1, {"prefetch_factor": 4}),
        "Set prefetch_factor to 4: the accelerator is busy only 77% of the time, and would be 100%. A batch takes a worker 10 ms "
        "as a rule and up to 160 ms: a longer queue evens that out.",
    ),
    # 168 ms are 8 more than eight steps, half a ms for each step; but 1.07 times as many would be 20 more.
    "prefetching with a margin": (
        *(uneven(1.05, cores=16, free_bytes=PLENTY), 26, "prefetching", 1, {"prefetch_factor": 8}),
        "Set prefetch_factor to 8: ",
    ),
    # 57.3 ms on average, 19.1 with three. By a clock that counts milliseconds, 8 each leave 30.6 ms, and 16 leave 20.
    "prefetching with the workers that help": (
        *(uneven(3, cores=16, free_bytes=PLENTY), 40, "prefetching", 1, {"workers": 3, "prefetch_factor": 16}),
        "Set num_workers to 3 and set prefetch_factor to 16: ",
    ),
    # Four workers have eight batches, too.
    "more workers where there is no memory for a longer queue": (
        *(uneven(cores=16, free_bytes=PLENTY, batch_bytes=None), 26, "more_workers", 1, {"workers": 4}),
        "Set num_workers to 4: ",
    ),
    # 20 + 6 ms; the copy takes 1 from pinned memory.
    "pinning alone": (
        {"copy": Spread.exactly(6 * MS), "workers": 8, "pinning": Pinning(Spread.exactly(3 * MS), Spread.exactly(1 * MS))},
        *(26, "pinning", 1, {"pin_memory": True}),
        "Set pin_memory to True: the accelerator is busy only 77% of the time, and would be 95%.",
    ),
    # With seven workers 20 + 6 ms, and 19.4 of the host. Five would do for 26 ms, but not for the 21 with a pinned batch.
    "pinning beside more workers": (
        {"copy": Spread.exactly(6 * MS), "cores": 16, "pinning": Pinning(Spread.exactly(3 * MS), Spread.exactly(1 * MS))},
        *(68, "pinning", 1, {"workers": 7, "pin_memory": True}, "Set num_workers to 7 and set pin_memory to True: "),
    ),
    "pinning that hardly helps": (
        {"copy": Spread.exactly(2 * MS), "workers": 8, "pinning": Pinning(Spread.exactly(1 * MS), Spread.exactly(1 * MS))},
        *(22, "not_starved", 1, {}, "Do nothing: the accelerator is busy 91% of the time, and the rest is spent on taking"),
    ),
    "reads that no thread may do": (
        {"no_reads_ahead": "read of Mine is code of the user's: set reads_concurrently = True", "free_bytes": PLENTY},
        *(68, "cache", 1, {"cached_fraction": 0.9, "cache_size": "5.3GiB", **LOADED}),
        "Reads mostly wait, and reads_in_flight could overlap them, but threads may not read ahead: read of Mine is code of the "
        "user's: set reads_concurrently = True.",
    ),
    "sizes that were not measured": (
        *({"cores": 4, "in_cache": None, "examples": None, "free_bytes": None}, 68, "cache", 1),
        {"workers": 4, "cached_fraction": 0.6, **LOADED},
        "The size of that cache is not known from this analysis: analyze again.",
    ),
    # Per batch 256 ms reused and 24 redone before the augmentation: 15.1; 272 and 8 after it: 8.53; 280 and 0: 7.12.
    "the earliest point whose factor is not large": (
        *({"read": Spread.exactly(28 * MS)}, 140, "echo", 280 / (2 * 20 / 0.95) * 1.07, {"insertion_point": "after_batching"}),
        "Echo at insertion_point='after_batching' with factor 7.12: the accelerator is busy only 14% of the time, and would "
        "be 100%; each step then has 14% as many fresh examples. Neither more workers nor a cache are enough.",
    ),
    "echoing beside more workers": (
        *({"workers": 0}, 100, "echo", 6.62, {"workers": 2, "insertion_point": "before_augmentation"}),
        "Set num_workers to 2 and echo at insertion_point=",
    ),
    # 136 ms on two cores; 68 ms with two workers, no less with more of them.
    "cores are the limit": (
        {"read_cpu_share": 1.0, "prepare_cpu_share": 1.0, "step_cpu_seconds": 20 * MS},
        *(78, "echo", 136 / (2 * 20 / 0.95 - 20) * 1.07, {"insertion_point": "after_batching"}),
        "The 2 cores are the limit, so that neither more workers nor a cache are enough",
    ),
    "nothing is enough": (
        {"collate": Spread.exactly(100 * MS), "points": ("before_augmentation", "after_augmentation")},
        *(100, "not_enough", 1, {}),
        "Nothing that was tried is enough: the accelerator is busy only 20% of the time. What helps is a faster source.",
    ),
    # 136 / 4 = 34 ms with four workers: a step works for 20 of them. Nothing can be echoed or held.
    "what helps is advised, although it is not enough": (
        {"cores": 4, "points": (), "in_cache": {}},
        *(68, "not_enough", 1, {"workers": 4}),
        "Set num_workers to 4: the accelerator is busy only 29% of the time, and would be 59%. Nothing that was tried is enough: "
        "a faster source would help more.",
    ),
    # 4 ms of 25 are the copy: no loader helps.
    "only copying takes time": (
        {"copy": Spread.exactly(4 * MS), "hand_over": Spread.exactly(1 * MS), "workers": 8},
        *(25, "not_starved", 1, {}),
        "Do nothing: the accelerator is busy 80% of the time, and the rest is spent on taking",
    ),
    # With eight workers the host needs 17 ms, a step 20.
    "not explained": ({"workers": 8}, 40, "not_enough", 1, {}, "the stages by themselves explain 20 of 40 ms"),
    "workers fail": (
        *({"workers": 0, "cores": 16, "can_have_workers": False}, 157, "not_enough", 1, {}),
        "Make the data set work in worker processes first (the notes say how it fails), then analyze again: the accelerator is "
        "busy only 13% of the time",
    ),
}


@pytest.mark.parametrize(("changes", "milliseconds", "kind", "factor", "setting", "message"), CASES.values(), ids=CASES)
def test_the_verdict_is_the_cheapest_setting_that_feeds(changes, milliseconds, kind, factor, setting, message):
    stages = replace(STARVED, **changes)
    verdict = judge(stages, milliseconds * MS, {})
    assert verdict.kind is VerdictKind(kind)
    assert verdict.setting.factor == pytest.approx(factor, abs=0.02 if factor > 1 else 0)
    assert replace(verdict.setting, factor=1.0) == TrainingSetting(**setting)
    assert message in verdict.message
    if kind not in ("not_enough", "not_starved"):
        assert predict(stages, verdict.setting).idle_fraction <= (0.2 if "copy" in changes else 0.05)


@pytest.mark.parametrize("point", ["before_augmentation", "after_batching"])
def test_the_advice_at_the_end_of_a_training_is_the_same(point):
    """EchoCallback has measured the same pipeline at factor 1; its source is fast enough for factors up to 4."""
    stages = replace(STARVED, points=(point,), **reading(4))
    costs = costs_of(stages, TrainingSetting(insertion_point=point))
    waited = Observation(0, 1.0, 100, idle_fraction=1 - 20 / 44, step_seconds=44 * MS, costs=costs)  # (8 * 10 + 8) / 2
    told, verdict = recommend(waited), judge(stages, 44 * MS, {})
    assert 1 < told.factor == verdict.setting.factor < 4
    for message in (verdict.message, advise(waited, told).message):
        assert "the accelerator is busy only 45% of the time" in message


def test_of_a_steady_source_prefetching_is_not_advised_and_changes_no_advice():
    for changes in ({}, {"cores": 16}, {"free_bytes": PLENTY}, LATENCY):
        stages = replace(STARVED, **changes)
        steady = replace(stages, batch_seconds=(136 * MS,) * 50, batch_bytes=2**20)
        assert judge(steady, 68 * MS, {}) == judge(stages, 68 * MS, {})


def test_prefetching_that_is_not_enough_is_advised_as_far_as_it_helps_and_memory_allows():
    """In `/dev/shm` there is room for four batches of two workers: two each. Then a cache holds what is read."""
    verdict = judge(
        replace(STARVED, **uneven(prefetch_factor=1, free_bytes=PLENTY, free_shared_bytes=2 * 4 * 2**20)), 28 * MS, {}
    )
    prefetching, cache = verdict.remedies
    assert (prefetching.name, prefetching.setting) == ("prefetching", TrainingSetting(prefetch_factor=2))
    assert (prefetching.is_enough, cache.name, cache.is_enough) == (False, "cache", True)
    assert verdict.message.startswith("Set prefetch_factor to 2 and keep ")


def test_a_large_factor_is_advised_with_a_warning():
    verdict = judge(replace(STARVED, **reading(60)), 200 * MS, {})
    assert verdict.setting.factor > LARGE_FACTOR
    assert "so large a factor seldom pays in learning" in verdict.message


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
