"""A data set is examined once, described as a value that can be printed, and that description is cut at a point."""

from __future__ import annotations

import bisect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from typing import Any

import torch
from torch.utils.data import IterableDataset

from lightning_echo.data.objects import is_concat, is_subset, routes_as
from lightning_echo.insertion import InsertionPoint, Needs, earliest
from lightning_echo.split.staged import AugmentedDataset, StagedDataset, is_raw, is_staged

# ---------------------------------------------------------------------- chains
# A chain of transforms is cut before its first random one. An echo reuses those before it. All others run for each use.
#
# A transform counts as deterministic if its exact class is in a list (of torchvision's v1 and v2, and torch's ``Identity``), or
# if MONAI marks it so (see below). Everything else counts as random: subclasses, ``Lambda``, functions, containers that hold
# anything else. Only this is safe: RandomHorizontalFlip, RandAugment, GaussianNoise and a dozen other random classes of v2 do not
# show from outside that they are random. If a transform is wrongly taken for random, that costs only time.
#
# The base classes of MONAI's transforms show whether they are random (``RandomizableTrait``), and MONAI's own caches trust that.
# All other transforms of MONAI are deterministic, unless they call a function of the user's (``Lambda``,
# ``CropForeground(select_fn=...)``).
#
# MONAI's ``Compose`` does more than call its members in a row: it maps lists of samples, passes overrides on, and delays
# resampling (``lazy``). So it is never taken apart: ``compose(value, end=k)`` runs the part before the cut, ``compose(value,
# start=k)`` the rest.
#
# A class is recognized by its qualified name, so that neither torchvision nor MONAI is imported here.

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
    # The transforms that come with pretrained weights.
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


_MONAI_COMPOSE = "monai.transforms.compose.Compose"
_MONAI_TRANSFORM = "monai.transforms.transform.Transform"
_MONAI_RANDOM = {"monai.transforms.traits.RandomizableTrait", "monai.transforms.transform.Randomizable"}
_MONAI_LAZY = "monai.transforms.traits.LazyTrait"


def cut_chain(transform: Transform | None) -> tuple[list[Transform], list[Transform]]:
    """Returns the transforms before the first random one, and the rest. Containers are taken apart.

    >>> cut_chain(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout(), torch.nn.Identity()))
    ([Identity()], [Dropout(p=0.5, inplace=False), Identity()])
    """
    transforms = [] if transform is None else _taken_apart(transform)
    cut = next((number for number, single in enumerate(transforms) if not is_deterministic(single)), len(transforms))
    return transforms[:cut], transforms[cut:]


def members_before_cut(transform: Transform | None) -> list[Transform]:
    """Returns the transforms before the first random one, without MONAI's ``Compose`` around them."""
    before, _ = cut_chain(transform)
    return [member for each in before for member in (each.members if isinstance(each, ComposePart) else [each])]


def is_deterministic(transform: Transform) -> bool:
    """Returns whether it is certain that ``transform`` draws no random numbers and calls no function of the user's."""
    if isinstance(transform, ComposePart):
        return transform.is_before_cut
    is_listed = (
        _qualified_name(type(transform)) in _DETERMINISTIC
        and not _has_hooks(transform)
        and not callable(getattr(transform, "labels_getter", None))  # a function of the user's, in SanitizeBoundingBoxes
    )
    return is_listed or _is_deterministic_of_monai(transform)


def names_of(transform: Transform) -> tuple[str, ...]:
    """Returns the name of ``transform``, or the names of its members: a function's own name, otherwise that of the class."""
    if isinstance(transform, ComposePart):
        return transform.names
    return (str(getattr(transform, "__name__", type(transform).__name__)),)


def chained(transforms: list[Transform], joint: bool) -> Transform | None:
    """Returns one function that applies ``transforms`` in order; None if there are none.

    ``joint``: each takes and returns several values (image and target), as v2 transforms may.
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


def recorder_like(transform: Transform, record: Transform) -> Transform:
    """Returns a function that calls ``record``, and that a data set accepts in place of ``transform``.

    It is ``record`` itself, unless ``transform`` is MONAI's ``Compose``. MONAI's caching data sets check whether their transform
    is a ``Compose``, run its first members themselves (``end=k``) and the others at each read (``start=k``). They get a
    ``Compose`` which runs the members before the cut and calls ``record`` for the rest, with the value at the cut, marked as such
    for `ComposePart`.
    """
    if not _is_compose(transform):
        return record
    compose: Any = transform
    kind, cut = type(compose), _members_before_cut(compose)

    def call(self: Any, value: Any, *range_: Any, start: int = 0, end: int | None = None, **options: Any) -> Any:
        if range_:
            return record(value, *range_)  # no known data set calls it in this way: the check of the read refuses it
        if end is not None:
            return kind.__call__(self, value, start=start, end=end, **options)
        if not start:
            return record(value)
        if start > cut:  # the members before the cut have run already: by the keyword, the check refuses the read with the reason
            name = type(compose.transforms[cut]).__name__
            return record(value, **{f"start={start} (and {name}, number {cut}, counts as random)": start})
        return record(_AtCut(kind.__call__(self, value, start=start, end=cut, **options)))

    recording: Any = types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(__call__=call))
    made: Transform = object.__new__(recording)
    made.__dict__.update(vars(compose))
    return made


class ComposePart:
    """The members ``start`` to ``end`` of MONAI's ``Compose``, as one transform. ``end`` is None for the part after the cut."""

    def __init__(self, compose: Any, start: int, end: int | None) -> None:
        self._compose, self._start, self._end = compose, start, end
        self.members = compose.transforms[start:end]
        self.names = _member_names(self.members)
        self.is_before_cut = end is not None

    def __call__(self, value: Any) -> Any:
        if type(value) is _AtCut:  # only the part before the cut gets such a value: the data set has run these members
            return value.value
        return self._compose(value, start=self._start, end=self._end)


@dataclass(frozen=True, slots=True)
class _AtCut:
    """A value that has gone through all members before the cut."""

    value: Any


def _taken_apart(transform: Transform) -> list[Transform]:
    if _is_compose(transform):
        cut = _members_before_cut(transform)
        return [part for part in (ComposePart(transform, 0, cut), ComposePart(transform, cut, None)) if part.members]
    if _qualified_name(type(transform)) not in _CONTAINERS or _has_hooks(transform):
        return [transform]
    members: Any = transform if isinstance(transform, torch.nn.Sequential) else transform.transforms  # type: ignore[attr-defined]
    return [single for member in members for single in _taken_apart(member)]


def _has_hooks(transform: Transform) -> bool:
    return isinstance(transform, torch.nn.Module) and bool(transform._forward_hooks or transform._forward_pre_hooks)


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# --- MONAI ---------------------------------------------------------------------------------------------------------


def _is_compose(transform: Any) -> bool:
    """Returns whether ``transform`` is MONAI's ``Compose`` itself, not a subclass (``OneOf``, ``SomeOf``, ``RandomOrder``)."""
    return _qualified_name(type(transform)) == _MONAI_COMPOSE


def _members_before_cut(compose: Any) -> int:
    """Returns how many members come before the cut: those before the first random one.

    If ``compose`` may delay resampling, the members that resample must stay together, because delayed work would be done at the
    cut. Then the cut is before the first of them.
    """
    members = compose.transforms
    cut = next((number for number, member in enumerate(members) if not is_deterministic(member)), len(members))
    if cut == len(members) or compose.lazy is False:
        return cut
    return next((number for number, member in enumerate(members[:cut]) if _MONAI_LAZY in _names_of_bases(member)), cut)


def _is_deterministic_of_monai(transform: Any) -> bool:
    """Returns whether a transform is one of MONAI's that draws no random numbers and calls no function of the user's."""
    if _is_compose(transform):
        return all(_is_deterministic_of_monai(member) for member in transform.transforms)
    bases = _names_of_bases(transform)
    is_of_monai = type(transform).__module__.startswith("monai.transforms.") and _MONAI_TRANSFORM in bases
    if not is_of_monai or bases & _MONAI_RANDOM:
        return False
    values = list(vars(transform).values())
    for value in tuple(values):
        members = list(value.values()) if isinstance(value, dict) else value
        if isinstance(members, list | tuple):
            values += members
    return not any(map(_is_users_function, values))


def _names_of_bases(value: Any) -> set[str]:
    return {_qualified_name(base) for base in type(value).__mro__}


def _is_users_function(value: Any) -> bool:
    """Returns whether ``value`` can be called, and is not a class, a function of MONAI's or a deterministic transform."""
    if not callable(value) or isinstance(value, type):
        return False
    if isinstance(value, types.FunctionType):
        return not value.__module__.startswith("monai.")
    return not is_deterministic(value)


def _member_names(members: Sequence[Any]) -> tuple[str, ...]:
    nested = [_member_names(member.transforms) if _is_compose(member) else (type(member).__name__,) for member in members]
    return tuple(name for names in nested for name in names)


# ---------------------------------------------------------------------- describe
# The first step. A data set shows in one of two ways where it can be cut:
#
# * It has the stages as methods, e.g. ``load(index)`` and ``augment(example)``.
# * It follows torchvision's convention: an attribute (``transform``) holds what the data set applies to each example.
#
# An attribute does not show with which values the data set calls it: the image, the image and the target, the whole sample, or,
# as with Albumentations, image and mask by name. The description lists every `Convention` that is possible, the likeliest first.
# The proof finds the right one.
#
# torchvision's ``DatasetFolder`` (``ImageFolder``) can also be cut after reading. Its default loader takes a path and not bytes,
# so `make.py` repeats the work of that loader.
#
# ``Subset`` and ``ConcatDataset`` (and ``random_split``, which returns subsets) only pass an index on to the data sets inside
# them. A named cut, which is what `StagedDataset.of` returns, is itself cut, or the data set inside it is cut.
#
# `describe` reads no example, makes no function and calls no function of the user's. It never imports torchvision: if a data set
# uses torchvision's classes, torchvision is imported already.

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
    def keywords(self) -> tuple[str, ...]:
        """The names of the values that the data set passes by keyword, in their order in the sample."""
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
    """The transforms that one attribute applies, one after the other, by name: those before the first random one, and the rest.

    ``path`` is where the data set holds them, e.g. ``"transform"``, ``"_transform"`` or ``"transforms.target_transform"``.
    """

    path: str
    reused: tuple[str, ...]
    redone: tuple[str, ...]

    @property
    def attribute(self) -> str:
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        return self.attribute.removeprefix("_")

    def __str__(self) -> str:
        return f"{self.path}: {', '.join(self.reused)} | {', '.join(self.redone)}"


NOTHING = Chain("", (), ())
"""Stands where a data set holds no transform."""


class Role(Enum):
    """Whether a data set reads an example for an index, or passes the index on to a data set inside."""

    reader = "reads"
    subset = "chooses indices of"
    concat = "strings together"
    named_cut = "augments"


@dataclass(frozen=True)
class Description:
    """The description of a data set, and of those inside it."""

    number: int  # a data set that is met twice has the same number
    name: str
    role: Role = Role.reader
    inside: tuple[Description, ...] = ()  # the data sets that it passes indices on to
    is_stream: bool = False  # a stream has no index
    conventions: tuple[Convention, ...] = ()  # how it may be split before its augmentation, the likeliest first
    raw_conventions: tuple[Convention, ...] = ()  # how it may be split after reading
    chains: tuple[Chain, ...] = ()
    augments: bool = False  # whether it has a method that augments a decoded example
    why_no_folder: str | None = None  # why it is not certain how a file of a DatasetFolder is decoded

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
        # Kept with the data set, so that its id is not used again.
        known[id(dataset)] = dataset, _described_alone(dataset, number, role, inside)
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
    """Returns the number of the data set of a ``ConcatDataset`` that has an index, and the index there.

    ``ends`` are the lengths of the data sets, summed up. The index may be negative.
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
    if _is_pair(transforms):
        pair: Any = transforms
        if not (pair.transform is transform and pair.target_transform is target_transform):
            found.append(Convention.transforms_joint)
    elif transforms is not None:
        found += [Convention.transforms_joint, Convention.transforms]
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


def _why_no_folder(dataset: Any) -> str | None:
    """Returns why it is not certain how a file of torchvision's ``DatasetFolder`` is decoded; None if it is certain."""
    torchvision, folder = sys.modules.get("torchvision"), sys.modules.get("torchvision.datasets.folder")
    name = type(dataset).__name__
    if torchvision is None or folder is None or not isinstance(dataset, folder.DatasetFolder):
        return "is not a torchvision ImageFolder or DatasetFolder"
    if not routes_as(dataset, folder.DatasetFolder, ("__getitem__", "__getitems__")):
        return f"{name} reads examples by a method of its own, not by DatasetFolder's"
    if dataset.loader is not folder.default_loader:
        loader = getattr(dataset.loader, "__name__", type(dataset.loader).__name__)
        return f"its loader is {loader}, not torchvision's default_loader, so it is not known how its files are decoded"
    if torchvision.get_image_backend() != "PIL":
        return f"torchvision's image backend is {torchvision.get_image_backend()}, which decodes only files, not bytes"
    return None


# ---------------------------------------------------------------------- cut
# The second step: a description is cut before the augmentation or after reading (``raw``). The data set itself is not needed.
#
# A *leaf* is a data set that is cut, and that does not pass its indices on to data sets which are cut inside it.


class SplitRefused(ValueError):
    """A data set cannot be split before its augmentation. `reason` is the cause; the message adds a hint."""

    where = "split before its augmentation"
    hint = (
        "Subclass lightning_echo.StagedDataset (or implement its load(index) and augment(example)), name the cut "
        f"with StagedDataset.of(dataset, augment=...), or use {earliest(Needs.examples).option}"
    )

    @property
    def reason(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:  # args has only the reason: torch remakes a worker's exception, with its whole message in args
        if self.reason.startswith("Caught "):  # such a message begins like this, and already has the hint
            return self.reason
        return f"the data set cannot be {self.where}: {self.reason}. {self.hint}"


class ReadRefused(SplitRefused):
    """A data set cannot be split after reading."""

    where = "split after reading"
    hint = (
        "Give it read(index), which returns the raw item (best as bytes), and decode(raw), as lightning_echo.StagedDataset "
        "has them, name the cut with StagedDataset.of(dataset_of_raw_items, decode=..., augment=...), or use "
        f"{earliest(Needs.split).option} or {InsertionPoint.auto.value!r}"
    )


@dataclass(frozen=True)
class CutLeaf:
    """Where a leaf is cut. ``image`` applies to the image or the whole sample, ``target`` to the target alone.

    ``reused`` and ``redone`` are human-readable names of the stages.
    """

    description: Description
    convention: Convention
    image: Chain
    target: Chain
    reused: tuple[str, ...]
    redone: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """Where a data set is cut. The description ends at the leaves. They stand in the order in which they are met."""

    description: Description
    leaves: tuple[CutLeaf, ...]

    def __str__(self) -> str:
        lines = (
            f"{leaf.description.name}: reuse [{', '.join(leaf.reused)}], redo [{', '.join(leaf.redone)}]" for leaf in self.leaves
        )
        return "\n".join(lines)


def cut(description: Description, conventions: Sequence[Convention] = (), *, raw: bool) -> Cut:
    """Returns where a data set is cut (``raw``: after reading). Raises `SplitRefused` if a leaf cannot be cut, or not so.

    ``conventions`` are in the order in which the leaves are met. A leaf without one is taken apart in the likeliest way.
    """
    description = pruned(description, raw)
    found = leaves(description)
    given: dict[int, Convention] = {leaf.number: convention for leaf, convention in zip(found, conventions, strict=False)}
    return Cut(description, tuple(_cut_leaf(leaf, given.get(leaf.number), raw) for leaf in found))


def pruned(description: Description, raw: bool) -> Description:
    """Returns a description that ends at the leaves: a named cut that is itself a leaf has no data sets inside.

    Before the augmentation, a named cut is always a leaf, because it adds the augmentation. After reading, it is a leaf if it
    decodes.
    """
    if description.role is Role.named_cut and (Convention.read in description.raw_conventions or not raw):
        return replace(description, inside=())
    return replace(description, inside=tuple(pruned(part, raw) for part in description.inside))


def leaves(description: Description) -> list[Description]:
    """Returns the distinct leaves of a pruned description, in the order in which they are met."""
    found = [leaf for part in description.inside for leaf in leaves(part)] if description.inside else [description]
    return list({leaf.number: leaf for leaf in found}.values())


def candidates(leaf: Description, raw: bool) -> tuple[Convention, ...]:
    """Returns how a leaf may be cut, the likeliest way first. Raises `SplitRefused` if nothing shows how."""
    if leaf.is_stream:
        raise SplitRefused(f"{leaf.name} is a stream, which has no index")
    found = leaf.raw_conventions if raw else leaf.conventions
    if not found and raw:
        raise SplitRefused(f"{leaf.name} has no read(index) and decode(raw), and {leaf.why_no_folder}")
    if not found:
        raise SplitRefused(f"{leaf.name} has neither load(index) and augment(example) nor a transform")
    return found


def _cut_leaf(leaf: Description, convention: Convention | None, raw: bool) -> CutLeaf:
    if convention is None or raw:
        found = candidates(leaf, raw)
        convention = convention or found[0]
        if convention not in found:
            raise SplitRefused(f"{leaf.name} no longer has {convention.value}")
    if convention is Convention.protocol:
        return CutLeaf(leaf, convention, NOTHING, NOTHING, ("load",), ("augment",))
    if convention is Convention.read:
        return CutLeaf(leaf, convention, NOTHING, NOTHING, ("read",), ("decode", "augment") if leaf.augments else ("decode",))
    # The chain that is applied to the image (or to the whole sample), and the one for the target alone.
    attribute = "transforms" if convention in (Convention.transforms, Convention.transforms_joint) else "transform"
    images = [chain for chain in leaf.chains if chain.name == attribute]
    targets = [chain for chain in leaf.chains if chain.name == "target_transform"]
    if convention not in (Convention.transform, Convention.folder):
        targets = images[1:]  # the second one of torchvision's pair
    image, target = (chains[0] if chains else NOTHING for chains in (images, targets))
    if convention is Convention.folder:
        every = _names((*image.reused, *image.redone), (*target.reused, *target.redone))
        return CutLeaf(leaf, convention, image, target, ("read",), ("decode", *every))
    reused, redone = _names(image.reused, target.reused), _names(image.redone, target.redone)
    return CutLeaf(leaf, convention, image, target, ("load", *reused), redone)


def _names(image: tuple[str, ...], target: tuple[str, ...]) -> tuple[str, ...]:
    return (*image, *(f"target {name}" for name in target))
