"""Splits through the loader: where data sets are cut, what is read in the workers, and what a user is told.

That every kind of data set is split right is proved in tests/unit/split/test_splits.py; here real workers read.
"""

import logging
import random
import zipfile

import numpy as np
import pytest
import torch
from loader_cases import LoggedDataset, ReadLog, epochs
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset
from torchvision import datasets
from torchvision.transforms import v2

from lightning_echo import EchoLoader, StagedDataset

LENGTH = 48


class ZipDataset(Dataset):
    """Opens its archive at the first read: inherited by two workers, they would read through one file position."""

    def __init__(self, path, transform=None):
        self.path, self.transform, self.archive = path, transform, None

    def __getitem__(self, index):
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.path)
        value = torch.frombuffer(bytearray(self.archive.read(str(index))), dtype=torch.uint8)
        return (value if self.transform is None else self.transform(value)), index

    def __len__(self):
        return LENGTH


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "examples.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for index in range(LENGTH):
            file.writestr(str(index), bytes([index]) * 50_000)
    return path


class RandomShift:
    """What it adds says that it ran: a multiple of 1,000, never the same twice."""

    def __call__(self, value):
        return value.int() + 1000 * int(torch.randint(1, 2**20, ()))


@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("point", ["before_augmentation", "after_augmentation", "after_batching"])
def test_a_file_that_the_data_set_opens_at_its_first_read_is_opened_anew_in_each_worker(archive, point, workers):
    dataset = ZipDataset(archive, RandomShift())
    loader = EchoLoader(DataLoader(dataset, batch_size=8, shuffle=True, num_workers=workers), 2, insertion_point=point, seed=1)
    assert dataset.archive is None, "the proof and the look at an example leave nothing open behind"
    for epoch in epochs(loader, 2):
        for values, indices in epoch:
            assert torch.equal(values % 1000, indices[:, None].expand_as(values))
    assert dataset.archive is None or not workers


class Batched(Dataset):
    """Reads a whole batch in one call, and says with which others an example was read."""

    def __init__(self, log):
        self.log = log

    def __getitems__(self, indices):
        stamp = self.log.add(len(indices))
        return [torch.tensor([index, stamp]) for index in indices]

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __len__(self):
        return LENGTH


@pytest.mark.grid
@pytest.mark.parametrize(
    "wrap", [lambda d: d, lambda d: Subset(d, range(LENGTH)), lambda d: StagedDataset.of(d, lambda e: e + 0)]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_that_reads_whole_batches_gets_the_fresh_examples_of_a_batch_in_one_call(tmp_path, workers, wrap):
    log = ReadLog(tmp_path / "calls")
    dataset = wrap(Batched(log))
    loader = EchoLoader(DataLoader(dataset, batch_size=8, shuffle=True, num_workers=workers), 2, seed=1)
    at_construction = len(log.entries())
    seen, batches = set(), []
    for _ in range(3):
        for batch in loader:
            stamps = {stamp for _, stamp in batch.tolist()}
            assert len(stamps - seen) == (1 if loader.last_batch_counts.fresh else 0), "one call for all that is fresh"
            seen |= stamps
            batches.append(batch)
    loader.close()
    calls = dict(log.entries()[at_construction:])
    assert sum(calls[stamp] for stamp in seen) == loader.counts.fresh
    assert len(batches) == 18


class OwnGenerator:
    """As Albumentations: draws from a generator of its own, seeded by ``set_random_seed``."""

    def __init__(self):
        self.generator = np.random.default_rng()

    def set_random_seed(self, seed):
        self.generator = np.random.default_rng(seed)

    def __call__(self, value):
        return value + float(self.generator.random())


class Plain(Dataset):
    def __init__(self, transform=None):
        self.transform = transform

    def __getitem__(self, index):
        value = torch.tensor([float(index)], dtype=torch.float64)
        return value if self.transform is None else self.transform(value)

    def __len__(self):
        return LENGTH


@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: ConcatDataset([Subset(d, range(24)), Subset(d, range(24, LENGTH))])])
def test_transforms_with_a_generator_of_their_own_are_split_off_and_reproducible(workers, wrap):
    def run(seed=1):
        plain = DataLoader(wrap(Plain(OwnGenerator())), batch_size=8, shuffle=True, num_workers=workers)
        loader = EchoLoader(plain, 4, seed=seed)
        assert loader.insertion_point == "before_augmentation"
        return torch.cat([batch for epoch in epochs(loader, 2) for batch in epoch])

    first = run()
    noise = (first % 1).flatten().tolist()
    assert len(set(noise)) == len(noise), "every use draws anew"
    assert torch.equal(run(), first)
    assert not torch.equal(run(seed=2), first)


class Deceptive(Dataset):
    """Stores a transform, but uses it so that the inferred split would be wrong."""

    def __init__(self):
        self.transform = lambda value: value + torch.rand(1)

    def __getitem__(self, index):
        return self.transform(torch.tensor([float(index)])).round()

    def __len__(self):
        return LENGTH


class Opaque(Dataset):
    def __getitem__(self, index):
        return torch.tensor([index])

    def __len__(self):
        return LENGTH


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(LENGTH))

    def __len__(self):
        return LENGTH


def said_by(loader):
    """What the package logs when the loader delivers its first batches."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("lightning_echo")
    logger.addHandler(handler)
    try:
        epochs(loader, 2)
    finally:
        logger.removeHandler(handler)
    return records


@pytest.mark.parametrize(
    ("plain", "point", "why"),
    [
        (lambda: DataLoader(Deceptive(), batch_size=8), "after_augmentation", "it looks at what its transform returns"),
        (lambda: DataLoader(Opaque(), batch_size=8), "after_augmentation", "Opaque has neither load(index) and augment(example)"),
        (lambda: DataLoader(Stream(), batch_size=8), "after_augmentation", "the data set is a stream, which has no index"),
        (lambda: [torch.zeros(1)] * 3, "after_batching", "list is an iterable of batches"),
    ],
)
def test_auto_falls_back_and_says_once_what_it_took_and_why(plain, point, why):
    loader = EchoLoader(plain(), 2)
    assert loader.insertion_point == point
    said = said_by(loader)
    assert len(said) <= 3
    assert said[0].startswith(f"{point}, factor 2: ")
    assert said[1].startswith(f"auto chose {point}: ")
    assert why in said[1]


@pytest.mark.parametrize(
    ("options", "live", "end"),
    [
        # Half of what the pass allows, (12 - 4) / 2, is less than a batch for each worker.
        ({}, 2 * 4, " MiB; 2 workers"),
        ({"reuse": "each"}, 2 * 2 * 4, " MiB; 2 workers"),  # at least two batches in each worker
    ],
    ids=["default", "each"],
)
def test_what_was_chosen_is_said_once_with_cut_and_memory(tmp_path, options, live, end):
    image = tmp_path / "images" / "cat"
    image.mkdir(parents=True)
    for index in range(12):
        Image.new("RGB", (64, 64), (index, 0, 0)).save(image / f"{index:02}.png")
    transform = v2.Compose([v2.Resize(32), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    plain = DataLoader(datasets.ImageFolder(tmp_path / "images", transform), batch_size=4, num_workers=2)
    loader = EchoLoader(plain, 4, **options)
    assert repr(loader) == said_by(loader)[0]
    assert repr(loader).startswith(
        f"before_augmentation, factor 4: reuse [load, Resize], redo [RandomHorizontalFlip, PILToTensor]; {live} live examples, "
    )
    assert repr(loader).endswith(end)


@pytest.mark.parametrize("dataset", [Deceptive(), Opaque()], ids=["deceptive", "opaque"])
def test_an_explicit_split_that_is_impossible_is_refused_with_the_way_out(dataset):
    with pytest.raises(ValueError, match="before_augmentation") as refused:
        EchoLoader(DataLoader(dataset, batch_size=8), 2, insertion_point="before_augmentation")
    for way in ("StagedDataset", "load(index) and augment(example)", "StagedDataset.of", "insertion_point='after_augmentation'"):
        assert way in str(refused.value)


@pytest.mark.parametrize("point", ["after_read", "before_augmentation", "after_augmentation"])
def test_an_example_level_point_on_batches_of_unknown_examples_is_refused_with_the_way_out(point):
    with pytest.raises(ValueError, match=f"insertion_point='{point}' is impossible here: .*Use 'after_batching' or 'auto'"):
        EchoLoader([torch.zeros(1)] * 3, 2, insertion_point=point)


@pytest.mark.parametrize("point", ["after_read", "before_augmentation"])
def test_a_point_before_the_augmentation_of_a_stream_is_refused_with_the_way_out(point):
    with pytest.raises(
        ValueError, match=r"the data set is a stream, which has no index\. Use 'after_augmentation', 'after_batch"
    ):
        EchoLoader(DataLoader(Stream(), batch_size=8), 2, insertion_point=point)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_folder_is_decoded_once_and_augmented_for_each_use(tmp_path, workers):
    folder = tmp_path / "images" / "class"
    folder.mkdir(parents=True)
    for index in range(16):
        Image.new("L", (8, 8), index).save(folder / f"{index:02}.png")
    log = ReadLog(tmp_path / "reads")

    def decode(path):
        log.add(0)
        return Image.open(path).convert("L")

    transform = v2.Compose([v2.Pad(2), v2.RandomCrop(8), v2.PILToTensor()])
    dataset = datasets.ImageFolder(tmp_path / "images", transform, loader=decode)
    loader = EchoLoader(DataLoader(dataset, batch_size=4, num_workers=workers, shuffle=True), 4, seed=0)
    at_construction = len(log.entries())
    crops = {}
    for epoch in epochs(loader, 8):
        for images, _ in epoch:
            for image in images:
                crops.setdefault(int(image.max()), set()).add(image.numpy().tobytes())
    loader.close()
    assert loader.counts.delivered == 128
    in_flight = 6 * 4 if workers else 0
    assert loader.counts.fresh <= len(log.entries()) - at_construction <= loader.counts.fresh + in_flight
    assert loader.counts.fresh <= 128 / 4 + loader.buffer_size
    del crops[0]
    assert max(map(len, crops.values())) > 1, "an image is cropped anew for its echoes"


def test_global_random_states_decide_nothing_about_the_split(tmp_path):
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    EchoLoader(DataLoader(LoggedDataset(9, ReadLog(tmp_path / "reads")), batch_size=3), 2)
    EchoLoader(DataLoader(Deceptive(), batch_size=3), 2)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
