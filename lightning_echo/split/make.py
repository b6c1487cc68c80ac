"""The third step: for a data set that was described and cut, the functions that a worker runs are made.

There are three kinds of data sets:

* A data set that only passes indices on (``Subset``, ``ConcatDataset``) gets the stages of those inside, and passes indices on to
  them.
* If a data set has the stages as methods, these are called. When it is cut after reading, torchvision's ``DatasetFolder`` is such
  a data set. Its raw item is the content of the file, and the target. The work of its default loader is repeated here, and the
  proof compares the two.
* A data set that follows a convention is copied, and the copy gets a recorder in place of each transform (`check.py`). It
  does not get None, because many data sets call their transform without a check. The copy loads. The transforms before the cut
  are applied once to the loaded example, and the others for each use.

Nothing is changed in the user's objects, and no example is read.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from inspect import getattr_static
from operator import attrgetter
from types import MemberDescriptorType
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from lightning_echo.data.copies import shallow_copy
from lightning_echo.data.objects import blank
from lightning_echo.split.check import LookedAt, Placeholder, ReadCheck, elements_of, like
from lightning_echo.split.describe import (
    Chain,
    Convention,
    Cut,
    CutLeaf,
    Description,
    Role,
    SplitRefused,
    Transform,
    chained,
    cut_chain,
    data_sets_inside,
    locate,
    recorder_like,
)
from lightning_echo.split.staged import AugmentedDataset, LoadMany, Stages, batched, load_of, unchanged


def make(cut: Cut, dataset: Any, until: Cut | None = None) -> Stages:
    """Returns the stages of a data set, without reading from it. Raises `SplitRefused` if the transforms cannot be taken out.

    ``dataset`` is the one that was described, or a copy of it. ``until`` is a later cut of the same description, at which
    ``augment`` ends: it turns a raw item into what the ``load`` of the later cut returns. Else ``augment`` does all the rest.
    """
    leaves = {leaf.description.number: leaf for leaf in cut.leaves}
    ends = {leaf.description.number: leaf for leaf in until.leaves} if until is not None else {}
    made: dict[int, Stages] = {}

    def stages_of(description: Description, dataset: Any) -> Stages:
        number, role = description.number, description.role
        if number in made:
            return made[number]
        if number in leaves:
            made[number] = _leaf_stages(leaves[number], dataset, ends.get(number))
            return made[number]
        inside = list(map(stages_of, description.inside, data_sets_inside(dataset, role)))
        if number in ends:  # a named cut whose inside is cut after reading: the later cut is before the augmentation that it adds
            made[number] = inside[0]
        elif role is Role.concat:
            made[number] = concat_stages(dataset, inside)
        else:
            made[number] = subset_stages(dataset, inside[0]) if role is Role.subset else _named_cut_stages(dataset, inside[0])
        return made[number]

    return stages_of(cut.description, dataset)


def _leaf_stages(leaf: CutLeaf, dataset: Any, end: CutLeaf | None) -> Stages:
    if leaf.convention is Convention.protocol:
        return method_stages(dataset)
    if leaf.convention is Convention.read:
        return _read_stages(leaf, dataset, only_decodes=end is not None)
    if leaf.convention is Convention.folder:
        return _folder_stages(leaf, dataset, end)
    return _transform_stages(leaf, dataset)


# --- data sets that pass indices on --------------------------------------------------------------------------------


def subset_stages(subset: Subset[Any], inner: Stages) -> Stages:
    load, many, augment = inner.load, inner.load_many, inner.augment
    return Stages(
        lambda index: load(subset.indices[index]),
        # The usual case costs nothing more.
        (lambda index, example: augment(subset.indices[index], example)) if inner.augment_routes else augment,
        reused=inner.reused,
        redone=inner.redone,
        load_many=None if many is None else (lambda indices: many([subset.indices[index] for index in indices])),
        augment_routes=inner.augment_routes,
        sources=inner.sources,
    )


def concat_stages(concat: ConcatDataset[Any], inside: list[Stages]) -> Stages:
    """Returns stages that read no whole batches: each index goes to the data set inside that has it."""
    ends = concat.cumulative_sizes

    def load(index: Any) -> Any:
        place, index = locate(ends, index)
        return inside[place].load(index)

    def augment(index: Any, example: Any) -> Any:
        place, index = locate(ends, index)
        return inside[place].augment(index, example)

    redoes = any(stages.augment is not unchanged for stages in inside)
    return Stages(
        load,
        augment if redoes else unchanged,
        reused=tuple(dict.fromkeys(name for stages in inside for name in stages.reused)),  # without repeats
        redone=tuple(dict.fromkeys(name for stages in inside for name in stages.redone)),
        augment_routes=redoes,
        sources=tuple(source for stages in inside for source in stages.sources),
    )


def _named_cut_stages(dataset: AugmentedDataset, inner: Stages) -> Stages:
    """Returns the stages of a named cut whose inside is cut. Its own augmentation is redone for each use, too."""
    redo, augment = inner.augment, dataset._augment_one
    return Stages(
        inner.load,
        lambda index, raw: augment(redo(index, raw)),
        reused=inner.reused,
        redone=(*inner.redone, "augment"),
        load_many=inner.load_many,
        augment_routes=inner.augment_routes,
        sources=inner.sources,
    )


# --- data sets that have the stages as methods ---------------------------------------------------------------------


def method_stages(dataset: Any) -> Stages:
    """Returns the stages of a data set that has ``load`` and ``augment`` as methods."""
    load, augment, load_many = load_of(dataset), dataset.augment, None
    if isinstance(dataset, AugmentedDataset):
        augment, load_many = dataset._augment_one, _then(batched(dataset._inner), dataset._decode_one)
        if dataset._decode_one is None:  # the usual case costs nothing more
            load = dataset._inner.__getitem__
    return Stages(load, lambda index, example: augment(example), reused=("load",), redone=("augment",), load_many=load_many)


def _read_stages(leaf: CutLeaf, dataset: Any, *, only_decodes: bool) -> Stages:
    decode, augment = dataset.decode, None if only_decodes else getattr(dataset, "augment", None)
    return Stages(
        dataset.read,
        (lambda index, raw: augment(decode(raw))) if callable(augment) else (lambda index, raw: decode(raw)),
        reused=leaf.reused,
        redone=leaf.redone,
        load_many=batched(dataset._inner) if isinstance(dataset, AugmentedDataset) else None,
    )


def _folder_stages(leaf: CutLeaf, dataset: Any, end: CutLeaf | None) -> Stages:
    open_image = sys.modules["PIL.Image"].open
    before_end = None if end is None else [chained(_cut(dataset, chain)[0], joint=False) for chain in (end.image, end.target)]

    def read(index: Any) -> tuple[bytes, Any]:
        path, target = dataset.samples[index]
        with open(path, "rb") as file:
            return file.read(), target

    def redo(index: Any, raw: tuple[bytes, Any]) -> tuple[Any, Any]:
        # What default_loader does, then what DatasetFolder.__getitem__ does.
        image, target = open_image(io.BytesIO(raw[0])).convert("RGB"), raw[1]
        on_image, on_target = before_end or (dataset.transform, dataset.target_transform)
        if on_image is not None:
            image = on_image(image)
        if on_target is not None:
            target = on_target(target)
        return image, target

    return Stages(read, redo, reused=leaf.reused, redone=leaf.redone)


def _then(load_many: LoadMany | None, function: Callable[[Any], Any] | None) -> LoadMany | None:
    if load_many is None or function is None:
        return load_many
    return lambda indices: [function(sample) for sample in load_many(indices)]


# --- data sets that hold transforms --------------------------------------------------------------------------------


def _transform_stages(leaf: CutLeaf, dataset: Any) -> Stages:
    chains = leaf.description.chains
    (image_reused, image_redone), (target_reused, target_redone) = (_cut(dataset, chain) for chain in (leaf.image, leaf.target))
    check = ReadCheck(leaf.convention, {chain.name for chain in chains}, in_order=bool(image_redone and target_redone))
    source = _without_transforms(dataset, chains, check.recorder)
    load, load_many = check.checked(source.__getitem__), batched(source)
    if load_many is not None:
        load_many = check.checked_many(load_many)
    # If the data set calls a pair as one transform, the two are applied one after the other, as torchvision does it.
    applied_as = Convention.transform if leaf.target.path else leaf.convention
    before = _unless_none(_on_sample(image_reused, target_reused, applied_as))
    after = _unless_none(_on_sample(image_redone, target_redone, applied_as))
    return Stages(
        load if before is None else lambda index: before(load(index)),
        unchanged if after is None else lambda index, example: after(example),
        reused=leaf.reused,
        redone=leaf.redone,
        load_many=_then(load_many, before),
        sources=(source,),
    )


def _unless_none(function: Transform | None) -> Transform | None:
    """Returns the function for samples that may be None. Such a sample has gone through no transform, see `ReadCheck`."""
    return None if function is None else lambda sample: None if sample is None else function(sample)


def _cut(dataset: Any, chain: Chain) -> tuple[list[Transform], list[Transform]]:
    return cut_chain(attrgetter(chain.path)(dataset) if chain.path else None)


def _on_sample(image: list[Transform], target: list[Transform], convention: Convention) -> Transform | None:
    """Returns a function that applies transforms to a sample as the convention demands; None if there are none."""
    on_image, on_target = chained(image, convention.is_joint), chained(target, joint=False)
    if on_image is None and on_target is None:
        return None
    if on_image is not None and convention.is_joint:
        return lambda sample: on_image(*sample)
    if on_image is not None and convention is Convention.transform_whole:
        return on_image
    names = convention.keywords

    def on_named(sample: Any) -> Any:
        elements = elements_of(sample)
        transformed = on_image(**dict(zip(names, elements, strict=False)))  # type: ignore[misc]
        return like(sample, [*(transformed[name] for name in names), *elements[len(names) :]])

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

    return on_named if on_image is not None and names else on_elements


# --- taking the transforms out -------------------------------------------------------------------------------------


def _without_transforms(dataset: Any, chains: tuple[Chain, ...], recorder: Callable[[str], Transform]) -> Any:
    """Returns a shallow copy with a recorder in place of each transform, or refuses if the user's objects would change."""
    source = shallow_copy(dataset)
    if source is dataset or getattr(source, "__dict__", None) is getattr(dataset, "__dict__", source):
        raise SplitRefused(f"a copy of {type(dataset).__name__} is not independent of it")
    for attribute, name in {chain.attribute: chain.name for chain in chains}.items():
        _replace(source, dataset, attribute, recorder_like(getattr(dataset, attribute), recorder(name)))
    return source


def _replace(source: Any, original: Any, name: str, value: Transform) -> None:
    """Sets an attribute of a shallow copy at the place where Python finds it first. No code of the data set runs on the copy."""
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

    The setter runs on an object that has a placeholder in place of each attribute. So it cannot change objects that the instance
    shares with others. For example, the setter of a wrapper would set the transform of the data set inside.
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
