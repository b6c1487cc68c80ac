"""A chain of transforms is cut before its first random one.

An echo reuses what comes before the cut. Everything from the first random transform on runs for each use.

A transform counts as deterministic if its exact class is in a list (of torchvision's v1 and v2, and torch's ``Identity``), or if
MONAI says so (see below). Everything else counts as random: subclasses, ``Lambda``, functions, containers that hold anything
else. Only this is safe: RandomHorizontalFlip, RandAugment, GaussianNoise and a dozen other random classes of v2 do not show from
outside that they are random. If a transform is wrongly taken for random, that costs only time.

The base classes of MONAI's transforms show whether they are random (``RandomizableTrait``), and MONAI's own caches trust that.
All other transforms of MONAI are deterministic, unless they call a function of the user's (``Lambda``,
``CropForeground(select_fn=...)``).

MONAI's ``Compose`` does more than call its members in a row: it maps lists of samples, passes overrides on, and delays resampling
(``lazy``). So it is never taken apart: ``compose(value, end=k)`` runs the part before the cut, ``compose(value, start=k)`` the
rest.

A class is recognized by its qualified name, so that neither torchvision nor MONAI is imported here.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = [
    "ComposePart",
    "Transform",
    "chained",
    "cut_chain",
    "is_deterministic",
    "members_before_cut",
    "names_of",
    "recorder_like",
]

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
    return _is_listed(transform) or _is_deterministic_of_monai(transform)


def names_of(transform: Transform) -> tuple[str, ...]:
    """Returns the name of ``transform``, or the names of its members: a function's own name, otherwise that of the class."""
    if isinstance(transform, ComposePart):
        return transform.names
    return (str(getattr(transform, "__name__", type(transform).__name__)),)


def chained(transforms: list[Transform], joint: bool) -> Transform | None:
    """Returns one function that applies ``transforms`` in order; None if there are none.

    Args:
        transforms: One of the two lists that `cut_chain` returned.
        joint: Whether each takes and returns several values (image and target), as v2 transforms may.
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
    ``Compose`` which runs the members before the cut and calls ``record`` for the rest.

    Args:
        transform: The transform. It is not changed.
        record: Called with the value that the transform is called with. If the data set has run members itself, it is called with
            the value at the cut instead, marked as such for `ComposePart`.
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
        if start > cut:  # the members before the cut have run already: the keyword makes the check refuse the read, and says why
            name = type(compose.transforms[cut]).__name__
            return record(value, **{f"start={start} (and {name}, number {cut}, counts as random)": start})
        return record(_AtCut(kind.__call__(self, value, start=start, end=cut, **options)))

    recording: Any = types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(__call__=call))
    made: Transform = object.__new__(recording)
    made.__dict__.update(vars(compose))
    return made


class ComposePart:
    """Some members of MONAI's ``Compose`` in a row, as one transform.

    Args:
        compose: MONAI's ``Compose``.
        start: The number of the first member.
        end: The number of the member after the last one; None: all members that follow.

    Attributes:
        members: The members.
        names: Their names.
        is_before_cut: Whether this is the part before the cut.
    """

    def __init__(self, compose: Any, start: int, end: int | None) -> None:
        self._compose, self._start, self._end = compose, start, end
        self.members = compose.transforms[start:end]
        self.names = _member_names(self.members)
        self.is_before_cut = end is not None

    def __call__(self, value: Any) -> Any:
        if type(value) is _AtCut:  # only the part before the cut gets such a value: the data set has run these members
            return value.value
        return self._compose(value, start=self._start, end=self._end)


class _AtCut:
    """A value that has gone through all members before the cut."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _taken_apart(transform: Transform) -> list[Transform]:
    if _is_compose(transform):
        return list(_parts_of(transform))
    if _qualified_name(type(transform)) not in _CONTAINERS or _has_hooks(transform):
        return [transform]
    members: Any = transform if isinstance(transform, torch.nn.Sequential) else transform.transforms  # type: ignore[attr-defined]
    return [single for member in members for single in _taken_apart(member)]


def _is_listed(transform: Transform) -> bool:
    return (
        _qualified_name(type(transform)) in _DETERMINISTIC
        and not _has_hooks(transform)
        and not callable(getattr(transform, "labels_getter", None))  # a function of the user's, in SanitizeBoundingBoxes
    )


def _has_hooks(transform: Transform) -> bool:
    return isinstance(transform, torch.nn.Module) and bool(transform._forward_hooks or transform._forward_pre_hooks)


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# --- MONAI ---------------------------------------------------------------------------------------------------------


def _is_compose(transform: Any) -> bool:
    """Returns whether ``transform`` is MONAI's ``Compose`` itself, and no subclass (``OneOf``, ``SomeOf``, ``RandomOrder``)."""
    return _qualified_name(type(transform)) == _MONAI_COMPOSE


def _parts_of(compose: Any) -> list[ComposePart]:
    """Returns the part before the first random member, and the rest. An empty part is left out."""
    cut, count = _members_before_cut(compose), len(compose.transforms)
    before = [ComposePart(compose, 0, cut)] if cut else []
    return before if cut == count else [*before, ComposePart(compose, cut, None)]


def _members_before_cut(compose: Any) -> int:
    """Returns how many members come before the cut: those before the first random one.

    If ``compose`` may delay resampling, the members that resample must stay together, because delayed work would be done at the
    cut. Then the cut is before the first of them.
    """
    members = compose.transforms
    cut = next((number for number, member in enumerate(members) if not _is_deterministic_member(member)), len(members))
    if cut == len(members) or compose.lazy is False:
        return cut
    return next((number for number, member in enumerate(members[:cut]) if _MONAI_LAZY in _names_of_bases(member)), cut)


def _is_deterministic_member(member: Any) -> bool:
    return _is_deterministic_of_monai(member) or _is_listed(member)


def _is_deterministic_of_monai(transform: Any) -> bool:
    """Returns whether a transform is one of MONAI's that draws no random numbers and calls no function of the user's."""
    if _is_compose(transform):
        return all(_is_deterministic_of_monai(member) for member in transform.transforms)
    bases = _names_of_bases(transform)
    return (
        type(transform).__module__.startswith("monai.transforms.")
        and _MONAI_TRANSFORM in bases
        and not bases & _MONAI_RANDOM
        and not any(_is_users_function(value) for value in _attribute_values(transform))
    )


def _names_of_bases(value: Any) -> set[str]:
    return {_qualified_name(base) for base in type(value).__mro__}


def _attribute_values(transform: Any) -> list[Any]:
    """Returns the values of its attributes, and the members of the containers among them."""
    values = list(vars(transform).values())
    containers = [list(value.values()) if isinstance(value, dict) else value for value in values]
    return values + [member for container in containers if isinstance(container, list | tuple) for member in container]


def _is_users_function(value: Any) -> bool:
    """Returns whether ``value`` can be called, and is no class, no function of MONAI's and no deterministic transform."""
    if not callable(value) or isinstance(value, type):
        return False
    if isinstance(value, types.FunctionType):
        return not value.__module__.startswith("monai.")
    return not _is_deterministic_member(value)


def _member_names(members: Sequence[Any]) -> tuple[str, ...]:
    nested = [_member_names(member.transforms) if _is_compose(member) else (type(member).__name__,) for member in members]
    return tuple(name for names in nested for name in names)
