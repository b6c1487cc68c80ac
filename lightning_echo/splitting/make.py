"""The third step: the functions that a worker runs are made, of a data set that was described and cut.

A data set that has the stages as methods is called by them. Where a data set follows a convention, a shallow copy gets another
function in place of each transform (not None: many data sets call their transform without asking), which keeps what it is called
with (watch.py). That is the source; the transforms before the cut are applied to it once, the others for each use.

After reading, a data set has ``read(index)`` and ``decode(raw)`` (`StagedDataset`, as a base class or only in shape;
``StagedDataset.of(..., decode=...)``); or it is torchvision's ``DatasetFolder``, whose raw item is the content of the file, and
the target. What its default loader does is written down here; the proof (prove.py) compares the two.

The user's objects are left as they are, and no example is read.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from inspect import getattr_static
from operator import attrgetter
from types import MemberDescriptorType
from typing import Any

from lightning_echo.protecting.copies import shallow_copy
from lightning_echo.protecting.objects import blank
from lightning_echo.splitting.chains import Transform, chained, cut_chain, put_in_place
from lightning_echo.splitting.cut import Cut, CutLeaf, SplitRefused, led_to
from lightning_echo.splitting.describe import Chain, Convention, DataSet, Leads, held_by
from lightning_echo.splitting.staged import AugmentedDataset, batched
from lightning_echo.splitting.stages import AugmentedStages, ConcatStages, ProtocolStages, Stages, SubsetStages, then, unchanged
from lightning_echo.splitting.watch import NAMES, LookedAt, Placeholder, Watch, elements_of, like

__all__ = ["make"]


def make(cut: Cut, dataset: Any) -> Stages:
    """Returns the stages of a data set, without reading from it.

    Args:
        cut: Where it is cut.
        dataset: The one that was described, or a copy of it; left as it is.

    Raises:
        SplitRefused: The transforms cannot be taken out; from ``load``: they are called otherwise than the convention says.
    """
    cuts = {leaf.dataset.number: leaf for leaf in cut.leaves}
    known: dict[int, Stages] = {}

    def made(described: DataSet, dataset: Any) -> Stages:
        if described.number not in known:
            leaf = cuts.get(described.number)
            if leaf is None:
                inside = list(map(made, led_to(described, cut.raw), held_by(dataset, described.leads)))
                known[described.number] = _ROUTED[described.leads](dataset, inside)
            else:
                known[described.number] = _OF_METHODS.get(leaf.convention, _of_transforms)(leaf, dataset)
        return known[described.number]

    return made(cut.dataset, dataset)


_ROUTED: dict[Leads, Callable[[Any, list[Stages]], Stages]] = {
    Leads.subset: lambda subset, inside: SubsetStages(subset, inside[0]),
    Leads.concat: ConcatStages,
    Leads.named_cut: lambda named, inside: AugmentedStages(named, inside[0]),
}


# --- a data set by its methods -------------------------------------------------------------------------------------


def _of_read(leaf: CutLeaf, dataset: Any) -> Stages:
    decode, augment = dataset.decode, getattr(dataset, "augment", None)
    return Stages(
        dataset.read,
        (lambda index, raw: augment(decode(raw))) if callable(augment) else (lambda index, raw: decode(raw)),
        reused=leaf.reused,
        redone=leaf.redone,
        load_many=batched(dataset._inner) if isinstance(dataset, AugmentedDataset) else None,
    )


def _of_folder(leaf: CutLeaf, dataset: Any) -> Stages:
    open_image = sys.modules["PIL.Image"].open

    def read(index: Any) -> tuple[bytes, Any]:
        path, target = dataset.samples[index]
        with open(path, "rb") as file:
            return file.read(), target

    def redo(index: Any, raw: tuple[bytes, Any]) -> tuple[Any, Any]:
        # default_loader, then DatasetFolder.__getitem__
        image, target = open_image(io.BytesIO(raw[0])).convert("RGB"), raw[1]
        if dataset.transform is not None:
            image = dataset.transform(image)
        if dataset.target_transform is not None:
            target = dataset.target_transform(target)
        return image, target

    return Stages(read, redo, reused=leaf.reused, redone=leaf.redone)


_OF_METHODS: dict[Convention, Callable[[CutLeaf, Any], Stages]] = {
    Convention.protocol: lambda leaf, dataset: ProtocolStages(dataset),
    Convention.read: _of_read,
    Convention.folder: _of_folder,
}


# --- a data set by its transforms ----------------------------------------------------------------------------------


def _of_transforms(leaf: CutLeaf, dataset: Any) -> Stages:
    (image_reused, image_redone), (target_reused, target_redone) = (_held(dataset, chain) for chain in (leaf.image, leaf.target))
    watch = Watch(leaf.convention, in_order=bool(image_redone and target_redone))
    source = _without_transforms(dataset, leaf.dataset.chains, watch.stand_in)
    load, load_many = watch.watched(source.__getitem__), batched(source)
    if load_many is not None:
        load_many = watch.watched_many(load_many)
    way = Convention.transform if leaf.target.path else leaf.convention  # a pair, too, is applied to one after the other
    before, after = _on_sample(image_reused, target_reused, way), _on_sample(image_redone, target_redone, way)
    return Stages(
        load if before is None else lambda index: before(load(index)),
        unchanged if after is None else lambda index, example: after(example),
        reused=leaf.reused,
        redone=leaf.redone,
        load_many=then(load_many, before),
    )


def _held(dataset: Any, chain: Chain) -> tuple[list[Transform], list[Transform]]:
    """The transforms of a chain before the first random one, and the rest."""
    return cut_chain(attrgetter(chain.path)(dataset) if chain.path else None)


def _without_transforms(dataset: Any, chains: tuple[Chain, ...], stand_in: Callable[[str], Transform]) -> Any:
    """Returns a shallow copy with another function in the place of each transform, and leaves everything else as it was."""
    source = shallow_copy(dataset)
    if source is dataset or getattr(source, "__dict__", None) is getattr(dataset, "__dict__", source):
        raise SplitRefused(f"a copy of {type(dataset).__name__} is not independent of it")
    for attribute, name in {chain.attribute: chain.name for chain in chains}.items():
        _replace(source, dataset, attribute, put_in_place(getattr(dataset, attribute), stand_in(name)))
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
