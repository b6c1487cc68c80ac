"""Where a list of transforms is cut: before its first random one.

What stands before the cut is the same each time and is reused; from the first random transform on, all is
redone. Deterministic is only what stands in a list of exact classes, v1 and v2. Everything else counts as
random: subclasses, ``Lambda``, functions, containers with anything else in them. Nothing less is safe:
RandomHorizontalFlip, RandAugment, GaussianNoise and a dozen other random classes of v2 show no sign from
outside, while a transform taken for random by mistake costs only time.

Classes are known by qualified name, so that torchvision need not be imported. MONAI's say themselves whether they are random
(``monai.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_echo.splitting import monai

Transform = Callable[..., Any]

_CONTAINERS = frozenset(
    {
        "torch.nn.modules.container.Sequential",
        "torchvision.transforms.transforms.Compose",
        "torchvision.transforms.v2._container.Compose",
    }
)

_DETERMINISTIC_BY_MODULE = {
    "torch.nn.modules.linear": "Identity",
    "torchvision.transforms.transforms": """
        CenterCrop ConvertImageDtype FiveCrop Grayscale LinearTransformation Normalize PILToTensor Pad Resize
        TenCrop ToPILImage ToTensor
        """,
    "torchvision.transforms._transforms_video": "CenterCropVideo NormalizeVideo ToTensorVideo",
    # What the transforms of a set of weights are made of.
    "torchvision.transforms._presets": """
        ImageClassification ObjectDetection SemanticSegmentation VideoClassification
        """,
    "torchvision.transforms.v2._color": "Grayscale RGB",
    "torchvision.transforms.v2._deprecated": "ToTensor",
    "torchvision.transforms.v2._geometry": "CenterCrop FiveCrop Pad Resize TenCrop",
    "torchvision.transforms.v2._meta": """
        ClampBoundingBoxes ClampKeyPoints ConvertBoundingBoxFormat SetClampingMode
        """,
    "torchvision.transforms.v2._misc": """
        ConvertImageDtype Identity LinearTransformation Normalize SanitizeBoundingBoxes SanitizeKeyPoints
        ToDtype
        """,
    "torchvision.transforms.v2._temporal": "UniformTemporalSubsample",
    "torchvision.transforms.v2._type_conversion": "PILToTensor ToImage ToPILImage ToPureTensor",
}
_DETERMINISTIC = frozenset(f"{module}.{name}" for module, names in _DETERMINISTIC_BY_MODULE.items() for name in names.split())


def cut(transform: Transform | None) -> tuple[list[Transform], list[Transform]]:
    """Returns the transforms before the first random one and the rest, containers taken apart.

    >>> cut(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout(), torch.nn.Identity()))
    ([Identity()], [Dropout(p=0.5, inplace=False), Identity()])
    """
    transforms = [] if transform is None else _taken_apart(transform)
    for position, single in enumerate(transforms):
        if not is_deterministic(single):
            return transforms[:position], transforms[position:]
    return transforms, []


def is_deterministic(transform: Transform) -> bool:
    """Whether ``transform`` stands in the list and calls nobody else's code, or is one of MONAI's that does neither."""
    if isinstance(transform, monai.Part):
        return transform.is_first
    return _is_listed(transform) or monai.is_deterministic(transform, _is_listed)


def _is_listed(transform: Transform) -> bool:
    return (
        _qualified_name(transform) in _DETERMINISTIC
        and not _has_hooks(transform)
        and not callable(getattr(transform, "labels_getter", None))  # SanitizeBoundingBoxes: the user's function
    )


def names_in(transform: Transform) -> tuple[str, ...]:
    """Returns what people call ``transform``, or those that it consists of: a function's own name, else that of the class."""
    if isinstance(transform, monai.Part):
        return transform.names
    return (str(getattr(transform, "__name__", type(transform).__name__)),)


def put_in_place(transform: Transform | None, keep: Transform) -> Transform:
    """Returns what can be put in the place of ``transform``: ``keep``, or what looks like a ``transform`` and calls it."""
    return monai.stand_in(transform, keep, _is_listed) if monai.is_compose(transform) else keep


def chained(transforms: list[Transform], joint: bool) -> Transform | None:
    """Returns one function that applies ``transforms`` in order, None if there is none.

    Args:
        transforms: what `cut` returned.
        joint: whether each takes and returns several values (image and target), as v2 transforms may.
    """
    if len(transforms) < 2:
        return transforms[0] if transforms else None

    def one_value(value: Any) -> Any:
        for transform in transforms:
            value = transform(value)
        return value

    def several_values(*values: Any) -> Any:
        for transform in transforms:
            values = transform(*values)
        return values

    return several_values if joint else one_value


def _taken_apart(transform: Transform) -> list[Transform]:
    if monai.is_compose(transform):
        return list(monai.parts_of(transform, _is_listed))
    if _qualified_name(transform) not in _CONTAINERS or _has_hooks(transform):
        return [transform]
    members: Any = transform if isinstance(transform, torch.nn.Sequential) else transform.transforms  # type: ignore[attr-defined]
    return [single for member in members for single in _taken_apart(member)]


def _qualified_name(transform: Transform) -> str:
    return f"{type(transform).__module__}.{type(transform).__qualname__}"


def _has_hooks(transform: Transform) -> bool:
    return isinstance(transform, torch.nn.Module) and bool(transform._forward_hooks or transform._forward_pre_hooks)
