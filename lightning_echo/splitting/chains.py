"""A chain of transforms: which of them are random, and where the chain is cut: before the first random one.

What stands before the cut is the same each time and is reused; from the first random transform on, all is redone. Only what
stands in a list of exact classes, v1 and v2, is deterministic. Everything else counts as random: subclasses, ``Lambda``,
functions, containers with anything else in them. Nothing less is safe: RandomHorizontalFlip, RandAugment, GaussianNoise and a
dozen other random classes of v2 show no sign from outside, while a transform taken for random by mistake costs only time.

MONAI's transforms say themselves whether they are random (``RandomizableTrait``), which its own caches go by. All others of
MONAI are deterministic unless they call somebody else's code (``Lambda``, ``CropForeground(select_fn=...)``). MONAI's
``Compose`` is more than its members in a row: it maps lists of samples, hands on overrides, puts off resampling (``lazy``). So
it is never taken apart: ``compose(value, end=k)`` runs what stands before the cut, ``compose(value, start=k)`` the rest.

Classes are known by qualified name, so that neither torchvision nor MONAI need be imported.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Part", "Transform", "chained", "cut_chain", "is_deterministic", "names_in", "put_in_place"]

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
    # What the transforms of a set of weights are made of.
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
    """Returns the transforms before the first random one and the rest, containers taken apart.

    >>> cut_chain(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout(), torch.nn.Identity()))
    ([Identity()], [Dropout(p=0.5, inplace=False), Identity()])
    """
    transforms = [] if transform is None else _taken_apart(transform)
    place = next((place for place, single in enumerate(transforms) if not is_deterministic(single)), len(transforms))
    return transforms[:place], transforms[place:]


def is_deterministic(transform: Transform) -> bool:
    """Whether ``transform`` stands in the list and calls nobody else's code, or is one of MONAI's that does neither."""
    if isinstance(transform, Part):
        return transform.is_first
    return _is_listed(transform) or _is_deterministic_of_monai(transform)


def names_in(transform: Transform) -> tuple[str, ...]:
    """Returns what people call ``transform``, or those that it consists of: a function's own name, else that of the class."""
    return transform.names if isinstance(transform, Part) else (str(getattr(transform, "__name__", type(transform).__name__)),)


def chained(transforms: list[Transform], joint: bool) -> Transform | None:
    """Returns one function that applies ``transforms`` in order, None if there is none.

    Args:
        transforms: what `cut_chain` returned.
        joint: whether each takes and returns several values (image and target), as v2 transforms may.
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


def put_in_place(transform: Transform, keep: Transform) -> Transform:
    """Returns what can be put in the place of ``transform`` in a data set, to keep what it is called with.

    MONAI's caching data sets run the first members of their ``Compose`` themselves (``end=k``) and the others at each read
    (``start=k``). They get a ``Compose``, since they ask for that, which runs what they want to keep.

    Args:
        transform: Left as it is.
        keep: Called with the value, or with one at which the part before the cut has ended.
    """
    if not _is_compose(transform):
        return keep
    compose: Any = transform
    kind, cut = type(compose), _place_in_compose(compose)

    def call(self: Any, value: Any, *range_: Any, start: int = 0, end: int | None = None, **options: Any) -> Any:
        if range_:
            return keep(value, *range_)  # nobody calls it like that: it is refused
        if end is not None:
            return kind.__call__(self, value, start=start, end=end, **options)
        if not start:
            return keep(value)
        if start > cut:
            name = type(compose.transforms[cut]).__name__
            return keep(value, **{f"start={start} (and {name}, number {cut}, counts as random)": start})
        return keep(_Begun(kind.__call__(self, value, start=start, end=cut, **options)))

    taken: Any = types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(__call__=call))
    made: Transform = object.__new__(taken)
    made.__dict__.update(vars(compose))
    return made


class Part:
    """Some members of MONAI's ``Compose`` in a row, as a transform.

    Args:
        compose: MONAI's.
        start: The first member.
        end: The one after the last; None: all that follow.

    Attributes:
        names: What people call the members.
        is_first: Whether it is what stands before the cut.
    """

    def __init__(self, compose: Any, start: int, end: int | None) -> None:
        self._compose, self._start, self._end = compose, start, end
        self.names = _member_names(compose.transforms[start:end])
        self.is_first = end is not None

    def __call__(self, value: Any) -> Any:
        if type(value) is _Begun:  # the data set has run the first members itself
            return value.value
        return self._compose(value, start=self._start, end=self._end)


class _Begun:
    """What the first part has returned already."""

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
        and not callable(getattr(transform, "labels_getter", None))  # SanitizeBoundingBoxes: the user's function
    )


def _has_hooks(transform: Transform) -> bool:
    return isinstance(transform, torch.nn.Module) and bool(transform._forward_hooks or transform._forward_pre_hooks)


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# --- MONAI ---------------------------------------------------------------------------------------------------------


def _is_compose(transform: Any) -> bool:
    """Whether it is MONAI's ``Compose`` itself, and no subclass (``OneOf``, ``SomeOf``, ``RandomOrder``)."""
    return _qualified_name(type(transform)) == _MONAI_COMPOSE


def _parts_of(compose: Any) -> list[Part]:
    """The part before the first random member and the rest; without those that are empty."""
    cut, count = _place_in_compose(compose), len(compose.transforms)
    first, rest = [Part(compose, 0, cut)] if cut else [], [Part(compose, cut, None)] if cut < count else []
    return first + rest


def _place_in_compose(compose: Any) -> int:
    """The number of members before the first random one.

    Where resampling may be put off, those that do it go together: what is before the cut is carried out there.
    """
    members = compose.transforms
    cut = next((i for i, member in enumerate(members) if not _is_deterministic_member(member)), len(members))
    if cut < len(members) and compose.lazy is not False:
        return next((i for i in range(cut) if _MONAI_LAZY in map(_qualified_name, type(members[i]).__mro__)), cut)
    return cut


def _is_deterministic_member(member: Any) -> bool:
    return _is_deterministic_of_monai(member) or _is_listed(member)


def _is_deterministic_of_monai(transform: Any) -> bool:
    """Whether a transform is one of MONAI's that draws no random numbers and calls nobody else's code."""
    if _is_compose(transform):
        return all(_is_deterministic_of_monai(member) for member in transform.transforms)
    kind = type(transform)
    bases = {_qualified_name(base) for base in kind.__mro__}
    return (
        kind.__module__.startswith("monai.transforms.")
        and _MONAI_TRANSFORM in bases
        and not bases & _MONAI_RANDOM
        and all(_is_own(held) for held in _held_by(transform))
    )


def _held_by(transform: Any) -> list[Any]:
    """What its attributes hold, and the members of containers among them."""
    held = list(vars(transform).values())
    members = [list(value.values()) if isinstance(value, dict) else value for value in held]
    return held + [member for value in members if isinstance(value, list | tuple) for member in value]


def _is_own(value: Any) -> bool:
    """Whether it is no function, or one of MONAI's: its other transforms, its predicates."""
    if not callable(value) or isinstance(value, type):
        return True
    return value.__module__.startswith("monai.") if isinstance(value, types.FunctionType) else _is_deterministic_member(value)


def _member_names(members: Sequence[Any]) -> tuple[str, ...]:
    nested = [_member_names(member.transforms) if _is_compose(member) else (type(member).__name__,) for member in members]
    return tuple(name for names in nested for name in names)
