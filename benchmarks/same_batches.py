"""Whether two versions of the package deliver the same batches: hashes of 300 batches of each of 120 settings.

    python benchmarks/same_batches.py write               # writes results/same_batches.csv, before a change of structure
    python benchmarks/same_batches.py check [NUMBER ...]  # runs all settings again, or these; exit status 1 if one differs

Each setting runs twice. The first loader delivers 300 batches without interruption, over as many epochs as that takes. A second
loader loads the state that the first one had after 150 batches, and delivers the other 150. A hash covers what the batches are
(values, dtypes, shapes, containers), the counts of fresh and echoed examples after each batch, and where epochs end. Each batch
is then overwritten, as a training that edits in place would do. No echo may be affected.

The settings are combinations of the values in `DIMENSIONS` that the package accepts (`is_accepted`). They are chosen so that each
pair of values that can occur occurs at least once. A few settings with `share=` come last. `after_transfer` is
missing, because only a Trainer's hooks can run it. Seed and `buffer_size` are given: a default would follow the free memory.

The hashes depend on the releases of torch, torchvision and numpy, whose random numbers are in the batches. They do not depend on
the machine.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from report import progress
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_echo import EchoLoader, StagedDataset

ROWS = Path(__file__).parent / "results" / "same_batches.csv"
FIELDS = ("number", "setting", "first_half", "second_half", "resumed_second_half")
HALF, COUNT, SEED = 150, 120, 7
LENGTH = 211  # examples of each data set: a prime, so that the last batch of a pass is never a full one
_CANDIDATES = 40  # of each step of the covering sample, of which the best is taken
_SIDE = 6  # of an image, in pixels

# ---------------------------------------------------------------------- data


def png(index: int) -> bytes:
    """Returns a small image as the bytes of a file."""
    pixels = (np.arange(_SIDE * _SIDE * 3) * 7 + index * 13) % 251
    file = io.BytesIO()
    Image.fromarray(pixels.reshape(_SIDE, _SIDE, 3).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def pixels_of(raw: bytes) -> torch.Tensor:
    """Returns the pixels of an image as a tensor."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(raw))))


def noise() -> torch.Tensor:
    """Draws from each of the three global generators."""
    return torch.tensor([float(torch.rand(())), random.random(), float(np.random.rand())], dtype=torch.float64)


def augmented(example: dict[str, Any]) -> dict[str, Any]:
    """Returns an example with noise, and edits it in place as well: an echo must not see that."""
    example["image"] += int(torch.randint(5, ()))
    return {**example, "noise": (noise(), random.randrange(1000))}


class Transformed(Dataset[Any]):
    """Follows torchvision's convention: an attribute `transform`, which is cut before its first random member."""

    def __init__(self, length: int = LENGTH, first: int = 0) -> None:
        self.length, self.first = length, first
        self.transform = v2.Compose([v2.CenterCrop(4), v2.RandomHorizontalFlip(), v2.RandomCrop(3)])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        label = self.first + index
        image = (torch.arange(3 * _SIDE * _SIDE) * 7 + label * 13).remainder(251).to(torch.uint8).reshape(3, _SIDE, _SIDE)
        return self.transform(image), label


class Staged(StagedDataset):
    """Reads the bytes of images, decodes them, and adds noise."""

    def __init__(self) -> None:
        self.files = [png(index) for index in range(LENGTH)]

    def __len__(self) -> int:
        return LENGTH

    def read(self, index: Any) -> Any:
        return self.files[index] + bytes([index])

    def decode(self, raw: Any) -> Any:
        return {"image": pixels_of(raw[:-1]), "label": raw[-1]}

    def augment(self, example: Any) -> Any:
        return augmented(example)


class Plain(Dataset[Any]):
    """Nothing shows where it could be cut. It draws from the global generators if `is_random`."""

    def __init__(self, is_random: bool) -> None:
        self.is_random = is_random

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> list[Any]:
        added = noise() if self.is_random else torch.zeros(3, dtype=torch.float64)
        return [torch.full((2, 3), index, dtype=torch.int16), added + index, f"example {index}"]


class Together(Plain):
    """Reads a whole batch in one call, so that the examples of a call have some of their noise in common."""

    def __getitems__(self, indices: list[int]) -> list[list[Any]]:
        common = float(torch.rand(())) if self.is_random else 0.5
        return [[*self[index], common] for index in indices]


class Records(Dataset[bytes]):
    """Raw items, for a cut that is named with `StagedDataset.of`."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> bytes:
        return f"{index}/{index * index % 97}".encode()


class Point(NamedTuple):
    """A named tuple in an example."""

    x: float
    y: float


def record_of(raw: bytes) -> dict[str, Any]:
    """Decodes a raw item to a nested example."""
    index, value = map(int, raw.split(b"/"))
    array = np.full((2, 2), value, dtype=np.float32)
    return {
        "image": torch.full((3,), value),
        "index": index,
        "name": f"{index}",
        "nested": {"array": array, "point": Point(value, 0.5)},
    }


class Stream(IterableDataset[Any]):
    """A stream that each worker has its share of, with a state: the place in the share, and the pass."""

    def __init__(self) -> None:
        self.at = self.number = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first + self.at * step, LENGTH, step):
            self.at += 1
            yield {"index": index, "number": self.number, "noise": noise()}
        self.at, self.number = 0, self.number + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "number": self.number}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.at, self.number = state["at"], state["number"]


class SizedStream(Stream):
    """The same with a length, which is told the number of the pass as well."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[Any]:
        for example in super().__iter__():
            yield {**example, "epoch": self.epoch}


class Uneven(Sampler[list[int]]):
    """A batch sampler of the user's own: batches of two sizes, in an order that its generator draws."""

    def __init__(self, batch_size: int) -> None:
        self.sizes = (batch_size, batch_size - 1)
        self.generator = torch.Generator().manual_seed(SEED)

    def __len__(self) -> int:
        return len(list(self._cut(range(LENGTH))))

    def __iter__(self) -> Iterator[list[int]]:
        return self._cut(torch.randperm(LENGTH, generator=self.generator).tolist())

    def _cut(self, order: Sequence[int]) -> Iterator[list[int]]:
        rest = iter(order)
        for size in itertools.cycle(self.sizes):
            if not (batch := list(itertools.islice(rest, size))):
                return
            yield batch


class Batches:
    """An opaque loader: an iterable of batches that draws from all global generators and is told the epoch."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size, self.epoch = batch_size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-LENGTH // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for indices in torch.randperm(LENGTH).split(self.batch_size):
            yield {"index": indices, "epoch": self.epoch, "noise": [noise(), random.random()]}


class StatefulBatches:
    """An opaque loader without a length, which has a state: its place and the pass."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size, self.at, self.number = batch_size, 0, 0

    def __iter__(self) -> Iterator[Any]:
        for indices in torch.arange(LENGTH).split(self.batch_size)[self.at :]:
            self.at += 1
            yield indices, self.number, torch.stack([noise() for _ in indices])
        self.at, self.number = 0, self.number + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "number": self.number}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.at, self.number = state["at"], state["number"]


# ---------------------------------------------------------------------- settings

Setting = Mapping[str, Any]
DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "kind": (
        *("transform", "image folder", "staged", "named cut", "plain", "getitems", "subsets joined"),
        *("batch sampler", "stream", "sized stream", "batches", "stateful batches"),
    ),
    "point": ("after_read", "before_augmentation", "after_augmentation", "after_batching", "auto"),
    "cache": ("none", "auto", "raw", "loaded", "whole", "auto on disk"),
    "sampler": ("sequential", "shuffle", "weighted", "distributed", "own"),
    "ranks": ("one", "0 of 2", "1 of 2"),
    "drop_last": (False, True),
    "workers": (0, 1, 2),
    "reuse": ("memory", "each"),
    "factor": (1, 1.5, 2, 3.37, 5),
    "batch_size": (3, 5, 8),
    "epoch_length": ("fixed", "full_pass"),
    "buffer": ("small", "large"),
}
_RULED = ("kind", "point", "cache", "sampler", "ranks", "drop_last", "workers")  # those that `is_accepted` looks at

_RAW = {"image folder", "staged", "named cut"}
_SPLIT = _RAW | {"transform", "subsets joined"}
_INDEXED = _SPLIT | {"plain", "getitems"}
_STREAMS = {"stream", "sized stream"}
_OPAQUE = {"batches", "stateful batches"}


def is_accepted(setting: Setting) -> bool:
    """Returns whether the package accepts a combination of the values in `_RULED`, and can resume it within a pass."""
    kind, point, cache = setting["kind"], setting["point"], setting["cache"]
    kinds = {
        "after_read": _RAW,
        "before_augmentation": _SPLIT,
        "after_augmentation": _INDEXED | _STREAMS,
        # Whole batches of a stream can be resumed within a pass only if the loader has a state.
        "after_batching": _INDEXED | _OPAQUE | {"batch sampler"},
        "auto": set(DIMENSIONS["kind"]),
    }
    cached = {
        "none": kind in kinds[point],
        "auto": kind in _SPLIT | {"batch sampler"},
        "raw": kind in _RAW | {"batch sampler"},
        "loaded": kind in _SPLIT | {"batch sampler"} and point != "after_read",
        "whole": kind in {"plain", "getitems"},  # they have no noise then
        "auto on disk": kind in _SPLIT | {"batch sampler"},
    }
    return (
        kind in kinds[point]
        and cached[cache]
        and (setting["sampler"] == "own") == (kind not in _INDEXED)
        and (setting["sampler"] != "distributed" or setting["ranks"] == "one")  # it divides the data itself
        and (not setting["drop_last"] or kind in _INDEXED | _STREAMS)
        and (setting["workers"] == 0 or kind not in _OPAQUE)
    )


_SHARED: tuple[Setting, ...] = tuple(
    dict(zip((*DIMENSIONS, "share"), (*values, f"same{number}"), strict=True))
    for number, values in enumerate(
        (
            ("plain", "after_augmentation", "none", "shuffle", "one", False, 2, "memory", 2, 5, "fixed", "large"),
            ("transform", "after_batching", "none", "shuffle", "one", True, 1, "each", 1.5, 8, "full_pass", "small"),
            ("staged", "after_augmentation", "none", "weighted", "one", False, 0, "each", 3.37, 3, "fixed", "small"),
            ("sized stream", "after_augmentation", "none", "own", "one", False, 1, "memory", 1.5, 5, "fixed", "small"),
            ("batch sampler", "auto", "none", "own", "one", False, 1, "memory", 2, 5, "full_pass", "large"),
            ("batches", "after_batching", "none", "own", "one", False, 0, "each", 2, 8, "fixed", "small"),
        )
    )
)


def settings() -> list[Setting]:
    """Returns the settings, the same in each run."""
    found = covering(DIMENSIONS, _RULED, is_accepted, COUNT - len(_SHARED))
    assert len(found) == COUNT - len(_SHARED), f"the pairs of values need {len(found)} settings"
    return [*found, *_SHARED]


def covering(
    dimensions: Mapping[str, Sequence[Any]], ruled: Sequence[str], accepts: Callable[[Setting], bool], count: int = 0
) -> list[Setting]:
    """Returns settings that hold every pair of values that can occur together, and at least ``count``; the same in each run.

    ``accepts`` looks at the dimensions in ``ruled`` alone, and says whether their values can occur together.
    """
    accepted = [dict(zip(ruled, values, strict=True)) for values in itertools.product(*(dimensions[name] for name in ruled))]
    accepted = [setting for setting in accepted if accepts(setting)]
    free = {name: values for name, values in dimensions.items() if name not in ruled}
    chosen = random.Random(SEED)
    missing = dict.fromkeys(_possible_pairs(dimensions, ruled, accepted))  # in a fixed order, unlike a set
    found: list[Setting] = []
    while missing or len(found) < count:
        fixed = dict(next(iter(missing))) if missing else {}
        fitting = [setting for setting in accepted if all(setting.get(name, value) == value for name, value in fixed.items())]
        candidates = []
        for _ in range(_CANDIDATES if missing else 1):
            both = {**{name: chosen.choice(values) for name, values in free.items()}, **fixed, **chosen.choice(fitting)}
            candidates.append({name: both[name] for name in dimensions})
        best = max(candidates, key=lambda setting: sum(pair in missing for pair in _pairs(setting)))
        for pair in _pairs(best):
            missing.pop(pair, None)
        if best not in found:
            found.append(best)
    return found


def _pairs(setting: Setting) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    return itertools.combinations(setting.items(), 2)


def _possible_pairs(
    dimensions: Mapping[str, Sequence[Any]], ruled: Sequence[str], accepted: Sequence[Setting]
) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    of_ruled = {pair for setting in accepted for pair in _pairs(setting)}
    for (one, firsts), (other, seconds) in itertools.combinations(dimensions.items(), 2):
        for pair in itertools.product([(one, value) for value in firsts], [(other, value) for value in seconds]):
            if not (one in ruled and other in ruled) or pair in of_ruled:
                yield pair


def described(setting: Setting) -> str:
    """Returns a setting as one string for people."""
    return ", ".join(f"{name} {value}" for name, value in setting.items())


# ---------------------------------------------------------------------- loaders


class Folders(NamedTuple):
    """Folders of a run, which are gone after it.

    Attributes:
        images: Images, for the kind that reads files.
        cache: Where caches on disk lie.
    """

    images: Path
    cache: Path


def dataset_of(setting: Setting, folders: Folders) -> Any:
    """Returns a new data set of an indexed kind, or a stream."""
    kind = setting["kind"]
    if kind == "image folder":
        transform = v2.Compose([v2.PILToTensor(), v2.CenterCrop(4), v2.RandomHorizontalFlip(), v2.RandomCrop(3)])
        return ImageFolder(str(folders.images), transform)
    if kind == "subsets joined":
        part = Subset(Transformed(150), range(149, 29, -1))
        return ConcatDataset([part, Transformed(LENGTH - len(part), first=1000)])
    if kind == "named cut":
        return StagedDataset.of(Records(), augment=augmented, decode=record_of)
    if kind in ("plain", "getitems"):
        return (Plain if kind == "plain" else Together)(is_random=setting["cache"] != "whole")
    made = {"transform": Transformed, "staged": Staged, "batch sampler": Staged, "stream": Stream, "sized stream": SizedStream}
    return made[kind]()


def plain_loader(setting: Setting, folders: Folders) -> Any:
    """Returns a new loader, before it is echoed."""
    kind, batch_size, workers = setting["kind"], setting["batch_size"], setting["workers"]
    if kind in _OPAQUE:
        return Batches(batch_size) if kind == "batches" else StatefulBatches(batch_size)
    dataset = dataset_of(setting, folders)
    context = "fork" if workers else None
    if kind == "batch sampler":
        return DataLoader(dataset, batch_sampler=Uneven(batch_size), num_workers=workers, multiprocessing_context=context)
    sampler: Sampler[int] | None = None
    if setting["sampler"] == "weighted":
        weights = [1.0 + index % 3 for index in range(LENGTH)]
        sampler = WeightedRandomSampler(weights, LENGTH, generator=torch.Generator().manual_seed(SEED))
    elif setting["sampler"] == "distributed":
        sampler = DistributedSampler(dataset, num_replicas=2, rank=1, seed=SEED)
    return DataLoader(
        dataset,
        batch_size,
        shuffle=True if setting["sampler"] == "shuffle" else None,
        sampler=sampler,
        num_workers=workers,
        drop_last=setting["drop_last"],
        multiprocessing_context=context,
    )


def echoed_loader(setting: Setting, folders: Folders) -> EchoLoader:
    """Returns a new loader that echoes."""
    by_batches = setting["point"] == "after_batching" or setting["kind"] in _OPAQUE | {"batch sampler"}
    smallest = 1 if by_batches else setting["batch_size"] * max(setting["workers"], 1)
    times = {"small": 1, "large": 6 if by_batches else 3}  # the largest still leaves a batch of a rank's share of a pass
    options: dict[str, Any] = {"buffer_size": smallest * times[setting["buffer"]]}
    if setting["cache"] != "none":
        hold, _, on_disk = setting["cache"].partition(" on ")
        options["cache"] = {"size": "4MiB", "hold": hold, **({"path": str(folders.cache)} if on_disk else {})}
    if setting["ranks"] != "one":
        options.update(num_replicas=2, rank=int(setting["ranks"][0]))
    if "share" in setting:
        options["share"] = {"name": setting["share"], "window": "1MiB", "linger_seconds": 0}
    return EchoLoader(
        plain_loader(setting, folders),
        setting["factor"],
        insertion_point=setting["point"],
        reuse=setting["reuse"],
        epoch_length=setting["epoch_length"],
        seed=SEED,
        **options,
    )


# ---------------------------------------------------------------------- hashes


class Digest:
    """A hash of batches: of their values, and of the types that hold them."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=12)

    def text(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: Any) -> None:
        """Adds a batch, or a part of one.

        Raises:
            TypeError: Nothing says how such a value is hashed.
        """
        self._write(type(value).__qualname__)
        if isinstance(value, (torch.Tensor, np.ndarray)):
            array = value.numpy() if isinstance(value, torch.Tensor) else value
            self._write(f"{value.dtype} {tuple(value.shape)}")
            self._hash.update(np.ascontiguousarray(array).tobytes())
        elif isinstance(value, Mapping):
            self._write(str(len(value)))
            for key, part in value.items():
                self.add(key)
                self.add(part)
        elif isinstance(value, (list, tuple)):
            self._write(str(len(value)))
            for part in value:
                self.add(part)
        elif value is None or isinstance(value, (bool, int, float, str, bytes)):
            self._write(repr(value))
        else:
            raise TypeError(f"a {type(value).__name__} cannot be hashed")

    def _write(self, text: str) -> None:
        self._hash.update(f"{text}\0".encode())


def overwrite(batch: Any) -> None:
    """Sets all tensors of a batch to zero, in place."""
    if isinstance(batch, torch.Tensor):
        batch.zero_()
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            overwrite(part)


class Delivery:
    """What a loader delivers, epoch after epoch, as hashes."""

    def __init__(self, loader: EchoLoader) -> None:
        self._loader, self._batches, self._epoch = loader, iter(loader), 0

    def digest(self, count: int) -> str:
        """Returns the hash of the next batches.

        Whether an epoch ends before the first of them is left out, because a resumed loader cannot tell.
        """
        digest, before = Digest(), None
        for _ in range(count):
            batch, counts = self._next(), self._loader.last_batch_counts
            digest.add(batch)
            digest.add((counts.fresh, counts.echoed))
            overwrite(batch)
            if before not in (None, self._epoch):
                digest.add(f"an epoch of {len(self._loader)}" if self._loader.has_length else "an epoch")
            before = self._epoch
        total = self._loader.counts
        digest.add((total.fresh, total.echoed, self._loader.delivered_batches, self._loader.passes))
        return digest.text()

    def _next(self) -> Any:
        for _ in range(3):  # a resumed epoch may be over already
            for batch in self._batches:
                return batch
            self._batches, self._epoch = iter(self._loader), self._epoch + 1
        raise RuntimeError("epochs without a batch follow one another")


def hashes(setting: Setting, folders: Folders) -> tuple[str, str, str]:
    """Returns the hashes of the first half, of the second half, and of the second half after a resume."""
    _seed_process(1)
    loader = echoed_loader(setting, folders)
    delivery = Delivery(loader)
    first = delivery.digest(HALF)
    state = loader.state_dict()
    second = delivery.digest(HALF)
    loader.close()
    _seed_process(2)  # a resumed run must not depend on the states of its process
    resumed = echoed_loader(setting, folders)
    resumed.load_state_dict(state)
    again = Delivery(resumed).digest(HALF)
    resumed.close()
    return first, second, again


def _seed_process(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


# ---------------------------------------------------------------------- the program


def rows_of(numbers: Sequence[int]) -> list[dict[str, str]]:
    """Runs the settings with these numbers, or all if none is given.

    Raises:
        RuntimeError: A setting failed; the message names it.
    """
    every = settings()
    rows = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a reader may just be ending
        folders = Folders(Path(folder, "images"), Path(folder, "cache"))
        shared = Path(folder, "shared")
        for each in (folders.images / "a", folders.images / "b", folders.cache, shared):
            each.mkdir(parents=True)
        shared.chmod(0o700)
        os.environ["LIGHTNING_ECHO_SHARED"] = str(shared)
        for index in range(LENGTH):
            (folders.images / "ab"[index % 2] / f"{index:03}.png").write_bytes(png(index))
        for number, setting in enumerate(every):
            if number % 10 == 0:
                progress(f"setting {number} of {len(every)}")
            if numbers and number not in numbers:
                continue
            try:
                found = hashes(setting, folders)
            except Exception as error:
                raise RuntimeError(f"setting {number} ({described(setting)}) failed") from error
            rows.append(dict(zip(FIELDS, (str(number), described(setting), *found), strict=True)))
    return rows


def differences(before: Sequence[Mapping[str, str]], now: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns what has changed, as texts for people.

    >>> row = {"number": "3", "setting": "kind plain", "first_half": "ab", "second_half": "cd", "resumed_second_half": "cd"}
    >>> differences([row], [row])
    []
    >>> differences([row], [{**row, "second_half": "ce"}])
    ["setting 3 (kind plain): second_half is 'ce', was 'cd'"]
    """
    written = {row["number"]: row for row in before}
    found = []
    for row in now:
        old = written.get(row["number"], {})
        changed = [f"{name} is {row[name]!r}, was {old.get(name)!r}" for name in FIELDS[1:] if row[name] != old.get(name)]
        if changed:
            found.append(f"setting {row['number']} ({row['setting']}): {'; '.join(changed)}")
    return found


def main(command: str, *numbers: str) -> int:
    """Runs the program, and returns its exit status."""
    logging.getLogger("lightning_echo").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # small buffers, more workers than cores
    torch.set_num_threads(1)
    rows = rows_of([int(number) for number in numbers])
    for row in rows:
        if row["second_half"] != row["resumed_second_half"]:
            print(f"setting {row['number']} ({row['setting']}) was not resumed exactly")
    if command == "write":
        with ROWS.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return 0
    with ROWS.open(newline="") as file:
        found = differences(list(csv.DictReader(file)), rows)
    print("\n".join(found) if found else f"{len(rows)} settings deliver the same batches")
    return 1 if found else 0


if __name__ == "__main__":
    usage = "usage: same_batches.py write | check [NUMBER ...]"
    if sys.argv[1:2] not in (["write"], ["check"]) or (sys.argv[1] == "write" and sys.argv[2:]):
        sys.exit(usage)
    sys.exit(main(*sys.argv[1:]))
