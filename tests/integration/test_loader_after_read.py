"""`after_read` with real workers: a raw item is read once, decoded and augmented for each use, and every run can be repeated.

What all points share is tested with the other points, by the parameter ``point``; here is what only this one has.
"""

import random
from collections import defaultdict

import numpy as np
import pytest
import torch
from loader_cases import LoggedDataset, ReadLog, epochs, same, take
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import datasets
from torchvision.transforms import v2

from lightning_echo import EchoLoader, StagedDataset


class RandomlyDecoded(LoggedDataset):
    """An example is [index, number of the read, noise of decoding, noise of augmenting]; both draw from all three generators."""

    def decode(self, raw):
        return torch.cat([super().decode(raw), noise()])

    def augment(self, example):
        return torch.cat([example, noise()])


def noise():
    drawn = torch.randint(2**20, ()).item(), np.random.randint(2**20), random.randrange(2**20)
    return torch.tensor([drawn[0] << 40 | drawn[1] << 20 | drawn[2]])


def loader(dataset, workers, factor=4, batch_size=8, reuse="memory", **options):
    plain = DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=workers, **options)
    return EchoLoader(plain, factor, insertion_point="after_read", reuse=reuse, seed=2)


@pytest.mark.parametrize("reuse", ["each", "memory"])
@pytest.mark.parametrize("workers", [0, 2])
def test_uses_share_what_was_read_and_differ_by_decoding_and_augmenting(tmp_path, workers, reuse):
    echoed = loader(RandomlyDecoded(40, ReadLog(tmp_path / "reads")), workers, reuse=reuse)
    examples = [tuple(example) for epoch in epochs(echoed, 4) for batch in epoch for example in batch.tolist()]
    uses = defaultdict(list)
    for index, read, decoded, augmented in examples:
        uses[read].append((index, decoded, augmented))
    assert len(uses) == echoed.counts.fresh
    most = max(map(len, uses.values()))
    assert most == 4 if reuse == "each" else most > 4, "from memory chance draws some of dozens more often than the factor"
    for several in uses.values():
        assert len({index for index, _, _ in several}) == 1
    for place in (2, 3):
        assert len({example[place] for example in examples}) == len(examples), "no two uses of anything share their noise"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_with_random_decoding_is_repeated_and_resumed_exactly(tmp_path, workers):
    class Numbered(RandomlyDecoded):
        def read(self, index):  # the number of the read is another one in another run
            return super().read(index)[:8] + bytes(8)

    def make():
        return loader(Numbered(19, ReadLog(tmp_path / "reads")), workers, factor=2.37, batch_size=4)

    whole, states = take(make(), 20), [make().state_dict()]
    running = make()
    for _ in range(4):
        for batch in running:
            assert same(batch, whole[len(states) - 1])
            states.append(running.state_dict())
    for step in range(0, 20, 1 if workers == 0 else 4):
        resumed = make()
        resumed.load_state_dict(states[step])
        assert same(take(resumed, 20 - step), whole[step:])
        assert (resumed.counts.refetched > 0) == (0 < step < 20)


def test_without_workers_random_decoding_leaves_the_random_states_of_the_training_alone(tmp_path):
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = torch.rand(3).tolist(), np.random.rand(), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    epochs(loader(RandomlyDecoded(40, ReadLog(tmp_path / "reads")), 0), 2)
    assert (torch.rand(3).tolist(), np.random.rand(), random.random()) == expected


def test_random_decoding_is_a_reason_for_auto_not_to_reuse_what_is_decoded(tmp_path):
    plain = DataLoader(RandomlyDecoded(40, ReadLog(tmp_path / "reads")), batch_size=8)
    assert EchoLoader(plain, 2).insertion_point == "after_augmentation"
    with pytest.raises(ValueError, match=r"before_augmentation' is impossible .* \(load\) draws random numbers from torch"):
        EchoLoader(plain, 2, insertion_point="before_augmentation")


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


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_folder_is_read_once_and_decoded_and_cropped_for_each_use(images, workers, tmp_path):
    dataset, log = datasets.ImageFolder(images, CROP), ReadLog(tmp_path / "reads")
    dataset.samples = LoggedSamples([(path, index) for index, (path, _) in enumerate(dataset.samples)], log)
    echoed = loader(dataset, workers, batch_size=4)
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


@pytest.mark.slow
def test_workers_that_inherit_nothing_deliver_what_forked_ones_do(images):
    dataset = ConcatDataset([Subset(datasets.ImageFolder(images, CROP), range(8)), datasets.ImageFolder(images, CROP)])

    def run(context):
        echoed = loader(dataset, 1, batch_size=4, multiprocessing_context=context)
        batches = take(echoed, 8)
        echoed.close()
        return batches

    assert same(run("spawn"), run("fork"))


class OwnGenerator:
    """Draws from a generator of its own, seeded by ``set_random_seed``, as Albumentations does."""

    def __init__(self):
        self.generator = np.random.default_rng()

    def set_random_seed(self, seed):
        self.generator = np.random.default_rng(seed)

    def __call__(self, image):
        return int(self.generator.integers(2**40))


@pytest.mark.parametrize("workers", [0, 2])
def test_transforms_with_a_generator_of_their_own_are_seeded_also_inside_a_named_augmentation(images, workers):
    def run():
        dataset = StagedDataset.of(datasets.ImageFolder(images, OwnGenerator()), augment=list)
        return take(loader(dataset, workers, batch_size=4), 12)

    first = run()
    assert same(run(), first)
    numbers = [number for batch in first for number in batch[0].tolist()]
    assert len(set(numbers)) == len(numbers), "drawn anew for each use"
