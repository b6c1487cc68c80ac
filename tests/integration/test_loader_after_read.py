"""`after_read` with real workers: a raw item is read once, decoded and augmented for each use, and every run can be repeated."""

import random
from collections import defaultdict

import numpy as np
import pytest
import torch
from loader_cases import LoggedDataset, ReadLog, same, take
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import v2

from lightning_echo import EchoLoader


class RandomlyDecoded(LoggedDataset):
    """An example is [index, number of the read, noise of decoding, noise of augmenting]; both draw from all three generators."""

    def decode(self, raw):
        return torch.cat([super().decode(raw), noise()])

    def augment(self, example):
        return torch.cat([example, noise()])


def noise():
    drawn = torch.randint(2**20, ()).item(), np.random.randint(2**20), random.randrange(2**20)
    return torch.tensor([drawn[0] << 40 | drawn[1] << 20 | drawn[2]])


def loader(dataset, workers, factor=4, batch_size=8, reuse="memory", point="after_read"):
    plain = DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=workers)
    return EchoLoader(plain, factor, insertion_point=point, reuse=reuse, seed=2)


class Numbered(RandomlyDecoded):
    def read(self, index):  # the number of the read is another one in another run
        return super().read(index)[:8] + bytes(8)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_with_random_decoding_is_repeated_and_resumed_exactly_and_leaves_random_states_alone(tmp_path, workers):
    def make():
        return loader(Numbered(19, ReadLog(tmp_path / "reads")), workers, factor=2.37, batch_size=4)

    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    whole, states = take(make(), 20), [make().state_dict()]
    running = make()
    for _ in range(4):
        for batch in running:
            assert same(batch, whole[len(states) - 1])
            states.append(running.state_dict())
    for step in range(0, 20, 3 if workers == 0 else 7):
        resumed = make()
        resumed.load_state_dict(states[step])
        assert same(take(resumed, 20 - step), whole[step:])
        assert (resumed.counts.refetched > 0) == (0 < step < 20)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


@pytest.fixture
def images(tmp_path):
    """One folder of images that say by their colour which they are."""
    (tmp_path / "images" / "class").mkdir(parents=True)
    for index in range(16):
        Image.new("RGB", (8, 8), (10 * index + 5, 0, 0)).save(tmp_path / "images" / "class" / f"{index:02}.png")
    return tmp_path / "images"


CROP = v2.Compose([v2.Resize(16), v2.Pad(2), v2.RandomCrop(16), v2.PILToTensor()])


class LoggedSamples(list):
    """What an image folder looks a file up in when it reads it."""

    def __init__(self, samples, log):
        super().__init__(samples)
        self.log = log

    def __getitem__(self, index):
        self.log.add(index)
        return super().__getitem__(index)


def is_delivered(image, index):
    """Whether an image is a crop of the file of that index."""
    return set(image[0].unique().tolist()) <= {0, 10 * index + 5} and image[1:].sum() == 0


@pytest.mark.parametrize(("point", "workers"), [("after_read", 2), ("after_read", 0), ("before_augmentation", 2)])
def test_an_image_folder_is_read_once_and_cropped_for_each_use(images, point, workers, tmp_path):
    dataset, log = datasets.ImageFolder(images, CROP), ReadLog(tmp_path / "reads")
    dataset.samples = LoggedSamples([(path, index) for index, (path, _) in enumerate(dataset.samples)], log)
    echoed = loader(dataset, workers, batch_size=4, point=point)
    at_construction = len(log.entries())
    crops = defaultdict(list)
    for images_of_batch, indices in take(echoed, 32):
        for image, index in zip(images_of_batch, indices.tolist(), strict=True):
            assert is_delivered(image, index)
            crops[index].append(image.numpy().tobytes())
    echoed.close()
    assert echoed.counts.delivered == 128
    in_flight = 6 * 4 if workers else 0
    assert echoed.counts.fresh <= len(log.entries()) - at_construction <= echoed.counts.fresh + in_flight
    assert echoed.counts.fresh <= 128 / 4 + echoed.buffer_size
    assert max(len(set(several)) for several in crops.values()) > 4, "an image is cropped anew for its echoes"
