"""Everything random comes after the cut: every class of torchvision's transforms, v1 and v2."""

import inspect
import random
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from lightning_echo.split.describe import cut_chain, names_of

# Written down from torchvision's documentation, and checked below against what draws random numbers.
DETERMINISTIC_V2 = {
    *("CenterCrop", "ClampBoundingBoxes", "ClampKeyPoints", "ConvertBoundingBoxFormat", "ConvertImageDtype"),
    *("FiveCrop", "Grayscale", "Identity", "LinearTransformation", "Normalize", "PILToTensor", "Pad", "RGB"),
    *("Resize", "SanitizeBoundingBoxes", "SanitizeKeyPoints", "SetClampingMode", "TenCrop", "ToDtype"),
    *("ToImage", "ToPILImage", "ToPureTensor", "ToTensor", "UniformTemporalSubsample"),
}
CONTAINERS = {"Compose"}  # taken apart
ABSTRACT = {"Transform"}

CLASSES_V2 = {
    name: value
    for name, value in vars(v2).items()
    if inspect.isclass(value) and issubclass(value, v2.Transform) and name not in CONTAINERS | ABSTRACT
}
RANDOM_V2 = sorted(CLASSES_V2.keys() - DETERMINISTIC_V2)

# What the classes that cannot be made without arguments are made with.
ARGUMENTS = {
    "AugMix": {},
    "CenterCrop": {"size": 8},
    "ClampKeyPoints": {},
    "ConvertBoundingBoxFormat": {"format": "XYWH"},
    "CutMix": {"num_classes": 3},
    "ElasticTransform": {"sigma": 1.0},
    "FiveCrop": {"size": 4},
    "GaussianBlur": {"kernel_size": 3},
    "JPEG": {"quality": (10, 90)},
    "Lambda": {"lambd": lambda value: value + torch.rand(())},
    "LinearTransformation": {"transformation_matrix": torch.eye(300), "mean_vector": torch.zeros(300)},
    "MixUp": {"num_classes": 3},
    "Normalize": {"mean": [0.5] * 3, "std": [0.5] * 3},
    "Pad": {"padding": 1},
    "RandomAffine": {"degrees": 10},
    "RandomApply": {"transforms": [v2.Identity()]},
    "RandomChoice": {"transforms": [v2.Identity(), v2.Identity()]},
    "RandomCrop": {"size": 4},
    "RandomOrder": {"transforms": [v2.Identity(), v2.Identity()]},
    "RandomPosterize": {"bits": 4},
    "RandomResize": {"min_size": 4, "max_size": 8},
    "RandomResizedCrop": {"size": 4},
    "RandomRotation": {"degrees": 10},
    "RandomShortestSize": {"min_size": [4, 8]},
    "RandomSolarize": {"threshold": 0.5},
    "RandomAdjustSharpness": {"sharpness_factor": 2.0},
    "Resize": {"size": 8},
    "ScaleJitter": {"target_size": (40, 40)},
    "SetClampingMode": {"clamping_mode": "soft"},
    "TenCrop": {"size": 4},
    "ToDtype": {"dtype": torch.float32},
    "UniformTemporalSubsample": {"num_samples": 2},
}


def made(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ToTensor is deprecated
        return CLASSES_V2[name](**ARGUMENTS.get(name, {}))


def sample_for(name):
    image = tv_tensors.Image(torch.randint(0, 255, (3, 10, 10), dtype=torch.uint8))
    boxes = tv_tensors.BoundingBoxes(torch.tensor([[1.0, 1, 6, 6]]), format="XYXY", canvas_size=(10, 10))
    if name in ("Normalize", "LinearTransformation", "GaussianNoise"):
        return image.float() / 255
    if name in ("CutMix", "MixUp"):
        return torch.rand(2, 3, 10, 10), torch.tensor([0, 1])
    if name in ("PILToTensor", "ToTensor", "AugMix", "ToImage"):
        return Image.new("RGB", (10, 10), (1, 2, 3))
    if name == "UniformTemporalSubsample":
        return tv_tensors.Video(torch.zeros(4, 3, 10, 10))
    if "Box" in name or name in ("RandomIoUCrop", "SetClampingMode"):
        return {"image": image, "boxes": boxes, "labels": torch.tensor([1])}
    if "KeyPoints" in name:
        points = tv_tensors.KeyPoints(torch.tensor([[1.0, 2]]), canvas_size=(10, 10))
        return {"image": image, "points": points, "labels": torch.tensor([1])}
    return image


def draws(transform, sample):
    """Whether one of some calls moves a global random state."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for _ in range(5):
        transform(*sample) if isinstance(sample, tuple) else transform(sample)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    return not torch.equal(states[0], after[0]) or states[1:] != after[1:]


@pytest.mark.parametrize("name", sorted(CLASSES_V2))
def test_the_list_of_deterministic_classes_above_says_what_draws(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drew = draws(made(name), sample_for(name))
    assert drew == (name in RANDOM_V2)


@pytest.mark.parametrize("name", RANDOM_V2)
def test_every_random_class_of_v2_comes_after_the_cut(name):
    transform, before, behind = made(name), v2.Resize(10), v2.ToImage()
    for joined in (v2.Compose, v1.Compose, lambda members: torch.nn.Sequential(*members)):
        assert cut_chain(joined([before, transform, behind])) == ([before], [transform, behind])
    assert cut_chain(transform) == ([], [transform])


@pytest.mark.parametrize("name", sorted(CLASSES_V2.keys() & DETERMINISTIC_V2))
def test_every_deterministic_class_of_v2_comes_before_the_cut(name):
    transform, flip = made(name), v2.RandomHorizontalFlip()
    assert cut_chain(v2.Compose([transform, flip, transform])) == ([transform], [flip, transform])


DETERMINISTIC_V1 = {
    *("CenterCrop", "ConvertImageDtype", "FiveCrop", "Grayscale", "LinearTransformation", "Normalize"),
    *("PILToTensor", "Pad", "Resize", "TenCrop", "ToPILImage", "ToTensor"),
}
# Bare objects: only the class is looked at, and none of these is taken for deterministic.
RANDOM_V1 = [
    name
    for name, value in vars(v1).items()
    if inspect.isclass(value)
    and value.__module__.startswith("torchvision.transforms.")
    and name not in DETERMINISTIC_V1 | {"Compose", "AutoAugmentPolicy", "InterpolationMode"}
]


@pytest.mark.parametrize("name", RANDOM_V1)
def test_every_random_class_of_v1_comes_after_the_cut(name):
    transform = object.__new__(getattr(v1, name))
    reused, redone = cut_chain(v1.Compose([v1.Resize(4), transform, v1.ToTensor()]))
    assert [type(one) for one in reused] == [v1.Resize]
    assert redone[0] is transform
    assert len(redone) == 2


def test_the_classes_are_found_in_the_modules_at_all():
    assert {"RandomHorizontalFlip", "ColorJitter", "GaussianNoise", "RandAugment", "CutMix"} <= set(RANDOM_V2)
    assert {"RandomHorizontalFlip", "ColorJitter", "RandAugment", "Lambda", "RandomApply"} <= set(RANDOM_V1)


def test_the_deterministic_classes_of_v1_come_before_the_cut():
    transforms = [
        v1.Resize(8),
        v1.CenterCrop(6),
        v1.Pad(2),
        v1.Grayscale(3),
        v1.ToTensor(),
        v1.PILToTensor(),
        v1.ToPILImage(),
        v1.ConvertImageDtype(torch.float32),
        v1.Normalize([0.5], [0.5], inplace=True),
        v1.FiveCrop(2),
        v1.TenCrop(2),
        v1.LinearTransformation(torch.eye(2), torch.zeros(2)),
    ]
    assert cut_chain(v1.Compose(transforms)) == (transforms, [])
    assert {type(transform).__name__ for transform in transforms} == DETERMINISTIC_V1


def test_nested_containers_are_taken_apart():
    a, b, c, d = v2.Resize(4), v2.CenterCrop(3), v2.RandomCrop(2), v2.Pad(1)
    nested = v2.Compose([a, v1.Compose([torch.nn.Sequential(b), v2.Compose([c])]), d])
    assert cut_chain(nested) == ([a, b], [c, d])


def test_what_only_holds_deterministic_transforms_at_random_is_random():
    transform = v2.RandomApply([v2.Resize(4)])
    assert cut_chain(transform) == ([], [transform])


def test_subclasses_functions_and_lambdas_count_as_random():
    class Resize(v2.Resize):
        pass

    class Compose(v1.Compose):
        pass

    for transform in (Resize(4), Compose([v1.Resize(4)]), v1.Lambda(abs), abs, lambda image: image):
        assert cut_chain(v2.Compose([v2.Pad(1), transform]))[1] == [transform]


def test_deterministic_classes_that_call_the_users_code_count_as_random():
    hooked, asked = v2.Resize(4), v2.SanitizeBoundingBoxes(labels_getter=lambda sample: sample[1]["labels"])
    hooked.register_forward_hook(lambda module, args, output: output)
    container = v2.Compose([v2.Resize(4)])
    container.register_forward_pre_hook(lambda module, args: None)
    for transform in (hooked, asked, container):
        assert cut_chain(transform) == ([], [transform])
    named = v2.SanitizeBoundingBoxes(labels_getter=None)
    assert cut_chain(named) == ([named], [])


def test_a_scripted_transform_counts_as_random():
    class Scripted(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated in newer versions
        scripted = torch.jit.script(Scripted())
    assert cut_chain(scripted)[0] == []


def test_without_a_transform_there_is_nothing():
    assert cut_chain(None) == ([], [])


def test_names_are_those_of_classes_and_functions():
    def brighten(image):
        return image

    names = [name for one in (v2.RandomResizedCrop(4), brighten, torch.nn.Identity()) for name in names_of(one)]
    assert names == ["RandomResizedCrop", "brighten", "Identity"]
