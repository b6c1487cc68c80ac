"""The second step: a description is cut at a point. For each data set inside, this says what is reused and what is redone.

There are two points: before the augmentation, and after reading (``raw``). A description goes in and a value comes out. The data
set itself is not needed.

A *leaf* is a data set that is cut, and that does not pass its indices on to data sets which are cut inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_echo.insertion import InsertionPoint, Needs, earliest
from lightning_echo.splitting.describe import NOTHING, Chain, Convention, Description, Role

__all__ = ["Cut", "CutLeaf", "ReadRefused", "SplitRefused", "candidates", "cut", "leaves", "pruned"]


class SplitRefused(ValueError):
    """A data set cannot be split before its augmentation.

    Attributes:
        reason: Why it cannot be split. The message also says what to do instead.
    """

    where = "split before its augmentation"
    way_out = (
        "Subclass lightning_echo.StagedDataset (or implement its load(index) and augment(example)), name the cut "
        f"with StagedDataset.of(dataset, augment=...), or use {earliest(Needs.examples).option}"
    )

    @property
    def reason(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:  # args has only the reason: torch makes a worker's exception anew, with its whole message in args
        if self.reason.startswith("Caught "):  # such a message begins like this, and already says what to do instead
            return self.reason
        return f"the data set cannot be {self.where}: {self.reason}. {self.way_out}"


class ReadRefused(SplitRefused):
    """A data set cannot be split after reading."""

    where = "split after reading"
    way_out = (
        "Give it read(index), which returns the raw item (best as bytes), and decode(raw), as lightning_echo.StagedDataset "
        "has them, name the cut with StagedDataset.of(dataset_of_raw_items, decode=..., augment=...), or use "
        f"{earliest(Needs.split).option} or {InsertionPoint.auto.value!r}"
    )


@dataclass(frozen=True)
class CutLeaf:
    """Where a leaf is cut.

    Attributes:
        description: Its description.
        convention: How it is taken apart.
        image: The transforms that it applies to the image, or to the whole sample.
        target: The transforms that it applies to the target alone.
        reused: What an echo reuses, for people.
        redone: What each use redoes, for people.
    """

    description: Description
    convention: Convention
    image: Chain
    target: Chain
    reused: tuple[str, ...]
    redone: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """Where a data set is cut.

    Attributes:
        description: Its description, which ends at the leaves.
        leaves: Where each leaf is cut, in the order in which they are met.
    """

    description: Description
    leaves: tuple[CutLeaf, ...]

    def __str__(self) -> str:
        lines = (
            f"{leaf.description.name}: reuse [{', '.join(leaf.reused)}], redo [{', '.join(leaf.redone)}]" for leaf in self.leaves
        )
        return "\n".join(lines)


def cut(description: Description, conventions: Sequence[Convention] = (), *, raw: bool) -> Cut:
    """Returns where a data set is cut.

    Args:
        description: Describes the data set.
        conventions: How to take the leaves apart, in the order in which they are met. A leaf without a convention is taken apart
            in the likeliest way.
        raw: Whether to cut after reading.

    Raises:
        SplitRefused: A leaf cannot be cut, or not in the given way.
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
    """Returns how a leaf may be cut, the likeliest way first.

    Raises:
        SplitRefused: Nothing shows how it may be cut.
    """
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
    image, target = _chains(leaf, convention)
    if convention is Convention.folder:
        every = _names((*image.reused, *image.redone), (*target.reused, *target.redone))
        return CutLeaf(leaf, convention, image, target, ("read",), ("decode", *every))
    reused, redone = _names(image.reused, target.reused), _names(image.redone, target.redone)
    return CutLeaf(leaf, convention, image, target, ("load", *reused), redone)


def _chains(leaf: Description, convention: Convention) -> tuple[Chain, Chain]:
    """Returns two chains: the one that is applied to the image (or to the whole sample), and the one for the target alone."""
    images = [chain for chain in leaf.chains if chain.name == convention.attribute] or [NOTHING]
    targets = [chain for chain in leaf.chains if chain.name == "target_transform"]
    if convention not in (Convention.transform, Convention.folder):
        targets = images[1:]  # the second one of torchvision's pair
    return images[0], (targets or [NOTHING])[0]


def _names(image: tuple[str, ...], target: tuple[str, ...]) -> tuple[str, ...]:
    return (*image, *(f"target {name}" for name in target))
