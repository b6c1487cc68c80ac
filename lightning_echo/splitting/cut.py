"""The second step: a description is cut at a point, into what is reused and what is redone of each data set inside.

There are two points: before the augmentation, and after reading (``raw``). A description goes in and a value comes out; the data
set itself is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_echo.insertion import InsertionPoint, Needs, earliest
from lightning_echo.splitting.describe import NOTHING, Chain, Convention, DataSet, Leads

__all__ = ["Cut", "CutLeaf", "ReadRefused", "SplitRefused", "candidates", "cut", "leaves", "led_to"]


class SplitRefused(ValueError):
    """A data set cannot be split before its augmentation.

    Attributes:
        reason: why, without the way out that the message adds.
    """

    where = "before its augmentation"
    way_out = (
        "Subclass lightning_echo.StagedDataset (or implement its load(index) and augment(example)), name the cut "
        f"with StagedDataset.of(dataset, augment=...), or use {earliest(Needs.examples).option}"
    )

    @property
    def reason(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:  # not in args: a worker's exception is built again from its message
        if self.reason.startswith("Caught "):  # as torch says of a worker's, which has said the rest already
            return self.reason
        return f"the data set cannot be split {self.where}: {self.reason}. {self.way_out}"


class ReadRefused(SplitRefused):
    """A data set cannot be split after reading."""

    where = "after reading"
    way_out = (
        "Give it read(index), which returns the raw item (best as bytes), and decode(raw), as lightning_echo.StagedDataset "
        "has them, name the cut with StagedDataset.of(dataset_of_raw_items, decode=..., augment=...), or use "
        f"{earliest(Needs.split).option} or {InsertionPoint.auto.value!r}"
    )


@dataclass(frozen=True)
class CutLeaf:
    """Where a data set that reads examples by itself is cut.

    Attributes:
        dataset: The description of the data set.
        convention: How it is taken apart.
        image: What is applied to the image, or to the whole sample.
        target: What is applied to the target alone.
        reused: What an echo reuses, for people.
        redone: What each use redoes.
    """

    dataset: DataSet
    convention: Convention
    image: Chain
    target: Chain
    reused: tuple[str, ...]
    redone: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """Where a data set is cut, and each of those inside it.

    Attributes:
        dataset: The description of the data set.
        raw: Whether it is cut after reading, not before its augmentation.
        leaves: Those that read examples, as they are met.
    """

    dataset: DataSet
    raw: bool
    leaves: tuple[CutLeaf, ...]

    def __str__(self) -> str:
        said = (f"{cut.dataset.name}: reuse [{', '.join(cut.reused)}], redo [{', '.join(cut.redone)}]" for cut in self.leaves)
        return "\n".join(said)


def cut(dataset: DataSet, conventions: Sequence[Convention] = (), *, raw: bool) -> Cut:
    """Returns where a data set is cut.

    Args:
        dataset: Its description.
        conventions: How to take those inside apart, as they are met; where there is none, in the likeliest way.
        raw: Whether to cut after reading.

    Raises:
        SplitRefused: Nothing shows where to cut, or a data set does not show that convention.
    """
    found = leaves(dataset, raw)
    given: dict[int, Convention] = {leaf.number: way for leaf, way in zip(found, conventions, strict=False)}
    return Cut(dataset, raw, tuple(_cut_leaf(leaf, given.get(leaf.number), raw) for leaf in found))


def candidates(leaf: DataSet, raw: bool) -> tuple[Convention, ...]:
    """Returns how a data set that reads examples may be cut, the likeliest first.

    Raises:
        SplitRefused: It shows no way.
    """
    if leaf.is_stream:
        raise SplitRefused(f"{leaf.name} is a stream, which has no index")
    found = leaf.raw_conventions if raw else leaf.conventions
    if not found and raw:
        raise SplitRefused(f"{leaf.name} has no read(index) and decode(raw), and {leaf.why_no_folder}")
    if not found:
        raise SplitRefused(f"{leaf.name} has neither load(index) and augment(example) nor a transform")
    return found


def leaves(dataset: DataSet, raw: bool) -> list[DataSet]:
    """Returns the distinct data sets that read examples, as they are met."""
    inside = led_to(dataset, raw)
    found = [leaf for part in inside for leaf in leaves(part, raw)] if inside else [dataset]
    return list({leaf.number: leaf for leaf in found}.values())


def led_to(dataset: DataSet, raw: bool) -> tuple[DataSet, ...]:
    """Returns the data sets that ``dataset`` only leads to; none where it is cut by itself."""
    is_cut_inside = dataset.leads is not Leads.named_cut or (raw and Convention.read not in dataset.raw_conventions)
    return dataset.inside if is_cut_inside else ()


def _cut_leaf(leaf: DataSet, convention: Convention | None, raw: bool) -> CutLeaf:
    if convention is None or raw:
        found = candidates(leaf, raw)
        convention = convention or found[0]
        if convention not in found:
            raise SplitRefused(f"{leaf.name} no longer has {convention.value}")
    if convention is Convention.protocol:
        return CutLeaf(leaf, convention, NOTHING, NOTHING, ("load",), ("augment",))
    if convention is Convention.read:
        return CutLeaf(leaf, convention, NOTHING, NOTHING, ("read",), ("decode", "augment") if leaf.augments else ("decode",))
    image, target = _chains(leaf, convention)
    if convention is Convention.folder:
        every = _names((*image.reused, *image.redone), (*target.reused, *target.redone))
        return CutLeaf(leaf, convention, image, target, ("read",), ("decode", *every))
    reused, redone = _names(image.reused, target.reused), _names(image.redone, target.redone)
    return CutLeaf(leaf, convention, image, target, ("load", *reused), redone)


def _chains(leaf: DataSet, convention: Convention) -> tuple[Chain, Chain]:
    """What is applied to the image (or to all), and what to the target alone."""
    name = "transforms" if convention.name.startswith("transforms") else "transform"
    images = [chain for chain in leaf.chains if chain.name == name] or [NOTHING]
    targets = [chain for chain in leaf.chains if chain.name == "target_transform"]
    if convention not in (Convention.transform, Convention.folder):
        targets = images[1:]  # of torchvision's pair
    return images[0], (targets or [NOTHING])[0]


def _names(image: tuple[str, ...], target: tuple[str, ...]) -> tuple[str, ...]:
    return (*image, *(f"target {name}" for name in target))
