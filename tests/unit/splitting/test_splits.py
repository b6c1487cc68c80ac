"""Data sets are split where they can be, the split is proved, and the user's objects stay as they were.

The expectation is always the data set itself: under the same seeds, ``dataset[i]`` is what the stages have
to return.
"""

import pickle
import random
import subprocess
import sys
import threading
import warnings
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from split_cases import behaves_like, same, seed
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    random_split,
)
from torchvision import datasets, tv_tensors
from torchvision import transforms as v1
from torchvision.transforms import v2

from lightning_echo.splitting.conventions import Convention
from lightning_echo.splitting.splits import Split, SplitRefused, find_split, make_stages
from lightning_echo.splitting.staged import StagedDataset


def sent(value):
    """Returns what a worker gets that is started with spawn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.4 warns of every tensor in a pickle
        return pickle.loads(pickle.dumps(value))


def proved(dataset):
    """Returns the split of a data set, and its stages as a worker makes them."""
    split = find_split(dataset)
    return split, make_stages(sent(dataset), split.conventions)


@pytest.fixture
def folder(tmp_path):
    """Images of different sizes in two classes, as files."""
    generator = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(3):
            pixels = generator.integers(0, 255, (20 + number, 26 - number, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    return tmp_path / "images"


class Arrays(Dataset):
    """Small images in memory with a ``transform``, not torchvision's class; counts what is read."""

    def __init__(self, size=6, transform=None, **attributes):
        self.images = torch.arange(size * 3 * 6 * 6, dtype=torch.uint8).view(size, 3, 6, 6)
        self.transform = transform
        self.reads = []
        vars(self).update(attributes)

    def image(self, index):
        if not 0 <= index < len(self.images):
            raise IndexError(index)
        self.reads.append(int(index))
        return self.images[index]

    def __getitem__(self, index):
        image = self.image(index)
        if self.transform is not None:
            image = self.transform(image)
        return image, int(index)

    def __len__(self):
        return len(self.images)


class Tripled(Arrays):
    """Calls its transform without asking, as many data sets do."""

    def __getitem__(self, index):
        return self.transform(self.image(index)), index, -index


CROP_AND_FLIP = v2.Compose([v2.Resize(8), v2.RandomCrop(5), v2.RandomHorizontalFlip()])


class TestTorchvision:
    def test_image_folder_with_v1_transforms(self, folder):
        augmentation = v1.Compose(
            [
                v1.Resize(16),
                v1.Compose([v1.CenterCrop(14), v1.RandomCrop(8)]),
                v1.ColorJitter(0.5),
                v1.ToTensor(),
                v1.Normalize([0.5] * 3, [0.5] * 3, inplace=True),
            ]
        )
        dataset = datasets.ImageFolder(folder, transform=augmentation)
        split, stages = proved(dataset)
        assert split.reused == ("load", "Resize", "CenterCrop")
        assert split.redone == ("RandomCrop", "ColorJitter", "ToTensor", "Normalize")
        assert behaves_like(dataset, stages)

        image, label = stages.load(4)
        with Image.open(folder / "dog" / "1.png") as opened:
            by_hand = v1.CenterCrop(14)(v1.Resize(16)(opened.convert("RGB")))
        assert same((image, label), (by_hand, 1))
        crops = [stages.augment(4, (image.copy(), label))[0] for _ in range(8)]
        assert any(not torch.equal(crops[0], crop) for crop in crops[1:])

    def test_the_estimated_memory_is_that_of_the_reused_example(self, folder):
        augmentation = v1.Compose([v1.Resize((16, 10)), v1.RandomCrop(8)])
        split = find_split(datasets.ImageFolder(folder, transform=augmentation))
        assert 16 * 10 * 4 <= split.example_bytes <= 16 * 10 * 4 + 200  # Pillow holds four bytes per pixel

    def test_image_folder_with_v2_transforms_and_a_target_transform(self, folder):
        dataset = datasets.ImageFolder(
            folder,
            transform=v2.Compose([v2.ToImage(), v2.Resize((9, 9)), v2.RandomResizedCrop(6), v2.ToDtype(torch.float32)]),
            target_transform=lambda label: label + random.random(),
        )
        split = find_split(dataset)
        assert split.reused == ("load", "ToImage", "Resize")
        assert split.redone == ("RandomResizedCrop", "ToDtype", "target <lambda>")
        assert behaves_like(dataset, make_stages(dataset, split.conventions))

    def test_a_sequential_of_transforms(self):
        steps = torch.nn.Sequential(v2.Resize(8), v2.RandomCrop(4), torch.nn.Identity())
        dataset = Arrays(transform=steps)
        split, stages = proved(dataset)
        assert (split.reused, split.redone) == (("load", "Resize"), ("RandomCrop", "Identity"))
        assert behaves_like(dataset, stages)

    def test_fake_data(self):
        dataset = datasets.FakeData(5, (3, 12, 12), transform=v1.Compose([v1.Pad(2), v1.RandomVerticalFlip()]))
        split, stages = proved(dataset)
        assert (split.reused, split.redone) == (("load", "Pad"), ("RandomVerticalFlip",))
        assert behaves_like(dataset, stages)

    def test_all_deterministic_transforms_are_reused_and_nothing_redone(self, folder):
        dataset = datasets.ImageFolder(folder, transform=v1.Compose([v1.Resize((8, 8)), v1.ToTensor()]))
        split, stages = proved(dataset)
        assert (split.reused, split.redone) == (("load", "Resize", "ToTensor"), ())
        example = stages.load(0)
        assert stages.augment(0, example) is example
        assert behaves_like(dataset, stages)

    def test_without_any_transform_everything_is_reused(self, folder):
        split, stages = proved(datasets.ImageFolder(folder))
        assert (split.reused, split.redone) == (("load",), ())
        assert stages.load(0)[0].size == (26, 20)

    def test_a_target_is_cut_too(self, folder):
        dataset = datasets.ImageFolder(folder, transform=CROP_AND_FLIP, target_transform=v2.Identity())
        assert find_split(dataset).reused == ("load", "Resize", "target Identity")
        assert find_split(dataset).redone == ("RandomCrop", "RandomHorizontalFlip")

    def test_a_transform_set_after_construction_is_the_one_in_use(self, folder):
        dataset = datasets.ImageFolder(folder, transform=v1.RandomRotation(10))
        dataset.transform = v1.Compose([v1.Resize(8), v1.RandomCrop(4)])
        split, stages = proved(dataset)
        assert split.redone == ("RandomCrop",)
        assert behaves_like(dataset, stages)

    def test_a_pair_of_transforms_that_is_called_as_one(self):
        """COCO and others call ``transforms`` only, so that a ``transform`` set later does nothing."""
        dataset = Shapes(transform=v2.Compose([v2.Resize((8, 8)), v2.RandomCrop(4)]), target_transform=len)
        split, stages = proved(dataset)
        assert (split.reused, split.redone) == (("load", "Resize"), ("RandomCrop", "target len"))
        assert behaves_like(dataset, stages)

        dataset.transform = v2.RandomRotation(45)
        split, stages = proved(dataset)
        assert (split.reused, split.redone) == (("load", "Resize"), ("RandomCrop", "target len"))
        assert stages.load(0)[0].shape == (3, 8, 8)
        assert behaves_like(dataset, stages)

    def test_transforms_of_image_and_target_together(self):
        dataset = Shapes(v2.Compose([v2.Resize((10, 20)), v2.RandomHorizontalFlip(), v2.SanitizeBoundingBoxes()]))
        split, stages = proved(dataset)
        assert split.reused == ("load", "Resize")
        assert split.redone == ("RandomHorizontalFlip", "SanitizeBoundingBoxes")
        assert behaves_like(dataset, stages, uses=4)

        _, target = stages.load(0)
        assert target["boxes"].tolist() == [[4, 1, 8, 3]]  # twice as wide
        assert target["boxes"].canvas_size == (10, 20)
        seen = set()
        for use in range(20):
            seed(use)
            image, target = stages.augment(0, stages.load(0))
            flipped = bool(image[0, 2, 5] == 0)
            assert target["boxes"].tolist() == ([[12, 1, 16, 3]] if flipped else [[4, 1, 8, 3]])
            seen.add(flipped)
        assert seen == {True, False}

    def test_detection_data_wrapped_for_v2(self, tmp_path):
        dataset = datasets.wrap_dataset_for_transforms_v2(
            datasets.VOCDetection(
                voc_files(tmp_path),
                year="2012",
                image_set="train",
                transforms=v2.Compose([v2.Resize((20, 40)), v2.RandomHorizontalFlip(), v2.ToImage()]),
            )
        )
        split, stages = proved(dataset)
        assert (split.reused, split.redone) == (("load", "Resize"), ("RandomHorizontalFlip", "ToImage"))
        assert behaves_like(dataset, stages, uses=4)
        image, target = stages.load(1)
        assert image.size == (40, 20)
        assert type(target["boxes"]) is tv_tensors.BoundingBoxes
        assert target["boxes"].tolist() == [[4, 4, 16, 12]]

    def test_classification_data_wrapped_for_v2(self, folder):
        inner = datasets.ImageFolder(folder, transform=CROP_AND_FLIP)
        dataset = datasets.wrap_dataset_for_transforms_v2(inner)
        split, stages = proved(dataset)
        assert (split.reused, split.redone) == (("load", "Resize"), ("RandomCrop", "RandomHorizontalFlip"))
        assert behaves_like(dataset, stages)
        assert dataset._dataset.transform is None  # as torchvision left it

    @pytest.mark.parametrize(
        "name",
        [name for name, value in vars(v2).items() if isinstance(value, type) and name.startswith("Random")],
    )
    def test_random_classes_are_redone(self, name):
        transform = object.__new__(getattr(v2, name))  # nothing is called: no example is read
        torch.nn.Module.__init__(transform)
        dataset = datasets.FakeData(5, transform=v2.Compose([v2.Resize(8), transform, v2.ToImage()]))
        stages = make_stages(dataset)
        assert (stages.reused, stages.redone) == (("load", "Resize"), (name, "ToImage"))


class Shapes(datasets.VisionDataset):
    """A box drawn on an image, both made on the fly."""

    def __init__(self, transforms=None, **separate):
        super().__init__("", transforms=transforms, **separate)

    def __getitem__(self, index):
        image = tv_tensors.Image(torch.zeros(3, 10, 10))
        image[:, 1:3, 2:4] = 1
        boxes = tv_tensors.BoundingBoxes(torch.tensor([[2, 1, 4, 3]]), format="XYXY", canvas_size=(10, 10))
        target = {"boxes": boxes, "labels": torch.tensor([index])}
        if self.transforms is not None:
            image, target = self.transforms(image, target)
        return image, target

    def __len__(self):
        return 4


def voc_files(root):
    base = root / "VOCdevkit" / "VOC2012"
    for name in ("ImageSets/Main", "JPEGImages", "Annotations"):
        (base / name).mkdir(parents=True)
    (base / "ImageSets" / "Main" / "train.txt").write_text("a\nb\n")
    for name, left in (("a", 1), ("b", 2)):
        Image.new("RGB", (20, 10), (left, 0, 0)).save(base / "JPEGImages" / f"{name}.jpg")
        box = f"<xmin>{left}</xmin><ymin>2</ymin><xmax>8</xmax><ymax>6</ymax>"
        (base / "Annotations" / f"{name}.xml").write_text(
            f"<annotation><object><name>dog</name><bndbox>{box}</bndbox></object></annotation>"
        )
    return root


class TestOtherDataSets:
    @pytest.mark.parametrize("kind", [Arrays, Tripled])
    def test_the_first_element_of_a_tuple_is_transformed(self, kind):
        dataset = kind(transform=CROP_AND_FLIP)
        split, stages = proved(dataset)
        assert (split.reused, split.redone) == (("load", "Resize"), ("RandomCrop", "RandomHorizontalFlip"))
        assert behaves_like(dataset, stages)

    def test_a_sample_that_is_no_tuple_is_transformed_whole(self):
        class Landmarks(Arrays):
            """As in PyTorch's data loading tutorial."""

            def __getitem__(self, index):
                sample = {"image": self.image(index), "landmarks": np.arange(4.0) + index}
                return self.transform(sample) if self.transform else sample

        class RandomShift:
            def __call__(self, sample):
                by = np.random.randint(5)
                return {"image": sample["image"] + by, "landmarks": sample["landmarks"] + by}

        dataset = Landmarks(transform=v1.Compose([v2.Identity(), RandomShift()]))
        split, stages = proved_in_process(dataset)
        assert (split.reused, split.redone) == (("load", "Identity"), ("RandomShift",))
        assert behaves_like(dataset, stages)

    @pytest.mark.parametrize("transform", [CROP_AND_FLIP, None])
    def test_images_as_they_were_opened(self, folder, transform):
        class Files(Arrays):
            """Decoded by whoever looks at the pixels first."""

            def image(self, index):
                return Image.open(folder / "cat" / f"{index}.png")

        dataset = Files(size=3, transform=transform)
        split, stages = proved_in_process(dataset)
        assert split.reused == (("load", "Resize") if transform else ("load",))
        assert behaves_like(dataset, stages)

    def test_lists_and_namedtuples_keep_their_type(self):
        from collections import namedtuple

        Pair = namedtuple("Pair", ["image", "label"])

        class Listed(Arrays):
            def __getitem__(self, index):
                return [*super().__getitem__(index)]

        class Paired(Arrays):
            def __getitem__(self, index):
                return Pair(*super().__getitem__(index))

        for dataset in (Listed(transform=CROP_AND_FLIP), Paired(transform=CROP_AND_FLIP)):
            _, stages = proved_in_process(dataset)
            assert behaves_like(dataset, stages)

    @pytest.mark.parametrize("attribute", ["transform", "transforms"])
    def test_image_and_target_together(self, attribute):
        class Detection(Arrays):
            """As in torchvision's detection tutorial."""

            def __getitem__(self, index):
                target = {"mask": tv_tensors.Mask(torch.eye(6)), "index": index}
                return getattr(self, attribute)(tv_tensors.Image(self.image(index)), target)

        dataset = Detection(**{attribute: v2.Compose([v2.Resize((8, 6)), v2.RandomHorizontalFlip(0.01)])})
        split, stages = proved_in_process(dataset)
        assert split.conventions == (Convention(f"{attribute}(*sample)"),)
        assert (split.reused, split.redone) == (("load", "Resize"), ("RandomHorizontalFlip",))
        assert stages.load(2)[1]["mask"].shape == (8, 6)  # the target was resized with the image
        assert behaves_like(dataset, stages)

    def test_a_whole_tuple(self):
        class Wine(Arrays):
            def __getitem__(self, index):
                return self.transform((self.image(index), index))

        def add_noise(sample):
            return sample[0] + torch.rand(()), sample[1]

        dataset = Wine(transform=add_noise)
        split, stages = proved_in_process(dataset)
        assert split.redone == ("add_noise",)
        assert behaves_like(dataset, stages)

    def test_a_method_named_transform(self):
        class Noisy(Arrays):
            def __init__(self):
                super().__init__()
                del self.transform

            def transform(self, image):
                return image + torch.rand(()) + self.images[0, 0, 0, 0]

        dataset = Noisy()
        split, stages = proved_in_process(dataset)
        assert split.redone == ("transform",)
        assert behaves_like(dataset, stages)

    def test_a_subset_that_transforms_is_a_data_set_of_its_own(self):
        class Transformed(Subset):
            """Found in many Lightning projects: each part of a random_split with transforms of its own."""

            def __init__(self, subset, transform):
                super().__init__(subset.dataset, subset.indices)
                self.transform = transform

            def __getitem__(self, index):
                image, label = super().__getitem__(index)
                return self.transform(image), label

            def __getitems__(self, indices):
                return [self[index] for index in indices]

        part, _ = random_split(Arrays(transform=v2.Pad(1)), [4, 2])
        dataset = Transformed(part, CROP_AND_FLIP)
        split, stages = proved_in_process(dataset)
        assert (split.reused, split.redone) == (("load", "Resize"), ("RandomCrop", "RandomHorizontalFlip"))
        assert stages.load(0)[0].shape == (3, 8, 8)
        assert behaves_like(dataset, stages)

    def test_a_transform_with_a_generator_of_its_own(self):
        """As Albumentations: both reads must start from the same state, and the user's must not move."""

        class Shift:
            def __init__(self):
                self.rng = np.random.default_rng(5)
                self.py = random.Random(5)
                self.transforms = [Blend(self.rng)]

            def __call__(self, image):
                for transform in self.transforms:
                    image = transform(image)
                return image + self.rng.integers(1000) + self.py.randrange(1000)

        class Blend:
            def __init__(self, rng):
                self.rng = rng

            def __call__(self, image):
                return image.float() * self.rng.random()

        dataset = Arrays(transform=v2.Compose([v2.Resize(4), Shift()]))
        split, _ = proved_in_process(dataset)
        assert (split.reused, split.redone) == (("load", "Resize"), ("Shift",))
        assert dataset.transform.transforms[1].rng.random() == np.random.default_rng(5).random()
        assert dataset.transform.transforms[1].py.random() == random.Random(5).random()

    @pytest.mark.parametrize("with_mask", [False, True])
    @pytest.mark.parametrize("share", [0.01, 0.5])
    def test_image_and_mask_by_name(self, with_mask, share):
        """As Albumentations is called in most data sets."""

        class Flip:
            def __init__(self):
                self.rng = random.Random(4)

            def __call__(self, **data):
                if self.rng.random() < share:
                    data = {name: value.flip(-1) for name, value in data.items()}
                return {**data, "replay": None}

        class Segmentation(Arrays):
            def __getitem__(self, index):
                image = self.image(index)
                if with_mask:
                    done = self.transform(image=image, mask=image[0] > 100)
                    return done["image"], done["mask"], index
                return self.transform(image=image)["image"], image[0] > 100, index

        dataset = Segmentation(transform=Flip())
        split, stages = proved_in_process(dataset)
        assert (split.reused, split.redone) == (("load",), ("Flip",))
        assert dataset.transform.rng.random() == random.Random(4).random()

        image, mask = dataset.images[3], dataset.images[3][0] > 100
        dataset.transform.rng = Always()
        expected = (image.flip(-1), mask.flip(-1) if with_mask else mask, 3)
        assert same(stages.augment(3, stages.load(3)), expected)

    def test_other_names_are_refused(self):
        class Detection(Arrays):
            def __getitem__(self, index):
                done = self.transform(image=self.image(index), bboxes=[])
                return done["image"], done["bboxes"]

        with pytest.raises(SplitRefused, match=r"calls its transform by keyword \(image, bboxes\)"):
            find_split(Detection(transform=lambda **data: data))

    def test_a_transform_that_cannot_be_copied_deeply(self):
        class Guarded:
            def __init__(self):
                self.lock, self.rng = threading.Lock(), random.Random(0)

            def __call__(self, image):
                with self.lock:
                    return image + self.rng.randrange(100)

        split = find_split(Arrays(transform=Guarded()))
        assert split.redone == ("Guarded",)

    def test_placeholders_leave_a_data_set_that_has_no_index_zero_alone(self):
        class Keyed(Arrays):
            def __getitem__(self, key):
                return self.transform(self.image("abcdef".index(key))), key

        dataset = Keyed(transform=CROP_AND_FLIP)
        split = find_split(dataset, indices=["b", "e", "c"])
        assert split.redone == ("RandomCrop", "RandomHorizontalFlip")
        assert make_stages(dataset, split.conventions).load("d")[1] == "d"


class Always:
    def random(self):
        return 0.0


def proved_in_process(dataset):
    """As `proved`, for classes and functions that cannot be pickled."""
    split = find_split(dataset)
    return split, make_stages(dataset, split.conventions)


class TestNested:
    def test_subset_concat_and_random_split_in_any_order(self, folder):
        resized = v1.Compose([v1.Resize((9, 9)), v1.RandomCrop(4), v1.ToTensor()])
        padded = v1.Compose([v1.Pad(1), v1.RandomCrop(4), v1.ToTensor()])
        files = datasets.ImageFolder(folder, transform=resized)
        fakes = datasets.FakeData(7, (3, 12, 12), transform=padded)
        part, rest = random_split(files, [4, 2])
        for dataset in (
            Subset(files, [5, 0]),
            Subset(Subset(files, [5, 4, 3]), [2, 0]),
            part,
            ConcatDataset([files, fakes]),
            ConcatDataset([part, rest, fakes]),
            ConcatDataset([Subset(fakes, [6]), ConcatDataset([part, Subset(fakes, [])]), files]),
            Subset(ConcatDataset([files, fakes]), [12, 0, 5, 6]),
            random_split(ConcatDataset([part, fakes]), [6, 5])[1],
        ):
            split, stages = proved(dataset)
            assert set(split.reused) <= {"load", "Resize", "Pad"}
            assert split.redone == ("RandomCrop", "ToTensor")
            assert behaves_like(dataset, stages)

    def test_each_data_set_inside_is_proved_on_what_is_presented_of_it(self):
        read = {}

        class Recorded(Arrays):
            def image(self, index):
                read.setdefault(self.name, []).append(int(index))
                return super().image(index)

        a, b, c = (Recorded(transform=CROP_AND_FLIP, name=name) for name in "abc")
        inside = ConcatDataset([Subset(a, [4, 1, 2]), b, Subset(a, [3, 5])])
        find_split(Subset(ConcatDataset([inside, c]), [1, 9, 8, 4, 2, 6]))
        assert {name: sorted(set(indices)) for name, indices in read.items()} == {"a": [1, 2], "b": [3, 5]}
        assert all(read[name].count(index) == 2 for name in read for index in set(read[name]))

        read.clear()
        find_split(ConcatDataset([b, Subset(a, [2, 0]), c, Subset(b, [1, 4])]))
        assert {name: sorted(set(indices)) for name, indices in read.items()} == {
            "a": [0, 2],
            "b": [0, 4],
            "c": [0, 5],
        }

    def test_one_wrong_data_set_inside_is_enough_to_refuse(self):
        class Twice(Arrays):
            def __getitem__(self, index):
                return self.transform(self.transform(self.image(index))), index

        good, wrong = Arrays(transform=CROP_AND_FLIP), Twice(transform=v2.RandomHorizontalFlip(0.01))
        assert find_split(ConcatDataset([good, good])).redone == ("RandomCrop", "RandomHorizontalFlip")
        with pytest.raises(SplitRefused, match="calls its transform 2 times"):
            find_split(ConcatDataset([good, wrong]))
        with pytest.raises(SplitRefused, match="TensorDataset has neither"):
            find_split(ConcatDataset([good, TensorDataset(torch.zeros(3))]))

    def test_mixed_conventions(self):
        staged = StagedDataset.of(Arrays(), augment=flip_or_not)
        dataset = ConcatDataset([Arrays(transform=v2.RandomHorizontalFlip()), staged])
        split, stages = proved(dataset)
        assert split.conventions == (Convention.transform, Convention.protocol)
        assert split.redone == ("RandomHorizontalFlip", "augment")
        assert behaves_like(dataset, stages)


def flip_or_not(example):
    image, label = example
    return (image.flip(-1), label) if random.random() < 0.5 else (image, label)


class Staged(StagedDataset):
    def load(self, index):
        return torch.full((2,), float(index)), index

    def augment(self, example):
        return example[0] + torch.rand(2), example[1]

    def __len__(self):
        return 5


class ShapeOfStaged:
    """The protocol without the base class."""

    load, augment, __len__ = Staged.load, Staged.augment, Staged.__len__

    def __getitem__(self, index):
        return self.augment(self.load(index))


class TestStaged:
    @pytest.mark.parametrize(
        "dataset",
        [
            Staged(),
            ShapeOfStaged(),
            StagedDataset.of(Arrays(), augment=flip_or_not),
            Subset(Staged(), [3, 1]),
        ],
        ids=["inherited", "protocol", "named cut", "inside a subset"],
    )
    def test_the_stages_are_the_data_sets_own(self, dataset):
        split, stages = proved(dataset)
        assert (split.reused, split.redone) == (("load",), ("augment",))
        assert split.conventions == (Convention.protocol,)
        assert behaves_like(dataset, stages)

    def test_a_named_cut_may_stand_on_deterministic_transforms(self, folder):
        dataset = StagedDataset.of(
            datasets.ImageFolder(folder, transform=v1.Compose([v1.Resize((8, 8)), v1.PILToTensor()])),
            augment=flip_or_not,
        )
        _, stages = proved(dataset)
        assert stages.load(1)[0].shape == (3, 8, 8)
        assert behaves_like(dataset, stages)

    def test_a_generator_that_the_data_set_holds_may_augment(self):
        class OwnGenerator(Staged):
            def __init__(self):
                self.rng = np.random.default_rng(1)

            def augment(self, example):
                return example[0] + self.rng.random(), example[1]

        dataset = OwnGenerator()
        assert find_split(dataset).redone == ("augment",)
        assert dataset.rng.random() == np.random.default_rng(1).random()

    def test_a_load_that_draws_is_refused(self):
        class Drawing(Staged):
            def load(self, index):
                return torch.rand(2), index

        with pytest.raises(SplitRefused, match=r"would be reused \(load\) draws random numbers from torch"):
            find_split(Drawing())

    @pytest.mark.parametrize("kind", ["numpy", "random"])
    def test_all_global_states_are_watched(self, kind):
        class Drawing(Staged):
            def load(self, index):
                return torch.zeros(2) + (np.random.rand() if kind == "numpy" else random.random()), index

        with pytest.raises(SplitRefused, match=f"draws random numbers from {kind}"):
            find_split(Drawing())

    def test_a_load_that_draws_from_a_generator_that_the_data_set_holds_is_refused(self):
        class Drawing(Staged):
            rng = None

            def load(self, index):
                return torch.zeros(2) + self.rng.random(), index

        dataset = Drawing()
        dataset.rng = np.random.default_rng(0)
        with pytest.raises(SplitRefused, match="from a generator that the data set holds"):
            find_split(dataset)

    def test_an_augmentation_that_needs_what_the_last_load_left_is_refused(self):
        class Remembers(Staged):
            def load(self, index):
                self.last = index
                return super().load(index)

            def augment(self, example):
                return example[0] + self.last, example[1]

        with pytest.raises(SplitRefused, match=r"dataset\[0\] is not what .* return .* \(at \[0\]: tensors"):
            find_split(Remembers())

    def test_an_item_that_is_more_than_its_stages_is_refused(self):
        class More(Staged):
            def __getitem__(self, index):
                return super().__getitem__(index)[0]

        with pytest.raises(SplitRefused, match=r"dataset\[0\] is not what .* \(a Tensor and a tuple"):
            find_split(More())

    def test_an_item_that_draws_more_than_its_stages_is_refused_also_when_it_is_equal(self):
        class DrawsMore(Staged):
            def __getitem__(self, index):
                item = super().__getitem__(index)
                return item if random.random() < 2 else None

        with pytest.raises(SplitRefused, match=r"same random numbers .* by itself and in stages"):
            find_split(DrawsMore())


class TestLookAlikes:
    def test_attributes_that_are_not_callable(self):
        dataset = Arrays(transform=CROP_AND_FLIP, augment=True, load="data.csv")
        split, stages = proved(dataset)
        assert split.conventions == (Convention.transform,)
        assert behaves_like(dataset, stages)

    @pytest.mark.parametrize(
        "load",
        [
            lambda self, path: open(path),  # noqa: SIM115 - never called: open(0) would close standard input
            lambda self, image_file: open(image_file),  # noqa: SIM115
            lambda self, name, mode: open(name, mode),  # noqa: SIM115
            lambda self, name: {}[name],  # tried, and refused by the proof
        ],
        ids=["path", "file", "two arguments", "name"],
    )
    def test_an_unrelated_load_and_augment(self, load):
        kind = type("Unrelated", (Arrays,), {"load": load, "augment": lambda self, factor: self.images * factor})
        dataset = kind(transform=CROP_AND_FLIP)
        split, stages = proved_in_process(dataset)
        assert split.conventions == (Convention.transform,)
        assert split.redone == ("RandomCrop", "RandomHorizontalFlip")
        assert behaves_like(dataset, stages)

    def test_an_annotated_load(self):
        class Unrelated(Arrays):
            def load(self, name: str):
                raise AssertionError("called")

            def augment(self, factor):
                raise AssertionError("called")

        assert find_split(Unrelated(transform=CROP_AND_FLIP)).conventions == (Convention.transform,)

    def test_an_unrelated_load_and_augment_without_a_transform(self):
        class Unrelated(Arrays):
            def load(self, name):
                raise FileNotFoundError(name)

            def augment(self, factor):
                return factor

            def __getitem__(self, index):
                return self.image(index)

        dataset = Unrelated()
        del dataset.transform
        with pytest.raises(SplitRefused, match=r"loading .* raised FileNotFoundError: 0") as refused:
            find_split(dataset)
        assert isinstance(refused.value.__cause__, FileNotFoundError)

    def test_both_reasons_are_given_when_both_ways_fail(self):
        class Both(Arrays):
            def load(self, name):
                raise FileNotFoundError(name)

            def augment(self, factor):
                return factor

            def __getitem__(self, index):
                return self.transform(self.transform(self.image(index))), index

        with pytest.raises(SplitRefused, match=r"by load.*FileNotFoundError.*; by transform.* 2 times"):
            find_split(Both(transform=v2.RandomHorizontalFlip()))

    @pytest.mark.parametrize("value", ["resize", True, {"size": 3}])
    def test_a_transform_that_is_not_callable(self, value):
        class Configured(Arrays):
            def __getitem__(self, index):
                return self.image(index)

        with pytest.raises(SplitRefused, match="Configured has neither"):
            find_split(Configured(transform=value))


WRONG = {
    "twice": (lambda self, index: (self.transform(self.transform(self.image(index))), index), "2 times"),
    "on image and mask": (
        lambda self, index: (self.transform(self.image(index)), self.transform(self.image(index) > 9)),
        "2 times",
    ),
    "never": (lambda self, index: (self.image(index), index), "0 times where 1 would be expected"),
    "through another attribute": (
        lambda self, index: (self.hidden(self.image(index)), index),
        "0 times where 1 would be expected",
    ),
    "after another random one": (
        lambda self, index: (self.transform(self.hidden(self.image(index))), index),
        "draws random numbers from torch",
    ),
    "with more behind": (
        lambda self, index: (self.transform(self.image(index)).float() / 255, index),
        r"looks at what its transform returns \(float\)",
    ),
    "with an edit in place behind": (
        lambda self, index: (self.transform(self.image(index).float()).div_(255), index),
        r"looks at what its transform returns \(div_\)",
    ),
    "on the second element": (
        lambda self, index: (index, self.transform(self.image(index))),
        "without its transform",
    ),
    "by keyword": (
        lambda self, index: (self.transform(image=self.image(index)), index),
        r"by keyword \(image\)",
    ),
    "inside a dict": (
        lambda self, index: {"image": self.transform(self.image(index)), "label": index},
        "without its transform",
    ),
    "beside a draw of its own": (
        lambda self, index: (self.transform(self.image(index)), index + random.random()),
        "draws random numbers from random",
    ),
}


class Rare:
    """A flip that hardly ever happens, so that equal values prove nothing."""

    def __init__(self):
        self.flip = v2.RandomHorizontalFlip(1e-6)

    def __call__(self, image):
        return self.flip(image)


class TestRefused:
    @pytest.mark.parametrize("way", WRONG)
    def test_a_transform_that_is_used_in_another_way(self, way):
        use, reason = WRONG[way]
        kind = type("Wrong", (Arrays,), {"__getitem__": use})
        with pytest.raises(SplitRefused, match=reason) as refused:
            find_split(kind(transform=Rare(), hidden=Rare()))
        assert str(refused.value).endswith("or use insertion_point='after_augmentation'")
        assert "StagedDataset" in str(refused.value)
        assert "StagedDataset" not in refused.value.reason

    def test_a_transform_whose_draws_cannot_be_repeated(self):
        generator = random.Random(0)
        with pytest.raises(SplitRefused, match="differently when read again under the same seeds"):
            find_split(Arrays(transform=lambda image: image + generator.randrange(10**6)))

    def test_a_transform_that_cannot_be_replaced(self):
        class Fixed(Arrays):
            transform = property(lambda self: CROP_AND_FLIP, lambda self, value: None)

            def __setattr__(self, name, value):
                raise AttributeError(name)

        dataset = Fixed.__new__(Fixed)
        vars(dataset).update(images=torch.zeros(3, 1, 8, 8), reads=[])
        with pytest.raises(SplitRefused, match=r"Fixed\.transform cannot be replaced"):
            find_split(dataset)

    @pytest.mark.parametrize(
        ("dataset", "reason"),
        [
            (TensorDataset(torch.zeros(3)), "TensorDataset has neither load"),
            (Subset([1, 2, 3], [0]), "list has neither load"),
            (Subset(Arrays(transform=abs), []), "it holds no example"),
        ],
    )
    def test_nothing_to_split(self, dataset, reason):
        with pytest.raises(SplitRefused, match=reason):
            find_split(dataset)

    def test_a_stream(self):
        class Stream(IterableDataset):
            transform = abs

            def __iter__(self):
                return iter([1])

        with pytest.raises(SplitRefused, match="Stream is a stream"):
            make_stages(Stream())

    def test_an_example_that_cannot_be_copied(self):
        class Locked(Arrays):
            def __getitem__(self, index):
                return super().__getitem__(index)[0], threading.Lock()

        with pytest.raises(SplitRefused, match=r"augmenting dataset\[0\] .* TypeError: .*_thread.lock"):
            find_split(Locked(transform=CROP_AND_FLIP))

    def test_the_exception_is_the_same_after_pickling(self):
        refused = sent(SplitRefused("it is round"))
        assert refused.reason == "it is round"
        assert str(refused).startswith("the data set cannot be split before its augmentation: it is round. ")
        assert isinstance(refused, ValueError)


class TestExceptions:
    def test_the_data_sets_own_exception_comes_through(self):
        class Broken(Arrays):
            def __getitem__(self, index):
                raise OSError(f"cannot read {index}")

        with pytest.raises(OSError, match="cannot read 0"):
            find_split(Broken(transform=CROP_AND_FLIP))

    def test_the_transforms_own_exception_comes_through(self):
        with pytest.raises(ZeroDivisionError):
            find_split(Arrays(transform=lambda image: image + 1 // 0))

    def test_an_exception_of_the_stages_alone_is_a_refusal(self):
        class Picky(Arrays):
            def __getitem__(self, index):
                assert self.transform is CALLED  # a placeholder is not
                return self.transform(self.image(index)), index

        with pytest.raises(SplitRefused, match=r"loading dataset\[0\] .* raised Assertion") as got:
            find_split(Picky(transform=CALLED))
        assert isinstance(got.value.__cause__, AssertionError)


def CALLED(image):
    return image + torch.rand(())


class TestNoTrace:
    def test_the_users_objects_stay_as_they_were(self, folder):
        dataset = datasets.ImageFolder(folder, transform=CROP_AND_FLIP)
        subset = Subset(dataset, [1, 2])
        before = {id(one): dict(vars(one)) for one in (dataset, subset)}
        stages = make_stages(subset, find_split(subset).conventions)
        stages.augment(0, stages.load(0))
        assert {id(one): dict(vars(one)) for one in (dataset, subset)} == before
        assert dataset.transform is CROP_AND_FLIP

    @pytest.mark.parametrize("kind", [Arrays, type("Broken", (Arrays,), {"__getitem__": lambda self, index: 1 / 0})])
    def test_the_random_states_are_put_back(self, kind):
        seed(3)
        expected = torch.rand(1), np.random.rand(), random.random()
        seed(3)
        try:
            find_split(kind(transform=CROP_AND_FLIP))
        except ZeroDivisionError:
            assert kind is not Arrays
        assert (torch.rand(1), np.random.rand(), random.random()) == expected

    def test_each_example_is_read_once_by_itself_and_once_in_stages(self):
        reads = []

        class Recorded(Arrays):
            def image(self, index):
                reads.append(index)
                return super().image(index)

        find_split(Recorded(transform=CROP_AND_FLIP))
        assert reads == [0, 5, 0, 5]
        reads.clear()
        find_split(Subset(Recorded(transform=CROP_AND_FLIP), [4]))
        assert reads == [4, 4]

    def test_making_stages_reads_nothing(self):
        class Unreadable(Arrays):
            def __getitem__(self, index):
                raise AssertionError("read")

        for dataset in (Unreadable(transform=CROP_AND_FLIP), Staged()):
            assert make_stages(ConcatDataset([Subset(dataset, [0, 1]), dataset])).redone

    def test_stages_follow_what_a_worker_init_fn_has_set(self):
        dataset = Arrays(transform=v2.RandomHorizontalFlip())
        split = find_split(dataset)
        dataset.transform = v2.Compose([v2.Pad(1), v2.RandomVerticalFlip()])
        dataset.images = dataset.images + 1
        stages = make_stages(dataset, split.conventions)
        assert stages.redone == ("RandomVerticalFlip",)
        assert behaves_like(dataset, stages)

    def test_a_split_can_be_sent_to_workers(self):
        split = find_split(Arrays(transform=CROP_AND_FLIP))
        assert sent(split) == split
        assert str(split) == "reuse [load, Resize], redo [RandomCrop, RandomHorizontalFlip]"
        assert isinstance(split, Split)


class Zipped(Dataset):
    """Opens its file at the first read, as h5py users are told to, or has an object that does."""

    def __init__(self, path, held, transform=None):
        self.path, self.transform = path, transform
        self.archive = Archive(path) if held else None

    def read(self, index):
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.path)
        return np.frombuffer(self.archive.read(str(index)), dtype=np.uint8).copy()

    def is_open(self):
        handle = self.archive.opened if isinstance(self.archive, Archive) else self.archive
        return handle is not None

    def __getitem__(self, index):
        pixels = torch.from_numpy(self.read(index)).view(1, 2, 2)
        return self.transform(pixels) if self.transform else pixels

    def __len__(self):
        return 4


class Archive:
    def __init__(self, path):
        self.path, self.opened = path, None

    def read(self, name):
        if self.opened is None:
            self.opened = zipfile.ZipFile(self.path)
        return self.opened.read(name)


class InWorker(Dataset):
    """What a worker does, in short: make the stages at the first read, load once, augment."""

    def __init__(self, dataset, conventions):
        self.dataset, self.conventions, self.stages = dataset, conventions, None

    def __getitem__(self, index):
        if self.stages is None:
            self.stages = make_stages(self.dataset, self.conventions)
        return self.stages.augment(index, self.stages.load(index))

    def __len__(self):
        return len(self.dataset)


class TestLazilyOpenedFiles:
    @pytest.fixture(params=[False, True], ids=["in the data set", "in an object inside"])
    def dataset(self, request, tmp_path):
        with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
            for index in range(4):
                archive.writestr(str(index), bytes([index, index + 10, index + 20, index + 30]))
        augmentation = v2.Compose([v2.Pad(1), v2.RandomHorizontalFlip(1.0)])
        return Zipped(tmp_path / "data.zip", request.param, augmentation)

    def test_the_proof_opens_nothing_that_workers_would_inherit(self, dataset):
        find_split(ConcatDataset([Subset(dataset, [0, 1]), dataset]))
        assert not dataset.is_open()
        assert not sent(dataset).is_open()

    @pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
    def test_workers_open_it_themselves(self, dataset, context, workers):
        subset = Subset(dataset, [3, 2, 1, 0])
        split = find_split(subset)
        loader = DataLoader(
            InWorker(subset, split.conventions), batch_size=1, num_workers=workers, multiprocessing_context=context
        )
        pixels = [batch[0, 0, 1:3, 1:3].tolist() for batch in loader]
        # Padded, then flipped from left to right.
        assert pixels == [[[n + 10, n], [n + 30, n + 20]] for n in (3, 2, 1, 0)]


class Rows(Dataset):
    """A data set that reads whole batches."""

    calls = []  # noqa: RUF012 - of all copies

    def __init__(self, transform=None):
        self.transform = transform

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        rows = [torch.full((1, 1, 4), float(index)) for index in indices]
        if self.transform is not None:
            rows = [self.transform(row) for row in rows]
        return list(zip(rows, indices, strict=True))

    def __len__(self):
        return 20


class TestBatchedReading:
    @pytest.fixture(autouse=True)
    def _fresh_calls(self):
        Rows.calls.clear()

    def test_a_batch_stays_one_call(self):
        noise = v1.Compose([v2.Identity(), v2.GaussianNoise()]) if hasattr(v2, "GaussianNoise") else CALLED
        subset = Subset(Subset(Rows(transform=noise), range(10, 20)), [5, 3, 1])
        stages = make_stages(subset, find_split(subset).conventions)
        assert Rows.calls == [[15, 11], [15, 11]]  # by itself, and in stages

        Rows.calls.clear()
        loaded = stages.load_many([2, 0])
        assert Rows.calls == [[11, 15]]
        seed(1)
        augmented = [stages.augment(index, example) for index, example in zip([2, 0], loaded, strict=True)]
        seed(1)
        assert same(augmented, subset.__getitems__([2, 0]))

    def test_transforms_before_the_cut_are_applied_to_each_example(self):
        stages = make_stages(Rows(transform=v2.Compose([v2.Pad(1), v2.RandomHorizontalFlip()])))
        assert [image.shape for image, _ in stages.load_many([0, 1])] == [(1, 3, 6), (1, 3, 6)]

    def test_a_named_cut(self):
        dataset = StagedDataset.of(Rows(), augment=flip_or_not)
        split, stages = proved(dataset)
        assert split.redone == ("augment",)
        Rows.calls.clear()
        assert [label for _, label in stages.load_many([4, 6, 2])] == [4, 6, 2]
        assert Rows.calls == [[4, 6, 2]]

    def test_without_a_getitems_of_its_own_there_is_no_batched_loading(self):
        assert make_stages(Subset(Arrays(transform=CROP_AND_FLIP), [0, 1])).load_many is None

    def test_augmentation_of_a_whole_batch_at_once_is_refused(self):
        class Mixed(Rows):
            def __getitems__(self, indices):
                rows = torch.stack([torch.full((1, 1, 4), float(index)) for index in indices])
                if self.transform is not None:
                    rows = self.transform(rows)
                return list(zip(rows, indices, strict=True))

        with pytest.raises(SplitRefused, match=r"looks at what its transform returns \(__iter__\)"):
            find_split(Mixed(transform=v2.RandomHorizontalFlip()))


class TestClosedWhenCollected:
    def test_neither_the_proof_nor_stages_close_what_the_user_has_open(self, tmp_path):
        (tmp_path / "data").write_bytes(bytes(range(9)))

        class Closing(Arrays):
            def __init__(self, path, transform):
                super().__init__(transform=transform)
                self.file = open(path, "rb")  # noqa: SIM115 - held on purpose

            def __del__(self):
                self.file.close()

            def image(self, index):
                self.file.seek(index)
                return torch.full((1, 4, 4), self.file.read(1)[0])

        dataset = Closing(tmp_path / "data", CROP_AND_FLIP)
        split = find_split(dataset)
        stages = make_stages(dataset, split.conventions)
        assert stages.load(3)[0][0, 0, 0] == 3
        del stages
        assert dataset[4][0].unique().tolist() == [4]


def test_importing_the_splits_imports_neither_lightning_nor_torchvision_nor_pillow():
    program = (
        "import sys, types, pathlib\n"
        "package = types.ModuleType('lightning_echo')\n"  # its own __init__ may import more
        f"package.__path__ = [str(pathlib.Path({find_split.__code__.co_filename!r}).parents[1])]\n"
        "sys.modules['lightning_echo'] = package\n"
        "from lightning_echo.splitting.splits import find_split\n"
        "from torch.utils.data import Dataset\n"
        "class Own(Dataset):\n"
        "    transform = staticmethod(lambda value: value)\n"
        "    def __getitem__(self, index): return self.transform(index)\n"
        "    def __len__(self): return 2\n"
        "print(find_split(Own()).redone)\n"
        "print(sorted({'lightning', 'torchvision', 'PIL'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["('<lambda>',)", "[]"]
