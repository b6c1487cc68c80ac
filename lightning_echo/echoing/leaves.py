"""Stages of a data set that follows a convention: its transforms are taken out and cut in two.

A shallow copy gets a placeholder in place of each transform (not None: many data sets call their transform without asking). What
the copy returns is the source; the transforms before the cut are applied to it once, the others for each use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_echo.echoing.conventions import ATTRIBUTES, NAMES, Convention, SplitRefused, callable_of, elements_of, is_pair
from lightning_echo.echoing.copies import shallow_copy
from lightning_echo.echoing.cuts import Transform, chained, cut, name_of
from lightning_echo.echoing.staged import batched
from lightning_echo.echoing.stages import ProtocolStages, Stages, then, unchanged
from lightning_echo.echoing.watch import Watch, placeholder_for


def leaf_stages(dataset: Any, convention: Convention, watched: bool = False) -> Stages:
    """Returns the stages of a data set that is no ``Subset`` or ``ConcatDataset``, without reading from it.

    Args:
        dataset: left as it is.
        convention: one of `conventions_of`.
        watched: whether ``load`` checks that the data set calls its transforms as ``convention`` says.

    Raises:
        SplitRefused: the transforms cannot be taken out; from a watched ``load``: they are called otherwise.
    """
    if convention is Convention.protocol:
        return ProtocolStages(dataset)
    image, target, way = _transforms_of(dataset, convention)
    (image_reused, image_redone), (target_reused, target_redone) = cut(image), cut(target)
    watch = Watch(convention) if watched else None
    source = _without_transforms(dataset, placeholder_for if watch is None else watch.placeholder_for)
    load, load_many = source.__getitem__, batched(source)
    if watch is not None:
        load, load_many = watch.watched(load), None if load_many is None else watch.watched_many(load_many)
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


def _without_transforms(dataset: Any, placeholder_for: Callable[[str], Transform]) -> Any:
    source = shallow_copy(dataset)
    for name in ATTRIBUTES:
        if callable_of(dataset, name) is not None:
            try:
                setattr(source, name, placeholder_for(name))
            except (AttributeError, TypeError) as error:  # a property without a setter; a module that takes modules only
                raise SplitRefused(f"{type(dataset).__name__}.{name} cannot be replaced ({error})") from error
    return source


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
        return _like(sample, elements)

    return on_elements


def _on_named(transform: Transform, names: tuple[str, ...]) -> Transform:
    def on_named(sample: Any) -> Any:
        elements = elements_of(sample)
        transformed = transform(**dict(zip(names, elements, strict=False)))
        return _like(sample, [*(transformed[name] for name in names), *elements[len(names) :]])

    return on_named


def _like(sample: Any, elements: list[Any]) -> Any:
    """Returns ``elements`` as what they were taken from."""
    if not isinstance(sample, (tuple, list)):
        return elements[0]
    return elements if isinstance(sample, list) else tuple.__new__(type(sample), elements)


def names_of(image: list[Transform], target: list[Transform]) -> tuple[str, ...]:
    """Returns what people call the transforms of image and target."""
    return (*map(name_of, image), *(f"target {name_of(transform)}" for transform in target))
