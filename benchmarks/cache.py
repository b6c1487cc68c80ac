"""What a cache costs and brings: hits, filling, speed-up behind a slow source, its index, and other caches beside it.

Of a source R times slower than the step, a cache that holds a share x leaves ``1 - x`` of the reading. No loader can be faster
than the bound ``max(h, d) / max(h (1 - x) / e, d)``: h is the time per batch of the bare loader alone, d what the step really
takes, and e the echo factor. Where ``h (1 - x) / e`` is about d, source and step are exactly balanced, and any jitter costs.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from report import Table, progress, verdict
from side_by_side import side_by_side
from timing import alternate, seconds_per_batch
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms import v2
from workloads import BATCH_SIZE, WORKERS, Sleeping, loader, real_sleep, sleep_for

from lightning_echo import CacheConfig, EchoLoader, StagedDataset
from lightning_echo.cache.arena import Arena
from lightning_echo.cache.reads import ExampleStore

_STEPS = {0.004: 5, 0.016: 3}  # seconds of a step -> rounds
_RATIO = 4
_LENGTH = 44 * BATCH_SIZE  # a quarter of which takes more than the MiB that a cache has at least
_PASS, _TIMED_PASSES = _LENGTH // BATCH_SIZE, 5  # batches
_SHARES, _FACTORS = (0.25, 0.5, 0.75, 1.0), (1, 2)
_REQUIRED, _REQUIRED_BALANCED = 0.95, 0.88
_HIT_KIB, _HIT_MICROSECONDS = 150, 25
_ABOVE_LIST_MICROSECONDS = {10: 10, 150: 30}  # per KiB of an example
_FILLING, _FILE_BYTES = 0.05, 110_000
_FROM_PASS = 2  # the third: in the second, a worker sees the memory that others have filled for the first time


def cache(quick: bool) -> list[Table]:
    """All tables about the cache."""
    return [_speed(quick), _costs(quick), _index(quick), side_by_side(quick)]


# ---------------------------------------------------------------------- behind a slow source


def _speed(quick: bool) -> Table:
    rows = [row for seconds, rounds in _STEPS.items() for row in _speed_rows(seconds, 1 if quick else rounds)]
    text = (
        f"batch {BATCH_SIZE}, {WORKERS} workers, {_LENGTH} examples, shuffled, R about {_RATIO}, from the second pass on; "
        "reached = speed-up over the bare loader / bound, median of the rounds; as fast: the bare loader over a source of which "
        "only a share (1 - held) / e takes time, drawn by chance, divided by ours"
    )
    columns = (
        *("step ms", "held", "e", "plain ms", "cached ms", "speed-up", "bound", "reached", "lowest", "highest"),
        *("required", "passed", "bare with as little to read ms", "as fast"),
    )
    return Table("cache", text, columns, rows)


def _speed_rows(seconds: float, rounds: int) -> list[tuple[Any, ...]]:
    progress(f"cache behind a slow source, R about {_RATIO}, step {1e3 * seconds:g} ms")
    step_seconds = real_sleep(seconds)
    dataset = Sleeping(sleep_for(_RATIO * step_seconds * WORKERS / BATCH_SIZE), _LENGTH)
    endless = loader(Sleeping(dataset.seconds))
    step = partial(time.sleep, seconds)
    base, plain = partial(seconds_per_batch, endless, 60), partial(seconds_per_batch, endless, 60, step)
    runs: dict[str, Callable[[], float]] = {"base": base, "plain": plain}
    cases = [(share, factor) for share in _SHARES for factor in _FACTORS]
    each = _bytes_held(dataset) / _LENGTH
    for share, factor in cases:
        runs[str((share, factor))] = partial(_cached_seconds, dataset, share, factor, int(each * share * _LENGTH), step)
        little = PartlySleeping(dataset.seconds, (1 - share) / factor)
        runs[_little(share, factor)] = partial(seconds_per_batch, loader(little), 3 * _PASS, step)
    times = alternate(runs, rounds)
    return [_speed_row(share, factor, step_seconds, times) for share, factor in cases]


def _speed_row(share: float, factor: float, step: float, times: dict[str, list[float]]) -> tuple[Any, ...]:
    cached, little = times[str((share, factor))], times[_little(share, factor)]
    bounds = [bound(base, step, share, factor) for base in times["base"]]
    speedups = [plain / mine for plain, mine in zip(times["plain"], cached, strict=True)]
    reached = [speedup / most for speedup, most in zip(speedups, bounds, strict=True)]
    required = _REQUIRED_BALANCED if _RATIO * (1 - share) == factor else _REQUIRED
    return (
        *(step * 1e3, share, factor, statistics.median(times["plain"]) * 1e3, statistics.median(cached) * 1e3),
        *(statistics.median(speedups), statistics.median(bounds)),
        *(statistics.median(reached), min(reached), max(reached)),
        *(required, verdict(statistics.median(reached) >= required)),
        *(statistics.median(little) * 1e3, statistics.median(other / mine for other, mine in zip(little, cached, strict=True))),
    )


def _little(share: float, factor: float) -> str:
    return f"little to read: {share}, {factor}"


class PartlySleeping(Sleeping):
    """Reading takes a while for some of the examples alone, and no time for the others.

    Args:
        seconds: The while.
        share: Share of the examples that it takes, chosen by chance.
    """

    def __init__(self, seconds: float, share: float) -> None:
        super().__init__(seconds)
        self._takes_time = np.random.default_rng(0).random(self.length) < share

    def read(self, index: Any) -> Any:
        return super().read(index) if self._takes_time[index] else index


def bound(base: float, step: float, share: float, factor: float) -> float:
    """The largest speed-up that is possible.

    Args:
        base: Seconds per batch of the bare loader alone.
        step: Seconds of a step.
        share: Share of the examples that is held.
        factor: Echo factor.

    Example:
        >>> [bound(16, 4, share, factor) for share, factor in ((0.5, 1), (0.75, 1), (1, 1), (0.25, 2))]
        [2.0, 4.0, 4.0, 2.6666666666666665]
    """
    return max(base, step) / max(base * (1 - share) / factor, step)


def _cached_seconds(dataset: Sleeping, share: float, factor: float, size: int, step: Callable[[], None]) -> float:
    """Seconds per batch with a cache, from the second pass on, a step after each batch."""
    cached = _echoed(dataset, CacheConfig(size, hold="loaded"), factor)
    taken = _endless(cached)
    for _ in range(int(_PASS * factor) + _PASS // 4):  # a pass, and a little more
        next(taken)
        step()
    started = time.perf_counter()
    for _ in range(_TIMED_PASSES * _PASS):
        next(taken)
        step()
    seconds = (time.perf_counter() - started) / (_TIMED_PASSES * _PASS)
    held = cached.cache_counts.examples
    cached.close()
    if abs(held - share * len(dataset)) > 1:
        raise RuntimeError(f"{held} of {len(dataset)} examples were held, and not {share:.0%}")
    return seconds


def _endless(batches: Any) -> Any:
    while True:
        yield from batches


def _echoed(dataset: Any, config: CacheConfig | None, factor: float = 1.0, **options: Any) -> EchoLoader:
    options = {"num_workers": WORKERS, "multiprocessing_context": "fork", **options}
    plain = DataLoader(dataset, BATCH_SIZE, shuffle=True, **options)
    return EchoLoader(plain, factor, insertion_point="before_augmentation", seed=0, cache=config)


def _bytes_held(dataset: Sleeping) -> int:
    """Bytes that a cache takes for the whole data set."""
    quick = Sleeping(0, len(dataset))
    cached = _echoed(quick, CacheConfig("256MiB", hold="loaded"), num_workers=0, multiprocessing_context=None)
    for _ in cached:
        pass
    assert cached.cache_counts.examples == len(dataset)
    return cached.cache_counts.bytes


# ---------------------------------------------------------------------- what it costs


def _costs(quick: bool) -> Table:
    rounds = 3 if quick else 11
    rows = [_row(f"a hit of {_HIT_KIB} KiB with its copy, us", _hits(rounds), _HIT_MICROSECONDS)]
    for kib, most in _ABOVE_LIST_MICROSECONDS.items():
        progress(f"processor time of a worker, {kib} KiB")
        found = alternate({"list": partial(_worker_us, kib, False), "cache": partial(_worker_us, kib, True)}, rounds)
        rows.append(_row(f"worker with a list, {kib} KiB, us per example", found["list"]))
        rows.append(_row(f"worker with a cache, {kib} KiB, us per example", found["cache"]))
        above = [mine - other for mine, other in zip(found["cache"], found["list"], strict=True)]
        rows.append(_row(f"what is more, {kib} KiB, us per example", above, most))
    rows += _filling(quick, rounds)
    text = (
        f"processor time, where nothing else is said; batch {BATCH_SIZE}, one worker and its collate, all examples held; "
        f"filling: a first pass over JPEG files of {_FILE_BYTES // 1000} KB with {WORKERS} workers, divided by the same without "
        f"a cache, less 1; median of {rounds} rounds in turn"
    )
    return Table("cache_costs", text, ("what", "median", "lowest", "highest", "required", "passed"), rows)


def _row(what: str, found: Sequence[float], most: float | None = None) -> tuple[Any, ...]:
    middle = statistics.median(found)
    end = ("-", "-") if most is None else (most, verdict(middle <= most))
    return (what, middle, min(found), max(found), *end)


def _hits(rounds: int) -> list[float]:
    """Microseconds of a hit, each of another example: 150 MB in all, which no processor's cache holds."""
    progress(f"a hit of {_HIT_KIB} KiB")
    count = 1000
    store = ExampleStore(Arena.create(count, (_HIT_KIB + 1) * 1024 * count))
    for key in range(count):
        assert store.put(key, (_example(_HIT_KIB, key), key))
    order = np.random.default_rng(0).permutation(count).tolist()
    found = []
    for _ in range(rounds + 1):
        started = time.thread_time()
        for key in order:
            store.get(key)
        found.append((time.thread_time() - started) / count * 1e6)
    return found[1:]  # the first one meets memory that this process has not looked at yet


def _example(kib: int, index: int) -> torch.Tensor:
    return torch.full((kib, 32, 32), index % 251, dtype=torch.uint8)


class Listed(Dataset[Any]):
    """Examples in a Python list."""

    def __init__(self, kib: int, count: int) -> None:
        self.examples = [(_example(kib, index), index) for index in range(count)]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        return self.examples[index]


class Loaded(StagedDataset):
    """The same examples, made when they are read; their augmentation takes no time."""

    def __init__(self, kib: int, count: int) -> None:
        self.kib, self.count = kib, count

    def __len__(self) -> int:
        return self.count

    def load(self, index: int) -> Any:
        return _example(self.kib, index), index

    def augment(self, example: Any) -> Any:
        return example


def timed_collate(examples: list[Any]) -> Any:
    """A batch, and the processor seconds of its worker so far."""
    batch = default_collate(examples)
    return batch, torch.tensor(time.process_time(), dtype=torch.float64)


def _worker_us(kib: int, cached: bool) -> float:
    """Processor time of a worker per example in steady state, microseconds; its collate is in it."""
    count, passes = 30_000 // kib // BATCH_SIZE * BATCH_SIZE, 4
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "collate_fn": timed_collate}
    batches: Any
    if cached:
        batches = _echoed(Loaded(kib, count), CacheConfig(count * (kib + 1) * 1024, hold="loaded"), **options)
    else:
        batches = DataLoader(Listed(kib, count), BATCH_SIZE, shuffle=True, persistent_workers=True, **options)
    times = [float(seconds) for _ in range(_FROM_PASS + passes) for _, seconds in batches]
    if cached:
        assert batches.cache_counts.examples == count
        batches.close()
    steady = times[len(times) * _FROM_PASS // (_FROM_PASS + passes) :]
    return (steady[-1] - steady[0]) / (len(steady) - 1) / BATCH_SIZE * 1e6


# ---------------------------------------------------------------------- filling


class Jpegs(StagedDataset):
    """JPEG files, decoded, cropped and flipped as ImageNet's often are.

    Args:
        files: The files.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self._redone = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()])

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> tuple[bytes, int]:
        return self.files[index].read_bytes(), index

    def decode(self, raw: tuple[bytes, int]) -> tuple[Image.Image, int]:
        return Image.open(BytesIO(raw[0])).convert("RGB"), raw[1]

    def augment(self, example: tuple[Image.Image, int]) -> tuple[torch.Tensor, int]:
        return self._redone(example[0]), example[1]


def write_jpegs(folder: Path, count: int) -> list[Path]:
    """Files of about 110 KB, 500 x 375 pixels as ImageNet's are on average: soft areas and grain."""
    files = []
    for number in range(count):
        chance = np.random.default_rng(number)
        areas = Image.fromarray(chance.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((500, 375))
        grain = chance.normal(0, 16, (375, 500, 3))
        image = Image.fromarray((np.asarray(areas) + grain).clip(0, 255).astype(np.uint8))
        files.append(folder / f"{number:04}.jpg")
        image.save(files[-1], quality=_QUALITY)
    return files


_QUALITY = 93


def _filling(quick: bool, rounds: int) -> list[tuple[Any, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        progress("filling: files are written")
        dataset = Jpegs(write_jpegs(Path(folder), 96 if quick else 512))
        size = statistics.fmean(file.stat().st_size for file in dataset.files)
        runs = {name: partial(_first_pass, dataset, name) for name in ("none", "raw", "loaded")}
        progress(f"filling, files of {size / 1000:.0f} KB")
        found = alternate(runs, rounds)  # type: ignore[arg-type]
    rows = []
    for name in ("raw", "loaded"):
        for place, kind in enumerate(("", ", wall-clock")):
            pairs = zip(found[name], found["none"], strict=True)
            rows.append(_row(f"filling, {name}{kind}", [mine[place] / other[place] - 1 for mine, other in pairs], _FILLING))  # type: ignore[index]
    written = [_seconds_of_new_memory(len(dataset)) / other[0] for other in found["none"]]  # type: ignore[index]
    return [*rows, _row("filling, loaded: the least, its images written to new memory and nothing else", written)]


def _seconds_of_new_memory(count: int) -> float:
    """Processor time in which the system takes so many decoded images into new shared memory."""
    image = bytes(3 * 500 * 375)
    file = os.memfd_create("new")
    started = time.process_time()
    for number in range(count):
        os.pwrite(file, image, number * len(image))
    seconds = time.process_time() - started
    os.close(file)
    return seconds


def _first_pass(dataset: Jpegs, hold: str) -> tuple[float, float]:
    """Processor time of the workers for a pass, and its time by the wall clock, in seconds; start of the workers left out."""
    config = None if hold == "none" else CacheConfig("1GiB", hold=hold)
    batches = _echoed(dataset, config, collate_fn=timed_collate)
    times, started = [], 0.0
    for _, seconds in batches:
        times.append(float(seconds))
        started = started or time.perf_counter()
    wall = time.perf_counter() - started
    if config is not None:
        assert batches.cache_counts.examples == len(dataset)
    batches.close()
    return sum(times[-WORKERS:]) - sum(times[:WORKERS]), wall


# ---------------------------------------------------------------------- the index


class Many(StagedDataset):
    """So many examples of a kilobyte, made when they are read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def load(self, index: int) -> Any:
        return torch.full((1000,), index % 251, dtype=torch.uint8)

    def augment(self, example: Any) -> Any:
        return example


def _index(quick: bool) -> Table:
    rows = []
    for count in (10**4, 10**7):
        progress(f"index of {count} examples")
        rounds = 3 if quick else 7
        found = alternate(
            {"none": partial(_start_seconds, count, None), "cache": partial(_start_seconds, count, "64MiB")}, rounds
        )
        made = [_index_of(count) for _ in range(rounds)]
        rows.append(
            (
                *(count, statistics.median(each[0] for each in made) / 2**20, statistics.median(each[1] for each in made) / 1024),
                *(statistics.median(each[2] for each in made) * 1e3, statistics.median(found["none"]) * 1e3),
                statistics.median(found["cache"]) * 1e3,
            )
        )
    text = (
        "index: what the memory of the process, and what Python's objects (tracemalloc), grow by when it is made and each of its "
        "words was read; first batch: from making the loader on, without workers; medians"
    )
    columns = ("examples", "index MiB", "Python objects KiB", "index made ms", "first batch without cache ms", "with cache ms")
    return Table("cache_index", text, columns, rows)


def _index_of(count: int) -> tuple[float, float, float]:
    """Bytes of an index, bytes of Python objects, and seconds to make it."""
    started = time.perf_counter()
    arena = Arena.create(count, 2**20)
    seconds = time.perf_counter() - started
    before = _resident_bytes()
    assert not any(key in arena for key in range(0, count, 512))  # a word in each page
    resident = _resident_bytes() - before
    del arena
    tracemalloc.start()
    arena = Arena.create(count, 2**20)
    objects, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del arena
    return resident, objects, seconds


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _start_seconds(count: int, size: str | None) -> float:
    started = time.perf_counter()
    options = {"num_workers": 0, "multiprocessing_context": None}
    batches = _echoed(Many(count), None if size is None else CacheConfig(size, hold="loaded"), **options)
    next(iter(batches))
    seconds = time.perf_counter() - started
    batches.close()
    return seconds
