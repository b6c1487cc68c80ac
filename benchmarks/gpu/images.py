"""JPEG files that are made on the machine: a large rotated character before a soft background, with grain.

A file is a pure function of its number and size: character, place, angle, colours. The grain is cut from one tile at random
offsets, since drawing it for each file would take most of the time.

``python -m gpu.images FOLDER FIRST COUNT WIDTH HEIGHT SECONDS`` makes them and prints how many are there. A process that has used
the card does not make them itself: it would fork beside CUDA's threads.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

__all__ = ["CLASSES", "draw", "write_images"]

# None looks like another one's mirror image, since images are flipped.
CLASSES = "ABCDEFGHKLMNPQRTUVXYZ34679&@#%?$+=aehrft"
_CHUNK = 16  # files that a process makes at a time
_GRAIN, _MARGIN = 10.0, 256  # standard deviation, of 255; pixels by which the tile is larger than an image


def write_images(folder: Path, first: int, count: int, size: tuple[int, int], seconds: float) -> int:
    """Makes the files that are not there yet, on all cores, until the time is over.

    Args:
        folder: Has a folder for each class, as ``ImageFolder`` reads it.
        first: Number of the first file.
        count: Number of files.
        size: Width and height in pixels.
        seconds: No file is begun after so many.

    Returns:
        How many of the files are there.
    """
    end = time.monotonic() + seconds
    for label in range(len(CLASSES)):
        (folder / f"{label:02}").mkdir(parents=True, exist_ok=True)
    chunks = [range(start, min(start + _CHUNK, first + count)) for start in range(first, first + count, _CHUNK)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return sum(pool.map(partial(_write, folder, size, end), chunks))


def _write(folder: Path, size: tuple[int, int], end: float, numbers: range) -> int:
    made = 0
    for number in numbers:
        file = folder / f"{number % len(CLASSES):02}" / f"{number:06}.jpg"
        if not file.exists():
            if time.monotonic() > end:
                break
            part = file.with_suffix(".part")
            draw(number, size).save(part, "JPEG", quality=90)
            part.rename(file)  # a file is whole or not there
        made += 1
    return made


def draw(number: int, size: tuple[int, int]) -> Image.Image:
    """Returns the picture with this number; its class is ``number % len(CLASSES)``."""
    chance = np.random.default_rng(number)
    width, height = size
    soft = chance.integers(0, 150, (4, 5, 3), dtype=np.uint8)
    image = Image.fromarray(soft).resize(size, Image.Resampling.BICUBIC)
    side = round(height * chance.uniform(0.6, 0.9))
    mask = _character(CLASSES[number % len(CLASSES)]).rotate(chance.uniform(-30, 30), Image.Resampling.BILINEAR)
    middle = [each / 2 + height * chance.uniform(-0.1, 0.1) for each in size]  # so that a crop has most of it
    place = tuple(round(each - side / 2) for each in middle)
    image.paste(tuple(chance.integers(130, 256, 3).tolist()), place, mask.resize((side, side)))
    left, top = chance.integers(0, _MARGIN, 2)
    grain = _tile(width, height)[top : top + height, left : left + width]
    return Image.fromarray((np.asarray(image, np.int16) + grain).clip(0, 255).astype(np.uint8))


@cache
def _character(character: str) -> Image.Image:
    """A mask of the character, 320 pixels a side, with room to turn it."""
    mask = Image.new("L", (320, 320))
    ImageDraw.Draw(mask).text((160, 160), character, font=ImageFont.load_default(size=220), fill=255, anchor="mm", stroke_width=8)
    return mask


@cache
def _tile(width: int, height: int) -> np.ndarray:
    shape = (height + _MARGIN, width + _MARGIN, 3)
    return np.random.default_rng(0).normal(0, _GRAIN, shape).round().astype(np.int16)


if __name__ == "__main__":
    _folder, *_numbers = sys.argv[1:]
    _first, _count, _width, _height = map(int, _numbers[:4])
    print(write_images(Path(_folder), _first, _count, (_width, _height), float(_numbers[4])))
