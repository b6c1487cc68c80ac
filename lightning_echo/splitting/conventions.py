"""How a data set calls its transforms: what it may follow by the look of it.

A data set either has the stages as methods, or it follows torchvision's convention: an attribute holds what is applied to each
example. An attribute does not say how it is called: ``transform`` may get the image, the image and the target, the whole sample,
or, as with Albumentations, image and mask by name. The usual way is assumed first, and the proof finds out.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from lightning_echo.insertion import Needs, earliest
from lightning_echo.splitting.chains import Transform
from lightning_echo.splitting.staged import StagedDataset, is_staged

ATTRIBUTES = ("transform", "target_transform", "transforms")
_STANDARD_TRANSFORM = ("torchvision.datasets.vision", "StandardTransform")  # a pair, to be called as one


class SplitRefused(ValueError):
    """A data set cannot be split before its augmentation.

    Attributes:
        reason: why, without the way out that the message adds.
    """

    where = "before its augmentation"
    way_out = (
        "Subclass lightning_echo.StagedDataset (or implement its load(index) and augment(example)), name the cut "
        f"with StagedDataset.of(dataset, augment=...), or use {earliest(Needs.examples).option}"
    )

    @property
    def reason(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:  # not in args: a worker's exception is built again from its message
        if self.reason.startswith("Caught "):  # as torch says of a worker's, which has said the rest already
            return self.reason
        return f"the data set cannot be split {self.where}: {self.reason}. {self.way_out}"


class Convention(str, Enum):
    """How a data set is taken apart: by its own methods, or by an attribute and what it is called with."""

    protocol = "load(index) and augment(example)"
    transform = "transform(image) and target_transform(target)"
    transform_joint = "transform(*sample)"
    transform_whole = "transform(sample)"
    transform_image = "transform(image=image)['image']"
    transform_image_mask = "transform(image=image, mask=mask)['image'], ['mask']"
    transforms = "transforms(image)"
    transforms_joint = "transforms(*sample)"
    read = "read(index) and decode(raw)"  # this one and the next: after_read, see raw.py
    folder = "files that torchvision's default loader decodes"


def conventions_of(dataset: Any) -> list[Convention]:
    """Returns what ``dataset`` may follow by the look of it, the likeliest first; nothing if it is opaque."""
    found = [Convention.protocol] if is_staged(dataset) else []
    if isinstance(dataset, StagedDataset):
        return found  # it says so itself
    transform, target_transform, transforms = (callable_of(dataset, name) for name in ATTRIBUTES)
    if transform is not None or target_transform is not None:  # not by their truth: MONAI's may be empty
        found.append(Convention.transform)
    if transforms is not None and not _is_pair_of(transforms, transform, target_transform):
        found.append(Convention.transforms_joint)
        if not is_pair(transforms):
            found.append(Convention.transforms)
    if transform is not None:
        found += [Convention.transform_joint, Convention.transform_whole, *NAMES]
    if not found and any(getattr(dataset, attribute_of(dataset, name), False) is None for name in ATTRIBUTES):
        found.append(Convention.transform)  # it has a place for transforms, and none is there
    return found


def callable_of(dataset: Any, name: str) -> Transform | None:
    """Returns the attribute of that name, public or not, if it can be called."""
    value = getattr(dataset, attribute_of(dataset, name), None)
    return value if callable(value) else None


def attribute_of(dataset: Any, name: str) -> str:
    """Returns where a data set keeps a transform: TorchIO's in ``_transform``. A method of that name is none."""
    private = f"_{name}"
    return private if private in getattr(dataset, "__dict__", {}) and not hasattr(dataset, name) else name


def is_pair(transforms: Any) -> bool:
    """Whether torchvision made ``transforms`` of a transform of the image and one of the target."""
    return (type(transforms).__module__, type(transforms).__qualname__) == _STANDARD_TRANSFORM


def _is_pair_of(transforms: Any, transform: Transform | None, target_transform: Transform | None) -> bool:
    """Whether torchvision made ``transforms`` of just these two, so that it says nothing new."""
    return is_pair(transforms) and transforms.transform is transform and transforms.target_transform is target_transform


NAMES = {Convention.transform_image: ("image",), Convention.transform_image_mask: ("image", "mask")}


def elements_of(sample: Any) -> tuple[Any, ...]:
    """Returns what a sample is made of."""
    return tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)


def like(sample: Any, elements: list[Any]) -> Any:
    """Returns ``elements`` as what `elements_of` took them from."""
    if not isinstance(sample, (tuple, list)):
        return elements[0]
    return elements if isinstance(sample, list) else tuple.__new__(type(sample), elements)
