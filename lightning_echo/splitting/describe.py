"""The first step: a data set is looked at once, and written down as a value that can be printed.

A data set says in one of two ways where it can be cut: it has the stages as methods, or it follows torchvision's convention, in
which an attribute holds what is applied to each example. An attribute does not say how it is called: ``transform`` may get the
image, the image and the target, the whole sample, or, as with Albumentations, image and mask by name. All ways that are possible
by the look of it are written down, the likeliest first; the proof finds out. After reading, torchvision's ``DatasetFolder``
(``ImageFolder``) can be cut as well: its default loader takes a path and no bytes, so that what it does is written down in
`make.py`.

``Subset`` and ``ConcatDataset`` (and ``random_split``, which returns the former) only lead to the data sets inside, in any order;
what `StagedDataset.of` returns is cut by itself, or where the data set inside is cut. No example is read, no function is made,
and none of the user's is called. torchvision is never imported: whose class is looked for has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any

from torch.utils.data import IterableDataset

from lightning_echo.protecting.objects import is_concat, is_subset, routes_as
from lightning_echo.splitting.chains import Transform, cut_chain, names_in
from lightning_echo.splitting.staged import AugmentedDataset, StagedDataset, is_raw, is_staged

__all__ = ["NOTHING", "Chain", "Convention", "DataSet", "Leads", "describe", "held_by"]

_ATTRIBUTES = ("transform", "target_transform", "transforms")
_STANDARD_TRANSFORM = ("torchvision.datasets.vision", "StandardTransform")  # a pair, to be called as one


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
    read = "read(index) and decode(raw)"  # this one and the next: after_read
    folder = "files that torchvision's default loader decodes"


_BY_ONE_TRANSFORM = (
    Convention.transform_joint,
    Convention.transform_whole,
    Convention.transform_image,
    Convention.transform_image_mask,
)


@dataclass(frozen=True)
class Chain:
    """The transforms that are applied one after the other.

    Attributes:
        path: Where the data set holds them, e.g. ``"transform"``, ``"_transform"`` or ``"transforms.target_transform"``.
        reused: The names of those before the first random one.
        redone: The names of the others.
    """

    path: str
    reused: tuple[str, ...]
    redone: tuple[str, ...]

    @property
    def attribute(self) -> str:
        """The attribute of the data set."""
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """The public name of the attribute."""
        return self.attribute.removeprefix("_")

    def __str__(self) -> str:
        return f"{self.path}: {', '.join(self.reused)} | {', '.join(self.redone)}"


NOTHING = Chain("", (), ())  # where a data set holds no transform


class Leads(Enum):
    """Which data set an index is for."""

    itself = "reads"
    subset = "chooses indices of"
    concat = "strings together"
    named_cut = "augments"


@dataclass(frozen=True)
class DataSet:
    """The description of a data set, with those inside it.

    Attributes:
        number: Which one it is: a data set that is met twice has one number.
        name: Its class.
        leads: Which data set an index is for.
        inside: The data sets that it leads to.
        is_stream: Whether it has no index.
        conventions: How it may be split before its augmentation, the likeliest first; empty if it is opaque.
        raw_conventions: How it may be split after reading.
        chains: What its attributes apply to its examples.
        augments: Whether what is read and decoded is augmented by a method.
        why_no_folder: Why it is not certain what a file becomes; None if it is.
    """

    number: int
    name: str
    leads: Leads = Leads.itself
    inside: tuple[DataSet, ...] = ()
    is_stream: bool = False
    conventions: tuple[Convention, ...] = ()
    raw_conventions: tuple[Convention, ...] = ()
    chains: tuple[Chain, ...] = ()
    augments: bool = False
    why_no_folder: str | None = None

    def __str__(self) -> str:
        chains = {(chain.reused, chain.redone): str(chain) for chain in reversed(self.chains) if chain.reused or chain.redone}
        ways = [convention.value for convention in (*self.conventions, *self.raw_conventions)]
        own = "; ".join([*reversed(chains.values()), *ways])
        said = f"{self.number}: {self.name} {self.leads.value}{f' ({own})' if own else ''}"
        return "\n".join([said, *("  " + line for part in self.inside for line in str(part).splitlines())])


def describe(dataset: Any) -> DataSet:
    """Returns the description of a map-style data set.

    >>> print(describe(StagedDataset.of([1.0, 2.0], augment=abs)))
    0: AugmentedDataset augments (load(index) and augment(example))
      1: list reads
    """
    return _described(dataset, {}, count())


def _described(dataset: Any, known: dict[int, tuple[Any, DataSet]], numbers: Iterator[int]) -> DataSet:
    if id(dataset) not in known:
        number, leads = next(numbers), _leads(dataset)
        inside = tuple(_described(part, known, numbers) for part in held_by(dataset, leads))
        known[id(dataset)] = dataset, _looked_at(dataset, number, leads, inside)
    return known[id(dataset)][1]


def _looked_at(dataset: Any, number: int, leads: Leads, inside: tuple[DataSet, ...]) -> DataSet:
    name = type(dataset).__name__
    if leads in (Leads.subset, Leads.concat):
        return DataSet(number, name, leads, inside)
    if isinstance(dataset, IterableDataset):
        return DataSet(number, name, is_stream=True)
    why_no_folder = _why_no_folder(dataset)
    after_reading = {Convention.read: is_raw(dataset), Convention.folder: why_no_folder is None}
    says_itself = isinstance(dataset, StagedDataset) and why_no_folder is not None
    return DataSet(
        number,
        name,
        leads,
        inside,
        conventions=tuple(_conventions_of(dataset)),
        raw_conventions=tuple(convention for convention, is_there in after_reading.items() if is_there),
        chains=() if says_itself else tuple(_chains_of(dataset)),
        augments=callable(getattr(dataset, "augment", None)),
        why_no_folder=why_no_folder,
    )


def held_by(dataset: Any, leads: Leads) -> list[Any]:
    """Returns the data sets that ``dataset`` leads to."""
    if leads is Leads.concat:
        return list(dataset.datasets)
    name = {Leads.subset: "dataset", Leads.named_cut: "_inner"}.get(leads)
    return [] if name is None else [getattr(dataset, name)]


def _leads(dataset: Any) -> Leads:
    fits = {
        Leads.named_cut: isinstance(dataset, AugmentedDataset),
        Leads.itself: is_staged(dataset),
        Leads.subset: is_subset(dataset),
        Leads.concat: is_concat(dataset),
    }
    return next((leads for leads, is_so in fits.items() if is_so), Leads.itself)


def _conventions_of(dataset: Any) -> list[Convention]:
    """What a data set may follow by the look of it, the likeliest first; nothing if it is opaque."""
    found = [Convention.protocol] if is_staged(dataset) else []
    if isinstance(dataset, StagedDataset):
        return found
    transform, target_transform, transforms = (_callable_of(dataset, name) for name in _ATTRIBUTES)
    if transform is not None or target_transform is not None:  # not by their truth: MONAI's may be empty
        found.append(Convention.transform)
    if transforms is not None and not _is_pair_of(transforms, transform, target_transform):
        found += [Convention.transforms_joint] if _is_pair(transforms) else [Convention.transforms_joint, Convention.transforms]
    if transform is not None:
        found += _BY_ONE_TRANSFORM
    if not found and any(getattr(dataset, _attribute_of(dataset, name), False) is None for name in _ATTRIBUTES):
        found.append(Convention.transform)  # it has a place for transforms, and none is there
    return found


def _chains_of(dataset: Any) -> list[Chain]:
    chains = []
    for name in _ATTRIBUTES:
        path, held = _attribute_of(dataset, name), _callable_of(dataset, name)
        if name == "transforms" and _is_pair(held):
            chains += [_chain(f"{path}.{part}", getattr(held, part)) for part in _ATTRIBUTES[:2]]
        elif held is not None:
            chains.append(_chain(path, held))
    return chains


def _chain(path: str, transform: Transform | None) -> Chain:
    reused, redone = (tuple(name for single in part for name in names_in(single)) for part in cut_chain(transform))
    return Chain(path, reused, redone)


def _callable_of(dataset: Any, name: str) -> Transform | None:
    """The attribute of that name, public or not, if it can be called."""
    value = getattr(dataset, _attribute_of(dataset, name), None)
    return value if callable(value) else None


def _attribute_of(dataset: Any, name: str) -> str:
    """Where a data set keeps a transform: TorchIO's in ``_transform``. A method of that name is none."""
    private = f"_{name}"
    return private if private in getattr(dataset, "__dict__", {}) and not hasattr(dataset, name) else name


def _is_pair(transforms: Any) -> bool:
    """Whether torchvision made ``transforms`` of a transform of the image and one of the target."""
    return (type(transforms).__module__, type(transforms).__qualname__) == _STANDARD_TRANSFORM


def _is_pair_of(transforms: Any, transform: Transform | None, target_transform: Transform | None) -> bool:
    """Whether torchvision made ``transforms`` of just these two, so that it says nothing new."""
    return _is_pair(transforms) and transforms.transform is transform and transforms.target_transform is target_transform


def _why_no_folder(dataset: Any) -> str | None:
    """Why it is not certain what a file of torchvision's ``DatasetFolder`` becomes; None if it is."""
    torchvision, folder = sys.modules.get("torchvision"), sys.modules.get("torchvision.datasets.folder")
    name = type(dataset).__name__
    if torchvision is None or folder is None or not isinstance(dataset, folder.DatasetFolder):
        return "is no torchvision ImageFolder or DatasetFolder"
    if not routes_as(dataset, folder.DatasetFolder, ("__getitem__", "__getitems__")):
        return f"{name} reads examples by a method of its own, not by DatasetFolder's"
    if dataset.loader is not folder.default_loader:
        loader = getattr(dataset.loader, "__name__", type(dataset.loader).__name__)
        return f"its loader is {loader}, not torchvision's default_loader, so that how its files are decoded is not known"
    if torchvision.get_image_backend() != "PIL":
        return f"torchvision's image backend is {torchvision.get_image_backend()}, which decodes files only, no bytes"
    return None
