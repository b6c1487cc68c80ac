"""Data whose truth is known. Processes that read import this module: it asks for no device, and takes no second to import."""

from __future__ import annotations

from typing import Any

import torch

from lightning_echo import StagedDataset

__all__ = ["Coded", "coded"]


def coded(index: int, width: int) -> torch.Tensor:
    """The numbers of an example, each from place and index: 20 bits."""
    return (torch.arange(width) * 7919 + index * 104_729).remainder_(2**20).to(torch.int32)


class Coded(StagedDataset):
    """Example ``index``: the index, its numbers, and a shift that is drawn for each run of the augmentation and added to them.

    Args:
        length: Examples.
        width: Numbers of an example.
    """

    def __init__(self, length: int, width: int) -> None:
        self.length, self.width = length, width

    def __len__(self) -> int:
        return self.length

    def read(self, index: Any) -> Any:
        return str(index).encode()

    def decode(self, raw: Any) -> Any:
        return {"index": int(raw), "values": coded(int(raw), self.width)}

    def augment(self, example: Any) -> Any:
        shift = torch.randint(1, 2**20, (), dtype=torch.int32)
        return {**example, "shift": shift, "values": example["values"] + shift}
