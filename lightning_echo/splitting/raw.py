"""Stages whose raw item is reused (``after_read``): ``load`` reads, ``augment`` decodes and then augments.

What can be split there

* has ``read(index)`` and ``decode(raw)`` (`StagedDataset`, as a base class or only in shape; ``StagedDataset.of(...,
  decode=...)``), or
* is torchvision's ``DatasetFolder`` (``ImageFolder``), reads as that class does, and decodes by its default loader: the
  raw item is the content of the file, and the target. That loader takes a path and no bytes, so that what it does is
  written down here; the proof (proof.py) compares the two.

``StagedDataset.of(dataset, augment=...)`` says nothing about decoding, so that the data set inside is looked at.

torchvision and Pillow are never imported: whose class is looked for has imported them.
"""

from __future__ import annotations

import io
import sys
from typing import Any

from lightning_echo.insertion import InsertionPoint, Needs, earliest
from lightning_echo.protecting.routing import routes_as
from lightning_echo.splitting.chains import cut_chain
from lightning_echo.splitting.conventions import Convention, SplitRefused
from lightning_echo.splitting.leaves import names_of
from lightning_echo.splitting.staged import AugmentedDataset, batched, is_raw
from lightning_echo.splitting.stages import Stages


class ReadRefused(SplitRefused):
    """A data set cannot be split after reading."""

    where = "after reading"
    way_out = (
        "Give it read(index), which returns the raw item (best as bytes), and decode(raw), as lightning_echo.StagedDataset "
        "has them, name the cut with StagedDataset.of(dataset_of_raw_items, decode=..., augment=...), or use "
        f"{earliest(Needs.split).option} or {InsertionPoint.auto.value!r}"
    )


def raw_conventions_of(dataset: Any) -> list[Convention]:
    """Returns how ``dataset`` may be split after reading, the likeliest first.

    Raises:
        SplitRefused: It shows no way.
    """
    found = [Convention.read] if is_raw(dataset) else []
    why_not = _why_no_plain_folder(dataset)
    if why_not is None:
        found.append(Convention.folder)
    if not found:
        raise SplitRefused(f"{type(dataset).__name__} has no read(index) and decode(raw), and {why_not}")
    return found


def raw_stages(dataset: Any, convention: Convention) -> Stages:
    """Returns the stages of a data set that is split by itself, without reading from it.

    Raises:
        SplitRefused: It is, as it is now, no data set of that convention.
    """
    if convention not in raw_conventions_of(dataset):
        raise SplitRefused(f"{type(dataset).__name__} no longer has {convention.value}")
    return _protocol_stages(dataset) if convention is Convention.read else _folder_stages(dataset)


class AugmentedStages(Stages):
    """Stages of what `StagedDataset.of` returned, made of those of the data set inside."""

    __slots__ = ()

    def __init__(self, dataset: AugmentedDataset, inner: Stages) -> None:
        redo, augment = inner.augment, dataset._augment_one
        super().__init__(
            inner.load,
            lambda index, raw: augment(redo(index, raw)),
            reused=inner.reused,
            redone=(*inner.redone, "augment"),
            load_many=inner.load_many,
            augment_routes=inner.augment_routes,
        )


def _protocol_stages(dataset: Any) -> Stages:
    decode, augment = dataset.decode, getattr(dataset, "augment", None)
    return Stages(
        dataset.read,
        (lambda index, raw: augment(decode(raw))) if callable(augment) else (lambda index, raw: decode(raw)),
        reused=("read",),
        redone=("decode", "augment") if callable(augment) else ("decode",),
        load_many=batched(dataset._inner) if isinstance(dataset, AugmentedDataset) else None,
    )


# --- torchvision's DatasetFolder -----------------------------------------------------------------------------------


def _why_no_plain_folder(dataset: Any) -> str | None:
    """Why it is not certain what a file becomes; None if it is."""
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


def _folder_stages(dataset: Any) -> Stages:
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

    names = names_of(*([*before, *after] for before, after in map(cut_chain, (dataset.transform, dataset.target_transform))))
    return Stages(read, redo, reused=("read",), redone=("decode", *names))
