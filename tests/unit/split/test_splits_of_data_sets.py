"""Public data sets are split as they are: torchvision's, and those that follow other conventions.

The expectation is always the data set itself, under the same seeds.
"""

import random
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from split_cases import CROP_AND_FLIP, Always, Arrays, Tripled, behaves_like, proved, proved_in_process, same, seed
from torch.utils.data import Subset, random_split
from torchvision import datasets, tv_tensors
from torchvision import transforms as v1
from torchvision.transforms import v2

from lightning_echo.split.describe import Convention, SplitRefused
from lightning_echo.split.prove import find_split, make_stages


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
