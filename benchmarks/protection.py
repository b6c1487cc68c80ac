"""What it costs, per use, that in-place edits never reach an echo: the copy that is handed out."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from report import Table, progress
from timing import median_seconds

from lightning_echo.data.copies import copy_example


def protection(quick: bool) -> Table:
    progress("protection")
    pixels = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    image = torch.from_numpy(pixels.copy())
    cases: dict[str, Any] = {
        "tensor 224x224x3 uint8": image,
        "(tensor 224x224x3 uint8, label)": (image, 3),
        "tensor 3x224x224 float32": torch.rand(3, 224, 224),
        "array 224x224x3 uint8": pixels,
        "PIL image 224x224 RGB": Image.fromarray(pixels),
        "(PIL image 224x224 RGB, label)": (Image.fromarray(pixels), 3),
        "{image tensor, 10 boxes, 10 labels, id}": {
            "image": image,
            "boxes": torch.rand(10, 4),
            "labels": torch.zeros(10, dtype=torch.int64),
            "id": "000042",
        },
        "dict of 10 lists of 20 numbers": {str(i): list(range(20)) for i in range(10)},
    }
    rows = []
    for name, example in cases.items():
        seconds = median_seconds(partial(copy_example, example), 200 if quick else 2000)
        rows.append((name, seconds * 1e6))
    return Table("protection", "one copy, taken while uses are left", ("example", "us per use"), rows)
