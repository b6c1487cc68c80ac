"""The first step: a data set is examined once, and described as a value that can be printed.

A data set shows in one of two ways where it can be cut:

* It has the stages as methods, e.g. ``load(index)`` and ``augment(example)``.
* It follows torchvision's convention: an attribute (``transform``) holds what the data set applies to each example.

An attribute does not show with which values the data set calls it: the image, the image and the target, the whole sample, or, as
with Albumentations, image and mask by name. The description lists every `Convention` that is possible, the likeliest first. The
proof finds the right one.

torchvision's ``DatasetFolder`` (``ImageFolder``) can also be cut after reading. Its default loader takes a path and no bytes, so
`make.py` repeats what that loader does.

``Subset`` and ``ConcatDataset`` (and ``random_split``, which returns subsets) only pass an index on to the data sets inside them.
A named cut, which is what `StagedDataset.of` returns, is itself cut, or the data set inside it is cut.

`describe` reads no example, makes no function and calls no function of the user's. It never imports torchvision: if a data set
uses torchvision's classes, torchvision is imported already.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any

from torch.utils.data import IterableDataset

from lightning_echo.protecting.objects import is_concat, is_subset, routes_as
from lightning_echo.splitting.chains import Transform, cut_chain, names_of
from lightning_echo.splitting.staged import AugmentedDataset, StagedDataset, is_raw, is_staged

__all__ = ["NOTHING", "Chain", "Convention", "Description", "Role", "data_sets_inside", "describe", "locate", "pass_on"]

_ATTRIBUTES = ("transform", "target_transform", "transforms")
_STANDARD_TRANSFORM = ("torchvision.datasets.vision", "StandardTransform")  # a pair of transforms, called as one transform


class Convention(str, Enum):
    """How a data set is taken apart: by its own methods, or by an attribute and the values with which it calls that."""

    protocol = "load(index) and augment(example)"
    transform = "transform(image) and target_transform(target)"
    transform_joint = "transform(*sample)"
    transform_whole = "transform(sample)"
    transform_image = "transform(image=image)['image']"
    transform_image_mask = "transform(image=image, mask=mask)['image'], ['mask']"
    transforms = "transforms(image)"
    transforms_joint = "transforms(*sample)"
    read = "read(index) and decode(raw)"  # this one and the next are cut after reading
    folder = "files that torchvision's default loader decodes"

    @property
    def attribute(self) -> str:
        """The public name of the attribute that holds the transform of the image or of the sample."""
        return "transforms" if self in (Convention.transforms, Convention.transforms_joint) else "transform"

    @property
    def keywords(self) -> tuple[str, ...]:
        """The names of the values that the data set passes by keyword, in their order in the sample; empty if it passes none."""
        return {Convention.transform_image: ("image",), Convention.transform_image_mask: ("image", "mask")}.get(self, ())

    @property
    def is_joint(self) -> bool:
        """Whether the data set calls one transform with all values of the sample."""
        return self in (Convention.transform_joint, Convention.transforms_joint)


_BY_ONE_TRANSFORM = (
    Convention.transform_joint,
    Convention.transform_whole,
    Convention.transform_image,
    Convention.transform_image_mask,
)


@dataclass(frozen=True)
class Chain:
    """The transforms that one attribute applies, one after the other.

    Attributes:
        path: Where the data set holds them, e.g. ``"transform"``, ``"_transform"`` or ``"transforms.target_transform"``.
        reused: The names of the transforms before the first random one.
        redone: The names of the other transforms.
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


NOTHING = Chain("", (), ())
"""Stands where a data set holds no transform."""


class Role(Enum):
    """What a data set does with an index: it reads an example, or passes the index on to a data set inside."""

    reader = "reads"
    subset = "chooses indices of"
    concat = "strings together"
    named_cut = "augments"


@dataclass(frozen=True)
class Description:
    """The description of a data set, and of those inside it.

    Attributes:
        number: The number of the data set. A data set that is met twice has the same number.
        name: The name of its class.
        role: What it does with an index.
        inside: The data sets that it passes indices on to.
        is_stream: Whether it is a stream, which has no index.
        conventions: How it may be split before its augmentation, the likeliest first; empty if it shows no way.
        raw_conventions: How it may be split after reading.
        chains: What its attributes apply to its examples.
        augments: Whether it has a method that augments what was read and decoded.
        why_no_folder: Why it is not certain how a file of a ``DatasetFolder`` is decoded; None if it is certain.
    """

    number: int
    name: str
    role: Role = Role.reader
    inside: tuple[Description, ...] = ()
    is_stream: bool = False
    conventions: tuple[Convention, ...] = ()
    raw_conventions: tuple[Convention, ...] = ()
    chains: tuple[Chain, ...] = ()
    augments: bool = False
    why_no_folder: str | None = None

    def __str__(self) -> str:
        chains = {(chain.reused, chain.redone): str(chain) for chain in reversed(self.chains) if chain.reused or chain.redone}
        conventions = [convention.value for convention in (*self.conventions, *self.raw_conventions)]
        own = "; ".join([*reversed(chains.values()), *conventions])
        line = f"{self.number}: {self.name} {self.role.value}{f' ({own})' if own else ''}"
        return "\n".join([line, *("  " + inner for part in self.inside for inner in str(part).splitlines())])


def describe(dataset: Any) -> Description:
    """Returns the description of a data set.

    >>> print(describe(StagedDataset.of([1.0, 2.0], augment=abs)))
    0: AugmentedDataset augments (load(index) and augment(example))
      1: list reads
    """
    return _described(dataset, {}, count())


def _described(dataset: Any, known: dict[int, tuple[Any, Description]], numbers: Iterator[int]) -> Description:
    if id(dataset) not in known:
        number, role = next(numbers), _role_of(dataset)
        inside = tuple(_described(part, known, numbers) for part in data_sets_inside(dataset, role))
        known[id(dataset)] = (
            dataset,
            _described_alone(dataset, number, role, inside),
        )  # kept with the data set, so that its id is not used again
    return known[id(dataset)][1]


def _described_alone(dataset: Any, number: int, role: Role, inside: tuple[Description, ...]) -> Description:
    name = type(dataset).__name__
    if role in (Role.subset, Role.concat):
        return Description(number, name, role, inside)
    if isinstance(dataset, IterableDataset):
        return Description(number, name, is_stream=True)
    why_no_folder = _why_no_folder(dataset)
    after_reading = {Convention.read: is_raw(dataset), Convention.folder: why_no_folder is None}
    has_only_methods = isinstance(dataset, StagedDataset) and why_no_folder is not None
    return Description(
        number,
        name,
        role,
        inside,
        conventions=tuple(_conventions_of(dataset)),
        raw_conventions=tuple(convention for convention, is_there in after_reading.items() if is_there),
        chains=() if has_only_methods else tuple(_chains_of(dataset)),
        augments=callable(getattr(dataset, "augment", None)),
        why_no_folder=why_no_folder,
    )


def data_sets_inside(dataset: Any, role: Role) -> Sequence[Any]:
    """Returns the data sets that ``dataset`` passes indices on to."""
    if role is Role.concat:
        held: Sequence[Any] = dataset.datasets
        return held
    attribute = {Role.subset: "dataset", Role.named_cut: "_inner"}.get(role)
    return [] if attribute is None else [getattr(dataset, attribute)]


def pass_on(dataset: Any, role: Role, index: Any) -> tuple[int, Any]:
    """Passes an index on to a data set inside. Returns the number of that data set, and the index there."""
    if role is Role.concat:
        return locate(dataset.cumulative_sizes, index)
    return 0, dataset.indices[index] if role is Role.subset else index


def locate(ends: list[int], index: int) -> tuple[int, int]:
    """Returns to which data set of a ``ConcatDataset`` an index belongs, by its number, and the index there.

    Args:
        ends: The lengths of the data sets, summed up.
        index: The index. It may be negative.
    """
    if index < 0:
        index = index + ends[-1]  # not in place: it may be an element of a tensor of the user's
    place = bisect.bisect_right(ends, index)
    return place, index - ends[place - 1] if place else index


def _role_of(dataset: Any) -> Role:
    if isinstance(dataset, AugmentedDataset):
        return Role.named_cut
    if is_staged(dataset):  # also a Subset that has the stages as methods
        return Role.reader
    if is_subset(dataset):
        return Role.subset
    return Role.concat if is_concat(dataset) else Role.reader


def _conventions_of(dataset: Any) -> list[Convention]:
    """Returns the conventions that a data set may follow, the likeliest first; none if it shows no way."""
    found = [Convention.protocol] if is_staged(dataset) else []
    if isinstance(dataset, StagedDataset):
        return found
    transform, target_transform, transforms = (_callable_of(dataset, name) for name in _ATTRIBUTES)
    if transform is not None or target_transform is not None:  # not by `bool`: a Compose of MONAI's may be empty
        found.append(Convention.transform)
    if transforms is not None and not _is_pair_of(transforms, transform, target_transform):
        found += [Convention.transforms_joint] if _is_pair(transforms) else [Convention.transforms_joint, Convention.transforms]
    if transform is not None:
        found += _BY_ONE_TRANSFORM
    if not found and any(getattr(dataset, _attribute_of(dataset, name), False) is None for name in _ATTRIBUTES):
        found.append(Convention.transform)  # it has a place for a transform, and the place is empty
    return found


def _chains_of(dataset: Any) -> list[Chain]:
    chains = []
    for name in _ATTRIBUTES:
        path, transform = _attribute_of(dataset, name), _callable_of(dataset, name)
        if name == "transforms" and _is_pair(transform):
            chains += [_chain(f"{path}.{part}", getattr(transform, part)) for part in _ATTRIBUTES[:2]]
        elif transform is not None:
            chains.append(_chain(path, transform))
    return chains


def _chain(path: str, transform: Transform | None) -> Chain:
    reused, redone = (tuple(name for single in part for name in names_of(single)) for part in cut_chain(transform))
    return Chain(path, reused, redone)


def _callable_of(dataset: Any, name: str) -> Transform | None:
    """Returns the attribute of this name, public or private, if it can be called."""
    value = getattr(dataset, _attribute_of(dataset, name), None)
    return value if callable(value) else None


def _attribute_of(dataset: Any, name: str) -> str:
    """Returns the name under which a data set holds a transform. In TorchIO it is ``_transform``.

    A method ``_transform`` does not count, only an attribute of the instance.
    """
    private = f"_{name}"
    return private if private in getattr(dataset, "__dict__", {}) and not hasattr(dataset, name) else name


def _is_pair(transforms: Any) -> bool:
    """Returns whether torchvision made ``transforms`` from a transform of the image and one of the target."""
    return (type(transforms).__module__, type(transforms).__qualname__) == _STANDARD_TRANSFORM


def _is_pair_of(transforms: Any, transform: Transform | None, target_transform: Transform | None) -> bool:
    """Returns whether torchvision made ``transforms`` from exactly these two."""
    return _is_pair(transforms) and transforms.transform is transform and transforms.target_transform is target_transform


def _why_no_folder(dataset: Any) -> str | None:
    """Returns why it is not certain how a file of torchvision's ``DatasetFolder`` is decoded; None if it is certain."""
    torchvision, folder = sys.modules.get("torchvision"), sys.modules.get("torchvision.datasets.folder")
    name = type(dataset).__name__
    if torchvision is None or folder is None or not isinstance(dataset, folder.DatasetFolder):
        return "is no torchvision ImageFolder or DatasetFolder"
    if not routes_as(dataset, folder.DatasetFolder, ("__getitem__", "__getitems__")):
        return f"{name} reads examples by a method of its own, not by DatasetFolder's"
    if dataset.loader is not folder.default_loader:
        loader = getattr(dataset.loader, "__name__", type(dataset.loader).__name__)
        return f"its loader is {loader}, not torchvision's default_loader, so it is not known how its files are decoded"
    if torchvision.get_image_backend() != "PIL":
        return f"torchvision's image backend is {torchvision.get_image_backend()}, which decodes only files, not bytes"
    return None
