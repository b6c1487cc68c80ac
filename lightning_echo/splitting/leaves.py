"""Stages of a data set that follows a convention: its transforms are taken out and cut in two.

A shallow copy gets another function in place of each transform (not None: many data sets call their transform without asking),
which keeps what it is called with (watch.py). That is the source; the transforms before the cut are applied to it once, the
others for each use.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static
from types import MemberDescriptorType
from typing import Any

from lightning_echo.protecting.copies import shallow_copy
from lightning_echo.protecting.holders import blank
from lightning_echo.splitting.chains import Transform, chained, cut_chain, names_in, put_in_place
from lightning_echo.splitting.conventions import (
    ATTRIBUTES,
    NAMES,
    Convention,
    SplitRefused,
    attribute_of,
    callable_of,
    elements_of,
    is_pair,
    like,
)
from lightning_echo.splitting.staged import batched
from lightning_echo.splitting.stages import ProtocolStages, Stages, then, unchanged
from lightning_echo.splitting.watch import LookedAt, Placeholder, Watch


def leaf_stages(dataset: Any, convention: Convention) -> Stages:
    """Returns the stages of a data set that is no ``Subset`` or ``ConcatDataset``, without reading from it.

    Args:
        dataset: left as it is.
        convention: one of `conventions_of`.

    Raises:
        SplitRefused: the transforms cannot be taken out; from ``load``: they are called otherwise than ``convention`` says.
    """
    if convention is Convention.protocol:
        return ProtocolStages(dataset)
    image, target, way = _transforms_of(dataset, convention)
    (image_reused, image_redone), (target_reused, target_redone) = cut_chain(image), cut_chain(target)
    watch = Watch(convention, in_order=bool(image_redone and target_redone))
    source = _without_transforms(dataset, watch.stand_in)
    load, load_many = watch.watched(source.__getitem__), batched(source)
    if load_many is not None:
        load_many = watch.watched_many(load_many)
    before = _on_sample(image_reused, target_reused, way)
    after = _on_sample(image_redone, target_redone, way)
    return Stages(
        load if before is None else lambda index: before(load(index)),
        unchanged if after is None else lambda index, example: after(example),
        reused=("load", *names_of(image_reused, target_reused)),
        redone=names_of(image_redone, target_redone),
        load_many=then(load_many, before),
    )


def _transforms_of(dataset: Any, convention: Convention) -> tuple[Transform | None, Transform | None, Convention]:
    """Returns what is applied to the image (or to all), what to the target alone, and in which way."""
    if convention is Convention.transform:
        return callable_of(dataset, "transform"), callable_of(dataset, "target_transform"), convention
    if not convention.name.startswith("transforms"):
        return callable_of(dataset, "transform"), None, convention
    transforms: Any = callable_of(dataset, "transforms")
    if is_pair(transforms):
        return transforms.transform, transforms.target_transform, Convention.transform
    return transforms, None, convention


def _without_transforms(dataset: Any, stand_in: Callable[[str], Transform]) -> Any:
    """Returns a shallow copy with another function in the place of each transform, and leaves everything else as it was."""
    source = shallow_copy(dataset)
    if source is dataset or getattr(source, "__dict__", None) is getattr(dataset, "__dict__", source):
        raise SplitRefused(f"a copy of {type(dataset).__name__} is not independent of it")
    for name in ATTRIBUTES:
        if (transform := callable_of(dataset, name)) is not None:
            _replace(source, dataset, attribute_of(dataset, name), put_in_place(transform, stand_in(name)))
    return source


def _replace(source: Any, original: Any, name: str, value: Transform) -> None:
    """Sets an attribute of a shallow copy, where Python finds it first and nobody else does: no code of the data set's runs.

    Raises:
        SplitRefused: It cannot be set, or not for the copy alone.
    """
    what, descriptor = f"{type(original).__name__}.{name}", getattr_static(type(original), name, None)
    if isinstance(descriptor, MemberDescriptorType):  # of __slots__
        descriptor.__set__(source, value)
    elif isinstance(descriptor, property):
        source.__dict__.update(_set_by(descriptor, original, value, what))
    elif hasattr(type(descriptor), "__set__") or not hasattr(source, "__dict__"):
        raise SplitRefused(f"{what} cannot be replaced")
    else:
        source.__dict__[name] = value
    if getattr(source, name) is not value:
        raise SplitRefused(f"{what} cannot be replaced: it stays what it was")


def _set_by(descriptor: property, original: Any, value: Transform, what: str) -> dict[str, Any]:
    """Returns the attributes of the instance that a property's setter sets to ``value``.

    The setter runs on an object that has a placeholder in the place of each attribute, so that it cannot reach what the instance
    shares with others: a wrapper would set the transform of the data set inside.
    """
    if descriptor.fset is None:
        raise SplitRefused(f"{what} cannot be replaced: it is a property without a setter")
    probe = blank(original)
    probe.__dict__.update({name: Placeholder() for name in vars(original)})
    reason = ""
    try:
        descriptor.fset(probe, value)
    except LookedAt:
        reason = "its setter needs or changes what other objects share"
    except Exception as error:  # the data set's own code
        reason = f"its setter raised {type(error).__name__}: {error}"
    changed = {name: item for name, item in vars(probe).items() if type(item) is not Placeholder}
    if not reason and (not changed or any(item is not value for item in changed.values())):
        reason = "its setter sets something else"
    if reason:
        raise SplitRefused(f"{what} cannot be replaced in a copy alone: {reason}")
    return changed


def _on_sample(image: list[Transform], target: list[Transform], convention: Convention) -> Transform | None:
    """Returns a function that applies transforms where the convention says: sample in, sample out."""
    joint = convention in (Convention.transform_joint, Convention.transforms_joint)
    on_image, on_target = chained(image, joint), chained(target, joint=False)
    if on_image is None and on_target is None:
        return None
    if on_image is not None and joint:
        return lambda sample: on_image(*sample)
    if on_image is not None and convention is Convention.transform_whole:
        return on_image
    if on_image is not None and convention in NAMES:
        return _on_named(on_image, NAMES[convention])

    def on_elements(sample: Any) -> Any:
        if on_target is None and type(sample) is tuple:  # the usual case
            return (on_image(sample[0]), *sample[1:])  # type: ignore[misc]
        if not isinstance(sample, (tuple, list)):
            return sample if on_image is None else on_image(sample)
        elements = list(sample)
        for place, transform in enumerate((on_image, on_target)):
            if transform is not None:
                elements[place] = transform(elements[place])
        return like(sample, elements)

    return on_elements


def _on_named(transform: Transform, names: tuple[str, ...]) -> Transform:
    def on_named(sample: Any) -> Any:
        elements = elements_of(sample)
        transformed = transform(**dict(zip(names, elements, strict=False)))
        return like(sample, [*(transformed[name] for name in names), *elements[len(names) :]])

    return on_named


def names_of(image: list[Transform], target: list[Transform]) -> tuple[str, ...]:
    """Returns what people call the transforms of image and target."""
    on_image, on_target = ([name for transform in transforms for name in names_in(transform)] for transforms in (image, target))
    return (*on_image, *(f"target {name}" for name in on_target))
