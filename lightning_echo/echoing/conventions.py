"""How a data set calls its transforms, and the stages that follow from it.

A data set either has the stages as methods, or it follows torchvision's convention: an attribute holds what
is applied to each example. To take it out, a shallow copy gets a placeholder in its place (not None: many
data sets call their transform without asking). What the copy returns is the source; the transforms before the
cut are applied to it once, the others for each use.

An attribute does not say how it is called. ``transform`` may get the image, the image and the target, the
whole sample, or, as with Albumentations, image and mask by name. The usual way is assumed first, and in the
proof a `Watch` stands in the placeholder: it sees what the data set really hands over, so that a wrong
assumption is found also when a random transform happens to do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from lightning_echo.echoing.copies import shallow_copy
from lightning_echo.echoing.cuts import Transform, chained, cut, name_of
from lightning_echo.echoing.difference import difference
from lightning_echo.echoing.protect import copy_example
from lightning_echo.echoing.stages import (
    Load,
    LoadMany,
    ProtocolStages,
    StagedDataset,
    Stages,
    batched,
    is_staged,
    unchanged,
)

_ATTRIBUTES = ("transform", "target_transform", "transforms")
_STANDARD_TRANSFORM = ("torchvision.datasets.vision", "StandardTransform")  # a pair, to be called as one

_Arguments = tuple[Any, ...]


class SplitRefused(ValueError):
    """A data set cannot be split before its augmentation.

    Attributes:
        reason: why, without the way out that the message adds.
    """

    @property
    def reason(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:  # not in args: a worker's exception is built again from its message
        return (
            f"the data set cannot be split before its augmentation: {self.reason}. Subclass "
            "lightning_echo.StagedDataset (or implement its load(index) and augment(example)), name the cut "
            "with StagedDataset.of(dataset, augment=...), or use insertion_point='after_augmentation'"
        )


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


def conventions_of(dataset: Any) -> list[Convention]:
    """Returns what ``dataset`` may follow by the look of it, the likeliest first; nothing if it is opaque."""
    found = [Convention.protocol] if is_staged(dataset) else []
    if isinstance(dataset, StagedDataset):
        return found  # it says so itself
    transform, target_transform, transforms = (_callable(dataset, name) for name in _ATTRIBUTES)
    if transform or target_transform:
        found.append(Convention.transform)
    if transforms and not _is_pair_of(transforms, transform, target_transform):
        found.append(Convention.transforms_joint)
        if not _is_pair(transforms):
            found.append(Convention.transforms)
    if transform:
        found += [Convention.transform_joint, Convention.transform_whole, *_NAMES]
    if not found and any(getattr(dataset, name, False) is None for name in _ATTRIBUTES):
        found.append(Convention.transform)  # it has a place for transforms, and none is there
    return found


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
        reused=("load", *_names(image_reused, target_reused)),
        redone=_names(image_redone, target_redone),
        load_many=load_many if before is None else _then(load_many, before),
    )


def _transforms_of(dataset: Any, convention: Convention) -> tuple[Transform | None, Transform | None, Convention]:
    """Returns what is applied to the image (or to all), what to the target alone, and in which way."""
    if convention is Convention.transform:
        return _callable(dataset, "transform"), _callable(dataset, "target_transform"), convention
    if not convention.name.startswith("transforms"):
        return _callable(dataset, "transform"), None, convention
    transforms: Any = _callable(dataset, "transforms")
    if _is_pair(transforms):
        return transforms.transform, transforms.target_transform, Convention.transform
    return transforms, None, convention


def _callable(dataset: Any, name: str) -> Transform | None:
    value = getattr(dataset, name, None)
    return value if callable(value) else None


def _is_pair(transforms: Any) -> bool:
    return (type(transforms).__module__, type(transforms).__qualname__) == _STANDARD_TRANSFORM


def _is_pair_of(transforms: Any, transform: Transform | None, target_transform: Transform | None) -> bool:
    """Whether torchvision made ``transforms`` of just these two, so that it says nothing new."""
    return _is_pair(transforms) and transforms.transform is transform and transforms.target_transform is target_transform


def _names(image: list[Transform], target: list[Transform]) -> tuple[str, ...]:
    return (*map(name_of, image), *(f"target {name_of(transform)}" for transform in target))


def _then(load_many: LoadMany | None, before: Transform) -> LoadMany | None:
    return None if load_many is None else lambda indices: [before(sample) for sample in load_many(indices)]


_NAMES = {Convention.transform_image: ("image",), Convention.transform_image_mask: ("image", "mask")}


# --- what is called with what ------------------------------------------------------------------------------


def placeholder(*values: Any, **named: Any) -> Any:
    """Stands where a transform was taken out: one value in, the same out; several in, all of them out."""
    return named or (values[0] if len(values) == 1 else values)


def placeholder_for(name: str) -> Transform:
    """Returns what to put in place of the attribute ``name``."""
    return placeholder


def _without_transforms(dataset: Any, placeholder_for: Callable[[str], Transform]) -> Any:
    source = shallow_copy(dataset)
    for name in _ATTRIBUTES:
        if _callable(dataset, name) is not None:
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
    if on_image is not None and convention in _NAMES:
        return _on_named(on_image, _NAMES[convention])

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
        elements = _elements(sample)
        transformed = transform(**dict(zip(names, elements, strict=False)))
        return _like(sample, [*(transformed[name] for name in names), *elements[len(names) :]])

    return on_named


def _like(sample: Any, elements: list[Any]) -> Any:
    """Returns ``elements`` as what they were taken from."""
    if not isinstance(sample, (tuple, list)):
        return elements[0]
    return elements if isinstance(sample, list) else tuple.__new__(type(sample), elements)


def _elements(sample: Any) -> _Arguments:
    return tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)


# What each attribute gets of a sample. torchvision's data sets call a pair one by one or as one.
_CALLS: dict[Convention, list[dict[str, Callable[[Any], _Arguments]]]] = {
    Convention.transform: [
        {
            "transform": lambda sample: _elements(sample)[:1],
            "target_transform": lambda sample: _elements(sample)[1:2],
        },
        {"transforms": _elements},
    ],
    Convention.transform_joint: [{"transform": _elements}],
    Convention.transform_whole: [{"transform": lambda sample: (sample,)}],
    Convention.transforms: [{"transforms": lambda sample: _elements(sample)[:1]}],
    Convention.transforms_joint: [{"transforms": _elements}],
    Convention.transform_image: [{"transform": lambda sample: _named(sample, "image")}],
    Convention.transform_image_mask: [{"transform": lambda sample: _named(sample, "image", "mask")}],
}


def _named(sample: Any, *names: str) -> _Arguments:
    return tuple(zip(names, _elements(sample), strict=False))


class Watch:
    """Sees what a data set hands to its transforms, and compares it with what the convention says it does."""

    def __init__(self, convention: Convention) -> None:
        self._convention = convention
        self._calls: dict[str, list[_Arguments]] = {}
        self._keywords: dict[str, str] = {}

    def placeholder_for(self, name: str) -> Transform:
        """Returns what to put in place of the attribute ``name``: it keeps what it is called with."""
        calls = self._calls.setdefault(name, [])

        def keep(*values: Any, **named: Any) -> Any:
            calls.append(copy_example((*values, *named.items())))  # the data set may go on to edit them
            if named and self._convention not in _NAMES:
                self._keywords[name] = ", ".join(named)
            return placeholder(*values, **named)

        return keep

    def watched(self, load: Load) -> Load:
        """Returns ``load``, checked."""
        return lambda index: self.watched_many(lambda indices: [load(one) for one in indices])([index])[0]

    def watched_many(self, load_many: LoadMany) -> LoadMany:
        """Returns ``load_many``, checked."""

        def load(indices: list[Any]) -> list[Any]:
            for calls in self._calls.values():
                calls.clear()
            samples = list(load_many(indices))
            ways = [way for way in _CALLS[self._convention] if way.keys() & self._calls.keys()]
            refusals = [self._refusal(samples, way) for way in ways]
            if ways and None not in refusals:
                raise SplitRefused(refusals[0])
            return samples

        return load

    def _refusal(self, samples: list[Any], way: dict[str, Callable[[Any], _Arguments]]) -> str | None:
        for name, keywords in self._keywords.items():
            return f"it calls its {name} by keyword ({keywords})"
        for name, calls in self._calls.items():
            expected = [way[name](sample) for sample in samples] if name in way else []
            if len(calls) != len(expected):
                return f"it calls its {name} {len(calls)} times where {len(expected)} would be expected"
            where = difference(calls, expected)
            if where is not None:
                return (
                    f"without its {name} it does not return what the {name} is called with, as "
                    f"{self._convention.value} would ({where})"
                )
        return None
