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

from lightning_echo.split.describe import cut_chain, is_deterministic

# Written down from torchvision's documentation, with the arguments that they are made with; checked below against what draws.
DETERMINISTIC = {
    v1: {
        "CenterCrop": {"size": 6},
        "ConvertImageDtype": {"dtype": torch.float32},
        "FiveCrop": {"size": 2},
        "Grayscale": {},
        "LinearTransformation": {"transformation_matrix": torch.eye(300), "mean_vector": torch.zeros(300)},
        "Normalize": {"mean": [0.5] * 3, "std": [0.5] * 3, "inplace": True},
        "PILToTensor": {},
        "Pad": {"padding": 1},
        "Resize": {"size": 8},
        "TenCrop": {"size": 4},
        "ToPILImage": {},
        "ToTensor": {},
    },
    v2: {
        "ClampBoundingBoxes": {},
        "ClampKeyPoints": {},
        "ConvertBoundingBoxFormat": {"format": "XYWH"},
        "Identity": {},
        "RGB": {},
        "SanitizeBoundingBoxes": {},
        "SanitizeKeyPoints": {},
        "SetClampingMode": {"clamping_mode": "soft"},
        "ToDtype": {"dtype": torch.float32},
        "ToImage": {},
        "ToPureTensor": {},
        "UniformTemporalSubsample": {"num_samples": 2},
    },
}
DETERMINISTIC[v2] |= DETERMINISTIC[v1]
CLASSES = {
    (module, name): value
    for module in (v1, v2)
    for name, value in vars(module).items()
    if inspect.isclass(value)
    and value.__module__.startswith("torchvision.transforms.")
    and name not in {"Compose", "Transform", "AutoAugmentPolicy", "InterpolationMode"}  # taken apart, abstract, no transforms
}


def ids(value):
    return value if isinstance(value, str) else value.__name__.rpartition(".")[2]


@pytest.mark.parametrize(("module", "name"), CLASSES, ids=ids)
def test_every_class_of_torchvision_comes_on_its_side_of_the_cut(module, name):
    transform = object.__new__(CLASSES[module, name])  # bare: only the class is looked at
    if isinstance(transform, torch.nn.Module):
        torch.nn.Module.__init__(transform)
    before, flip = v2.Resize(10), v2.RandomHorizontalFlip()
    is_before = name in DETERMINISTIC[module]
    for joined in (module.Compose, lambda members: torch.nn.Sequential(*members)):
        if joined is module.Compose or isinstance(transform, torch.nn.Module):
            reused, redone = cut_chain(joined([before, transform, flip]))
            assert [id(each) for each in reused] == [id(before), id(transform)][: 2 if is_before else 1]
            assert [id(each) for each in redone] == [id(transform), id(flip)][1 if is_before else 0 :]


def sample_for(name):
    image = tv_tensors.Image(torch.randint(0, 255, (3, 10, 10), dtype=torch.uint8))
    boxes = tv_tensors.BoundingBoxes(torch.tensor([[1.0, 1, 6, 6]]), format="XYXY", canvas_size=(10, 10))
    points = tv_tensors.KeyPoints(torch.tensor([[1.0, 2]]), canvas_size=(10, 10)) if hasattr(tv_tensors, "KeyPoints") else None
    if name in ("Normalize", "LinearTransformation"):
        return image.float() / 255
    if name in ("PILToTensor", "ToTensor", "ToImage"):
        return Image.new("RGB", (10, 10), (1, 2, 3))
    if name == "UniformTemporalSubsample":
        return tv_tensors.Video(torch.zeros(4, 3, 10, 10))
    if "Box" in name or name == "SetClampingMode":
        return {"image": image, "boxes": boxes, "labels": torch.tensor([1])}
    return {"image": image, "points": points, "labels": torch.tensor([1])} if "KeyPoints" in name else image


@pytest.mark.parametrize("name", [name for name in DETERMINISTIC[v2] if hasattr(v2, name)])
@pytest.mark.filterwarnings("ignore::UserWarning")  # ToTensor is deprecated
def test_what_counts_as_deterministic_draws_nothing(name):
    transform, sample = getattr(v2, name)(**DETERMINISTIC[v2][name]), sample_for(name)
    assert is_deterministic(transform)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for _ in range(5):
        transform(sample)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_nested_containers_are_taken_apart():
    a, b, c, d = v2.Resize(4), v2.CenterCrop(3), v2.RandomCrop(2), v2.Pad(1)
    nested = v2.Compose([a, v1.Compose([torch.nn.Sequential(b), v2.Compose([c])]), d])
    assert cut_chain(nested) == ([a, b], [c, d])
    assert cut_chain(None) == ([], [])


def scripted():
    class Scripted(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated in newer versions
        return torch.jit.script(Scripted())


def hooked(transform, register="register_forward_hook"):
    getattr(transform, register)(lambda *args: None)
    return transform


@pytest.mark.parametrize(
    "make",
    [
        lambda: v2.RandomApply([v2.Resize(4)]),
        lambda: type("Resize", (v2.Resize,), {})(4),
        lambda: type("Compose", (v1.Compose,), {})([v1.Resize(4)]),
        lambda: v1.Lambda(abs),
        lambda: abs,
        lambda: hooked(v2.Resize(4)),
        lambda: hooked(v2.Compose([v2.Resize(4)]), "register_forward_pre_hook"),
        lambda: v2.SanitizeBoundingBoxes(labels_getter=lambda sample: sample[1]["labels"]),
        scripted,
    ],
    ids=["at random", "subclass", "own container", "Lambda", "function", "hook", "hooked container", "labels_getter", "scripted"],
)
def test_what_may_run_code_of_others_counts_as_random(make):
    pad, transform = v2.Pad(1), make()
    assert cut_chain(v2.Compose([pad, transform])) == ([pad], [transform])
